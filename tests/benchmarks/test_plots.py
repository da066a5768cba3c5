"""The plots of docs/benchmarks.md are what docs/benchmarks.jsonl says."""

import xml.etree.ElementTree as ET

import pytest

from tests.benchmarks.plots import DOCS, plots


@pytest.mark.parametrize("name", plots())
def test_a_plot_is_fresh_and_on_the_page(name):
    svg = plots()[name].svg()
    stored = (DOCS / "images" / f"bench-{name}.svg").read_text("utf-8")
    assert stored == svg, "python -m tests.benchmarks.plots"
    assert f"(images/bench-{name}.svg)" in (DOCS / "benchmarks.md").read_text("utf-8")
    assert len(svg) < 5000


@pytest.mark.parametrize("name", plots())
def test_its_bars_are_as_long_as_their_values(name):
    plot = plots()[name]
    space = "{http://www.w3.org/2000/svg}"
    bars = [each for each in ET.fromstring(plot.svg()).iter(f"{space}rect") if each.get("x")]
    lengths = sorted(float(each.attrib["width"]) for each in bars)
    longest = max(plot.bars.values())
    shares = sorted(value / longest for value in plot.bars.values())
    assert [length / lengths[-1] for length in lengths] == pytest.approx(shares, abs=2e-3)
    assert any(bar.startswith("shardkit") for bar in plot.bars)
    assert not all(bar.startswith("shardkit") for bar in plot.bars)
