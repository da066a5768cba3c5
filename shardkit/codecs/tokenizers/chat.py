"""Conversations to token ids, and the mask of what a model learns of them.

Ids, and the mask of a template with `{% generation %}` marks, are those of transformers. A template
without marks is rendered for the beginnings of a conversation, too: a message of the assistant is
what the template adds after the prompt to which it replies, up to the next message. Nothing is
guessed: where the borders cannot be told, the conversation is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.tokenizers.engines import check_unicode
from shardkit.codecs.tokenizers.names import named_beside, read_sidecar
from shardkit.codecs.tokenizers.offsets import Encoded
from shardkit.codecs.tokenizers.tokenizer import Tokenizer
from shardkit.errors import NotFoundError, SampleError, UsageError
from shardkit.helpers.extras import extra
from shardkit.storage import fs

if TYPE_CHECKING:
    from shardkit.codecs.tokenizers.template import Span, Template

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Mask = npt.NDArray[np.bool_]
Message = dict[str, Any]

LOSS_ON = ("assistant", "all")
_CONFIG = "tokenizer_config.json"
# The names under which a message has what the model thinks; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_STEPS = 100_000_000  # of rendering all beginnings of a conversation: some seconds
UNMARKED = "the chat template does not mark what is generated"
_PROBE = "ContentOfTheMessage"  # put in place of a message's content to find what surrounds it


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its chat template, which renders conversations as transformers does.

    Picklable; a template is compiled once per process. Created by `ChatTemplate.of`.
    """

    tokenizer: Tokenizer
    templates: Mapping[str, Template]  # by name: "default", and maybe "tool_use"
    special: Mapping[str, str]  # variables of the template, such as eos_token
    notes: tuple[str, ...] = ()  # for the user: what was decided, and why

    @classmethod
    def of(cls, choice: str | os.PathLike[str], tokenizer: Tokenizer) -> ChatTemplate:
        """Return the chat template of a tokenizer ("auto") or of a file.

        Raises UsageError if there is none, if it is invalid, or if the tokenizer cannot be used
        with chat templates.
        """
        beside = None if tokenizer.path is None else Path(tokenizer.path)
        config = {} if beside is None else read_sidecar(beside.with_name(_CONFIG))
        if str(choice) != "auto":
            texts = {"default": (Path(choice), _read(Path(choice)))}
        else:
            texts = {} if beside is None else _texts(beside.parent, config)
        if not texts:
            raise UsageError(
                "the tokenizer has no chat template",
                path=str(beside or tokenizer.file),
                expected=f"a chat_template.jinja next to it, or chat_template in {_CONFIG}",
                fix="give a template with --chat-template FILE",
            )
        templates = _compiled(texts)
        special = {} if beside is None else named_beside(beside)
        _check_tokenizer(tokenizer, [*special.values(), *_added(config)])
        variables = {f"{name}_token": token for name, token in special.items()}
        return cls(tokenizer, templates, variables, tuple(_notes(templates, variables)))

    @classmethod
    def of_identity(cls, identity: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """Return the chat template that a manifest holds, for the tokenizer of its dataset."""
        templates = _compiled({n: ("the manifest", t) for n, t in identity["templates"].items()})
        return cls(tokenizer, templates, identity["special_tokens"])

    def identity(self) -> dict[str, Any]:
        """Return the entry for a manifest, which `of_identity` takes."""
        texts = {name: template.text for name, template in self.templates.items()}
        return {"templates": texts, "special_tokens": dict(self.special)}

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        loss_on: str = "assistant",
        **variables: Any,
    ) -> tuple[Tokens, Mask]:
        """Return the ids of a conversation, (tokens,) in the tokenizer's dtype; and the mask, bool.

        The mask is true for tokens that are learned. Other variables of the template, such as
        `documents`, are given by name. Raises SampleError if the conversation cannot be rendered,
        or if it is not certain which tokens are the assistant's.
        """
        conversation = {"messages": messages, "tools": tools, **variables}
        found = self.encode_many([conversation], loss_on)[0]
        if isinstance(found, SampleError):
            raise found
        return found

    def encode_many(
        self, conversations: Sequence[Mapping[str, Any]], loss_on: str = "assistant"
    ) -> list[tuple[Tokens, Mask] | SampleError]:
        """Return ids and mask of each conversation, as `encode` does, or why there are none.

        A conversation is a mapping of the template's variables: `messages`, `tools` and others.
        """
        if loss_on not in LOSS_ON:
            raise UsageError(f"loss_on is {loss_on!r}", expected=" or ".join(LOSS_ON))
        rendered = [self._rendered(variables, loss_on) for variables in conversations]
        texts = [one for one in rendered if not isinstance(one, SampleError)]
        encoded = iter(self._encoded(texts, loss_on))
        return [one if isinstance(one, SampleError) else next(encoded) for one in rendered]

    def _encoded(
        self, texts: list[tuple[str, list[Span]]], loss_on: str
    ) -> list[tuple[Tokens, Mask] | SampleError]:
        try:
            return [*self._encoded_together(texts, loss_on)]
        except SampleError as error:  # one by one, to find out which one fails
            if len(texts) == 1:
                return [error]
            return [self._encoded([text], loss_on)[0] for text in texts]

    def _encoded_together(
        self, texts: list[tuple[str, list[Span]]], loss_on: str
    ) -> list[tuple[Tokens, Mask]]:
        dtype = self.tokenizer.dtype
        if loss_on == "all":
            every = self.tokenizer.encode([text for text, _ in texts])
            return [(ids.astype(dtype), np.ones(len(ids), bool)) for ids in every]
        found = self.tokenizer.encode_with_offsets([text for text, _ in texts])
        return [
            (one.ids.astype(dtype), _mask(one, spans))
            for one, (_, spans) in zip(found, texts, strict=True)
        ]

    def _rendered(
        self, conversation: Mapping[str, Any], loss_on: str
    ) -> tuple[str, list[Span]] | SampleError:
        """Return the text of a conversation, and the spans of it that are learned."""
        try:
            variables = {
                **self.special,
                "tools": None,
                "documents": None,
                "add_generation_prompt": False,
                **conversation,
                "messages": _messages(conversation["messages"]),
            }
            template = self._template(variables["tools"] is not None)
            steps = template.steps(variables)
            text, marked, _ = template.render(variables, steps)
            check_unicode([text])
            if loss_on == "assistant" and not template.is_marked:
                marked = _Turns(template, variables, steps, text).spans()
            return text, marked
        except SampleError as error:
            return error

    def _template(self, has_tools: bool) -> Template:
        names = ("tool_use", "default") if has_tools else ("default",)
        found = next((self.templates[name] for name in names if name in self.templates), None)
        if found is None:
            raise SampleError(
                "the tokenizer has no chat template for conversations without tools",
                found=", ".join(self.templates),
                fix="give a template with --chat-template FILE",
            )
        return found


def _mask(encoded: Encoded, spans: Sequence[Span]) -> Mask:
    """Return which tokens overlap with spans, exactly as transformers does.

    It goes through tokens and spans at once, and leaves a span when a token begins after it.
    """
    if not spans or not len(encoded.ids):
        return np.zeros(len(encoded.ids), bool)
    starts, ends = np.array(spans, np.int64).T
    reached = np.maximum.accumulate(encoded.starts)
    at = np.searchsorted(np.maximum.accumulate(ends), reached, "right")
    inside: Mask = encoded.ends > np.append(starts, np.iinfo(np.int64).max)[at]
    return inside


@dataclass
class _Turns:
    """A conversation rendered by a template without marks: the rule in the module's docstring."""

    template: Template
    variables: Mapping[str, Any]
    steps: int  # that rendering may take
    text: str
    left: int = field(default_factory=lambda: _STEPS)

    def spans(self) -> list[Span]:
        """Return the spans of the assistant's messages; raises SampleError if one is unknown."""
        messages: list[Message] = self.variables["messages"]
        return [
            self._span(messages, number)
            for number, message in enumerate(messages)
            if message.get("role") == "assistant"
        ]

    def _span(self, messages: list[Message], number: int) -> Span:
        prompt = self._render(messages[:number], True)
        until = self._render(messages[: number + 1]) if number + 1 < len(messages) else self.text
        if self.text.startswith(until) and until.startswith(prompt):
            return len(prompt), len(until)
        before, end = self._around(messages, number)
        if self.text.startswith(prompt) and len(prompt) <= before:
            return len(prompt), end
        raise self._unknown(number)

    def _around(self, messages: list[Message], number: int) -> Span:
        """Return where a message's content begins, and where the text that ends its turn ends.

        For templates that render a message differently if it is the last one: Qwen3's shows what
        the model thinks only there, and Phi's ends the whole text with `eos_token`. What ends the
        turn is what follows the content of a last message, if that follows it here, too.
        """
        message = messages[number]
        if not isinstance(message.get("content"), str):
            raise self._unknown(number)
        probe = [*messages[:number], {**message, "content": _PROBE}, *messages[number + 1 :]]
        before, _, after = self._render(probe).partition(_PROBE)
        ending = self._render(probe[: number + 1]).partition(_PROBE)[2]
        start, stop = len(before), len(self.text) - len(after)
        same = self.text.startswith(before) and self.text.endswith(after) and start <= stop
        for end in (ending, ending.removesuffix(self.variables.get("eos_token", ""))):
            if same and end and _PROBE not in after + end and after.startswith(end):
                return start, stop + len(end)
        raise self._unknown(number)

    def _render(self, messages: list[Message], prompt: bool = False) -> str:
        variables = {**self.variables, "messages": messages, "add_generation_prompt": prompt}
        try:
            steps = min(self.steps, self.left)
            text, _, left = self.template.render(variables, steps)
            self.left -= steps - left
            return text
        except SampleError as error:
            raise self._unknown(len(messages) - (not prompt), error) from error

    def _unknown(self, number: int, why: SampleError | None = None) -> SampleError:
        return SampleError(
            "the chat template does not mark what the assistant generates, and it cannot be told "
            "where that begins or ends",
            found=f"message {number} is rendered in another way without those after it"
            if why is None
            else f"message {number} without those after it: {why.found}",
            fix="give a template with {% generation %} marks with --chat-template FILE, or learn "
            "all tokens with --loss-on all",
        )


def _messages(messages: Any) -> list[Message]:
    """Return messages as transformers gives them to a template."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise SampleError(
            "a conversation has no messages",
            expected="a list of messages",
            found=f"{messages!r:.60}",
        )
    for message in messages:
        if not isinstance(message, Mapping):
            raise SampleError(
                "a message is not an object",
                expected='an object with "role" and "content"',
                found=f"{message!r:.60}",
            )
    return [_with_reasoning({k: v for k, v in m.items() if v is not None}) for m in messages]


def _with_reasoning(message: Message) -> Message:
    found = next((message[name] for name in _REASONING if name in message), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


# --- The files of a template --------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return fs.read(path).decode()
    except NotFoundError as error:
        error.fix = error.fix or "give auto, for the tokenizer's own template, or an existing file"
        raise
    except UnicodeDecodeError as error:
        raise UsageError(
            "a chat template is not text", path=str(path), expected="UTF-8", found=str(error)
        ) from error


def _compiled(texts: Mapping[str, tuple[object, str]]) -> dict[str, Template]:
    """Return templates by name, of the place and text of each; raises UsageError if invalid."""
    with extra("text", "a chat template"):
        from shardkit.codecs.tokenizers.template import Template
    found = {name: Template(text, str(path)) for name, (path, text) in texts.items()}
    for template in found.values():
        template.check()
    return found


def _texts(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Return the file and text of a tokenizer's templates, by name, as transformers finds them."""
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: (path, _read(path)) for name, path in sorted(files.items())}
    named = config.get("chat_template")
    if named is None:
        return {}
    try:
        if isinstance(named, str):
            named = [{"name": "default", "template": named}]
        return {str(one["name"]): (folder / _CONFIG, str(one["template"])) for one in named}
    except (TypeError, KeyError) as error:
        raise UsageError(
            "chat_template in a tokenizer's configuration is not a template",
            path=str(folder / _CONFIG),
            expected='a string, or a list of objects with "name" and "template"',
            found=f"{named!r:.60}",
        ) from error


def _added(config: Mapping[str, Any]) -> list[str]:
    """Return the tokens that transformers adds to those of tokenizer.json."""
    decoder = config.get("added_tokens_decoder")
    found = list(decoder.values()) if isinstance(decoder, dict) else []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        found += config[name] if isinstance(config.get(name), list) else []
    tokens = [one.get("content") if isinstance(one, dict) else one for one in found]
    return [token for token in tokens if isinstance(token, str)]


def _check_tokenizer(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Raise UsageError for a tokenizer that would encode tokens of the template as other text."""
    if tokenizer.kind == "sentencepiece":
        raise UsageError(
            "a SentencePiece model cannot encode the special tokens that a chat template writes",
            path=str(tokenizer.path),
            fix="use the tokenizer.json of the same model",
        )
    if tokenizer.special_tokens == "text":
        raise UsageError(
            "a chat template writes special tokens, which would be encoded as text",
            found='special_tokens="text"',
            fix="remove --special-tokens text",
        )
    lost = [t for t, ids in zip(tokens, tokenizer.encode(tokens), strict=True) if len(ids) != 1]
    if lost:
        raise UsageError(
            f"{tokenizer.file} lacks tokens that the files next to it name",
            path=str(tokenizer.path),
            found=", ".join(sorted(set(lost))[:5]),
            fix="load the tokenizer with transformers' AutoTokenizer and save it again",
        )


def _notes(templates: Mapping[str, Template], special: Mapping[str, str]) -> list[str]:
    text = "".join(template.text for template in templates.values())
    notes = [
        f"the chat template uses {name}, which the tokenizer's files do not name: it is empty, as "
        "in transformers"
        for name in ("bos_token", "eos_token")
        if name in text and name not in special
    ]
    if not all(template.is_marked for template in templates.values()):
        notes.append(
            f"{UNMARKED}: what it adds for a message of the assistant, up to the next message, is "
            "learned" + (", its header too" if "add_generation_prompt" not in text else "")
        )
    if "strftime_now" in text:
        notes.append(
            "the chat template asks for today's date: it gets 26 July 2024, so that converting "
            "again gives the same tokens"
        )
    return notes
