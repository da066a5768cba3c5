"""Tables, charts and other pieces of an HTML report, and its style sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardkit.dataset.display.markup import Markup, join, tag
from shardkit.dataset.display.previews import short
from shardkit.helpers.words import size

ROWS = 30  # of a table
_CELL = 400  # characters
_UNITS = {"width": "pixels", "height": "pixels", "sampling_rate": "Hz"}


def soft(words: str) -> Markup:
    return tag("p", words, class_="soft")


def warning(words: str) -> Markup:
    return tag("p", tag("strong", "Warning: "), words, class_="warning")


def tiles(facts: Mapping[str, str]) -> Markup:
    """Return a few key figures in large type."""
    pairs = (tag("div", tag("dt", what), tag("dd", words)) for what, words in facts.items())
    return tag("dl", *pairs, class_="tiles")


def links(anchors: Iterable[tuple[str, str]], what: str) -> Markup:
    """Links to sections of the page, given as pairs of anchor and name."""
    each = (tag("li", tag("a", short(name, 40), href=f"#{anchor}")) for anchor, name in anchors)
    return tag("nav", tag("ul", *each), aria_label=what)


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: int = 99,
    total: int = 0,
) -> Markup:
    """Return a table that scrolls independently. The columns from `numbers` on are numeric.

    Only the first 30 rows are shown, with a note of how many of `total`, or of `rows`, are missing.
    """
    shown = _rows(head, rows[:ROWS], numbers)
    left = max(total, len(rows)) - min(len(rows), ROWS)
    note = [soft(f"and {left:,} more")] if left else []
    return join(
        [tag("div", shown, class_="scroll", tabindex=0, role="region", aria_label=title), *note]
    )


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: int) -> Markup:
    kinds = ["number" if column >= numbers else None for column in range(len(head))]
    top = (
        tag("th", name, scope="col", class_=kind) for name, kind in zip(head, kinds, strict=True)
    )
    body = []
    for first, *others in rows:
        cells = zip(map(_cell, others), kinds[1:], strict=True)
        columns = (tag("td", cell, class_=kind) for cell, kind in cells)
        body.append(tag("tr", tag("th", _cell(first), scope="row"), *columns))
    return tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body))


def _cell(value: object) -> object:
    return value if isinstance(value, Markup) else short(value, _CELL)


def bar(share: float) -> Markup:
    """Return a bar for a table cell; `share` is its length relative to the longest bar."""
    return _svg([_rect(0, 0, 100 * share, 10)], 100, 10, class_="bar", aria_hidden="true")


def histogram(name: str, measure: str, about: Mapping[str, Any]) -> Markup:
    """Return the histogram of a measure of a field's values, in the form of `statistics.stats`."""
    words = size if measure == "bytes" else "{:,}".format
    facts = " / ".join(words(round(about[n])) for n in ("min", "median", "mean", "max"))
    unit = f" ({_UNITS[measure]})" if measure in _UNITS else ""
    title = f"{name}: {measure.replace('_', ' ')}{unit}"
    return _chart(title, about["histogram"], f"{facts} (min / median / mean / max)", words)


def histogram_by_powers(title: str, about: Mapping[str, Any]) -> Markup:
    """Return the histogram of lengths by powers of two, in the form of `inspect`."""
    counts = {int(start): count for start, count in about["histogram"].items()}
    most = about["longest"]
    ranges = [(n, min(max(2 * n - 1, n), most), count) for n, count in counts.items()]
    facts = " / ".join(f"{about[n]:,}" for n in ("shortest", "median", "longest"))
    return _chart(title, ranges, f"{facts} (min / median / max)", "{:,}".format)


def _chart(
    title: str, ranges: Sequence[tuple[int, int, int]], facts: str, words: Callable[[int], str]
) -> Markup:
    """Bars, the range that they span, and the same data as a table."""
    most = max(1, *(count for _, _, count in ranges))  # all may be 0 in a damaged manifest
    tall = [100 * count / most for _, _, count in ranges]
    bars = [_rect(n + 0.05, 100 - height, 0.9, height) for n, height in enumerate(tall)]
    spans = [
        words(low) if low == high else f"{words(low)} to {words(high)}" for low, high, _ in ranges
    ]
    rows = ((span, f"{count:,}") for span, (_, _, count) in zip(spans, ranges, strict=True))
    label = f"histogram of {title}: {facts}"
    ends = (tag("span", words(ranges[0][0])), tag("span", words(ranges[-1][1])))
    return tag(
        "figure",
        tag("h4", title),
        _svg(bars, len(ranges), 100, role="img", aria_label=label),
        tag("div", *ends, class_="axis"),
        tag("p", facts),
        tag("details", tag("summary", "As a table"), _rows(("Range", "Values"), rows, 1)),
        class_="chart",
    )


def _svg(bars: Sequence[Markup], width: int, height: int, **attributes: str) -> Markup:
    box = f"0 0 {width} {height}"
    return tag("svg", *bars, viewBox=box, preserveAspectRatio="none", **attributes)


def _rect(x: float, y: float, width: float, height: float) -> Markup:
    return tag("rect", x=f"{x:.4g}", y=f"{y:.4g}", width=f"{width:.4g}", height=f"{height:.4g}")


# For light and dark, for narrow and wide screens.
PAGE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1a1f26;--soft:#55606d;--line:#d7dde4;
--bar:#3a7bd5;--warn:#8a4b00;--warnbg:#fff4e0}
@media (prefers-color-scheme:dark){:root{--bg:#0f1318;--card:#181d24;--ink:#e7ebf0;--soft:#9ba6b3;
--line:#2e3640;--bar:#5b9bf0;--warn:#ffc37a;--warnbg:#2c2214}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:1rem/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:76rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.75rem}
h1{font-size:1.75rem;line-height:1.2;margin:0}
h2{font-size:1.35rem;margin:2.5rem 0 .5rem}
h3{font-size:1.1rem;margin:2rem 0 .6rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
h4{font-size:.9rem;margin:0}
p{margin:.5rem 0}
a{color:inherit;text-underline-offset:.2em}
.soft,footer,small,dt,.sk-sample code{color:var(--soft)}
.path{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.8125rem}
.tiles{display:grid;gap:.75rem;margin:1rem 0;padding:0;
grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr))}
.tiles div,.chart,.sk-sample,.scroll,pre{background:var(--card);border:1px solid var(--line);
border-radius:.6rem}
.tiles div{padding:.6rem .8rem}
.tiles dt{font-size:.75rem}
.tiles dd{margin:0;font-size:1.2rem;font-weight:600;line-height:1.3}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;list-style:none;margin:.75rem 0 0;padding:0;
font-size:.9rem}
.scroll{overflow-x:auto}
.scroll:focus-visible,a:focus-visible,summary:focus-visible{outline:2px solid var(--bar);
outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{padding:.4rem .8rem;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
thead th{border-top:0;font-size:.75rem;font-weight:600;color:var(--soft);white-space:nowrap}
tbody th{font-weight:500}
tbody th,td{min-width:7rem}
td.number,th.number{text-align:right;white-space:nowrap;min-width:0;font-variant-numeric:tabular-nums}
.charts{display:grid;gap:.75rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,17rem),1fr));
margin-bottom:.75rem}
.chart{margin:0;padding:.7rem .9rem;min-width:0}
.chart svg{display:block;width:100%;height:4.5rem;margin-top:.5rem;
border-bottom:1px solid var(--line)}
.chart rect,.bar rect{fill:var(--bar)}
.axis{display:flex;justify-content:space-between;font-size:.75rem;color:var(--soft)}
.chart p{font-size:.8125rem;margin:.25rem 0 0}
.bar{display:block;width:100%;min-width:6rem;height:.7rem;margin-top:.35rem}
summary{cursor:pointer;color:var(--soft);font-size:.875rem;padding:.35rem 0}
details th,details td{padding:.15rem .3rem}
.warning{border-left:.3rem solid var(--warn);background:var(--warnbg);color:var(--warn);
padding:.5rem .8rem;border-radius:.3rem}
.sk-bad{color:var(--warn)}
pre{padding:.8rem 1rem;margin:.5rem 0;white-space:pre-wrap;font:.8125rem/1.6 ui-monospace,
SFMono-Regular,Menlo,Consolas,monospace;user-select:all}
footer{padding-top:2rem;padding-bottom:2rem;font-size:.8125rem}
@media print{.sk-sample,.chart{break-inside:avoid}}
"""
