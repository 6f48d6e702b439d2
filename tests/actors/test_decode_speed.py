"""How many sequences decode within a budget, by a line through what was measured."""

from __future__ import annotations

import pytest

from laminar.actors.engine_metrics import STEPS_KEPT, DecodeSpeed, fit_batch_size
from laminar.engines.protocol import EngineStep

MS = 1e6


def line(base_ms: float, each_ms: float, *sizes: int) -> list[tuple[int, float]]:
    return [(size, (base_ms + each_ms * size) * MS) for size in sizes]


@pytest.mark.parametrize(
    ("budget_ms", "sequences"), [(28.0, 1), (36.5, 100), (36.4, 98), (1_000.0, 256), (5.0, 1)]
)
def test_a_line_is_followed_to_the_budget(budget_ms: float, sequences: int) -> None:
    """28 ms and 0.085 ms for each sequence; between 1 and what the engine has slots for."""
    points = line(28.0, 0.085, 3, 40, 200)
    assert fit_batch_size(points, budget_ms * MS + 1_000, 256) == sequences


def test_noise_is_evened_out() -> None:
    points = [
        (size, ns + (1 if size % 2 else -1) * 0.05 * MS) for size, ns in line(10, 1, *range(20))
    ]
    assert abs(fit_batch_size(points, 30.5 * MS, 64) - 20) <= 1


@pytest.mark.parametrize("points", [[], line(10, 1, 7)])
def test_one_size_tells_nothing(points: list[tuple[int, float]]) -> None:
    assert fit_batch_size(points, 1.0, 64) == 64


@pytest.mark.parametrize(("budget_ms", "sequences"), [(20.0, 64), (9.0, 1)])
@pytest.mark.parametrize("each_ms", [0.0, -0.01])
def test_steps_that_take_no_longer_with_more(
    each_ms: float, budget_ms: float, sequences: int
) -> None:
    assert fit_batch_size(line(10, each_ms, 2, 8), budget_ms * MS, 64) == sequences


def record(size: int, ms: float, tokens: int | None = None) -> EngineStep:
    return EngineStep(7, 7 + int(ms * MS), size, size if tokens is None else tokens)


def test_a_step_that_was_held_up_changes_nothing() -> None:
    speed = DecodeSpeed()
    speed.add([record(2, 12), record(2, 900), record(2, 12), record(4, 14)])
    assert speed.get_points() == [(2, 12 * MS), (4, 14 * MS)]


def test_steps_that_do_not_only_decode_are_left_out() -> None:
    speed = DecodeSpeed()
    speed.add([record(2, 50, tokens=9), record(0, 3), record(3, 13)])
    assert speed.get_points() == [(3, 13 * MS)]


def test_only_the_latest_steps_of_a_size_count() -> None:
    """Sequences grow, and with them the time of a step."""
    speed = DecodeSpeed()
    speed.add([record(2, 12)] * 1_000)
    speed.add([record(2, 20)] * STEPS_KEPT)
    assert speed.get_points() == [(2, 20 * MS)]
