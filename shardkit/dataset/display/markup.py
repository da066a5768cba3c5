"""Generation of HTML, in which data cannot be interpreted as markup.

`tag` and `join` escape everything that is not `Markup`. They create all Markup except the style
sheets, which are constants. That of cards has no colours of its own, so that it fits any page.
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
    """Return an element. Children that are not Markup are escaped, and so are all attribute values.

    In attribute names a trailing `_` is dropped, and other `_` become `-`. Attributes that are None
    are omitted.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{shown}>" if name in ("img", "meta") else f"<{name}{shown}/>")
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")


def join(children: Iterable[object], between: str = "") -> Markup:
    """Concatenate text and markup."""
    return Markup(html.escape(between).join(map(_escaped, children)))


def lines(text: str) -> Markup:
    """Text with its line breaks kept."""
    return join(text.splitlines(), "\n")


def _escaped(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(printable(str(child)))


SHEET = """
.sk th,.sk td{text-align:left}
.sk-sheet{display:grid;gap:.9rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,10.5rem),1fr))}
.sk-sheet.sk-wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,17rem),1fr))}
.sk-sample{margin:0;min-width:0;border:1px solid rgba(128,128,128,.35);border-radius:.5rem;
overflow:hidden;overflow-wrap:anywhere}
.sk-sample img{display:block;width:100%;height:auto;aspect-ratio:4/3;object-fit:contain;
background:rgba(128,128,128,.12)}
.sk-sample .sk-tiny{image-rendering:pixelated;max-height:8rem}
.sk-sample>small,.sk-sample>p{display:block;margin:0;padding:.3rem .65rem}
.sk-sample small{font-size:.75rem}
.sk-wave{display:block;width:100%;height:5rem;background:rgba(128,128,128,.12)}
.sk-wave path{stroke:currentColor;stroke-width:.8;fill:none}
.sk-sample figcaption{padding:.35rem .65rem .6rem;font-size:.8125rem;line-height:1.45;
text-align:left}
.sk-sample code{font:.75rem ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:none}
.sk-sample figcaption strong{display:block;margin-top:.15rem}
.sk-sample dl{margin:.3rem 0 0}
.sk-sample dl div{margin-top:.2rem}
.sk-sample dt,.sk-sample dd{display:inline;margin:0}
.sk-sample dt{font-size:.75rem;font-weight:600}
.sk-text{white-space:pre-wrap}
.sk-bad{font-weight:600;font-size:.8125rem}
"""
