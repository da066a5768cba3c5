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

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.codecs.tokenizers import Tokenizer

    Tokens = npt.NDArray[np.unsignedinteger[Any]]

TOKENS = "tokens"
DOC_ENDS = "doc_ends"

# Limits of documents that are encoded together: enough work to be worth waking a thread.
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 19
_COUNTS = ("padding", "dropped", "cut")


@dataclass
class TextTally:
    """Counts of documents and tokens; counts of several tasks can be merged in any order.

    `counts` has the "bytes" of their UTF-8 text, and the packer's "padding", "dropped" and "cut".
    `lengths` are the documents' numbers of tokens, including bos and eos tokens.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lengths: FieldSizes = field(default_factory=FieldSizes)

    def add(self, size: int, tokens: int) -> None:
        self.counts["bytes"] += size
        self.lengths.append(tokens)

    def merge(self, other: TextTally) -> None:
        self.counts.update(other.counts)
        self.lengths.merge(other.lengths)

    def summary(self) -> dict[str, Any]:
        """Return the summary for the manifest; empty if no text was tokenized."""
        if not self.lengths.count:
            return {}
        about = self.lengths.summary()
        return {
            "documents": about.count,
            "tokens": about.bytes,
            "bytes": self.counts["bytes"],
            **{name: self.counts[name] for name in _COUNTS},
            "shortest": about.min,
            "median": about.median,
            "longest": about.max,
            "histogram": self.lengths.by_powers(),
        }


@dataclass(frozen=True)
class TextSteps:
    """The steps for samples with text in `field`; with `seq_len`, they become samples of blocks."""

    tokenizer: Tokenizer
    options: TextOptions
    field: str
    label: str | None = None  # a field that is kept along with tokens, unless they are packed

    @property
    def _kept(self) -> set[str]:
        """The fields that are kept, if not all are."""
        keeps = self.label is not None and self.options.seq_len is None
        return {"__key__", self.field, *([str(self.label)] if keeps else [])}

    def schema_after(self, schema: Schema) -> Schema:
        """Return the schema after the steps. Raises UsageError for fields that cannot be kept."""
        every = self.options.keep_fields
        others = {n: kind for n, kind in schema.items() if n != self.field}
        kept = {n: kind for n, kind in others.items() if every or n in self._kept}
        if TOKENS in kept:
            raise UsageError(
                f"there is already a field {TOKENS!r}", fix="rename it first, or leave it out"
            )
        optional = schema[self.field].optional and self.options.keep_fields  # else ignored
        dtype, seq_len = self.tokenizer.dtype, self.options.seq_len
        if seq_len is None:
            return Schema({TOKENS: Array(dtype, (None,), optional=optional), **kept})
        if kept:
            raise UsageError(
                "a block has tokens of several documents, so it cannot store their other fields",
                found=", ".join(kept),
                fix="remove --keep-fields and --fields, or --seq-len",
            )
        length = seq_len if self.options.remainder != "keep" else None
        ends = Array(ends_dtype(seq_len), (None,))
        return Schema({TOKENS: Array(dtype, (length,)), DOC_ENDS: ends})

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
            made[TOKENS] = tokens
        kept = sample.keys() if self.options.keep_fields else self._kept
        made |= {n: value for n, value in sample.items() if n in kept and n != self.field}
        return item._replace(read=made if isinstance(read, dict) else replace(read, sample=made))

    def _blocks(
        self, encoded: Iterator[tuple[Item, Tokens | None]], name: str, tally: TextTally
    ) -> Iterator[Item]:
        assert self.options.seq_len is not None
        pad_id, eos_id = self.tokenizer.pad_id, self.tokenizer.eos_id
        pad_id = (eos_id or 0) if pad_id is None else pad_id
        packer = PACKERS[self.options.pack](self.options.seq_len, self.options.remainder, pad_id)
        numbers, size = itertools.count(), 0

        def item(block: Block) -> Item:
            nonlocal size
            key, taken, size = f"{name}/{next(numbers):08d}", size, 0
            sample = {"__key__": key, TOKENS: block.tokens, DOC_ENDS: block.doc_ends}
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
        batches = _batches(items, self.field)
        encode = self._encode
        made = map(encode, batches) if threads < 2 else in_threads(encode, batches, threads, 2)
        for item, text, tokens in itertools.chain.from_iterable(made):
            if text is None:
                yield self._without_text(item), None
            elif isinstance(tokens, SampleError):
                tokens.where["key"] = sample_of(item.read)["__key__"]
                yield item._replace(read=tokens), None
            else:
                # Invalid Unicode is counted, too.
                size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
                tally.add(size, len(tokens))
                yield item, tokens

    def _encode(self, batch: list[Item]) -> list[tuple[Item, str | None, Any]]:
        """Return each document with its text, and its tokens or the error."""
        texts = [_text(item, self.field) for item in batch]
        present = [text for text in texts if text is not None]
        try:
            encoded: list[Any] = self.tokenizer.encode(present)
        except SampleError:  # one by one, to find out which one fails
            encoded = [self._encode_one(text) for text in present]
        found = map(self._framed, encoded)
        return [
            (item, text, None if text is None else next(found))
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
    return TextSteps(tokenizer, options, name, label)


def text_field(options: TextOptions, schema: Schema) -> str:
    """Return the field with the text; raises UsageError if there is none, or more than one."""
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


def _batches(items: Iterable[Item], field: str) -> Iterator[list[Item]]:
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(_text(item, field) or "")
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _text(item: Item, field: str) -> str | None:
    if isinstance(item.read, SampleError | Filtered):
        return None
    text: str | None = sample_of(item.read).get(field)
    return text
