"""The tokenizer libraries behind one interface: texts to arrays of ids, and ids to text."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.codecs.tokenizers import bytelevel, patterns
from shardkit.codecs.tokenizers.offsets import Encoded, Offsets
from shardkit.codecs.tokenizers.patterns import CODES
from shardkit.errors import SampleError, ShardkitError, UsageError
from shardkit.helpers.extras import extra

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

Ids = npt.NDArray[np.uint32]

_AT_ONCE = 1 << 16  # characters to look up at a time, to bound memory
# Without special tokens, tiktoken would search for the empty string: 0.02 s per megabyte.
_NO_SPECIAL = {"\0": 2**32 - 2}


class Engine(Protocol):
    def encode(self, texts: Sequence[str]) -> list[Ids]: ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@functools.lru_cache(maxsize=1)
def open_tokenizers(data: bytes, path: str, special_tokens: str) -> tokenizers.Tokenizer:
    """Open a tokenizer.json, without truncation and padding.

    Cached, as opening is slow and happens twice: to inspect it, and to check the fast engine.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:  # the library raises plain Exception, and ValueError
        if not is_failure(error):
            raise
        raise UsageError(
            "the file is JSON, but not a tokenizer of the `tokenizers` library",
            path=path,
            found=str(error),
            fix="give a tokenizer.json, or check whether it is complete",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = special_tokens == "text"
    return tokenizer


def is_failure(error: BaseException) -> bool:
    """Return whether an error is a failure of a library; a panic in Rust raises a BaseException."""
    if isinstance(error, ShardkitError | MemoryError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Tokenizers:
    """The `tokenizers` library, the reference for a tokenizer.json."""

    def __init__(self, data: bytes, path: str, special_tokens: str) -> None:
        self.tokenizer = open_tokenizers(data, path, special_tokens)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Encoded(np.array(one.ids, np.uint32), *_pairs(one.offsets)) for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _pairs(offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    flat = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets))
    return flat.reshape(-1, 2).T


def make_encoding(
    pattern: str, ranks: dict[bytes, int], special: dict[str, int]
) -> tiktoken.Encoding:
    from tiktoken import Encoding

    return Encoding(
        "shardkit",
        pat_str=patterns.for_tiktoken(pattern),
        mergeable_ranks=ranks,
        special_tokens=special or _NO_SPECIAL,
    )


def encode_text(encoding: tiktoken.Encoding, text: str, special: set[str]) -> Ids | None:
    """Return the ids of a text; None if tiktoken's regex engine fails, as on a million spaces."""
    try:
        return encoding.encode_to_numpy(text, allowed_special=special, disallowed_special=())
    except UnicodeEncodeError:
        raise
    except ValueError:
        return None


class ByteLevelByTiktoken:
    """tiktoken's engine for a tokenizer.json for which it provably gives the same ids.

    Documents with characters that the two engines may treat differently use `tokenizers`.
    """

    def __init__(
        self,
        data: bytes,
        path: str,
        special_tokens: str,
        settings: bytelevel.Settings,
        unsafe: Iterable[tuple[int, int]],
    ) -> None:
        self._pattern = settings.pattern
        ranks = self._ranks(json.loads(data))
        self._encoding = make_encoding(settings.pattern, ranks, settings.added)
        self._ids = settings.added
        self._added = set(self._ids)
        self._nfc = settings.nfc
        self._odd = _table(unsafe, unassigned=settings.nfc)
        self._file = data, path, special_tokens

    def _ranks(self, document: Any) -> dict[bytes, int]:
        return bytelevel.in_bytes(bytelevel.ranks(document["model"], self._pattern))

    @functools.cached_property
    def _slow(self) -> Tokenizers:
        return Tokenizers(*self._file)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        odd = self._are_odd("".join(text for text in texts if not text.isascii()))
        return [
            self._by_tokenizers(text)
            if odd and not text.isascii() and self._are_odd(text)
            else self._encode(text)
            for text in texts
        ]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        return [
            (self._offsets.of(text, ids) if self._as_it_is(text) else None)
            or self._slow.encode_with_offsets([text])[0]
            for text, ids in zip(texts, self.encode(texts), strict=True)
        ]

    @functools.cached_property
    def _offsets(self) -> Offsets:
        document = json.loads(self._file[0])
        return Offsets(self._ranks(document), self._ids, document.get("post_processor"))

    def _as_it_is(self, text: str) -> bool:
        """Return whether a text is encoded without another normalization before."""
        normal = text.isascii() or not self._nfc
        return normal or (unicodedata.is_normalized("NFC", text) and not self._are_odd(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._slow.decode(ids)

    def _are_odd(self, text: str) -> bool:
        return _has_any(self._odd, text)

    def _encode(self, text: str) -> Ids:
        if self._nfc and not unicodedata.is_normalized("NFC", text):
            normal = self._slow.tokenizer.normalizer.normalize_str(text)
            # Added tokens are found before normalization, which does not reach across them.
            has_added = any(token in text or token in normal for token in self._added)
            if has_added or self._are_odd(normal):
                return self._by_tokenizers(text)
            text = normal
        ids = encode_text(self._encoding, text, self._added)
        return self._by_tokenizers(text) if ids is None else ids

    def _by_tokenizers(self, text: str) -> Ids:
        return self._slow.encode([text])[0]


class Tiktoken:
    """tiktoken itself, with its own ranks."""

    def __init__(
        self, pattern: str, ranks: dict[bytes, int], special: dict[str, int], special_tokens: str
    ) -> None:
        self._encoding = make_encoding(pattern, ranks, special)
        self._special = set(special) if special_tokens == "special" else set[str]()
        self._tokens = ranks, special

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encode(text) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        found = [self._offsets.of(text, self._encode(text)) for text in texts]
        assert None not in found  # the ids have all bytes of their text
        return [one for one in found if one is not None]

    @functools.cached_property
    def _offsets(self) -> Offsets:
        return Offsets(*self._tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))

    def _encode(self, text: str) -> Ids:
        ids = encode_text(self._encoding, text, self._special)
        if ids is None:
            raise SampleError(
                "tiktoken cannot split the text of a document: its regex engine gives up",
                found="hundreds of thousands of spaces in a row, or similar",
                fix="leave the document out, or use the tokenizer.json of the same model",
            )
        return ids


class SentencePiece:
    """Google's library for its .model files."""

    def __init__(self, data: bytes, path: str) -> None:
        self.processor = open_sentencepiece(data, path)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self.processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, np.uint32) for ids in found]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        raise NotImplementedError  # only for chat templates, whose special tokens it cannot encode

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.processor.decode([int(index) for index in ids])
        return text


def open_sentencepiece(data: bytes, path: str) -> Any:
    with extra("sentencepiece", "a SentencePiece model"):
        from sentencepiece import SentencePieceProcessor
    try:
        return SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise UsageError(
            "the file is not a SentencePiece model", path=path, found=str(error)
        ) from error


def check_unicode(texts: Sequence[str]) -> None:
    """Raise SampleError for a lone surrogate, which JSON can contain but UTF-8 cannot."""
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SampleError(
                "the text of a document is not valid Unicode",
                found=f"half a surrogate pair, U+{ord(text[error.start]):04X}, "
                f"at character {error.start}",
                fix="repair the document, or leave it out",
            ) from error


def _has_any(table: npt.NDArray[np.bool_], text: str) -> bool:
    """Return whether a text contains a code point that is marked in the table."""
    return any(
        table.take(
            np.frombuffer(text[start : start + _AT_ONCE].encode("utf-32-le"), np.uint32)
        ).any()
        for start in range(0, len(text), _AT_ONCE)
    )


def _table(ranges: Iterable[tuple[int, int]], unassigned: bool = False) -> npt.NDArray[np.bool_]:
    """Return a table that marks the code points whose documents are encoded by `tokenizers`.

    With normalization, also those unassigned in Python's version of Unicode. Text without these
    that is normalized for Python is so for `tokenizers`, too: it stays normalized in later versions
    of Unicode, and in earlier ones, which reorder and compose fewer characters.
    """
    table = np.zeros(CODES, bool)
    for start, stop in ranges:
        table[start:stop] = True
    if unassigned:
        rest = np.flatnonzero(~table)
        table[rest] = [unicodedata.category(chr(code)) == "Cn" for code in rest]
    return table
