"""Generation of HTML, in which data cannot be interpreted as markup.

`tag` and `join` escape everything that is not `Markup`. They create all Markup except the style
sheets, which are constants.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from shardkit.errors import printable

_VOID = ("img", "meta", "path", "rect")


class Markup(str):
    """HTML. Methods of `str` return plain strings, which are escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that are not Markup are escaped, and so are all attribute values.

    In attribute names a trailing `_` is dropped, and other `_` become `-`. Attributes that are None
    are omitted.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>" if name in ("img", "meta") else f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[object], between: str = "") -> Markup:
    """Concatenate text and markup."""
    return Markup(html.escape(between).join(map(_escaped, children)))


def lines(text: str) -> Markup:
    """Text with its line breaks kept."""
    return join(text.splitlines(), "\n")


def _escaped(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(printable(str(child)))
