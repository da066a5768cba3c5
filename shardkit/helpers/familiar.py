"""Words of other libraries, and what shardkit has instead: for errors only, they are no aliases.

The words are those of torch's DataLoader, torchvision, datasets, MosaicML Streaming, LitData,
webdataset, FFCV and tf.data. Each key has several words, separated by blanks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

_FIRST = "give the path or URL first, without a name"
_THREADS = "leave it out: a Loader makes batches in threads of this process, in order"

# Of these, the first sentence is shown that begins with an existing option, or with none.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "num_workers workers num_threads num_proc n_jobs j": (
        "threads=N: a Loader uses threads, not processes",
        "workers=N",
    ),
    "threads": ("workers=N",),
    "persistent_workers multiprocessing_context worker_init_fn timeout in_order": (_THREADS,),
    "prefetch_factor predownload batches_ahead prefetch_size": ("prefetch=N, in batches",),
    "pin_memory": ("shardkit.torch.Loader has this option",),
    "sampler": (
        "sampling=shardkit.Balanced(FIELD), or shardkit.Weighted(FIELD); ranks divide the samples"
        " by themselves, without a DistributedSampler",
    ),
    "batch_sampler batching_method": (
        "batching=shardkit.Bucket(...), Dynamic(...) or Pack(...); batch_size=N for equal batches",
    ),
    "collate_fn": ("collate=FUNCTION",),
    "drop_last drop_remainder": ('last="drop"',),
    "shuffle_seed random_seed generator random_state": ("seed=N",),
    "shuffle_block_size buffer_size shuffle_buffer": ("window=N, in samples",),
    "shardshuffle shuffle_algo order": (
        "shuffle=True, which also mixes the samples of all shards",
    ),
    "num_canonical_nodes": ("parts=N",),
    "nodesplitter workersplitter distributed": (
        "leave it out: ranks and threads divide the samples by themselves",
    ),
    "streams proportion repeat choose": ("weights=[...], with a list of paths as the source",),
    "handler": ('on_error="skip"',),
    "transform pipelines decoders": ("transforms={FIELD: [...]}", "transform=MODULE:FUNCTION"),
    "columns": ("fields=[...]", "schema={...}"),
    "cache_dir cache_folder": ("cache=FOLDER",),
    "max_cache_size": ("cache_limit=SIZE",),
    "os_cache": ('cache="memory"',),
    "local remote dataset path i input input_dir inputs input_path data_dir data_files": (
        "cache=FOLDER for the data of a URL, which comes first, without a name, as a path does",
        _FIRST,
    ),
    "streaming": ("leave it out: samples are read when they are needed, also of a URL",),
    "validate_hash download_retry download_timeout": (
        "leave it out: data of a URL is compared with its checksums, and requests are repeated",
    ),
    "split subset": (f"{_FIRST}: that of one split is PATH/train",),
    "train_split val_split test_split test_size": ('split="train=0.9,val=0.1"',),
    "t format fmt output_format": ("to=FORMAT",),
    "output output_dir out_dir output_path destination": ("out=PATH",),
    "maxcount samples_per_shard": ("shard_samples=N",),
    "maxsize size_limit chunk_bytes chunk_size max_shard_size": ("shard_size=SIZE",),
    "num_shards": ("shard_samples=N, or shard_size=SIZE, which decide how many shards there are",),
    "compression": ("leave it out: images are compressed already; to=parquet compresses the rest",),
    "hashes": ("leave it out: checksums are always stored",),
    "f y force exist_ok yes": ("overwrite=True",),
    "v verbose": ("leave it out: without --quiet, the progress is shown",),
    "dry_run": ("plan=True",),
    "size image_size max_resolution": ("resize=N", "size=N"),
    "jpeg_quality": ("quality=N",),
    "labels csv annotations": ("metadata=FILE", "classes=[...]"),
    "text_column text_key": ("text_field=NAME",),
    "max_length max_seq_length block_size context_length": ("seq_len=N",),
    "packing": ("seq_len=N, which packs documents",),
    "assistant_only assistant_only_loss completion_only_loss train_on_inputs": ("loss_on=HOW",),
    "tokenizer_name tokenizer_path vocab": ("tokenizer=FILE",),
    "delimiter sep separator": ("leave it out: commas, semicolons, tabs and bars are found",),
    "header": ("columns=NAMES for a table without a header",),
    "n limit num_samples": ("n=N", "samples=N", "limit=N"),
}

_LOADER = "a Loader of shardkit.torch, or of shardkit.stream for NumPy arrays"
_CREATE = "with shardkit.create(OUT, FORMAT, SCHEMA) as writer: writer.write(sample)"
_DATA_FRAME = "({name: ds.column(name) for name in ds.schema})"

# Attributes of datasets and loaders, and functions and classes of whole libraries.
_ATTRIBUTES: Mapping[str, str] = {
    "map map_batches map_tuple with_transform set_transform decode": (
        "transforms={FIELD: FUNCTION} of shardkit.open and of a Loader run on each sample;"
        " `shardkit convert --transform MODULE:FUNCTION` runs once"
    ),
    "filter": "shardkit.open(path).filter(CONDITION) is a dataset, also for a Loader",
    "select skip take": "shardkit.open(path)[10:20] is a dataset, also for a Loader",
    "features element_spec": "shardkit.open(path).schema",
    "num_rows num_samples size cardinality": "len(dataset)",
    "column_names columns field_names": "list(dataset.schema)",
    "num_columns": "len(dataset.schema)",
    "shape": "len(dataset) samples of len(dataset.schema) fields",
    "imgs samples data": "dataset[i], dataset.keys() or dataset.column(FIELD)",
    "targets labels": 'dataset.column("label")',
    "class_to_idx": "dataset.classes has the names of the classes, in the order of their labels",
    "unique value_counts": "dataset.stats() counts the samples of each class",
    "shuffle shuffled": "Loader(path, shuffle=True), in another order each epoch",
    "sort": "dataset.select(np.argsort(dataset.column(FIELD)))",
    "iter batch batched dataloader as_numpy_iterator with_format set_format to_iterable_dataset": (
        f"batches come from {_LOADER}: Loader(path, batch_size=N)"
    ),
    "to_pandas": f"pandas.DataFrame{_DATA_FRAME}",
    "to_polars": f"polars.DataFrame{_DATA_FRAME}",
    "to_dict to_list": "list(dataset), or dataset.column(FIELD) of one field",
    "head peek": "dataset[:5], or `shardkit head PATH`",
    "train_test_split split": "`shardkit convert PATH --split train=0.9,val=0.1`",
    "shard split_by_node": "leave it out: ranks and threads divide the samples by themselves",
    "cache": 'Loader(path, cache="memory"), or cache=FOLDER for a URL',
    "prefetch": "Loader(path, prefetch=N)",
    "repeat with_epoch": "each iteration over a Loader is the next epoch",
    "rename_column rename_columns": "`shardkit convert PATH --rename OLD=NEW`",
    "remove_columns select_columns": "Loader(path, fields=[...]); `shardkit convert --drop FIELD`",
    "save_to_disk": '`shardkit convert PATH --to hf`, or shardkit.convert(dataset, "hf", out)',
    "push_to_hub": "`shardkit convert PATH --to hf`, then load_from_disk(OUT).push_to_hub(NAME)",
    "load_dataset load_from_disk load read WebDataset": "shardkit.open(path)",
    "Loader StreamingDataset DataLoader StreamingDataLoader": (
        "from shardkit.torch import Loader, StreamingDataset; the same in shardkit.stream, without"
        " torch"
    ),
    "torch stream": "import shardkit.torch or shardkit.stream, which are loaded only then",
    "optimize": "shardkit.convert(source, FORMAT, out)",
    "Writer MDSWriter ShardWriter TarWriter DatasetWriter write": _CREATE,
}

_COMMANDS: Mapping[str, str] = {
    "pack make build create write optimize prepare tokenize shard resize": "convert",
    "shuffle": "convert ... --shuffle",
    "upload push cp sync": "convert ... -o s3://BUCKET/NAME",
    "split": "convert ... --split train=0.9,val=0.1",
    "ls list info show describe view print schema": "inspect",
    "take peek sample": "head",
    "get read": "cat",
    "count analyze": "stats",
    "check validate test fsck": "verify",
    "repair fix": "verify ... --repair SOURCE",
    "compare": "diff",
    "extract unpack untar dump": "export",
    "concat concatenate join combine": "merge",
    "profile": "doctor",
    "help": "--help",
    "version": "--version",
}


def option_instead(name: str, known: Collection[str]) -> str | None:
    """Return what to write instead of an option that is not among the known ones, if known.

    >>> option_instead("shuffle_seed", ["shuffle", "seed"]), option_instead("SEED", ["seed"])
    ('write seed=N', 'write seed=VALUE, in lower case')
    """
    lower = name.lower()
    if lower in known and lower != name:
        return f"write {lower}=VALUE, in lower case"
    for way in _find(lower, _OPTIONS) or ():
        option = re.match(r"(\w+)=", way)
        if option is None or option[1] in known:
            return f"write {way}" if option else str(way)
    return None


def command_instead(name: str) -> str | None:
    """Return the command that does what a command of this name does elsewhere, if there is one."""
    found: str | None = _find(name.lower(), _COMMANDS)
    return found


def with_attribute_instead(error: AttributeError, name: str) -> AttributeError:
    """Return an error that also says what to write instead, for an attribute of other libraries."""
    found = _find(name, _ATTRIBUTES)
    return error if found is None else AttributeError(f"{error}; instead: {found}")


class Familiar:
    """A class whose errors for attributes of other libraries say what to write instead."""

    if not TYPE_CHECKING:  # a type checker would believe that every attribute exists

        def __getattr__(self, name: str) -> Any:
            try:
                return object.__getattribute__(self, name)  # the error, also that of a property
            except AttributeError as error:
                raise with_attribute_instead(error, name) from error.__cause__


def _find(name: str, table: Mapping[str, Any]) -> Any:
    return next((found for words, found in table.items() if name in words.split()), None)
