"""What a terminal shows while a run works: what goes wrong is told once, and counted since."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from laminar.analysis.log.evaluations import format_evaluation
from laminar.launch import panel as shown
from laminar.launch.panel import LINE_MAX, ProgressPanel, StepPace
from laminar.launch.train import _format_evaluations
from laminar.run.directory import STATUS_FILE
from tools.kit.golden_pages import check
from tools.kit.logs import write_log
from tools.kit.run_directory import CLOCK_NS, world_log

STATUS: dict[str, Any] = {
    "phase": "running", "seconds": 12.0, "step": 3, "total_steps": 6, "reward": 0.0,
    "tokens_per_s": 100.0, "staleness_mean": 0.0, "staleness_max": 0, "newest_version": 3,
    "groups_ready": 0, "trainer": "waiting", "replicas": {}, "hosts": {}, "evaluations": [],
    "failure": "", "reward_errors": None, "left_out": [], "warnings": [], "silent_nodes": [],
    "awaited": [], "lost_by": {"trainer-0": "killed by SIGKILL"}, "processes": {}, "repack": None,
}  # fmt: skip
ERRORS = {
    "answers": 40, "by_reason": {"timeout": 1, "error": 9},
    "first": "KeyError: 'x[0]' (reward.py:4)",
}  # fmt: skip
TOLD = {
    "step": 20, "version": 20, "final": False, "correct": 96, "total": 128, "missing": 0,
    "share": 0.75, "share_se": 0.0384, "score": 0.75, "score_se": 0.0384,
    "answers_per_prompt": 1, "passed": 0.75, "mean_length": 11.2, "truncated_share": 0.0,
    "extras": {},
}  # fmt: skip
REPLICAS = {
    f"rollout-{i}": {
        "version": 3, "running": 64, "waiting": 8 * i,
        "doing": ("admitting", "draining")[i],
        "engine": {"kv_used_tokens": 250, "kv_capacity_tokens": 1_000} if i else None,
    }
    for i in (0, 1)
}  # fmt: skip
LEFT_OUT = ["8 answers of rollout-1 with version 7", "3 answers of rollout-1 [version 8]"]
STORY: list[dict[str, Any]] = [
    {"phase": "starting", "step": 0, "reward": None, "newest_version": -1, "seconds": 1.0},
    {"step": 2, "replicas": REPLICAS, "processes": {"trainer-0": 7, "store-0": 1}},
    {"reward_errors": ERRORS, "warnings": ["of this"], "left_out": LEFT_OUT[:1]},
    {"step": 4, "reward_errors": ERRORS, "warnings": ["of this", "of that"], "left_out": LEFT_OUT},
    {"step": 4, "evaluations": [TOLD], "repack": {"emptied": 2, "moves": 7}},
    {"step": 5, "silent_nodes": ["node-1"], "processes": {"trainer-0": 7, "store-0": 1}},
    {"step": 5, "awaited": ["trainer-0"], "trainer": "away", "seconds": 40.0},
    {"step": 6, "trainer": "repeating step 2 of 3", "processes": {"trainer-0": 8, "store-0": 1}},
    {"step": 6, "processes": {"trainer-0": 8, "store-0": 2}, "replicas": REPLICAS},
    {"step": 6, "failure": "the reward failed on 9 of the last 16 training answers"},
    {"step": 6, "failure": "the reward failed on 9 of the last 16 training answers"}
    | {"phase": "exporting", "replicas": REPLICAS, "evaluations": [TOLD], "reward_errors": ERRORS},
]
"""Each is drawn twice: nothing is told twice."""


def drawn(run_dir: Path, changes: list[dict[str, Any]], *, terminal: bool = False) -> str:
    """Each status drawn; what comes faster than a terminal takes it may be left out."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=LINE_MAX, soft_wrap=True)
    progress = ProgressPanel(run_dir, console, attached=True)
    for change in changes:
        (run_dir / STATUS_FILE).write_text(json.dumps(STATUS | change))
        progress._draw_status()
    return file.getvalue()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1.0)
    monkeypatch.setattr(shown.time, "monotonic", lambda: next(ticks))


def test_the_plain_log_of_a_run(tmp_path: Path, clock: None) -> None:
    text = drawn(tmp_path, [change for change in STORY for _ in (1, 2)])
    assert max(map(len, text.splitlines())) <= LINE_MAX
    check("train_plain", text)


def test_the_panel_of_a_run(tmp_path: Path, clock: None) -> None:
    """Its last state, above it what was told once."""
    file = io.StringIO()
    console = Console(file=file, width=LINE_MAX, _environ={})
    progress = ProgressPanel(tmp_path, console, attached=True)
    console.print(progress.build_panel(STATUS | STORY[-1]))
    console.print(progress.build_panel(STATUS | {"total_steps": 0, "repack": {"moves": 7}}))
    check("train_panel", file.getvalue())


@pytest.mark.parametrize("terminal", [False, True])
def test_brackets_of_a_failure_are_no_markup(tmp_path: Path, terminal: bool) -> None:
    errors = {"reward_errors": ERRORS}
    text = drawn(tmp_path, [{}, errors, errors | {"step": 4}], terminal=terminal)
    assert text.count("the reward FAILED on a response: " + ERRORS["first"]) == 1


def test_a_panel_is_drawn_by_a_thread_and_stays(tmp_path: Path) -> None:
    file = io.StringIO()
    (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | {"evaluations": [TOLD]}))
    console = Console(file=file, force_terminal=True, width=200)
    with ProgressPanel(tmp_path, console) as progress:
        progress.update()
    assert "96/128 correct = 0.750 ± 0.038, 11 tokens" in file.getvalue()


def test_what_the_start_took_is_told_once_with_the_first_new_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork, or a run that is resumed, begins with steps that others have done."""
    write_log(tmp_path, world_log())
    begun_s = CLOCK_NS / 1e9 - 1
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun_s)
    for first in (0, 7):
        file = io.StringIO()
        progress = ProgressPanel(tmp_path, Console(file=file, width=200, soft_wrap=True))
        for step in (first, first, first + 1, first + 2):
            assert (step > first + 1) == ("first step" in file.getvalue())
            (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | {"step": step}))
            progress._draw_status()
        assert file.getvalue().count("the first step is done after") == 1


def test_the_processes_of_a_resumed_run_are_no_loss(tmp_path: Path) -> None:
    """None is there when it begins; who is lost later is told."""
    waited = (["store-0", "relay-0"], ["relay-0"], [], ["store-0"])
    text = drawn(tmp_path, [{"awaited": awaited} for awaited in waited])
    told = [line for line in text.splitlines() if "-0 " in line]
    assert told == ["store-0 is lost: its node restarts it"]


class Pane(io.StringIO):
    """A terminal that takes nothing for a while."""

    broken = False

    def write(self, text: str) -> int:
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_terminal_that_fails_holds_nobody_up_and_gets_the_lines_that_follow(
    tmp_path: Path,
) -> None:
    pane = Pane()
    with ProgressPanel(tmp_path, Console(file=pane, width=200)) as progress:
        for text, broken in (("first", False), ("second", True), ("third", False)):
            pane.broken = broken
            progress.add_note(text)
            assert progress._drain(60)
    text = pane.getvalue()
    assert "first" in text and "third" in text
    assert "lines lost here: 1 ([Errno 5] Input/output error)" in text


def test_the_time_that_is_left_follows_the_pace_of_the_last_steps() -> None:
    pace = StepPace()
    assert [
        pace.estimate_left(0, 100, 5.0),
        pace.estimate_left(0, 100, 30.0),
        pace.estimate_left(1, 100, 35.0),
    ] == [""] * 3
    assert pace.estimate_left(1, 100, 90.0) == ""
    for step in range(2, 41):
        told = pace.estimate_left(step, 100, 35.0 + 2 * step)
    assert told == "2.0 min left"
    assert pace.estimate_left(40, 100, 155.0) == "80 s left"
    assert pace.estimate_left(40, 100, 999.0) == "0 s left"
    assert (pace.estimate_left(100, 100, 999.0), pace.estimate_left(101, 0, 999.0)) == ("", "")


def test_of_many_replicas_the_sums_are_told(tmp_path: Path) -> None:
    many = {
        f"rollout-{i}": {
            "version": 3 + i % 2, "running": 64, "waiting": i % 2,
            "doing": "admitting",
            "engine": {"kv_used_tokens": 50 * (i % 2), "kv_capacity_tokens": 100},
        }
        for i in range(256)
    }  # fmt: skip
    hosts = {f"agent-{i}": {"sessions": 64, "sampled": i} for i in range(4)}
    status = {"replicas": many, "hosts": hosts}
    panel = " ".join(drawn(tmp_path, [status], terminal=True).split())
    counts = "256 admitting; 16384 running, 128 waiting, 25% of the caches"
    assert counts in panel and "rollout-0" not in panel
    assert "256 sessions, 6 sampled" in panel


def test_a_shaped_reward_shows_its_mean_score_and_what_went_wrong_is_named() -> None:
    """No answer is right, and it learns all the same."""
    changes = {"correct": 0, "share": 0.0, "share_se": 0.0, "score": 0.412, "score_se": 0.02}
    changes |= {"answers_per_prompt": 4, "passed": 0.0, "truncated_share": 0.25, "missing": 3}
    assert format_evaluation(TOLD | changes) == (
        "0/125 correct = 0.000 ± 0.000, mean score 0.412 ± 0.020, pass@4 0.000, 11 tokens, "
        "25.0% truncated, 3 missing"
    )


def test_an_evaluation_without_answers_has_no_share() -> None:
    nothing = dict.fromkeys(("share", "share_se", "score", "score_se", "passed", "mean_length"))
    gone = TOLD | nothing | {"truncated_share": None, "correct": 0, "missing": 128}
    assert format_evaluation(gone) == "0/0 correct = -, 128 missing"


def test_the_last_lines_show_the_score_with_its_error() -> None:
    later = TOLD | {"final": True, "share": 0.9, "share_se": 0.02, "score": 0.9}
    assert _format_evaluations([TOLD]) == []
    assert _format_evaluations([TOLD, later]) == [
        "held-out score   0.750 ± 0.038 -> 0.900 ± 0.020 (the exported model)"
    ]
    shaped = [TOLD | {"share": 0.0, "share_se": 0.0}, later | {"share": 0.0, "share_se": 0.0}]
    assert _format_evaluations(shaped) == [
        "held-out score   0.750 ± 0.038 -> 0.900 ± 0.038 (the exported model)",
        "accuracy         0.000 ± 0.000 -> 0.000 ± 0.000 (the exported model)",
    ]
