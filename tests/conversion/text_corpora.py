"""Generated corpora, and what must become of them, found out by other means than shardkit's."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer, models, pre_tokenizers

import shardkit
from shardkit.formats import FORMATS, get_format
from shardkit.options import TextOptions
from shardkit.schema import Array, Schema
from tests.codecs import tokenizer_zoo

Ids: TypeAlias = list[int]
EOS = 0  # of the zoo's gpt2
TEXT_FORMATS = [name for name in sorted(FORMATS) if name != "megatron"]


def write_lines(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """JSON Lines; a row that is text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def write_corpus(path: Path, texts: Iterable[str]) -> Path:
    """Documents with a number beside their text."""
    return write_lines(path, ({"text": text, "n": n} for n, text in enumerate(texts)))


def line_keys(path: Path, name: str | None = None) -> list[str]:
    """The keys of the documents in a file of lines: where each begins."""
    starts, start = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        if line.strip():
            starts.append(f"{name or path.name}/{start}")
        start += len(line)
    return starts


def few_words(size: int) -> dict[str, Any]:
    """The tokenizer.json of a vocabulary of `size` words: w0, w1, ..."""
    vocab = {f"w{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


@functools.cache
def _opened(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def ids_of(
    tokenizer: Path, texts: Iterable[str], before: Sequence[int] = (), after: Sequence[int] = (EOS,)
) -> list[Ids]:
    """The ids of documents by the `tokenizers` library, with those that begin and end them."""
    opened = _opened(tokenizer)
    return [[*before, *opened.encode(text, add_special_tokens=False).ids, *after] for text in texts]


@dataclass
class Packed:
    """What one task should make: blocks with their tokens and the ends of documents in them."""

    blocks: list[tuple[Ids, Ids]] = field(default_factory=list)
    padding: int = 0
    dropped: int = 0
    cut: int = 0

    def add(self, pieces: list[Ids], seq_len: int, remainder: str, pad_id: int) -> None:
        ends, tokens = [], []
        for piece in pieces:
            tokens += piece
            ends.append(len(tokens))
        missing = seq_len - len(tokens)
        if missing and remainder == "drop":
            self.dropped += len(tokens)
            return
        if remainder == "pad":
            self.padding += missing
            tokens = tokens + [pad_id] * missing
        self.blocks.append((tokens, ends))


def packed(
    documents: list[Ids], seq_len: int, pack: str, remainder: str, pad_id: int = EOS
) -> Packed:
    """The blocks of documents, in the plainest way; for fewer of them than a window has."""
    made = Packed()
    groups = {"concat": _run_on, "pad": _alone, "nosplit": _whole}[pack](documents, seq_len)
    for pieces in groups:
        made.add(pieces, seq_len, remainder, pad_id)
    if pack == "concat":
        start = 0
        for document in documents:
            end = start + len(document)
            made.cut += bool(document) and start // seq_len != (end - 1) // seq_len
            start = end
    else:
        made.cut = sum(len(document) > seq_len for document in documents)
    return made


def _run_on(documents: list[Ids], seq_len: int) -> list[list[Ids]]:
    groups: list[list[Ids]] = []
    for document in documents:
        for at, token in enumerate(document):
            if not groups or sum(map(len, groups[-1])) == seq_len:
                groups.append([[]])
            elif at == 0:
                groups[-1].append([])
            groups[-1][-1].append(token)
    return groups


def _alone(documents: list[Ids], seq_len: int) -> list[list[Ids]]:
    return [
        [document[at : at + seq_len]]
        for document in documents
        for at in range(0, len(document), seq_len)
    ]


def _whole(documents: list[Ids], seq_len: int) -> list[list[Ids]]:
    """Full pieces at once, then the others: the longest first, into the fullest with room."""
    pieces = [piece for (piece,) in _alone(documents, seq_len)]
    full = [[piece] for piece in pieces if len(piece) == seq_len]
    others = [piece for piece in pieces if len(piece) < seq_len]
    blocks: list[list[int]] = []
    for number in sorted(range(len(others)), key=lambda n: -len(others[n])):
        filled = [sum(len(others[n]) for n in block) for block in blocks]
        fitting = [at for at, size in enumerate(filled) if size + len(others[number]) <= seq_len]
        if fitting:
            blocks[max(fitting, key=lambda at: filled[at])].append(number)
        else:
            blocks.append([number])
    return full + [[others[n] for n in block] for block in sorted(map(sorted, blocks))]


def make(source: Path, to: str, out: Path, text: Any = None, **options: Any) -> Any:
    """Convert in this process; `text` are TextOptions by name."""
    options = {"workers": 0, **options}
    return shardkit.convert(source, to, out, text=TextOptions(**(text or {})), **options)


def samples_of(path: Path) -> list[dict[str, Any]]:
    with shardkit.open(path) as dataset:
        return list(dataset)


def blocks_of(path: Path) -> list[tuple[Ids, Ids]]:
    return [(s["tokens"].tolist(), s["doc_ends"].tolist()) for s in samples_of(path)]


def tokens_of(path: Path) -> dict[str, Ids]:
    """Tokens by key, in order."""
    return {sample["__key__"]: sample["tokens"].tolist() for sample in samples_of(path)}


def joined(documents: Iterable[Ids]) -> Ids:
    return [token for document in documents for token in document]


def run_of(blocks: Iterable[tuple[Ids, Ids]]) -> Ids:
    """The tokens of blocks that are not padded, one after the other."""
    return joined(tokens for tokens, _ in blocks)


def holds_blocks(format: str) -> bool:
    schema = {"tokens": Array("<u2", (8,)), "doc_ends": Array("<u2", (None,))}
    try:
        get_format(format).layout(Schema(schema))
    except shardkit.FormatError:
        return False
    return True


BLOCK_FORMATS = [name for name in sorted(FORMATS) if holds_blocks(name)]


def prose(count: int, seed: int = 1) -> list[str]:
    """Documents in several scripts; one in fifty is empty."""
    texts = tokenizer_zoo.documents(count, seed)
    return ["" if n % 50 == 49 else text for n, text in enumerate(texts)]
