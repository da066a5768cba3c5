"""The steps for text: tokenizing documents, and packing tokens into blocks of equal length."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import SampleError, UsageError, near
from shardkit.helpers.prefetch import in_threads
from shardkit.metadata.sizes import FieldSizes
from shardkit.options import TextOptions
from shardkit.preprocess.items import Filtered, Item, count_values, sample_of
from shardkit.preprocess.packing import PACKERS, Block, ends_dtype
from shardkit.sample import Sample
from shardkit.schema import Array, Schema, Text
from shardkit.sources.conversations import refuse_without_template

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.codecs.tokenizers import Tokenizer

    Tokens = npt.NDArray[Any]  # ids; of conversations, structured: ids and what is learned

TOKENS = "tokens"
DOC_ENDS = "doc_ends"

# Limits of documents that are encoded together: enough work to be worth waking a thread.
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 19
_COUNTS = ("padding", "dropped", "cut")


@dataclass
class TextTally:
    """Counts of documents and tokens; counts of several tasks can be merged in any order.

    `counts` has the "bytes" of their UTF-8 text, the packer's "padding", "dropped" and "cut", and
    for conversations the "learned" tokens.
    `lengths` are the documents' numbers of tokens, including bos and eos tokens.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lengths: FieldSizes = field(default_factory=FieldSizes)
    too_long: FieldSizes = field(default_factory=FieldSizes)  # of those that fit into no block

    def add(self, size: int, tokens: int) -> None:
        self.counts["bytes"] += size
        self.lengths.append(tokens)

    def merge(self, other: TextTally) -> None:
        self.counts.update(other.counts)
        self.lengths.merge(other.lengths)
        self.too_long.merge(other.too_long)

    def flush(self) -> None:
        self.lengths.flush()
        self.too_long.flush()

    def summary(self) -> dict[str, Any]:
        """Return the summary for the manifest; empty if no text was tokenized."""
        if not self.lengths.count:
            return {}
        about, long = self.lengths.summary(), self.too_long
        return {
            "documents": about.count,
            "tokens": about.bytes,
            "bytes": self.counts["bytes"],
            **{name: self.counts[name] for name in _COUNTS},
            **{name: self.counts[name] for name in ("learned",) if name in self.counts},
            **({"too long": long.count, "longest too long": long.max} if long.count else {}),
            "shortest": about.min,
            "median": about.median,
            "longest": about.max,
            "histogram": self.lengths.by_powers(),
        }


@dataclass(frozen=True)
class TextSteps:
    """The steps for samples with text; with `seq_len`, they become samples of blocks."""

    tokenizer: Tokenizer
    options: TextOptions
    fields: tuple[str, ...]  # that become tokens: here, the one with the text
    label: str | None = None  # a field that is kept along with tokens, unless they are packed

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a document's tokens, as they are stored."""
        return np.dtype(self.tokenizer.dtype)

    def notes(self) -> list[str]:
        """Return notes on what a user may not expect."""
        return list(self.tokenizer.notes)

    @property
    def _kept(self) -> set[str]:
        """The fields that are kept, if not all are."""
        keeps = self.label is not None and self.options.seq_len is None
        return {"__key__", *self.fields, *([str(self.label)] if keeps else [])}

    def schema_after(self, schema: Schema) -> Schema:
        """Return the schema after the steps. Raises UsageError for fields that cannot be kept."""
        every, seq_len = self.options.keep_fields, self.options.seq_len
        others = {n: kind for n, kind in schema.items() if n not in self.fields}
        kept = {n: kind for n, kind in others.items() if every or n in self._kept}
        arrays = _by_name(np.empty(0, self.dtype))
        for name in arrays.keys() & kept.keys():
            raise UsageError(
                f"there is already a field {name!r}", fix="rename it first, or leave it out"
            )
        length = None if self.options.remainder == "keep" else seq_len
        optional = every and schema[self.fields[0]].optional  # else ignored
        stored = {
            name: Array(array.dtype.str, (length,), optional=optional)
            for name, array in arrays.items()
        }
        if seq_len is None:
            return Schema({**stored, **kept})
        if kept:
            raise UsageError(
                "a block has tokens of several documents, so it cannot store their other fields",
                found=", ".join(kept),
                fix="remove --keep-fields and --fields, or --seq-len",
            )
        return Schema({**stored, DOC_ENDS: Array(ends_dtype(seq_len), (None,))})

    def __call__(
        self,
        items: Iterable[Item],
        name: str,
        threads: int,
        tally: TextTally,
        ignored: Counter[str] | None = None,
    ) -> Iterator[Item]:
        """Return samples with tokens of documents, in order; keys of blocks begin with `name`.

        Values of fields that are ignored are counted in `ignored`. Encoding runs in `threads`
        threads, as the libraries release the interpreter lock.
        """
        if not self.options.keep_fields:
            items = self._only_text(items, Counter() if ignored is None else ignored)
        encoded = self._encoded(items, threads, tally)
        if self.options.seq_len is None:
            return (self._document(item, tokens) for item, tokens in encoded)
        return self._blocks(encoded, name, tally)

    def _only_text(self, items: Iterable[Item], ignored: Counter[str]) -> Iterator[Item]:
        """Yield the documents, counting their other fields, which are ignored."""
        for item in items:
            if not isinstance(item.read, SampleError | Filtered):
                count_values(sample_of(item.read).keys() - self._kept, ignored)
            yield item

    def _document(self, item: Item, tokens: Tokens | None) -> Item:
        """Return the sample of a document, without tokens if the document has no text."""
        read = item.read
        if isinstance(read, SampleError | Filtered):
            return item
        sample = sample_of(read)
        made: Sample = {"__key__": sample["__key__"]}
        if tokens is not None:
            made |= _by_name(tokens)
        kept = sample.keys() if self.options.keep_fields else self._kept
        made |= {n: value for n, value in sample.items() if n in kept and n not in self.fields}
        return item._replace(read=made if isinstance(read, dict) else replace(read, sample=made))

    def _blocks(
        self, encoded: Iterator[tuple[Item, Tokens | None]], name: str, tally: TextTally
    ) -> Iterator[Item]:
        assert self.options.seq_len is not None
        pad_id, eos_id = self.tokenizer.pad_id, self.tokenizer.eos_id
        padding = np.zeros((), self.dtype)
        _by_name(padding)[TOKENS][...] = (eos_id or 0) if pad_id is None else pad_id
        packer = PACKERS[self.options.pack](self.options.seq_len, self.options.remainder, padding)
        numbers, size = itertools.count(), 0

        def item(block: Block) -> Item:
            nonlocal size
            key, taken, size = f"{name}/{next(numbers):08d}", size, 0
            sample = {"__key__": key, **_by_name(block.tokens), DOC_ENDS: block.doc_ends}
            return Item(key, sample, taken)

        for document, tokens in encoded:
            if isinstance(document.read, SampleError | Filtered):
                yield document
                continue
            assert tokens is not None
            size += document.size
            yield from map(item, packer.add(tokens))
        yield from map(item, packer.finish())
        tally.counts.update(packer.counts)

    def _encoded(
        self, items: Iterable[Item], threads: int, tally: TextTally
    ) -> Iterator[tuple[Item, Tokens | None]]:
        """Yield each document with its tokens; None for an error, or a document without text."""
        batches = self._batches(items)
        encode = self._encode
        made = map(encode, batches) if threads < 2 else in_threads(encode, batches, threads, 2)
        for item, size, found in itertools.chain.from_iterable(made):
            if found is None:
                yield self._without_text(item), None
                continue
            tokens = found if isinstance(found, SampleError) else self._fitting(found, tally)
            if isinstance(tokens, SampleError):
                tokens.where["key"] = sample_of(item.read)["__key__"]
                yield item._replace(read=tokens), None
            else:
                tally.add(size, len(tokens))
                yield item, tokens

    def _batches(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        batch: list[Item] = []
        characters = 0
        for item in items:
            batch.append(item)
            characters += self._characters(item)
            if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _characters(self, item: Item) -> int:
        """Return about how many characters a document has."""
        return len(_text(item, self.fields[0]) or "")

    def _fitting(self, tokens: Tokens, tally: TextTally) -> Tokens | SampleError:
        """Return the tokens of a document, or the error if they fit into no block uncut."""
        return tokens

    def _encode(self, batch: list[Item]) -> list[tuple[Item, int, Tokens | SampleError | None]]:
        """Return each document with its UTF-8 bytes, and its tokens, if any, or the error."""
        texts = [_text(item, self.fields[0]) for item in batch]
        present = [text for text in texts if text is not None]
        try:
            encoded: list[Any] = self.tokenizer.encode(present)
        except SampleError:  # one by one, to find out which one fails
            encoded = [self._encode_one(text) for text in present]
        found = map(self._framed, encoded)
        return [
            (item, 0, None) if text is None else (item, utf8_size(text), next(found))
            for item, text in zip(batch, texts, strict=True)
        ]

    def _encode_one(self, text: str) -> npt.NDArray[np.uint32] | SampleError:
        try:
            return self.tokenizer.encode([text])[0]
        except SampleError as error:
            return error

    def _framed(self, ids: npt.NDArray[np.uint32] | SampleError) -> Tokens | SampleError:
        """Return a document's ids in the stored dtype, with bos and eos tokens."""
        if isinstance(ids, SampleError):
            return ids
        first = int(self.options.bos)
        ends = self.options.append_eos is not False and self.tokenizer.eos_id is not None
        tokens = np.empty(first + len(ids) + ends, self.tokenizer.dtype)
        tokens[first : first + len(ids)] = ids
        if first:
            tokens[0] = self.tokenizer.bos_id
        if ends:
            tokens[-1] = self.tokenizer.eos_id
        return tokens

    def _without_text(self, item: Item) -> Item:
        """Return a document without text: a sample of its other fields, or dropped."""
        if self.options.keep_fields or isinstance(item.read, SampleError | Filtered):
            return item
        left_out = Filtered("without text", item.name, sample_of(item.read)["__key__"])
        return item._replace(read=left_out)


def text_steps(
    tokenizer: Tokenizer, options: TextOptions, schema: Schema, label: str | None = None
) -> TextSteps:
    """Return the steps for samples with these fields; raises UsageError for unsuitable options."""
    name = text_field(options, schema)
    no_end = options.append_eos and tokenizer.eos_id is None
    if no_end or (options.bos and tokenizer.bos_id is None):
        raise UsageError(
            f"the tokenizer has no token with which documents {'end' if no_end else 'begin'}",
            found=str(tokenizer.identity()["file"]),
            fix="name it with --eos-token" if no_end else "remove --bos",
        )
    return TextSteps(tokenizer, options, (name,), label)


def text_field(options: TextOptions, schema: Schema) -> str:
    """Return the field with the text; raises UsageError if there is none, or more than one."""
    refuse_without_template(schema, options)
    texts = [name for name, kind in schema.items() if isinstance(kind, Text)]
    name = options.field or ("text" if "text" in texts or len(texts) != 1 else texts[0])
    if name not in texts:
        option = "--text-field" if options.tokenizer is None else "--tokenizer"
        raise UsageError(
            f"there is no text field named {name!r}",
            expected=near(name, texts) if texts else None,
            found=", ".join(f"{n}: {type(kind).__name__}" for n, kind in schema.items()),
            fix=f"use --text-field {texts[0]}" if texts else f"leave out {option}",
        )
    return name


def _text(item: Item, field: str) -> str | None:
    if isinstance(item.read, SampleError | Filtered):
        return None
    text: str | None = sample_of(item.read).get(field)
    return text


def utf8_size(text: str) -> int:
    """Return the bytes of a text as UTF-8, also if it is not valid Unicode."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _by_name(tokens: Tokens) -> dict[str, npt.NDArray[Any]]:
    """Return the values of tokens as they are stored: their ids, and for conversations the mask."""
    names = tokens.dtype.names
    return {name: tokens[name] for name in names} if names else {TOKENS: tokens}
