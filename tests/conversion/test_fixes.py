"""What an error proposes to type works when it is typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import OutputError, SampleError, ShardkitError
from tests.conversion.test_fields import command
from tests.sources.test_text import put

TEXTS = ["first", "second: ä", "third"]


def texts_of(path: Path) -> list[str]:
    with shardkit.open(path) as ds:
        return [ds[n]["text"] for n in range(len(ds))]


def failure(*words: object) -> ShardkitError:
    with pytest.raises(ShardkitError) as caught:
        command(*words)
    return caught.value


@pytest.mark.parametrize(
    ("encoding", "form"),
    [
        *(("latin-1", form) for form in ("txt", "jsonl", "csv")),
        *(("utf-16", form) for form in ("txt", "jsonl", "csv")),
        ("utf-16-le", "jsonl"),
        ("utf-16-be", "csv"),
        ("utf-32", "txt"),
        ("utf-32-le", "csv"),
        ("utf-32-be", "jsonl"),
    ],
)
def test_encodings(tmp_path: Path, encoding: str, form: str) -> None:
    lines = {"txt": TEXTS, "csv": ["text", *TEXTS], "jsonl": [f'{{"text": "{t}"}}' for t in TEXTS]}
    source = put(tmp_path / f"a.{form}", "\n".join(lines[form]).encode(encoding))
    typed = [source, "--to", "wds", "-o", tmp_path / "out"]
    fix = str(failure(*typed).fix)
    proposed = re.findall(r"--encoding (\S+?),? ", fix + " ")
    assert proposed
    for name in [proposed[0], *(["auto"] if "auto" in fix else [])]:
        command(*typed, "--encoding", name, "--overwrite")
        assert texts_of(tmp_path / "out") == TEXTS


@pytest.mark.parametrize("option", ["--encoding-errors replace", "--on-error skip"])
def test_bad_bytes(tmp_path: Path, option: str) -> None:
    source = put(tmp_path / "a.txt", "\n".join(TEXTS).encode("latin-1"))
    typed = [source, "--to", "wds", "-o", tmp_path / "out"]
    assert option in str(failure(*typed).fix)
    command(*typed, *option.split())
    skipped = option == "--on-error skip"
    assert len(texts_of(tmp_path / "out")) == (2 if skipped else 3)


def test_text_with_a_nul_in_an_encoding_that_it_has(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "one\n\0two\n".encode("utf-16"))
    error = failure(source, "--to", "wds", "-o", tmp_path / "x", "--encoding", "utf-16")
    assert error.fix == "remove it, or use --on-error skip"


def test_other_options_where_work_would_be_lost(tmp_path: Path) -> None:
    """Then they are refused (C2), and the first error says already what it takes."""
    for name, data in (("a", b"x" * 5000), ("b", b"y" * 5000), ("c", "ä".encode("latin-1"))):
        put(tmp_path / f"in/{name}.txt", data)
    typed = [tmp_path / "in", "--to", "wds", "-o", tmp_path / "out", "--shard-size", 4096]
    error = failure(*typed)
    assert isinstance(error, SampleError)
    assert "--encoding latin-1" in str(error.fix)
    assert "--overwrite" in str(error.fix)
    assert isinstance(failure(*typed, "--encoding", "latin-1"), OutputError)
    command(*typed, "--encoding", "latin-1", "--overwrite")
    assert texts_of(tmp_path / "out")[2] == "ä"
