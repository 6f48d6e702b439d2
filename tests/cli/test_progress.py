"""What a terminal shows while a run works: what goes wrong is told once, and counted since."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from laminar.analysis.evaluations import held_out
from laminar.cli.progress import Pace, Progress
from laminar.cli.train import _held_out
from laminar.run.directory import STATUS_FILE
from tests.kit.logs import write_log
from tests.kit.run_directory import CLOCK_NS, world_log

STATUS: dict[str, Any] = {
    "phase": "running",
    "step": 3,
    "total_steps": 6,
    "reward": 0.0,
    "tokens_per_s": 100.0,
    "staleness_mean": 0.0,
    "staleness_max": 0,
    "newest_version": 3,
    "groups_ready": 0,
    "trainer": "waiting",
    "replicas": {},
    "evaluations": [],
    "failure": "",
    "reward_errors": None,
    "left_out": [],
    "warnings": [],
    "silent_nodes": [],
    "awaited": [],
    "lost_by": {"trainer-0": "killed by SIGKILL"},
    "processes": {},
    "repack": None,
}
FIRST = "KeyError: 'x[0]' (reward.py:4)"
ERRORS = {"answers": 40, "by_reason": {"timeout": 1, "error": 9}, "first": FIRST}


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_failure_is_told_once_and_all_are_counted(tmp_path: Path, terminal: bool) -> None:
    """On a terminal above the panel, elsewhere as a line; brackets in it are no markup."""
    failing = {"reward_errors": ERRORS}
    text = show(tmp_path, terminal, {}, failing, failing | {"step": 4})
    assert text.count("the reward FAILED on an answer: " + FIRST) == 1
    assert "REWARD FAILED on 10 of 40 answers (error 9, timeout 1)" in text


def test_why_a_run_ends_before_its_time_is_told_once(tmp_path: Path) -> None:
    ends = {"failure": "the reward failed on 9 of the last 16 training answers"}
    text = show(tmp_path, False, ends, ends | {"phase": "exporting"}, ends | {"phase": "ended"})
    assert text.count("the run ends: the reward failed on 9 of the last 16") == 1


def test_without_a_failure_nothing_is_told(tmp_path: Path) -> None:
    assert "FAILED" not in show(tmp_path, False, {}, {"step": 4})


def test_a_warning_is_told_once(tmp_path: Path) -> None:
    text = show(tmp_path, False, {"warnings": ["of this"]}, {"warnings": ["of this", "of that"]})
    assert text.count("WARNING: of this") == 1 and text.count("WARNING: of that") == 1


def test_each_replica_and_version_that_is_left_out_is_told_once(tmp_path: Path) -> None:
    first, second = ("8 answers of rollout-1 with version 7", "3 answers of rollout-1 [version 8]")
    text = show(tmp_path, False, {"left_out": [first]}, {"left_out": [first, second]})
    assert [text.count(f"MISMATCH: {line}") for line in (first, second)] == [1, 1]


def test_what_the_start_took_is_told_once_with_the_first_new_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork, or a run that is resumed, begins with steps that others have done."""
    write_log(tmp_path, world_log())
    begun_s = CLOCK_NS / 1e9 - 1
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun_s)
    for first in (0, 7):
        file = io.StringIO()
        progress = Progress(tmp_path, Console(file=file, width=200, soft_wrap=True))
        for step in (first, first, first + 1, first + 2):
            assert (step > first + 1) == ("first step" in file.getvalue())
            (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | {"step": step}))
            progress._draw()
        assert file.getvalue().count("the first step is done after") == 1
        assert "answers and training" in file.getvalue()


def test_a_silent_node_is_told_once_and_when_it_is_heard_again(tmp_path: Path) -> None:
    """Each status is drawn; what comes faster than a terminal takes it may be left out."""
    file = io.StringIO()
    progress = Progress(tmp_path, Console(file=file, width=200, soft_wrap=True))
    for silent in (["node-1"], ["node-1"], []):
        (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | {"silent_nodes": silent}))
        progress._draw()
    assert [line for line in file.getvalue().splitlines() if "node-1" in line] == [
        "nothing is heard from node-1: its processes go on, none is restarted",
        "node-1 is no longer silent, or its machine is lost",
    ]


def test_who_is_lost_is_told_once_and_so_is_its_return(tmp_path: Path) -> None:
    file = io.StringIO()
    progress = Progress(tmp_path, Console(file=file, width=200, soft_wrap=True))
    for changes in (
        {"step": 2, "processes": {"trainer-0": 7}},
        {"awaited": ["trainer-0"], "trainer": "away", "processes": {"trainer-0": 7}},
        {"awaited": ["trainer-0"], "trainer": "away", "processes": {"trainer-0": 7}},
        {"trainer": "redoing step 2 of 3", "step": 4, "processes": {"trainer-0": 8}},
    ):
        (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | changes))
        progress._draw()
    lines = file.getvalue().splitlines()
    assert [line for line in lines if "trainer-0" in line] == [
        "trainer-0 is lost (killed by SIGKILL): its node starts it again",
        "trainer-0 is back, or is not waited for any more",
    ]
    assert "started it again" not in file.getvalue(), "that was said already"
    assert "  away  " in file.getvalue() and "  redoing step 2 of 3  " in file.getvalue()


def test_the_processes_of_a_resumed_run_are_no_loss(tmp_path: Path) -> None:
    """None is there when it begins; who is lost later is told."""
    file = io.StringIO()
    progress = Progress(tmp_path, Console(file=file, width=200, soft_wrap=True))
    for awaited in (["store-0", "relay-0"], ["relay-0"], [], ["store-0"]):
        (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | {"awaited": awaited}))
        progress._draw()
    told = [line for line in file.getvalue().splitlines() if "-0 " in line]
    assert told == ["store-0 is lost: its node starts it again"]


def test_who_comes_back_before_anybody_has_looked_is_told_as_well(tmp_path: Path) -> None:
    file = io.StringIO()
    progress = Progress(tmp_path, Console(file=file, width=200, soft_wrap=True))
    for pid in (7, 7, 8, 8):
        (tmp_path / STATUS_FILE).write_text(json.dumps(STATUS | {"processes": {"store-0": pid}}))
        progress._draw()
    told = [line for line in file.getvalue().splitlines() if "store-0" in line]
    assert told == ["store-0 was lost, and has been started again"]


def show(run_dir: Path, terminal: bool, *changes: dict[str, Any]) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200, soft_wrap=True)
    with Progress(run_dir, console) as progress:
        for change in changes:
            (run_dir / STATUS_FILE).write_text(json.dumps(STATUS | change))
            progress.update()
    return file.getvalue()


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
    with Progress(tmp_path, Console(file=pane, width=200)) as progress:
        progress.note("first")
        assert progress._drain(60)
        pane.broken = True
        progress.note("second")
        assert progress._drain(60)
        pane.broken = False
        progress.note("third")
        assert progress._drain(60)
    text = pane.getvalue()
    assert "first" in text and "third" in text
    assert "lines lost here: 1 ([Errno 5] Input/output error)" in text


def test_the_time_that_is_left_follows_the_pace_of_the_last_steps() -> None:
    pace = Pace()
    assert [pace.left(0, 100, 5.0), pace.left(0, 100, 30.0), pace.left(1, 100, 35.0)] == [""] * 3
    assert pace.left(1, 100, 90.0) == ""
    for step in range(2, 41):
        told = pace.left(step, 100, 35.0 + 2 * step)
    assert told == "2.0 min left"
    assert pace.left(40, 100, 155.0) == "80 s left"
    assert pace.left(40, 100, 999.0) == "0 s left"
    assert (pace.left(100, 100, 999.0), pace.left(101, 0, 999.0)) == ("", "")


def test_what_waits_for_a_slot_is_not_said_to_run(tmp_path: Path) -> None:
    doing: dict[str, Any] = {"version": 3, "running": 64, "waiting": 8, "doing": "admitting"}
    doing["engine"] = None
    for terminal, said in ((True, "64 running, 8 waiting, admitting"), (False, "64 +8 admitting")):
        assert said in show(tmp_path, terminal, {"replicas": {"rollout-0": doing}})
    doing["waiting"] = 0
    assert "rollout-0 v3 64 admitting" in show(tmp_path, False, {"replicas": {"rollout-0": doing}})


def test_of_many_replicas_those_that_do_the_same_are_told_together(tmp_path: Path) -> None:
    many = {
        f"rollout-{i}": {
            "version": 3 + i % 2, "running": 64, "waiting": i % 2, "doing": "admitting",
            "engine": {"kv_used_tokens": 50 * (i % 2), "kv_capacity_tokens": 100},
        }
        for i in range(256)
    }  # fmt: skip
    for terminal in (True, False):
        text = " ".join(show(tmp_path, terminal, {"replicas": many}).split())
        assert "rollout-0" not in text
        assert "128 replicas" in text
        assert (
            "8192 running, 128 waiting, 50% of its cache" in text
            or "128 replicas v4 8192 +128" in text
        )


TOLD = {
    "step": 20, "version": 20, "final": False, "correct": 96, "total": 128, "missing": 0,
    "share": 0.75, "share_se": 0.0384, "score": 0.75, "score_se": 0.0384,
    "answers_per_prompt": 1, "passed": 0.75, "mean_length": 11.2, "truncated_share": 0.0,
    "extras": {},
}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_an_evaluation_is_one_line(tmp_path: Path, terminal: bool) -> None:
    text = show(tmp_path, terminal, {}, {"evaluations": [TOLD]})
    assert "96/128 right = 0.750 ± 0.038, 11 tokens" in text and "mean score" not in text


def test_a_shaped_reward_shows_its_mean_score_and_what_went_wrong_is_named() -> None:
    """No answer is right, and it learns all the same."""
    changes = {"correct": 0, "share": 0.0, "share_se": 0.0, "score": 0.412, "score_se": 0.02}
    changes |= {"answers_per_prompt": 4, "passed": 0.0, "truncated_share": 0.25, "missing": 3}
    assert held_out(TOLD | changes) == (
        "0/125 right = 0.000 ± 0.000, mean score 0.412 ± 0.020, pass@4 0.000, 11 tokens, "
        "25.0% truncated, 3 missing"
    )


def test_an_evaluation_without_answers_has_no_share() -> None:
    nothing = dict.fromkeys(("share", "share_se", "score", "score_se", "passed", "mean_length"))
    gone = TOLD | nothing | {"truncated_share": None, "correct": 0, "missing": 128}
    assert held_out(gone) == "0/0 right = -, 128 missing"


def test_the_last_lines_show_the_score_with_its_error() -> None:
    later = TOLD | {"final": True, "share": 0.9, "share_se": 0.02, "score": 0.9}
    assert _held_out([TOLD]) == []
    assert _held_out([TOLD, later]) == [
        "held-out score   0.750 ± 0.038 -> 0.900 ± 0.020 (the exported model)"
    ]
    shaped = [TOLD | {"share": 0.0, "share_se": 0.0}, later | {"share": 0.0, "share_se": 0.0}]
    assert _held_out(shaped) == [
        "held-out score   0.750 ± 0.038 -> 0.900 ± 0.038 (the exported model)",
        "held-out right   0.000 ± 0.000 -> 0.000 ± 0.000 (the exported model)",
    ]


def test_the_cache_and_the_moves_of_repack_are_shown(tmp_path: Path) -> None:
    engine = {"kv_used_tokens": 250, "kv_capacity_tokens": 1_000}
    doing = {"version": 3, "running": 2, "waiting": 0, "doing": "draining", "engine": engine}
    replicas = {"replicas": {"rollout-0": doing}}
    assert "2 running, 25% of its cache, draining" in show(tmp_path, True, replicas)
    assert "moved" not in show(tmp_path, False, replicas)
    packed = {"repack": {"emptied": 2, "moves": 7}}
    assert "7 moved" in show(tmp_path, False, packed)
