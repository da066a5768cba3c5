"""Batches of arrays of unlike lengths: padded like torch's own, and packed without a loss."""

import pickle
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import SampleError, ShardkitWarning, UsageError
from shardkit.stream import Loader, documents
from shardkit.stream.batching import Bucket, Dynamic, Pack
from shardkit.stream.collate import packed, pad_collate
from shardkit.torch import documents as torch_documents

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def tokens(size, seed=0, dtype="int64"):
    return np.random.default_rng(seed).integers(1, 1000, size).astype(dtype)


def samples_of(sizes, dtype="int64"):
    return [{"__key__": f"doc/{n}", "tokens": tokens(m, n, dtype)} for n, m in enumerate(sizes)]


def padded(values, collate=None):
    """What becomes of values of one field."""
    return (collate or pad_collate())([{"x": value} for value in values])["x"]


@given(
    sizes=SIZES,
    value=st.integers(-100, 5),
    side=st.sampled_from(["right", "left"]),
    multiple=st.integers(1, 16),
)
def test_padding_is_that_of_torch(sizes, value, side, multiple):
    """To the longest row, rounded up."""
    samples = samples_of(sizes)
    batch = pad_collate(value, side=side, multiple_of=multiple)(samples)
    step = 1 if side == "right" else -1  # old versions of torch pad on the right only
    longest = max(sizes)
    assert batch["tokens"].shape[1] == -(-max(longest, 1) // multiple) * multiple or not longest
    rows = [torch.from_numpy(sample["tokens"][::step].copy()) for sample in samples]
    expected = pad_sequence(rows, batch_first=True, padding_value=value).numpy()
    mask = pad_sequence([torch.ones(n, dtype=torch.bool) for n in sizes], batch_first=True)
    for name, array, beyond in (("tokens", expected, value), ("attention_mask", mask, False)):
        np.testing.assert_array_equal(batch[name][:, ::step][:, :longest], array)
        assert (batch[name][:, ::step][:, longest:] == beyond).all()
    assert batch["attention_mask"].dtype == np.bool_
    assert batch["lengths"].dtype == batch["tokens"].dtype == np.int64
    assert batch["lengths"].tolist() == sizes
    assert batch["__key__"] == [sample["__key__"] for sample in samples]


def test_all_padded_fields_share_one_length_and_keep_their_types():
    samples = [
        {"tokens": tokens(3, 1, "<u2"), "scores": np.ones(5, "<f4"), "flags": np.ones(1, "?")},
        {"tokens": tokens(4, 2, "<u2"), "scores": np.ones(0, "<f4"), "flags": np.ones(2, "?")},
    ]
    batch = pad_collate({"scores": np.nan, "tokens": 9})(samples)
    assert {name: array.shape for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "scores", "flags", "attention_mask"), (2, 5)),
        "lengths": (2,),
    }
    assert [str(batch[name].dtype) for name in samples[0]] == ["uint16", "float32", "bool"]
    assert batch["tokens"][0].tolist() == [*samples[0]["tokens"].tolist(), 9, 9]
    assert np.isnan(batch["scores"]).sum(1).tolist() == [0, 5]
    assert batch["flags"].sum() == 3
    for value in (1, 7):  # the tokenizer's own padding token: it is no answer to a question
        same = pad_collate(value)([{k: v for k, v in s.items() if k != "scores"} for s in samples])
        assert (same["tokens"] == value).sum() == 1
        assert same["flags"].sum() == 3
    assert batch["lengths"].tolist() == [3, 4]
    by_flags = pad_collate(field="flags")(samples)
    assert by_flags["lengths"].tolist() == by_flags["attention_mask"].sum(1).tolist() == [1, 2]
    # Of tokens, or else of the first array.
    assert pad_collate()([{"a": np.ones(1), "b": np.ones(2)}])["lengths"].tolist() == [1]


def test_other_values_become_arrays_and_lists():
    samples = [
        {
            "__key__": f"k{n}", "label": n, "score": n / 2, "good": n > 0, "text": str(n),
            "blob": bytes([n]), "about": {"n": n}, "any": None if n else [1],
            "points": np.full((2, 3), n, "<f4"), "one": np.array(n, ">i2"),
        }
        for n in range(3)
    ]  # fmt: skip
    batch = pad_collate()(samples)
    assert list(batch) == list(samples[0])  # no mask and no lengths where nothing is padded
    for name, dtype in (("label", np.int64), ("score", np.float64), ("good", np.bool_)):
        assert batch[name].dtype == dtype
        assert batch[name].tolist() == [sample[name] for sample in samples]
    for name in ("__key__", "text", "blob", "about", "any"):
        assert batch[name] == [sample[name] for sample in samples]
    np.testing.assert_array_equal(batch["points"], np.stack([s["points"] for s in samples]))
    assert batch["points"].dtype == np.float32
    assert batch["one"].tolist() == [0, 1, 2]
    assert batch["one"].dtype.isnative


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5], "float64"),
        ([np.int32(1), 2], "int64"),
        ([np.float32(1), 2.0], "float64"),
        ([np.True_, False], "bool"),
        ([1, True], None),
        ([1, "1"], None),
        ([2**70, 1], None),
        ([1.5, None], None),
    ],
)
def test_numbers_of_several_kinds_become_one_array_and_other_values_a_list(values, dtype):
    found = padded(values)
    assert getattr(found, "dtype", None) == dtype
    assert list(found) == values


def test_arrays_of_another_byte_order_become_native():
    for values in ([tokens(n, n, ">i4") for n in (2, 3)], [np.ones((1, 2), ">f8")] * 2):
        found = padded(values)
        assert found.dtype.isnative
        assert found[1].tolist() == values[1].tolist()


def test_rows_can_have_one_length_in_all_batches():
    batch = pad_collate(length=8)(samples_of([3, 5]))
    assert batch["tokens"].shape == batch["attention_mask"].shape == (2, 8)
    with pytest.raises(SampleError, match="longer than the length of the batch") as error:
        pad_collate(length=8)(samples_of([3, 9, 8]))
    assert error.value.where == {"key": "doc/1", "field": "tokens"}
    assert error.value.found == "9"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (np.ones(2, "<u2"), np.ones(2, "<i4"), "differ in shape or type"),
        (np.ones(2), np.ones((2, 2)), "differ in shape or type"),
        (np.ones((2, 2)), np.ones((2, 3)), "differ in shape or type"),
        (np.ones((2, 2), "<f4"), np.ones((2, 2)), "differ in shape or type"),
        (np.ones(2), [1.0, 2.0], "differ in shape or type"),
        (np.ones((1, 2)), None, "differ in shape or type"),
        ("x", ..., "lacks a field"),
    ],
)
def test_values_that_make_no_one_array_are_refused(first, second, words):
    other = {} if second is ... else {"x": second}
    with pytest.raises(SampleError, match=words) as error:
        pad_collate()([{"__key__": "a", "x": first}, {"__key__": "b", **other}])
    assert error.value.where == {"key": "b", "field": "x"}


@pytest.mark.parametrize(
    ("value", "dtype"), [(-100, "<u2"), (70_000, "<u2"), (0.5, "<i4"), (np.nan, "<i8")]
)
def test_a_padding_value_that_the_type_cannot_hold_is_refused(value, dtype):
    with pytest.raises(UsageError, match="cannot be represented in the field's type") as error:
        pad_collate(value)(samples_of([1, 2], dtype))
    assert error.value.where == {"field": "tokens"}
    if value == -100:
        with pytest.raises(UsageError, match="cannot be represented in the field's type"):
            packed(np.array([[0, 0, 0, 2]]), samples_of([2], dtype), 4, value, ["tokens"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": None}, "padding value must be a number"),
        ({"value": {"tokens": None}}, "padding value must be a number"),
        ({"side": "middle"}, "side must be one of"),
        ({"multiple_of": 0}, "multiple_of must be a whole number"),
        ({"length": 0}, "length must be a whole number"),
        ({"length": 10, "multiple_of": 8}, "length is not a multiple of multiple_of"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        pad_collate(**options)


def test_names_of_no_padded_field_and_of_what_is_added_are_refused():
    misspelt = "(?s)'token' is not a padded field.*one of tokens; did you mean tokens?"
    for collate, more, message in (
        (pad_collate({"token": 1}), {}, misspelt),
        (pad_collate(field="token"), {}, misspelt),
        (pad_collate(field="label"), {"label": 1}, "'label' is not a padded field"),
        (pad_collate(), {"attention_mask": tokens(2)}, "two values named 'attention_mask'"),
        (pad_collate(), {"lengths": tokens(2)}, "two values named 'lengths'"),
    ):
        with pytest.raises(UsageError, match=message):
            collate([{"tokens": tokens(2), **more}])
    for name in ("attention_mask", "lengths"):  # where nothing is added
        assert pad_collate()([{name: 3}])[name].tolist() == [3]


def test_it_serves_torchs_loader_in_other_processes(tmp_path):
    samples = [{**s, "label": len(s["tokens"])} for s in samples_of([3, 1, 4, 1, 5], "<u2")]
    schema = {"tokens": shardkit.Array("<u2", (None,)), "label": shardkit.Int()}
    shardkit.convert(samples, "arrow", tmp_path / "out", schema=schema, workers=0)
    collate = pickle.loads(pickle.dumps(pad_collate(7, multiple_of=4)))
    options = {"batch_size": 2, "collate_fn": collate, "num_workers": 1}
    batches = list(DataLoader(shardkit.open(tmp_path / "out"), **options))
    assert [batch["lengths"].tolist() for batch in batches] == [[3, 1], [4, 1], [5]]
    assert [batch["label"].tolist() for batch in batches] == [[3, 1], [4, 1], [5]]
    assert [batch["tokens"].shape for batch in batches] == [(2, 4), (2, 4), (1, 8)]
    assert batches[2]["tokens"][0].tolist() == [*samples[4]["tokens"].tolist(), 7, 7, 7]


@pytest.mark.parametrize("how", ["nosplit", "concat"])
@given(sizes=SIZES, seq_len=st.integers(1, 40), rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_packed_rows_hold_the_documents_and_say_where(how, sizes, seq_len, rows, seed):
    samples, found = samples_of(sizes, "<u2"), {}
    for micro in Pack(seq_len, rows, how).plan(np.array(sizes, np.int64), seed):
        chosen = [samples[n] for n in micro.samples]
        batch = packed(micro.segments, chosen, seq_len, 65_000, ["tokens"])
        shape = (micro.segments[-1, 0] + 1, seq_len)
        assert {k: (str(v.dtype), v.shape) for k, v in batch.items()} == {
            "tokens": ("uint16", shape),
            "segment_ids": ("int32", shape),
            "position_ids": ("int32", shape),
            "lengths": ("int64", shape[:1]),
        }
        padding = np.arange(seq_len) >= batch["lengths"][:, None]
        assert (batch["tokens"][padding] == 65_000).all()
        assert not batch["segment_ids"][padding].any()
        assert not batch["position_ids"][padding].any()
        segments = {}
        for row, number, start, stop in micro.segments.tolist():
            segments[row] = segments.get(row, 0) + 1
            here = batch["segment_ids"][row] == segments[row]
            assert batch["position_ids"][row][here].tolist() == list(range(stop - start))
            document = int(micro.samples[number])
            for place, token in enumerate(batch["tokens"][row][here].tolist(), start):
                assert (document, place) not in found
                found[document, place] = token
            assert place == stop - 1
    assert found == {
        (n, place): token
        for n, sample in enumerate(samples)
        for place, token in enumerate(sample["tokens"].tolist())
    }


def test_pieces_of_a_row_follow_each_other():
    segments = np.array([[0, 1, 0, 2], [0, 0, 4, 5], [1, 0, 0, 4]])
    samples = [{"tokens": np.arange(10, 15)}, {"tokens": np.arange(20, 22)}]
    batch = packed(segments, samples, 5, 0, ["tokens"])
    assert batch["tokens"].tolist() == [[20, 21, 14, 0, 0], [10, 11, 12, 13, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 0]]
    assert batch["lengths"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"tokens": np.arange(4)}, "shorter than the length"),
        ({"text": "abcde"}, "lacks a field"),
        ({"tokens": np.ones((5, 5), np.int64)}, "differ in shape or type"),
        ({"tokens": b"12345"}, "differ in shape or type"),
        ({"tokens": 5}, "differ in shape or type"),
    ],
)
def test_a_document_that_is_not_what_was_planned_is_named(sample, message):
    samples = [{"__key__": "good", "tokens": np.arange(5)}, {"__key__": "bad", **sample}]
    segments = np.array([[0, 0, 0, 5], [1, 1, 0, 5]])
    with pytest.raises(SampleError, match=message) as error:
        packed(segments, samples, 8, 0, ["tokens"])
    assert error.value.where == {"key": "bad", "field": "tokens"}


def test_arrays_with_a_value_per_token_are_packed_like_the_tokens(tmp_path):
    """Else a loss would count what it should not."""
    schema = {
        "source": shardkit.Text(),
        "loss_mask": shardkit.Array("bool", (None,)),
        "tokens": shardkit.Array("uint16", (None,)),
        "ends": shardkit.Array("int64", (None,)),
        "embedding": shardkit.Array("float32", (2,)),
    }
    with shardkit.create(tmp_path / "d", to="arrow", schema=schema) as writer:
        for number, size in enumerate([3, 0, 9, 4]):
            document = np.arange(size) + 10 * number
            rest = {"loss_mask": document % 3 == 1, "source": "x", "ends": np.arange(1)}
            rest["embedding"] = np.zeros(2, np.float32)
            writer.write({"__key__": f"{number}", "tokens": document.astype("uint16"), **rest})
    options = {"batching": Pack(8, 4), "threads": 0}
    both = ["tokens", "loss_mask"]
    batch = next(iter(Loader(tmp_path / "d", fields=both, **options)))
    assert batch["loss_mask"].dtype == bool
    assert (batch["loss_mask"] == (batch["tokens"] % 3 == 1) & (batch["segment_ids"] > 0)).all()
    assert batch["loss_mask"].sum() == 1 + 3 + 1  # 1; 22, 25 and 28; 31
    with pytest.raises(UsageError, match=r"cannot hold this field[\s\S]*fields=\['tokens'\]"):
        Loader(tmp_path / "d", fields=["tokens", "source"], **options)
    with pytest.raises(SampleError, match="another length than 'tokens'") as error:
        list(Loader(tmp_path / "d", fields=[*both, "ends"], **options))
    assert error.value.fix == f"leave the field out: fields={both}"  # not the loss mask, too
    assert (error.value.where["key"], error.value.where["field"]) == ("0", "ends")
    with pytest.warns(ShardkitWarning, match="'source', 'embedding': they are ignored"):
        Loader(tmp_path / "d", **options)


def test_a_document_without_its_loss_mask_is_an_error_rather_than_learnt_in_full(tmp_path):
    mask = shardkit.Array("bool", (None,), optional=True)
    schema = {"tokens": shardkit.Array("uint16", (None,)), "loss_mask": mask}
    with shardkit.create(tmp_path / "d", to="wds", schema=schema) as writer:
        for number in range(3):
            rest = {"loss_mask": np.ones(4, np.bool_)} if number else {}
            writer.write({"__key__": f"{number}", "tokens": np.ones(4, np.uint16), **rest})
    for batching in (Pack(8, 4), Bucket(4, 1), Dynamic(64)):
        with pytest.raises(SampleError, match="lacks a field that its batch requires") as error:
            list(Loader(tmp_path / "d", batching=batching, threads=0))
        assert error.value.where == {"key": "0", "field": "loss_mask"}


def by_hand(rows):
    """`cu_seqlens` of rows of documents, each given by its length."""
    ends = [0]
    for row in rows:
        for length in row:
            ends.append(ends[-1] + length)
    return ends


@given(rows=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5))
def test_documents_are_found_in_packed_rows_in_stored_blocks_and_in_padded_rows(rows):
    room = max(map(sum, rows)) + 2
    real = np.arange(room) < [[sum(row)] for row in rows]
    tokens = np.where(real, np.arange(real.size).reshape(real.shape), 0)
    ends = [np.cumsum(row, dtype="uint16") for row in rows]
    found = documents({"tokens": tokens, "doc_ends": ends})
    assert found["cu_seqlens"].dtype == np.int32
    assert found["cu_seqlens"].tolist() == by_hand(rows)
    assert found["max_seqlen"] == max(chain(*rows), default=0)
    assert ((found["segment_ids"] > 0) == real).all()
    flat = found["position_ids"][real].tolist()
    assert flat == [place for row in rows for length in row for place in range(length)]

    blocks = ({"tokens": t, "doc_ends": e} for t, e in zip(tokens, ends, strict=True))
    batches = [pad_collate()([*blocks])]
    samples = [{"tokens": line[: sum(row)]} for line, row in zip(tokens, rows, strict=True)]
    pieces = [
        (row, row, end - length, end)
        for row, lengths in enumerate(rows)
        for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True)
    ]
    if all(rows):  # packed rows are never empty
        batches.append(packed(np.array(pieces), samples, room, 0, ["tokens"]))
    for batch in batches:
        for name, value in documents(batch).items():
            np.testing.assert_array_equal(value, found[name])
    for side in ("left", "right"):  # each row is a document
        whole = documents(pad_collate(side=side, length=room)(samples))
        assert whole["cu_seqlens"].tolist() == by_hand([sum(row)] for row in rows if row)
        assert whole["position_ids"].max(initial=0) == max(whole["max_seqlen"] - 1, 0)


def test_documents_of_a_batch_that_does_not_tell_them_are_refused():
    unlike = {"tokens": [np.ones(2), np.ones(3)], "doc_ends": [np.ones(1)]}
    for batch in ({"tokens": np.ones((2, 3))}, unlike):
        with pytest.raises(UsageError, match="does not say where its documents are") as error:
            documents(batch)
        assert error.value.found == ", ".join(map(repr, batch))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_attention_inside_of_documents_is_that_of_each_document_by_itself():
    """By a mask of segments, and by torch's attention of variable length."""
    sizes = [5, 9, 1, 12, 3, 7, 7]
    samples = samples_of(sizes)
    (micro, *_) = Pack(16, 8).plan(np.array(sizes), seed=1)
    made = packed(micro.segments, [samples[n] for n in micro.samples], 16, 0, ["tokens"])
    batch = {name: torch.from_numpy(value) for name, value in made.items()}
    found = torch_documents(batch)
    segments, ends = found["segment_ids"], found["cu_seqlens"]
    assert (ends.dtype, ends.tolist()[-1], found["max_seqlen"]) == (torch.int32, sum(sizes), 12)
    real = segments > 0
    table = torch.randn(3, 1000, 8, generator=torch.Generator().manual_seed(0))
    heads = [part[batch["tokens"]].unflatten(-1, (2, 4)).transpose(1, 2) for part in table]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    masked = scaled_dot_product_attention(*heads, attn_mask=same).transpose(1, 2)[real]

    flat = [part[batch["tokens"][real]].unflatten(-1, (2, 4)) for part in table]
    alone = [
        scaled_dot_product_attention(*(part[start:end].transpose(0, 1) for part in flat))
        for start, end in pairwise(ends.tolist())
    ]
    torch.testing.assert_close(masked, torch.cat(alone, dim=1).transpose(0, 1))
    nested = [
        torch.nested.nested_tensor_from_jagged(part, ends.long()).transpose(1, 2) for part in flat
    ]
    ragged = scaled_dot_product_attention(*nested).transpose(1, 2)
    torch.testing.assert_close(masked, ragged.values())


def test_documents_are_what_transformers_makes_of_them():
    collator = pytest.importorskip("transformers").DataCollatorWithFlattening
    sizes = [5, 9, 1, 12, 3, 7, 7]
    samples = samples_of(sizes)
    (micro, *_) = Pack(16, 8).plan(np.array(sizes), seed=1)
    batch = packed(micro.segments, [samples[n] for n in micro.samples], 16, 0, ["tokens"])
    found = documents(batch)
    real = batch["segment_ids"] > 0
    order = [micro.samples[number] for _, number, _, _ in micro.segments]
    features = [{"input_ids": samples[number]["tokens"].tolist()} for number in order]
    theirs = collator(return_flash_attn_kwargs=True, return_tensors="np")(features)
    ours = {
        "input_ids": batch["tokens"][real][None],
        "position_ids": found["position_ids"][real][None],
        "labels": np.where(found["position_ids"], batch["tokens"], -100)[real][None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), found["cu_seqlens"]),
        **dict.fromkeys(("max_length_q", "max_length_k"), found["max_seqlen"]),
    }
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])
