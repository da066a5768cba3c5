"""Megatron's own library reads what we write, and we read what it writes; skipped without it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.formats import get_format
from shardkit.formats.base import Joins, ShardSpec
from shardkit.schema import Array, Schema
from shardkit.testing import write_shard

pytestmark = [
    pytest.mark.large,  # its import takes as long as a hundred other tests
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]

MEGATRON = get_format("megatron")

# Documents of several sequences by both ways of its builder, then all twice by merging. And of
# every prefix of ours all documents' sequences, mapped and not: copies, as its arrays are views.
SCRIPT = """
import json, sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

jobs, found = json.load(sys.stdin), {}
for prefix, dtype, multimodal in jobs["files"]:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", getattr(np, dtype), multimodal)
    for number, document in enumerate(jobs["documents"]):
        if number % 2:
            tokens = torch.tensor([token for sequence in document for token in sequence])
            lengths = [len(sequence) for sequence in document]
            builder.add_document(tokens, lengths, [1] * len(lengths))
        else:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64), 1)
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    merged = IndexedDatasetBuilder(f"{prefix}-twice.bin", getattr(np, dtype), multimodal)
    for _ in range(2):
        merged.add_index(prefix)
    merged.finalize(f"{prefix}-twice.idx")
for prefix in jobs["ours"]:
    for mapped in (True, False):
        data = IndexedDataset(prefix, mmap=mapped)
        ends = data.document_indices.tolist()
        documents = [[data[n].tolist() for n in range(a, b)] for a, b in zip(ends, ends[1:])]
        found[f"{prefix} {mapped}"] = [data.index.dtype.__name__, documents]
json.dump(found, sys.stdout)
"""

DOCUMENTS = [[[1, 2], [3]], [[4]], [], [[]], [[5, 6], [], [7, 8, 9]], [[10]]]


TYPES = ["uint8", "int8", "int16", "int32", "int64", "float32", "float64", "uint16"]


def of_every_type(folder: Path) -> dict[str, Any]:
    """A file of ours of each type; how Megatron stores it and what is in it, by prefix."""
    written = {}
    for dtype, stored in [
        ("|u1", "uint16"), ("<u2", "uint16"), ("<u4", "int32"), ("<u8", "int64"),
        ("|i1", "int8"), ("<i2", "int16"), ("<i4", "int32"), ("<i8", "int64"),
    ]:  # fmt: skip
        path = folder / f"ours-{np.dtype(dtype).name}.bin"
        high = min(np.iinfo(dtype).max, np.iinfo(stored).max)
        values = [[1, high, 0], [], list(range(100)), [5]]
        samples = [{"__key__": f"{n}", "x": np.array(v, dtype)} for n, v in enumerate(values)]
        write_shard(MEGATRON, path, Schema({"x": Array(dtype, (None,))}), samples)
        written[f"{path.with_suffix('')}"] = [stored, [[value] for value in values]]
    return written


def joined(folder: Path) -> dict[str, Any]:
    """The same of a file that tasks made together."""
    assert isinstance(MEGATRON, Joins)
    schema = Schema({"tokens": Array("<u2", (None,))})
    values = [np.arange(n, dtype="<u2") for n in range(300)]
    samples = [{"__key__": f"{n}", "tokens": value} for n, value in enumerate(values)]
    parts = [folder / f"part-{number}.bin" for number in range(3)]
    for path, some in zip(parts, (samples[:100], samples[100:101], samples[101:]), strict=True):
        write_shard(MEGATRON, path, schema, some)
    MEGATRON.join(folder / "joined.bin", parts, ShardSpec(schema))
    return {f"{folder / 'joined'}": ["uint16", [[value.tolist()] for value in values]]}


def test_megatron_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    ours = {**of_every_type(tmp_path), **joined(tmp_path)}
    files = [(f"{tmp_path}/{dtype}", dtype, number % 2) for number, dtype in enumerate(TYPES)]
    given = {"files": files, "documents": DOCUMENTS, "ours": [*ours]}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]  # it warns of what it would like
    done = subprocess.run(
        command, input=json.dumps(given), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {f"{prefix} {mapped}": ours[prefix] for prefix in ours for mapped in (True, False)}
    assert json.loads(done.stdout) == expected
    values = [[*itertools.chain(*document)] for document in DOCUMENTS]
    for prefix, dtype, _ in files:
        for path, documents in ((f"{prefix}.bin", values), (f"{prefix}-twice.bin", values * 2)):
            with shardkit.open(path) as dataset:
                assert dict(dataset.schema) == {"tokens": Array(dtype, (None,))}
                assert [sample["tokens"].tolist() for sample in dataset] == documents
