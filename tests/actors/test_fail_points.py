"""A process dies at a named place in its code, once in a run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.names.failpoint_names import POINTS
from laminar.run.fail_points import VARIABLE, FailPoints
from tools.check.fail_points import RUNS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been killed."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: calls.append((pid, number)))
    return calls


def test_it_dies_the_nth_time_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[tuple[int, int]]
) -> None:
    monkeypatch.setenv(VARIABLE, "trainer-step:2, trainer-book:1")
    points = FailPoints(tmp_path)
    for _ in range(3):
        points.hit_failpoint("trainer-step")
    assert killed == [(os.getpid(), signal.SIGKILL)]
    another = FailPoints(tmp_path)
    for _ in range(3):
        another.hit_failpoint("trainer-step")
    assert len(killed) == 1
    another.hit_failpoint("trainer-book")
    assert len(killed) == 2


@pytest.mark.parametrize("text", ["trainer-step", "trainer-step:0", "lunch:1", "trainer-step:x"])
def test_what_is_no_point_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=f"LAMINAR_FAIL has '{text}'; give POINT:N"):
        FailPoints(tmp_path).hit_failpoint("trainer-step")


def test_every_point_is_somewhere() -> None:
    files = (path for path in (ROOT / "laminar").rglob("*.py") if path.name != "failpoint_names.py")
    code = "".join(path.read_text() for path in files)
    assert len(set(POINTS)) == len(POINTS) >= 25
    # `reached` is the same call, handed on as a callback; a rank has a point for each order
    calls = set(re.findall(r'(?:hit_failpoint|reached)\("([a-z-]+)"\)', code))
    calls |= set(re.findall(r'Order: "([a-z-]+)"', code))
    assert [point for point in POINTS if point not in calls] == []


def test_a_process_of_no_run_passes_them_all(
    monkeypatch: pytest.MonkeyPatch, killed: list[tuple[int, int]]
) -> None:
    monkeypatch.setenv(VARIABLE, "reward-call:1")
    FailPoints(None).hit_failpoint("reward-call")
    assert killed == []


def test_each_point_is_tried_in_a_real_run_once() -> None:
    assert sorted(point for points in RUNS for point in points) == sorted(POINTS)
