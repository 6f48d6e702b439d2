"""What became of the answers by group and by length, held against the store of a made run."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from laminar.analysis.report.summary import summarize_run
from laminar.analysis.report.summary_lines import groups_line, length_line, list_problems
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.launch.train import _format_skipped
from tools.kit.run_directory import make_run, world_log


def rows(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run_dir / "store.sqlite") as db:
        return db.execute(sql).fetchall()


def test_groups_that_agree_are_shares_of_the_trained_ones(copy: Path) -> None:
    """The world calls every answer right and gives each 0 or 1 at random."""
    summary = summarize_run(copy)
    spread = "SELECT MAX(reward) - MIN(reward) FROM trajectories WHERE \"end\" = 'trained'"
    spreads = [value for (value,) in rows(copy, spread + " GROUP BY group_id")]
    assert summary["groups_trained"] == len(spreads)
    assert 0 < summary["groups_no_variance"] == spreads.count(0.0) / len(spreads) < 1
    assert (summary["groups_all_right"], summary["groups_all_wrong"]) == (1.0, 0.0)
    assert summary["groups_mixed_versions"] == 0
    assert groups_line(summary).startswith(f"{len(spreads)} trained: all correct 100.0%")


def test_every_end_is_in_a_class_of_lengths(tmp_path: Path) -> None:
    """Long answers are the ones that are dropped here, and one is cut off."""
    log = [(_longer(stamped), commands) for stamped, commands in world_log()]
    make_run(tmp_path / "run", log)
    classes = summarize_run(tmp_path / "run")["by_length"]
    ends = dict(
        rows(
            tmp_path / "run",
            "SELECT \"end\", COUNT(*) FROM trajectories WHERE purpose = 'train' GROUP BY 1",
        )
    )
    assert sum(found["trained"] for found in classes) == ends["trained"]
    assert sum(sum(found["dropped"].values()) for found in classes) == ends["dropped"]
    assert sum(found["truncated"] for found in classes) == 1
    assert (classes[0]["tokens_min"], classes[-1]["tokens_max"]) == (10, 50)
    assert all(a["tokens_max"] < b["tokens_min"] for a, b in itertools.pairwise(classes))
    staleness = sum(f["staleness_mean"] * f["trained"] for f in classes if f["trained"])
    summary = summarize_run(tmp_path / "run")
    assert abs(staleness / ends["trained"] - summary["staleness_mean"]) < 1e-9


def _longer(stamped: Stamped) -> Stamped:
    """Sibling 3 has 50 tokens; that of the first group is cut off there."""
    event = stamped.event
    if isinstance(event, ev.TrajectoryFinished) and event.trajectory_id.endswith(".3"):
        reason = "length" if event.trajectory_id == "0.0.3" else "stop"
        event = msgspec.structs.replace(event, num_tokens=50, finish_reason=reason)
    elif isinstance(event, ev.TrajectoriesEnded):
        ended = tuple(
            msgspec.structs.replace(row, num_tokens=50)
            if row.trajectory_id.endswith(".3") and row.num_tokens == 10
            else row
            for row in event.ended
        )
        event = msgspec.structs.replace(event, ended=ended)
    return msgspec.structs.replace(stamped, event=event)


def test_what_was_left_over_at_the_end_is_a_drop_with_its_length() -> None:
    found = {
        "tokens_min": 900, "tokens_max": 4096, "trained": 1200, "staleness_mean": 1.5,
        "truncated": 0, "dropped": {"run-ended": 31}, "unfinished": 30,
    }  # fmt: skip
    assert length_line(found) == (
        "900-4,096 tokens: 1,200 trained, staleness 1.50, 31 dropped: run-ended, 30 of them "
        "unfinished"
    )


def test_skipped_updates_are_told(tmp_path: Path) -> None:
    """In the summary, on the page, and in the last lines on the terminal."""
    make_run(tmp_path / "run", [_without_signal(s, c) for s, c in world_log()])
    summary = summarize_run(tmp_path / "run")
    assert (summary["steps"], summary["steps_unchanged"]) == (3, 1)
    assert "1 skipped update in 3 steps: 1 no-signal" in list(list_problems(summary))
    assert _format_skipped(summary) == "1 skipped update, "
    assert _format_skipped({"steps_unchanged": 0}) == ""


def _without_signal(stamped: Stamped, commands: list[Command]) -> tuple[Stamped, list[cmd.Command]]:
    event = stamped.event
    if isinstance(event, ev.StepCompleted) and event.step_index == 1:
        event = msgspec.structs.replace(event, changed=False, reason="no-signal")
    return msgspec.structs.replace(stamped, event=event), commands
