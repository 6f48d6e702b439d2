"""The race: policies of a seed share durations, the bound holds, and a repeated run is the same."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from tools.bench.race.learning import Course, measure_cell
from tools.bench.race.schedule import COLOCATED, DISAGGREGATED, IN_FLIGHT, Batch, Cell, RaceWorld


def run_batches(cell: Cell, count: int) -> tuple[RaceWorld, list[Batch]]:
    world = RaceWorld(cell)
    return world, list(islice(world.batches(), count))


def test_policies_of_a_seed_share_durations() -> None:
    (few, _), (many, batches) = (run_batches(Cell(IN_FLIGHT, b, 1), 6) for b in (1, 8))
    shared = few._totals.keys() & many._totals.keys()
    assert shared and all(few._totals[t] == many._totals[t] for t in shared)
    parts = [weights for batch in batches for _, weights in batch.responses]
    assert max(map(len, parts)) > 1
    for weights in parts:
        assert all(a[0] < b[0] and a[1] <= b[1] < 1 for a, b in pairwise(weights))


def test_synchronous_forms_train_the_same_batches_at_other_times() -> None:
    (_, one), (_, other) = (run_batches(Cell(f, 0, 1), 3) for f in (COLOCATED, DISAGGREGATED))
    assert [b.responses for b in one] == [b.responses for b in other]
    assert all(b.staleness == 0 for b in one)
    assert one[-1].end < other[-1].end
    course = Course(1, 1e-4, True)
    assert course.train(one[0], 0) == course.train(other[0], 0)
    with pytest.raises(RuntimeError, match="step 0 has trained another batch"):
        course.train(one[1], 0)


def test_a_repeated_run_is_the_same() -> None:
    lines = [measure_cell(Cell(IN_FLIGHT, bound, 1), 2) for bound in (1, 8, 8)]
    for line in lines:
        assert line.pop("cpu_s") > 0
    assert lines[1] == lines[2] != lines[0]
    assert lines[0]["staleness"] == lines[1]["staleness"] > lines[0]["token_staleness"] > 0
