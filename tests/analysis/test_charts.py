"""Charts: round figures on the axes, every value inside the frame, and well-formed SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from laminar.analysis.charts import (
    BOTTOM,
    HEIGHT,
    LEGEND_HEIGHT,
    POINTS_MAX,
    TOP,
    Chart,
    Line,
    draw,
    draw_shares,
    number,
    ticks,
    value_range,
)


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
    found = ticks(low, high, 5)
    assert found == pytest.approx(expected)


def test_a_range_begins_at_zero_unless_zero_is_far_away() -> None:
    assert value_range([(0, 0.2, 0), (1, 0.9, 0.2)]) == (0, pytest.approx(1.1))
    assert value_range([(0, 90, 0), (1, 95, 0)]) == (90, 95)
    assert value_range([(0, -1e-9, 0), (1, 1, 0)]) == (0, 1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.25, "0.25"), (1234.0, "1,234"), (0.00015, "1.5e-4"), (2.5e7, "2.5e7")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_every_value_and_its_error_bar_are_inside_the_frame() -> None:
    line = Line("a", [0, 1, 2], [0.5, -1.0, 7.3], error=[0.1, 0.4, 0.9], marks=True)
    svg = ElementTree.fromstring(draw(Chart("T & <t>", "steps", "nats", [line])))
    heights = [float(circle.get("cy")) for circle in svg.iter("circle")]
    bars = [path.get("d") for path in svg.iter("path")]
    ends = [float(y) for bar in bars for y in re.findall(r"[ V](\d+\.\d)", bar)]
    assert len(heights) == 3 and len(ends) == 12
    assert all(TOP <= y <= HEIGHT - BOTTOM for y in heights + ends)
    texts = [text.text for text in svg.iter("text")]
    assert {"T & <t>", "steps", "nats"} <= set(texts)
    assert [t.text for t in svg.iter("title")][2] == "a: 7.3 ± 0.9 (at 2)"


def test_what_is_missing_or_not_finite_is_left_out() -> None:
    line = Line("a", [0, 1, 2, 3], [1.0, None, float("nan"), 2.0])
    assert draw(Chart("t", "x", "y", [line])).count("<circle") == 2
    empty = draw(Chart("t", "x", "y", [Line("a", [], [])]))
    assert "no figures yet" in empty
    ElementTree.fromstring(empty)


def test_many_points_are_drawn_as_means() -> None:
    line = Line("a", list(range(100_000)), [3.0] * 100_000)
    svg = draw(Chart("t", "x", "y", [line, Line("b", [0], [1])]))
    assert POINTS_MAX / 2 < svg.count("<circle") <= POINTS_MAX + 1


def test_bars_of_shares_fill_their_row_and_only_what_occurs_is_in_the_legend() -> None:
    bars = {"rollout-0": {"stepping": 0.75, "no_work": 0.25}, "<x>": {"stepping": 1.0}}
    colours = {"stepping": "#111111", "no_work": "#222222", "pulling": "#333333"}
    svg = ElementTree.fromstring(draw_shares("t", bars, colours))
    texts = [text.text for text in svg.iter("text")]
    assert "no work" in texts and "pulling" not in texts
    told = [title.text for title in svg.iter("title")]
    assert told == ["rollout-0: stepping 75.0%", "rollout-0: no work 25.0%", "<x>: stepping 100.0%"]
    ElementTree.fromstring(draw_shares("t", {}, colours))


def test_a_legend_that_is_too_wide_has_several_rows() -> None:
    lines = [Line(f"a run with a long name, {n}", [0, 1], [n, n + 1]) for n in range(7)]
    svg = draw(Chart("Many", "x", "y", lines))
    places = [float(x) for x in re.findall(r'<line x1="(-?\d+)" x2="-?\d+" y1="\d+" y2', svg)]
    assert min(places) >= 0 and svg.count("a run with a long name, 6</text>") == 1
    few = draw(Chart("Few", "x", "y", lines[:2]))
    height, least = (int(re.findall(r'viewBox="0 0 \d+ (\d+)"', s)[0]) for s in (svg, few))
    assert height == least + 3 * LEGEND_HEIGHT
