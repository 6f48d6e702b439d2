"""Timeline: what a part of the picture shows, from facts."""

from __future__ import annotations

import numpy as np
import pytest

from laminar.view.timeline_data import (
    BARS_MAX,
    LaneBook,
    Part,
    Timeline,
    build_timeline,
    draw_part,
    split_source,
)
from tests.view.made_facts import MadeFacts, make_facts


def whole(timeline: Timeline) -> Part:
    return Part(0.0, timeline.seconds, 0.0, float(len(timeline.rows)))


def test_rows_are_processes_in_order_and_lanes_never_overlap() -> None:
    timeline = build_timeline(make_facts(replicas=12).table, 50.0)
    assert timeline.rows[0] == "trainer-0" and timeline.rows[-1] == "relay-0"
    assert timeline.rows[1:4] == ("rollout-0", "rollout-1", "rollout-2"), "2 comes before 10"
    drawn = draw_part(timeline, whole(timeline), LaneBook())
    assert drawn.cells is None
    tables = [split_source(source)[0] for source in drawn.bars["source"]]
    assert tables.count("placements") == 12 * 40 and tables.count("holdings") == 5
    bars = list(zip(*(drawn.bars[n] for n in ("left", "right", "top", "bottom")), strict=True))
    for i, (left, right, top, bottom) in enumerate(bars):
        assert int(top) == int(bottom) and top < bottom
        for other in bars[:i]:
            apart = right <= other[0] or other[1] <= left
            assert apart or bottom <= other[2] + 1e-9 or other[3] <= top + 1e-9


def test_only_the_visible_part_is_sent_and_a_bar_keeps_its_lane() -> None:
    timeline, lanes = build_timeline(make_facts().table, 50.0), LaneBook()
    everything = draw_part(timeline, whole(timeline), lanes).bars
    part = draw_part(timeline, Part(12.0, 13.0, 1.0, 2.0), lanes).bars
    assert 0 < len(part["left"]) <= 2 * 8
    for i, source in enumerate(part["source"]):
        assert part["left"][i] <= 13.0 and part["right"][i] >= 12.0 and int(part["top"][i]) == 1
        same = [j for j, other in enumerate(everything["source"]) if other == source]
        assert [everything["top"][j] for j in same] == [part["top"][i]]


def test_many_bars_become_cells_whose_sum_is_that_of_the_bars() -> None:
    facts = make_facts(replicas=300, stays=80)
    timeline = build_timeline(facts.table, 100.0)
    part = Part(3.25, 61.0, 0.0, float(len(timeline.rows)))
    drawn = draw_part(timeline, part, LaneBook())
    assert drawn.cells is not None and not drawn.bars["left"]
    stays = facts.table("placements")
    begin = np.maximum(stays["dispatched"].to_numpy(), part.x0)
    covered = np.maximum(np.minimum(stays["left_at"].to_numpy(), part.x1) - begin, 0).sum()
    held = sum(max(part.x1 - max(i * 20.0, part.x0), 0) for i in range(5))
    height, columns = drawn.cells.running.shape
    cell_s, rows = (part.x1 - part.x0) / columns, len(timeline.rows) / height
    assert float(drawn.cells.running.sum()) * cell_s * rows == pytest.approx(covered + held, 1e-4)
    assert len(timeline.bars.row) > BARS_MAX and drawn.cells.colour.nbytes < 500_000


def test_arcs_publishes_and_what_a_bar_of_the_background_is() -> None:
    timeline = build_timeline(make_facts().table, 50.0)
    drawn = draw_part(timeline, whole(timeline), LaneBook())
    assert drawn.arcs["y0"] == [1.5] and drawn.arcs["y1"] == [4.5]
    assert drawn.publishes["text"] == ["v0", "v1", "v2", "v3", "v4"]
    background = draw_part(timeline, Part(0.0, 0.5, 1.0, 2.0), LaneBook()).background
    assert set(background["text"]) == {"pulling"}
    assert {split_source(source)[0] for source in background["source"]} == {"replica_states"}


def test_a_run_without_facts_is_an_empty_picture() -> None:
    timeline = build_timeline(MadeFacts().table, 0.0)
    drawn = draw_part(timeline, Part(0.0, 1.0, 0.0, 1.0), LaneBook())
    assert timeline.rows == () and drawn.cells is None and not drawn.bars["left"]
