"""The benches of faults: the plan, the effective training time ratio and the slope of a soak."""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from tools.bench import soak
from tools.bench.ettr import compute_ratio
from tools.bench.kills.__main__ import list_faults
from tools.bench.kills.killed_run import draw_plan
from tools.bench.soak import BLOCK_S, BLOCKS_MIN, SAMPLE_S, WARM_S, Samples, fit_slope

ROLES = ("trainer", "store", "coordinator", "rollout")


def test_a_plan_hits_that_share_of_the_steps_in_order_and_is_repeatable() -> None:
    order = list(list_faults(("kill", "stop", "cut", "disk"), ROLES))
    assert order.count(("cut", "machine")) == order.count(("disk", "coordinator")) == 1
    assert len(order) == 2 * len(ROLES) + 2
    plan = draw_plan(order, 0.1, random.Random(7))
    steps = [step for step, *_ in plan]
    assert steps == sorted(set(steps)) and steps[0] >= 1 and steps[-1] <= 10 * len(order)
    assert [(kind, role) for _, kind, role in plan] == order
    assert (
        plan == draw_plan(order, 0.1, random.Random(7)) != draw_plan(order, 0.1, random.Random(8))
    )
    assert [step for step, *_ in draw_plan(order, 1.0, random.Random(7))] == list(range(1, 11))


def test_the_ratio_is_the_time_of_the_twin_over_the_time_of_the_run() -> None:
    ratio, step_s = compute_ratio([5.0, 7.0, 9.0, 11.0], [100.0, 102.0, 110.0])
    assert (ratio, step_s) == (0.4, 2.0)


def samples(
    growth_per_hour: float, noise: float, minutes: float
) -> tuple[list[float], list[float]]:
    chance = random.Random(3)
    times_s = [SAMPLE_S * n for n in range(round((WARM_S + minutes * 60) / SAMPLE_S))]
    grown = [100 * (1 + growth_per_hour * at_s / 3600) for at_s in times_s]
    warm_up = [50 * (at_s < WARM_S) for at_s in times_s]
    return times_s, [g - w + chance.gauss(0, noise) for g, w in zip(grown, warm_up, strict=True)]


@pytest.mark.parametrize(
    ("growth", "noise", "grows"),
    [(0.0, 0.0, False), (0.0, 5.0, False), (0.5, 1.0, True), (0.005, 0.0, False), (-1, 0.1, False)],
)
def test_growth_is_told_from_warm_up_noise_and_less_than_a_percent(
    growth: float, noise: float, grows: bool
) -> None:
    slope = fit_slope(*samples(growth, noise, 25.0))
    assert slope is not None and slope.is_growth() is grows


@pytest.mark.parametrize(("steps_at_min", "grows"), [((5,), False), ((2, 5, 9, 14, 19), True)])
def test_a_thread_that_starts_late_is_told_from_one_that_each_fault_leaves(
    steps_at_min: tuple[int, ...], grows: bool
) -> None:
    times_s, _ = samples(0.0, 0.0, 25.0)
    threads = [10.0 + sum(at_s > WARM_S + m * 60 for m in steps_at_min) for at_s in times_s]
    slope = fit_slope(times_s, threads)
    assert slope is not None and slope.is_growth() is grows


def test_a_process_that_lived_too_short_has_no_slope() -> None:
    assert fit_slope(*samples(9.0, 0.0, (BLOCKS_MIN - 1) * BLOCK_S / 60)) is None


def test_a_sample_has_the_resources_of_each_process_and_the_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples: Samples = defaultdict(list)
    end = threading.Event()
    monkeypatch.setattr(soak, "SAMPLE_S", 0.0)
    monkeypatch.setattr(soak.kills, "find_pids", lambda run_dir: {"me": os.getpid()})
    monkeypatch.setattr(soak, "SHARED_MEMORY", tmp_path)
    (tmp_path / "laminar-mine-0").write_bytes(bytes(1 << 20))
    waits = iter((False, True))
    monkeypatch.setattr(end, "wait", lambda seconds: next(waits))
    soak.sample(Path("mine"), samples, end)
    assert set(samples) == {("me", os.getpid()), ("run", 0)}
    assert all(value > 0 for rows in samples.values() for value in rows[0][1:])
    assert samples["run", 0][0][1] == 1.0
