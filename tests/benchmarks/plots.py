"""The plots of docs/benchmarks.md, made of docs/benchmarks.jsonl.

    python -m tests.benchmarks.plots

writes docs/images/bench-*.svg; tests/benchmarks/test_plots.py holds that they are fresh.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent.parent.parent / "docs"

_ROW, _LABEL, _BARS, _VALUE, _TOP = 26, 210, 380, 110, 44  # pixels
# A ground of their own: the same on light pages and on dark ones.
_GROUND, _TEXT, _OURS, _THEIRS = "#f6f7f9", "#1f2328", "#3f51b5", "#9aa3af"


@dataclass(frozen=True)
class Plot:
    """Bars, each with a name and a value; `better` is "more" or "less"."""

    title: str
    better: str
    bars: Mapping[str, float]

    def svg(self):
        """The plot: ours in colour, the best bar first."""
        bars = sorted(self.bars.items(), key=lambda bar: bar[1], reverse=self.better == "more")
        width, height = _LABEL + _BARS + _VALUE, _TOP + _ROW * len(bars) + 10
        words = f"{self.title} ({self.better} is better)"
        told = ", ".join(f"{name}: {_number(value)}" for name, value in bars)
        rows = [row for n, bar in enumerate(bars) for row in self._bar(_TOP + _ROW * n, *bar)]
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' font-family="sans-serif" font-size="14" fill="{_TEXT}" role="img">',
            f"<title>{escape(f'{words}. {told}')}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{_GROUND}"/>',
            f'<text x="16" y="27" font-weight="bold">{escape(words)}</text>',
            *rows,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _bar(self, top, name, value):
        length = round(_BARS * value / max(self.bars.values()), 1)
        colour = _OURS if name.startswith("shardkit") else _THEIRS
        yield f'<text x="{_LABEL - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect x="{_LABEL}" y="{top}" width="{length}" height="20" fill="{colour}"/>'
        yield f'<text x="{_LABEL + length + 6}" y="{top + 15}">{_number(value)}</text>'


def _number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plots():
    """Name of the file -> plot."""
    lines = (DOCS / "benchmarks.jsonl").read_text("utf-8").splitlines()
    runs = [json.loads(line) for line in lines]

    def one(**about):
        """The last line that says this of itself."""
        return [run for run in runs if about.items() <= run.items()][-1]

    tokens = one(section="tokenizing", tokens=48557845)
    crops = next(run for run in runs if run.get("section") == "loading" and "runs" in run)
    bucket = one(section="remote", benchmark="epoch")["median"]
    speed = {name: tokens["tokens"] / s / 1e6 for name, s in _medians(tokens).items()}
    written = _medians(one(section="writing and starting", benchmark="write"))
    resized = _medians(one(section="images", benchmark="images", samples=3000))
    first = {_NAMES.get(name, name): each["MB/s"] for name, each in bucket.items()}
    return {
        "write": Plot("Writing 50,000 photos as TAR, seconds", "less", written),
        "read": Plot("Reading photos in random order, photos a second", "more", _random(runs)),
        "load": Plot("Decoding and cropping for training, photos a second", "more", _rates(crops)),
        "tokens": Plot("Tokenizing 210 MB, million tokens a second", "more", speed),
        "resize": Plot("Resizing 3,000 originals to 256 pixels, seconds", "less", resized),
        "bucket": Plot("First epoch from a bucket, MB a second", "more", first),
    }


_NAMES = {
    "imagefolder": "loose files, DataLoader",
    "train.beton": "shardkit beton",
    "streaming": "MosaicML Streaming",
    "litdata": "LitData",
    "ffcv": "FFCV",
    "encode_batch": "tokenizers.encode_batch",
    "shardkit convert --resize 256": "shardkit",
    "pillow_bilinear": "Pillow, bilinear",
    "pillow_lanczos": "Pillow, Lanczos",
    "codecs alone": "the codecs alone",
    "link 64x1": "the link, bytes thrown away",
    "webdataset 1": "webdataset, 1 worker",
    "webdataset 4": "webdataset, 4 workers",
    "litdata 1": "LitData, 1 worker",
}


def _medians(run):
    return {_NAMES.get(name, name): median(each) for name, each in run["seconds"].items()}


def _rates(run):
    """By contender, samples a second."""
    formats = {each["name"] for each in run["contenders"] if each["format"] not in ("peer",)}
    named = {
        name: _NAMES.get(name, f"shardkit {name}" if name in formats else name)
        for name in (each["contender"] for each in run["runs"])
    }
    return {named[each["contender"]]: each["rate"] for each in run["runs"] if each["rate"]}


def _random(runs):
    """Of each format its own library, and shardkit on the same files: samples a second."""
    found = {}
    for run in runs:
        if run.get("action") == "random":
            name, _, library = run["library"].rstrip(")").partition(" (")
            rates = run["samples_per_second"]
            found |= {f"shardkit {name}": rates["shardkit"], library: rates[name]}
    return found


def main():
    for name, plot in plots().items():
        (DOCS / "images" / f"bench-{name}.svg").write_text(plot.svg(), "utf-8")


if __name__ == "__main__":
    main()
