"""A tokenizer as a small object to send to workers, and its engine, loaded on first use."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from shardkit.codecs.tokenizers import engines
from shardkit.codecs.tokenizers.bytelevel import Settings
from shardkit.codecs.tokenizers.engines import Engine, Ids
from shardkit.codecs.tokenizers.offsets import Encoded
from shardkit.codecs.tokenizers.patterns import read_ranks, write_ranks
from shardkit.errors import DamagedError, SampleError, SourceError, UsageError
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

# The attributes that a manifest has.
IDENTITY = (
    *("kind", "file", "digest", "vocab_size", "eos_id", "bos_id", "pad_id", "special_tokens"),
)
_LOCK = threading.Lock()
T = TypeVar("T")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer's file, and how to encode with it; created by `load_tokenizer`.

    Its pickle does not contain the engine, which is loaded on first use, once per process. Workers
    do not choose the engine again, so they must have the same libraries and an unchanged file.
    """

    kind: str  # "huggingface", "tiktoken" or "sentencepiece"
    engine: str  # the library that encodes: "tokenizers", "tiktoken" or "sentencepiece"
    path: str | RemotePath | None  # None: a tiktoken encoding, named by `file`
    file: str  # the file name of the copy in a dataset
    digest: str  # xxh3-128 of the file's bytes, as 32 hex digits
    special_tokens: str
    vocab_size: int  # the largest id + 1
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    notes: tuple[str, ...] = ()  # for the user: what was decided, and why
    # What tiktoken needs besides the ranks.
    pattern: str = ""
    nfc: bool = False
    added: tuple[tuple[str, int], ...] = ()
    unsafe: tuple[tuple[int, int], ...] = ()  # code points for which the fast engine is not used
    libraries: tuple[tuple[str, str], ...] = ()

    @property
    def dtype(self) -> str:
        """The smallest unsigned type that can hold all ids, as a NumPy type string."""
        return np.min_scalar_type(max(self.vocab_size - 1, 0)).newbyteorder("<").str

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without tokens that mark its beginning or end.

        Thread-safe. Raises SampleError for a text that is not valid Unicode, or that the tokenizer
        cannot encode.
        """
        return self._call(self._engine().encode, texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the same ids, and the position of each token in its text, in characters."""
        return self._call(self._engine().encode_with_offsets, texts)

    def _call(self, encode: Callable[[Sequence[str]], list[T]], texts: Sequence[str]) -> list[T]:
        try:
            return encode(texts)
        except BaseException as error:
            if not engines.is_failure(error):
                raise
            engines.check_unicode(texts)
            raise SampleError(
                "the tokenizer cannot encode the text of a document",
                expected=f"a text that {self.file} has tokens for",
                found=f"{error}",
                fix="use another tokenizer, or leave the document out with --on-error skip",
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return text for display, which may differ from the text that was encoded."""
        numbers = [int(index) for index in ids]
        try:
            return self._engine().decode(numbers)
        except BaseException as error:
            if not engines.is_failure(error):
                raise
            wrong = [number for number in numbers if not 0 <= number < self.vocab_size]
            raise DamagedError(
                "there is no such token in the vocabulary",
                expected=f"ids from 0 to {self.vocab_size - 1}",
                found=str(wrong[0] if wrong else max(numbers)),
            ) from error

    def identity(self) -> dict[str, Any]:
        """Return the entry for a manifest, which `open_copy` takes along with the file."""
        found: dict[str, Any] = {name: getattr(self, name) for name in IDENTITY}
        if self.kind == "tiktoken":
            found |= {"pattern": self.pattern, "special_ids": dict(self.added)}
        return found

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries on which the ids depend."""
        return dict(self.libraries)

    def files(self) -> dict[str, bytes]:
        """Return the files to store in a dataset, by name, for `open_copy`."""
        return {self.file: self._data()}

    def at(self, path: str | Path) -> Tokenizer:
        """Return the same tokenizer, read from a copy of its file."""
        return replace(self, path=str(path))

    def checked_on(self, texts: Sequence[str]) -> Tokenizer:
        """Return itself, or one that uses `tokenizers` if the fast engine errs on a document."""
        if (self.kind, self.engine) != ("huggingface", "tiktoken"):
            return self
        slow = replace(self, engine="tokenizers", unsafe=(), libraries=versions("tokenizers"))
        for number, (ours, theirs) in enumerate(
            zip(self.encode(texts), slow.encode(texts), strict=True)
        ):
            if not np.array_equal(ours, theirs):
                note = f"tokenizers is used: tiktoken gave other ids for document {number} of some"
                return replace(slow, notes=(*self.notes, note))
        return self

    def _engine(self) -> Engine:
        try:
            with _LOCK:
                return _load(self)
        except BaseException as error:
            if not engines.is_failure(error):
                raise
            raise UsageError(
                "a tokenizer cannot be used",
                path=self.path or self.file,
                found=f"{error}",
                fix="check whether its file is complete, or give another one",
            ) from error

    def _data(self) -> bytes:
        """Return the file's bytes; raises SourceError if they have changed since it was opened."""
        if self.path is None:
            data = encoding_data(Path(self.file).stem)
        else:
            data = fs.read(self.path if isinstance(self.path, RemotePath) else Path(self.path))
        if digest(data) != self.digest:
            raise SourceError(
                "a tokenizer's file has changed since it was opened",
                path=self.path or self.file,
                expected=f"xxh3-128 {self.digest}",
                found=digest(data),
                fix="do not modify the file while it is used, and run again",
            )
        return data


@functools.lru_cache(maxsize=8)
def _load(tokenizer: Tokenizer) -> Engine:
    if tokenizer.libraries != versions(*dict(tokenizer.libraries)):
        raise UsageError(
            "this machine has other versions of the tokenizer libraries than the one that started",
            expected=_listed(tokenizer.libraries),
            found=_listed(versions(*dict(tokenizer.libraries))),
            fix="install the same versions on all machines",
        )
    data, path = tokenizer._data(), str(tokenizer.path or tokenizer.file)
    special, pattern, added = tokenizer.special_tokens, tokenizer.pattern, dict(tokenizer.added)
    if tokenizer.kind == "tiktoken":
        return engines.Tiktoken(pattern, read_ranks(data, path), added, special)
    if tokenizer.kind == "sentencepiece":
        return engines.SentencePiece(data, path)
    if tokenizer.engine == "tiktoken":
        settings = Settings(pattern, tokenizer.nfc, added)
        return engines.ByteLevelByTiktoken(data, path, special, settings, tokenizer.unsafe)
    return engines.Tokenizers(data, path, special)


def versions(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, version(name)) for name in names)


def _listed(libraries: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {number}" for name, number in libraries)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def encoding_data(name: str) -> bytes:
    """Return the ranks of an encoding that tiktoken knows by name, as a file; may download them."""
    import tiktoken

    try:
        return write_ranks(tiktoken.get_encoding(name)._mergeable_ranks)
    except OSError as error:  # requests' errors are OSErrors
        raise UsageError(
            f"tiktoken could not download the file of its encoding {name}",
            found=type(error).__name__,
            fix=f"give a local file, such as {name}.tiktoken or a tokenizer.json; or set "
            "TIKTOKEN_CACHE_DIR to a folder that was filled on a machine with a network",
        ) from error
