"""Charts: round figures on the axes, every value inside the frame, and well-formed SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from laminar.analysis.report import charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1, 60, [20, 40, 60]),
        (0, 0.008, [0, 0.002, 0.004, 0.006, 0.008]),
        (-3, 7, [-2, 0, 2, 4, 6]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    found = charts.choose_ticks(low, high, 5)
    assert found == pytest.approx(expected)


def test_every_value_and_its_error_bar_are_inside_the_frame() -> None:
    line = charts.ChartLine("a", [0, 1, 2], [0.5, -1.0, 7.3], error=[0.1, 0.4, 0.9], marks=True)
    svg = ElementTree.fromstring(
        charts.draw_chart(charts.Chart("T & <t>", "steps", "nats", [line]))
    )
    heights = [float(circle.get("cy")) for circle in svg.iter("circle")]
    bars = [path.get("d") for path in svg.iter("path")]
    ends = [float(y) for bar in bars for y in re.findall(r"[ V](\d+\.\d)", bar)]
    assert len(heights) == 3 and len(ends) == 12
    assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM for y in heights + ends)
    texts = [text.text for text in svg.iter("text")]
    assert {"T & <t>", "steps", "nats"} <= set(texts)
    assert [t.text for t in svg.iter("title")][2] == "a: 7.3 ± 0.9 (at 2)"


def test_what_is_missing_or_not_finite_is_left_out() -> None:
    line = charts.ChartLine("a", [0, 1, 2, 3], [1.0, None, float("nan"), 2.0])
    assert charts.draw_chart(charts.Chart("t", "x", "y", [line])).count("<circle") == 2
    empty = charts.draw_chart(charts.Chart("t", "x", "y", [charts.ChartLine("a", [], [])]))
    assert "no figures yet" in empty
    ElementTree.fromstring(empty)


def test_a_band_and_a_histogram_are_inside_the_frame() -> None:
    band = charts.ChartLine(
        "a", [0, 1, 2], [1.0, 2.0, 3.0], band=[(0.5, 4.0), (1.0, 9.0), (2.5, 3.5)]
    )
    stairs = charts.ChartLine("b", [0.5, 1.5], [2.0, 7.0], stairs=True)
    for line, tag in ((band, "polygon"), (stairs, "polyline")):
        svg = ElementTree.fromstring(
            charts.draw_chart(charts.Chart("t", "x", "y", [line], x_range=(0, 2)), 700)
        )
        (shape,) = svg.iter(tag)
        places = [part.split(",") for part in shape.get("points").split()]
        assert all(charts.LEFT <= float(x) <= 700 - charts.RIGHT for x, _ in places)
        assert all(charts.TOP <= float(y) <= charts.HEIGHT - charts.BOTTOM for _, y in places)
    assert "a: 2 (1 to 9) (at 1)" in charts.draw_chart(charts.Chart("t", "x", "y", [band]))


def test_bars_of_shares_fill_their_row_and_only_what_occurs_is_in_the_legend() -> None:
    bars = {"rollout-0": {"stepping": 0.75, "no_work": 0.25}, "<x>": {"stepping": 1.0}}
    colours = {"stepping": "#111111", "no_work": "#222222", "pulling": "#333333"}
    svg = ElementTree.fromstring(charts.draw_shares("t", bars, colours))
    texts = [text.text for text in svg.iter("text")]
    assert "no work" in texts and "pulling" not in texts
    told = [title.text for title in svg.iter("title")]
    assert told == ["rollout-0: stepping 75.0%", "rollout-0: no work 25.0%", "<x>: stepping 100.0%"]
    ElementTree.fromstring(charts.draw_shares("t", {}, colours))
