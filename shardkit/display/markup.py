"""HTML by one function, in which nothing of the data can become a part of the page.

`tag` and `join` escape whatever is not `Markup`. They make all Markup but the styles, which are
constants.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from shardkit.errors import printable

_VOID = ("img", "meta", "path", "rect")


class Markup(str):
    """HTML. What is made of it by methods of `str` is none, and is escaped once more."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children are escaped, but for Markup, and so are all values of attributes.

    In names of attributes a trailing `_` is dropped, and others become `-`; those that are None are
    left out.
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
    """Text and markup, one after the other."""
    return Markup(html.escape(between).join(map(_escaped, children)))


def lines(text: str) -> Markup:
    """Text whose line breaks stay."""
    return join(text.splitlines(), "\n")


def _escaped(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(printable(str(child)))
