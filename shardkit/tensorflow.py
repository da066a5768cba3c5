"""Streaming into TensorFlow: the batches of a `Loader` as a `tf.data.Dataset`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import UsageError
from shardkit.helpers.extras import extra
from shardkit.helpers.keywords import takes
from shardkit.options import is_whole
from shardkit.schema import Array
from shardkit.stream.dataset import StreamingDataset
from shardkit.stream.loader import Loader
from shardkit.stream.options import LoaderKeywords
from shardkit.stream.stream import Source

if TYPE_CHECKING:
    import tensorflow as tf
    from typing_extensions import Unpack

STATE = "__state__"  # the entry of each batch with the state after it

_FIX = (
    "make values uniform with a transform or a collate function, such as shardkit.Resize(...) or"
    " shardkit.pad_collate, or leave the field out with fields=[...]"
)


@takes(Loader.__init__)
def dataset(
    source: StreamingDataset | Source,
    *,
    epochs: int | None = 1,
    state: dict[str, Any] | str | bytes | None = None,
    **options: Unpack[LoaderKeywords],
) -> tf.data.Dataset:
    """Return the batches of this rank as a `tf.data.Dataset`.

    epochs: total number of epochs, counted from epoch 0. None: no end.
    state: continue from this state. None: start at epoch 0.

    Each batch is a dict of tensors. Its entry `__state__` is the state after this batch, as JSON.
    It counts only delivered batches, no matter how many are prefetched. Every iteration over the
    dataset gives the same batches.

    The first batch is made immediately, to determine the types of all batches. Raises UsageError
    for invalid options, for states of other data, and for fields that tensors cannot hold.
    """
    with extra("tensorflow", "shardkit.tensorflow"):
        import tensorflow as tf
    if epochs is not None and (not is_whole(epochs) or epochs < 1):
        raise UsageError("epochs must be 1 or more, or None", found=f"{epochs!r:.200}")
    loader = Loader(source, **options)
    if isinstance(state, str | bytes):
        try:
            state = dict(json.loads(state))
        except (TypeError, ValueError):
            expected = f"the value of {STATE!r} in a batch"
            found = f"{state!r:.200}"
            raise UsageError("not a valid state", expected=expected, found=found) from None

    def started(begin: dict[str, Any] | None = state) -> Loader:
        mine = Loader(loader.dataset, **loader.settings)
        if begin is not None:
            mine.load_state_dict(begin)
        return mine

    started()  # raise now if the state is invalid
    signature = _signature(loader.dataset)

    def batches() -> Iterator[dict[str, Any]]:
        mine = started()
        numbers = itertools.count(mine.epoch) if epochs is None else range(mine.epoch, epochs)
        for epoch in numbers:
            mine.set_epoch(epoch)
            for batch in mine:
                made = _tensors(batch)
                made[STATE] = tf.constant(json.dumps(mine.state_dict()))
                _compare(made, signature)
                yield made

    made = tf.data.Dataset.from_generator(batches, output_signature=signature)
    unsplit = tf.data.Options()  # no auto-sharding: the batches are already this rank's share
    unsplit.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return made.with_options(unsplit)


def _signature(streaming: StreamingDataset) -> dict[str, Any]:
    """The TypeSpec of each entry, from the first batch, with None for sizes that may vary."""
    import tensorflow as tf

    stream, options = streaming.stream, streaming.options
    for name, kind in stream.samples.schema.items():
        if kind.optional and name not in stream.transforms.fields and not stream.own_collate:
            raise UsageError(
                "some samples lack this field, which a tensor cannot represent",
                field=name,
                fix="fill it in with a collate function, or leave it out with fields=[...]",
            )
    first = iter(Loader(streaming, threads=0, prefetch=1))
    made = _tensors(next(first))
    first.close()
    rows, fixed = None, {}
    if stream.own_collate is None:
        if options.batching is None and options.last != "short":
            rows = options.per_rank(streaming.world().size)
        fixed = {n: k.shape for n, k in stream.samples.schema.items() if isinstance(k, Array)}
        fixed |= {name: shape for name, (shape, _) in stream.transforms.outputs().items()}
    found = {STATE: tf.TensorSpec((), tf.string)}
    for name, value in made.items():
        if isinstance(value, tf.RaggedTensor):
            inner = value.values.shape[1:]
            found[name] = tf.RaggedTensorSpec((rows, None, *inner), value.dtype, ragged_rank=1)
            continue
        sides = value.shape[1:]
        if tuple(sides) != fixed.get(name):
            sides = [None] * len(sides)
        found[name] = tf.TensorSpec((rows, *sides), value.dtype)
    return found


def _tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: _tensor(name, value) for name, value in batch.items()}


def _tensor(name: str, value: Any) -> Any:
    """Convert an array, strings or bytes to a tensor, and arrays of different lengths to ragged."""
    import tensorflow as tf

    try:
        if isinstance(value, np.ndarray):
            return tf.convert_to_tensor(value.astype(value.dtype.newbyteorder("="), copy=False))
        kinds = {type(one) for one in value}
        if kinds in ({str}, {bytes}):
            return tf.constant(value, tf.string)
        if kinds == {np.ndarray} and len({(v.dtype, v.shape[1:]) for v in value if v.ndim}) == 1:
            rows = np.concatenate(value)
            rows = tf.convert_to_tensor(rows.astype(rows.dtype.newbyteorder("="), copy=False))
            return tf.RaggedTensor.from_row_lengths(rows, [len(one) for one in value])
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        if kinds == {np.ndarray}:
            found = ", ".join(sorted({f"{one.dtype} {one.shape}" for one in value})[:5])
    except (TypeError, ValueError) as error:
        found = f"{type(value).__name__}: {error}"
    raise UsageError("the values cannot become a tensor", field=name, found=found, fix=_FIX)


def _compare(made: dict[str, Any], signature: dict[str, Any]) -> None:
    """Raise UsageError for a batch that does not match the first one."""
    for name in {**signature, **made}:
        spec, value = signature.get(name), made.get(name)
        if spec is None or value is None or not spec.is_compatible_with(value):
            raise UsageError(
                "a batch differs from the first one",
                field=name,
                expected=str(spec),
                found="nothing" if value is None else f"{value.dtype} {value.shape}",
                fix=_FIX,
            )
