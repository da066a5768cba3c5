"""Conversations in the fields of a sample, in the layouts in which instruction data is published.

They become lists of messages as `transformers` takes them: {"role": ..., "content": ...}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.errors import SampleError, SourceError, UsageError, drop_option
from shardkit.options import TextOptions
from shardkit.sample import JsonText, Sample
from shardkit.schema import FieldType, Json, Text

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ALSO = {"human": "user", "gpt": "assistant"}  # the names of ShareGPT
_JOINT = "\n"  # between instruction and input
# The fields of each layout, with those that may be missing in brackets.
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "instruction and output": ("instruction", "output", "[input]"),
}
_ALWAYS = ("[system]", "[tools]")
_SKIP = "repair it, or use --on-error skip"


@dataclass(frozen=True)
class Conversations:
    """Where the conversation of a sample is: a layout, and the fields of it that the data has."""

    layout: str
    fields: tuple[str, ...]

    @classmethod
    def of(cls, types: Mapping[str, FieldType], **where: Any) -> Conversations:
        """Recognize the layout by the names of the fields; raises SourceError if there is none."""
        found = cls.find(types)
        if found is None:
            shown = (f"{name} ({type(kind).__name__})" for name, kind in types.items())
            raise SourceError(
                "a chat template needs conversations, and the first records have none",
                expected="the fields " + "; or ".join(_LAYOUTS),
                found=", ".join(shown) or "no fields",
                fix="first convert to a table in which they have these names (such as --to parquet "
                "--rename question=prompt --rename answer=completion, without a tokenizer), then "
                "convert that; or leave out --chat-template",
                **where,
            )
        return found

    @classmethod
    def find(cls, types: Mapping[str, FieldType]) -> Conversations | None:
        """Recognize the layout by the names of the fields; None if there is none.

        Raises SourceError if there are several.
        """
        found = [name for name, fields in _LAYOUTS.items() if set(_required(fields)) <= {*types}]
        if len(found) > 1:
            raise SourceError(
                "the records are of several kinds, or each has its conversation twice",
                expected="one of " + "; ".join(_LAYOUTS),
                found=", ".join(types),
                fix="convert each kind by itself, or leave the fields of one out: "
                + drop_option(_required(_LAYOUTS[found[-1]])[-1]),
            )
        if not found:
            return None
        return cls(found[0], tuple(name for name in _fields_of(found[0]) if name in types))

    def types(self, types: Mapping[str, FieldType]) -> dict[str, FieldType]:
        """The types to read the fields with: text, or JSON. Any record may lack or have them.

        So a field that no record in `types` has, such as a rare `input`, is not ignored.
        """
        return {
            name: Json(optional=True)
            if isinstance(types.get(name), Json) or (name == "tools" and name not in types)
            else Text(optional=True)
            for name in _fields_of(self.layout)
        }

    def note(self) -> str:
        """Say what was recognized."""
        if "input" in self.fields:
            return (
                "conversations: instruction and input, if any, joined by a line break, are the "
                "user's turn; output is the assistant's"
            )
        turns = ("prompt", "completion") if "prompt" in self.fields else ("instruction", "output")
        if turns[0] in self.fields:
            return f"conversations: {turns[0]} is the user's turn, {turns[1]} the assistant's"
        also = [name for name in self.fields if name != self.layout]
        with_also = f", with {' and '.join(also)}, if any" if also else ""
        return f"conversations in the field {self.layout}{with_also}"

    def messages(self, sample: Sample) -> list[Message]:
        """Return the messages of a sample, the system's first. Raises SampleError."""
        if self.layout in ("messages", "conversations"):
            turns = _turns(_loaded(sample.get(self.layout), self.layout), self.layout)
        elif self.layout == "prompt and completion":
            turns = _as_turns(sample, "prompt", "user")
            turns += _as_turns(sample, "completion", "assistant")
        else:
            asked = _text(sample, "instruction")
            more = _text(sample, "input") if sample.get("input") else ""
            turns = [_said("user", asked + (_JOINT + more if more else ""))]
            turns.append(_said("assistant", _text(sample, "output")))
        if not sample.get("system"):
            return turns
        if turns[0]["role"] == "system":
            raise _bad("the conversation has two system messages", "system", fix=_SKIP)
        return [_said("system", _text(sample, "system")), *turns]

    def tools(self, sample: Sample) -> list[Any] | None:
        """Return the tools that a conversation may use; None without any. Raises SampleError."""
        tools = _loaded(sample.get("tools") or None, "tools")
        if tools and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
            raise _bad("tools are not a list of JSON objects", "tools", _shown(tools), _SKIP)
        return tools or None

    def text(self, sample: Sample) -> str:
        """Return the text of all fields, also of a bad sample."""
        return "\n".join(str(sample[name]) for name in self.fields if name in sample)


def refuse_without_template(types: Mapping[str, FieldType], options: TextOptions) -> None:
    """Raise UsageError for conversations of which one field would be tokenized as it is."""
    if options.tokenizer is None or options.field is not None or "text" in types:
        return
    if (found := Conversations.find(types)) is not None:
        raise UsageError(
            f"the records are conversations, which need a chat template ({found.layout})",
            found=", ".join(types),
            fix=f"use the tokenizer's own: --tokenizer {options.tokenizer} --chat-template auto;"
            " or name a field that is tokenized as it is: --text-field NAME",
        )


def _fields_of(layout: str) -> list[str]:
    return [name.strip("[]") for name in (*_LAYOUTS[layout], *_ALWAYS)]


def _required(fields: Sequence[str]) -> list[str]:
    return [name for name in fields if name[0] != "["]


def _turns(turns: Any, field: str) -> list[Message]:
    """Return the messages in the value of a field."""
    if not isinstance(turns, list) or not turns:
        what = "the conversation is empty" if turns == [] else "the conversation is not a list"
        raise _bad(what, field, _shown(turns), _SKIP)
    return [_message(turn, f"{field}[{number}]") for number, turn in enumerate(turns)]


def _as_turns(sample: Sample, field: str, role: str) -> list[Message]:
    """Return the messages in a field; text is one message with this role."""
    value = _value(sample, field)
    return _turns(value, field) if isinstance(value, list) else [_said(role, _text(sample, field))]


def _message(turn: Any, at: str) -> Message:
    """Return a message with "role" and "content", and its other keys."""
    if not isinstance(turn, dict):
        raise _bad("a message is not a JSON object", at, _shown(turn), _SKIP)
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    found = _ALSO.get(role, role) if isinstance(role, str) else role
    if found not in ROLES:
        expected = ", ".join((*ROLES, *_ALSO))
        raise _bad("a message has an unknown role", at, _shown(role), _SKIP, expected)
    if isinstance(content, list):
        content = "".join(_text_of(part, at) for part in content)
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise _bad("a message has no content", at, _shown(content), _SKIP, "text")
    if turn.get("weight", 1) != 1:
        fix = "leave the weight out, or the conversation: --on-error skip"
        raise _bad("messages cannot have weights", at, _shown(turn["weight"]), fix)
    return {**turn, "role": found, "content": content}


def _text_of(part: Any, at: str) -> str:
    """Return the text of one part of a message's content."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        fix = "leave it out with --on-error skip: only text can be tokenized"
        raise _bad("a message has content that is not text", at, _shown(kind), fix)
    return text


def _text(sample: Sample, field: str) -> str:
    value = _value(sample, field)
    if not isinstance(value, str):
        raise _bad(f"the record's {field} is not text", field, _shown(value), _SKIP, "text")
    return value


def _value(sample: Sample, field: str) -> Any:
    value = sample.get(field)
    return _loaded(value, field) if isinstance(value, JsonText) else value


def _loaded(value: Any, field: str) -> Any:
    """Return a value that may be given as the text of its JSON, such as in a CSV."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _bad("the text of the field is not JSON", field, f"{value!r:.60}", _SKIP) from error


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _shown(value: Any) -> str:
    return "null, or no such field" if value is None else f"{type(value).__name__} {value!r:.60}"


def _bad(
    what: str,
    field: str,
    found: str | None = None,
    fix: str | None = None,
    expected: str | None = None,
) -> SampleError:
    return SampleError(what, field=field, expected=expected, found=found, fix=fix)
