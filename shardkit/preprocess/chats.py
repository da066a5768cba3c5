"""The steps for conversations: rendering with a chat template, tokenizing, packing whole ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import SampleError
from shardkit.preprocess.items import Filtered, Item, sample_of
from shardkit.preprocess.text import TOKENS, TextSteps, TextTally, utf8_size
from shardkit.schema import Schema
from shardkit.sources.conversations import Conversations, Message

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.codecs.tokenizers import Tokenizer
    from shardkit.codecs.tokenizers.chat import ChatTemplate
    from shardkit.options import TextOptions

LOSS_MASK = "loss_mask"


@dataclass(frozen=True, kw_only=True)
class ChatSteps(TextSteps):
    """The steps for samples with conversations, whose tokens have a mask of what is learned."""

    template: ChatTemplate
    conversations: Conversations

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype([(TOKENS, self.tokenizer.dtype), (LOSS_MASK, "?")])

    def notes(self) -> list[str]:
        packed = ["conversations are packed whole: --pack nosplit"]
        whole = packed if self.options.pack == "nosplit" else []
        from shardkit.codecs.tokenizers.chat import UNMARKED

        every = self.options.loss_on == "all"  # then marks do not matter
        found = [n for n in self.template.notes if not (every and n.startswith(UNMARKED))]
        return [self.conversations.note(), *whole, *found, *super().notes()]

    def schema_after(self, schema: Schema) -> Schema:
        present = {name: replace(schema[name], optional=False) for name in self.fields}
        return super().schema_after(Schema({**schema, **present}))

    def _characters(self, item: Item) -> int:
        return item.size

    def _fitting(
        self, tokens: npt.NDArray[Any], tally: TextTally
    ) -> npt.NDArray[Any] | SampleError:
        seq_len = self.options.seq_len
        if seq_len is None or len(tokens) <= seq_len:
            tally.counts["learned"] += int(np.count_nonzero(tokens[LOSS_MASK]))
            return tokens
        tally.too_long.append(len(tokens))
        return SampleError(
            "a conversation is longer than a block, and conversations are not cut",
            field=self.fields[0],
            expected=f"at most {seq_len:,} tokens",
            found=f"{len(tokens):,}",
            fix="use a larger --seq-len, or leave out all that are longer with --on-error skip, "
            "which counts them and names the longest length",
        )

    def _encode(
        self, batch: list[Item]
    ) -> list[tuple[Item, int, npt.NDArray[Any] | SampleError | None]]:
        read = [self._variables(item) for item in batch]
        present = [variables for variables in read if isinstance(variables, dict)]
        encoded = zip(
            present, self.template.encode_many(present, self.options.loss_on), strict=True
        )
        return [
            (item, 0, variables)
            if not isinstance(variables, dict)
            else (item, _size(variables["messages"]), self._masked(*next(encoded)))
            for item, variables in zip(batch, read, strict=True)
        ]

    def _variables(self, item: Item) -> dict[str, Any] | SampleError | None:
        """Return what the template gets of a sample, or the error; None if there is no sample."""
        if isinstance(item.read, SampleError | Filtered):
            return None
        sample = sample_of(item.read)
        try:
            messages = self.conversations.messages(sample)
            return {"messages": messages, "tools": self.conversations.tools(sample)}
        except SampleError as error:
            return error

    def _masked(
        self, variables: dict[str, Any], encoded: tuple[Any, npt.NDArray[np.bool_]] | SampleError
    ) -> npt.NDArray[Any] | SampleError:
        """Return ids and mask as one array, or the error of a conversation."""
        if isinstance(encoded, SampleError):
            return encoded
        ids, learned = encoded
        if self.options.seq_len is not None:
            # In a block, what precedes the first token belongs to another conversation.
            learned[:1] = False
        if not learned.any():
            return SampleError(
                "nothing of the conversation would be learned",
                field=self.fields[0],
                expected="a turn of the assistant",
                found="turns of " + ", ".join(m["role"] for m in variables["messages"][:8]),
                fix="leave it out with --on-error skip, or learn every token: --loss-on all",
            )
        tokens = np.empty(len(ids), self.dtype)
        tokens[TOKENS], tokens[LOSS_MASK] = ids, learned
        return tokens


def _size(messages: list[Message]) -> int:
    return sum(utf8_size(message["content"] or "") for message in messages)


def chat_steps(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    options: TextOptions,
    schema: Schema,
    label: str | None = None,
) -> ChatSteps:
    """Return the steps for samples with these fields; raises SourceError without conversations."""
    found = Conversations.of(schema)
    return ChatSteps(
        tokenizer, options, found.fields, label, template=template, conversations=found
    )
