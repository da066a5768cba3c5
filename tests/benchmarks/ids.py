"""Are the ids those of `tokenizers`, on real text? For tokenizers of every kind.

    python tests/benchmarks/ids.py --data TEXTS

Converts the folder, each file a document of whatever encoding it has, with small tokenizers trained
on the spot, and compares every document with what `tokenizers` makes of it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import shardkit
from tests.codecs import tokenizer_zoo


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in tokenizer_zoo.NAMES:
            (Path(folder) / name).mkdir()
            file = tokenizer_zoo.write_json(Path(folder) / name, name)
            report[name] = compared(options.data, file, Path(folder) / f"{name}-out")
            print(f"{name:<24}" + "  ".join(f"{n}: {v}" for n, v in report[name].items()))
    print(json.dumps(report))
    return report


def compared(data: Path, file: Path, out: Path) -> dict[str, Any]:
    """How many documents and tokens there are, and how many documents differ."""
    out.mkdir()
    text = shardkit.TextOptions(encoding="auto", encoding_errors="replace")
    shardkit.convert(data, "arrow", out / "text", text=text)
    text = shardkit.TextOptions(tokenizer=file, append_eos=False)
    made = shardkit.convert(out / "text", "arrow", out / "tokens", text=text)
    theirs = Tokenizer.from_file(str(file))
    theirs.no_truncation()
    theirs.no_padding()
    texts, tokens = shardkit.open(out / "text"), shardkit.open(out / "tokens")
    different = 0
    for document, found in zip(texts, tokens, strict=True):
        expected = theirs.encode(document["text"], add_special_tokens=False).ids
        different += found["tokens"].tolist() != expected
    slow = any("tokenizers is used" in note for note in made.notes)
    return {
        "engine": "tokenizers" if slow else "tiktoken",
        "documents": len(texts),
        "tokens": int(tokens.lengths("tokens").sum()),
        "different": different,
    }


if __name__ == "__main__":
    report = main(sys.argv[1:])
    sys.exit(any(row["different"] for row in report.values()))
