"""The report of a benchmark as an image: bars of medians, and what they vary by."""

from __future__ import annotations

import importlib.util
import io
import os
import tempfile
from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.errors import OutputError, UsageError

_ROW = 0.3  # inches
_COLD, _WARM = "tab:blue", "tab:orange"


def check_plot(path: Path) -> None:
    """Raise now what would be in the way of `draw` at the end: a UsageError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "matplotlib, which draws the plot, is not installed", fix="pip install shardkit[bench]"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(
            "the plot has no suffix that says what it is to be",
            path=path,
            expected=", ".join(f".{suffix}" for suffix in sorted(known)),
        )
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OutputError(
            f"the plot cannot be written: {os.strerror(error.errno or 0)}",
            path=path,
            fix="give a file in a folder that can be written to",
        ) from error


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw what `bench` has measured: a chart per measure, a bar per contender and setting.

    A bar is the median; its line goes from the slowest run to the fastest.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts: dict[str, list[dict[str, Any]]] = {}
    for run in report["runs"]:
        if run["rate"] is not None:
            charts.setdefault(run["measure"], []).append(run)
    rows = [len(runs) + 3 for runs in charts.values()]
    figure = Figure(figsize=(10, _ROW * max(sum(rows), 5)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(charts) or 1, squeeze=False, height_ratios=rows or None)
    for axes, (measure, runs) in zip(grid[:, 0], charts.items(), strict=False):
        rates = [run["rate"] for run in runs]
        below = [run["rate"] - run["min"] for run in runs]
        above = [run["max"] - run["rate"] for run in runs]
        colours = [_COLD if run["cold"] else _WARM for run in runs]
        axes.barh(range(len(runs)), rates, xerr=[below, above], color=colours, capsize=2)
        axes.set_yticks(range(len(runs)), [f"{run['contender']}, {words_of(run)}" for run in runs])
        axes.invert_yaxis()
        axes.set_title(measure)
        axes.set_xlabel("samples/s")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower())
    with storage.explained("write the plot", path):
        path.write_bytes(drawn.getvalue())


def words_of(run: dict[str, Any]) -> str:
    """The setting of a run of a report, for people."""
    parts = []
    for name in ("threads", "workers"):
        if run[name] is not None:
            parts.append(f"{run[name]} {name if run[name] != 1 else name[:-1]}")
    if run["batch_size"] is not None:
        parts.append(f"batch {run['batch_size']}")
    if run["transform"] not in (None, "none"):
        sized = run["transform"] in ("crop", "resize", "center")
        parts.append(f"{run['transform']} {run['size']}" if sized else run["transform"])
    return ", ".join([*parts, "cold"] if run["cold"] else parts)
