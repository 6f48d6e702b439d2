"""The summary of a made run, and of one that was killed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from laminar.analysis.facts.reader import load_facts
from laminar.analysis.log.timeline import read_spans, read_steps
from laminar.analysis.report.summary import summarize_run
from laminar.analysis.report.summary_lines import _format_mismatch, _format_truncated, calls_line
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Stamped
from tests.analysis.conftest import Cli
from tools.kit.logs import write_log
from tools.kit.random_worlds import environment_world
from tools.kit.run_directory import CLOCK_NS, make_run, world_log, write_spans, write_steps
from tools.kit.store_samples import (
    CALL,
    DONE,
    answers,
    append,
    filled,
    finish,
    go_on,
    intend,
    open_,
)
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings

SECOND = 10**9


def rows(run_dir: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "store.sqlite") as db:
        return db.execute(sql).fetchall()


def test_outcome_and_lengths_agree_with_the_store(copy: Path) -> None:
    summary = summarize_run(copy)
    assert json.loads((copy / "summary.json").read_text()) == summary
    assert (summary["exit_code"], summary["failure"], summary["steps"]) == (0, "", 3)
    assert summary["interrupted"] is False
    assert [e["step"] for e in summary["evaluations"]] == [0, 2, 3]
    assert [e["final"] for e in summary["evaluations"]] == [False, False, True]
    assert summary["eval_first"] == summary["eval_last"] == 1.0  # the world scores all correct
    assert summary["weight_versions"] == 1 + 3 + 1
    ((trained,),) = rows(copy, "SELECT COUNT(*) FROM trajectories WHERE \"end\" = 'trained'")
    assert summary["trajectories_trained"] == trained
    stale = "SELECT AVG(end_step - version_step), MAX(end_step - version_step) FROM trajectories"
    ((mean, highest),) = rows(copy, stale + " WHERE \"end\" = 'trained'")
    assert summary["staleness_mean"] == pytest.approx(mean)
    assert summary["staleness_max"] == highest
    assert summary["response_length_p50"] == summary["generated_response_length_p99"] == 10
    assert summary["truncated_share"] == 0
    assert summary["coordinator_incarnations"] == 1
    assert summary["processes"]["rollout-1"] == 1000
    # Weighted by the tokens of the steps: (0 * 10 + 0.1 * 20 + 0.2 * 30) / 60.
    assert summary["mismatch_kl_mean"] == pytest.approx(8 / 60)
    assert summary["probe_kl_mean"] is None  # no replica of this log has measured it


@pytest.mark.parametrize(("numerics", "larger"), [(0.05, "staleness"), (0.09, "numerics")])
def test_the_larger_part_of_the_mismatch_is_named(
    tmp_path: Path, numerics: float, larger: str
) -> None:
    """Numerics are measured at each load, on the probe."""
    log = []
    for stamped, commands in world_log():
        if isinstance(loaded := stamped.event, ev.WeightsLoaded):
            loaded = msgspec.structs.replace(loaded, probe_kl=numerics)
        log.append((msgspec.structs.replace(stamped, event=loaded), commands))
    make_run(tmp_path / "run", log)
    summary = summarize_run(tmp_path / "run")
    assert summary["probe_kl_mean"] == pytest.approx(numerics)
    assert _format_mismatch(summary["mismatch_kl_mean"], summary["probe_kl_mean"]) == (
        f"0.1333 per token, {numerics:g} of it at equal weights: mostly {larger}"
    )


def test_lengths_are_of_training_truncated_responses_included(tmp_path: Path) -> None:
    """One trained response has 500 tokens and is cut there; those of evaluations have 900."""
    log = world_log()
    first = next(c for _, commands in log for c in commands if isinstance(c, cmd.TrainStep))
    make_run(tmp_path / "run", [(_longer(s, first.trajectories[0]), c) for s, c in log])
    summary = summarize_run(tmp_path / "run")
    trained = summary["trajectories_trained"]
    assert summary["truncated_share"] == pytest.approx(1 / trained)
    expected = np.percentile([10] * (trained - 1) + [500], 99)
    assert summary["response_length_p99"] == pytest.approx(expected)
    unscored = len([1 for s, _ in log if isinstance(s.event, ev.TrajectoryFailed)])
    assert unscored > 0
    assert 10 < summary["generated_response_length_p99"] < expected
    assert summary["truncated_by"] == {"length": pytest.approx(1 / trained)}


def test_responses_that_their_environment_ended_are_truncated_by_its_limit(tmp_path: Path) -> None:
    log, names = [], set[str]()
    for stamped, commands in world_log():
        if isinstance(event := stamped.event, ev.TrajectoryRewarded):
            names.add(event.trajectory_id)
            event = msgspec.structs.replace(event, ended_by="max-turns", truncated=True)
        log.append((msgspec.structs.replace(stamped, event=event), commands))
    make_run(tmp_path / "run", log)
    summary = summarize_run(tmp_path / "run")
    assert (summary["truncated_share"], summary["truncated_by"]) == (1.0, {"max-turns": 1.0})
    assert _format_truncated(summary) == "100.00% of trained responses: max-turns 100.00%"
    assert sum(found["truncated"] for found in summary["by_length"]) > 0


def _longer(stamped: Stamped, cut_one: str) -> Stamped:
    """The same with other lengths, wherever an event tells them."""
    event = stamped.event
    if isinstance(event, ev.TrajectoryFinished | ev.TrajectoryRewarded):
        event = msgspec.structs.replace(event, num_tokens=_length(event.trajectory_id, cut_one))
    if isinstance(event, ev.TrajectoryFinished) and event.trajectory_id == cut_one:
        event = msgspec.structs.replace(event, finish_reason="length")
    elif isinstance(event, ev.TrajectoriesEnded):
        ended = tuple(
            msgspec.structs.replace(row, num_tokens=_length(row.trajectory_id, cut_one))
            for row in event.ended
        )
        event = msgspec.structs.replace(event, ended=ended)
    return msgspec.structs.replace(stamped, event=event)


def _length(trajectory: str, cut_one: str) -> int:
    if trajectory.startswith("e"):
        return 900
    return 500 if trajectory == cut_one else 10


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ("max_memory_allocated", "7.5 GB allocated on its GPU at most"),
        ("max_resident", "7.5 GB of its process resident at most"),
    ],
)
def test_the_trainers_memory_is_beside_its_estimate(
    measured: str, said: str, tmp_path: Path, cli: Cli
) -> None:
    """The most of all steps, whose trainer may have been another process each time."""
    make_run(tmp_path / "run", [(_with_memory(s, measured), c) for s, c in world_log()])
    code, out = cli("report", tmp_path / "run")
    assert code == 0 and f"{said}, 8.25 GB estimated for state and a pass" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trainer_memory_gb"] == {measured: 7.5, "estimated_memory": 8.25}


def _with_memory(stamped: Stamped, measured: str) -> Stamped:
    event = stamped.event
    if isinstance(event, ev.StepCompleted):
        took = {0: 5.0, 1: 7.5}.get(event.step_index, 6.0)
        memory = {f"perf/{measured}_gb": took, "perf/estimated_memory_gb": 8.25}
        event = msgspec.structs.replace(event, metrics=event.metrics | memory)
    return msgspec.structs.replace(stamped, event=event)


def test_publishing_is_measured_from_payload_to_published_weights(copy: Path) -> None:
    """Step 0: 1 s of way, 0.1 s of it blocked. Publishing the base model is no part of it."""
    facts = load_facts(copy)
    [done] = [facts.to_unix_ns(row["published"]) for row in facts.rows("versions", version=1)]
    write_spans(
        copy,
        "trainer-0",
        [
            {"state": "publishing", "start_ns": 5, "end_ns": SECOND, "step": 0, "version": 0},
            {"state": "busy", "start_ns": done - SECOND, "end_ns": done - 400, "step": 0},
            {
                "state": "publishing",
                "start_ns": done - SECOND // 10 - 300,
                "end_ns": done - 300,
                "step": 1,
                "version": 1,
            },
        ],
    )
    assert summarize_run(copy)["publish_stall_share"] == pytest.approx(0.1)


def test_time_shares_add_up_and_tokens_are_counted(copy: Path) -> None:
    start = CLOCK_NS
    span = {"start_ns": start + SECOND, "end_ns": start + 2 * SECOND, "step": 0}
    write_spans(copy, "trainer-0", [{"state": "busy", **span}])
    write_spans(copy, "rollout-0", [{"state": "pulling", "version": 1, **span}])
    steps = [
        (start + SECOND, start + 2 * SECOND, 1, 30),
        (start + 3 * SECOND, start + 5 * SECOND, 1, 10),
    ]
    write_steps(copy, "rollout-0", steps)
    summary = summarize_run(copy)
    assert summary["tokens_per_s"] == pytest.approx(40 / 4)
    assert summary["overlap"] == pytest.approx(1.0)
    assert set(summary["time_shares"]) == {"trainer-0", "rollout-0", "rollout-1"}
    for shares in summary["time_shares"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
        assert min(shares.values()) >= 0


def test_a_run_that_ended_before_anything_happened(tmp_path: Path, cli: Cli) -> None:
    make_run(tmp_path / "run", world_log()[:20])
    code, out = cli("report", "--json", tmp_path / "run")
    assert code == 0
    summary = json.loads(out)
    assert summary["exit_code"] is None
    for key in ("eval_first", "overlap", "decode_gap_ratio", "tokens_per_s", "truncated_share"):
        assert summary[key] is None, key


def test_damaged_timelines_are_named(copy: Path) -> None:
    write_spans(copy, "trainer-0", [{"state": "busy"}])
    with pytest.raises(ConfigError, match=r"trainer-0\.jsonl, line 1 is damaged"):
        summarize_run(copy)
    write_spans(copy, "trainer-0", [])
    for row in ((4, 5, -1, 1), (4, 1, 1, 1_700_000_000 * 10**9)):  # the second begins one cell late
        write_steps(copy, "rollout-0", [row])
        with pytest.raises(ConfigError, match=r"rollout-0\.steps is damaged"):
            summarize_run(copy)


def test_a_step_in_which_the_clock_was_set_back_has_no_duration(copy: Path) -> None:
    write_steps(copy, "rollout-0", [(100, 110, 1, 1), (110, 15, 1, 1), (15, 25, 1, 1)])
    rows = [[15, 25, 1, 1], [100, 110, 1, 1], [110, 110, 1, 1]]
    assert read_steps(copy, "rollout-0").tolist() == rows
    summarize_run(copy)


def test_what_a_crash_cut_short_is_left_out(copy: Path) -> None:
    write_spans(copy, "trainer-0", [{"state": "busy", "start_ns": 1, "end_ns": 2}])
    write_steps(copy, "rollout-0", [(1, 2, 3, 4), (5, 6, 7, 8)])
    for name in ("trainer-0.jsonl", "rollout-0.steps"):
        path = copy / "timeline" / name
        with path.open("ab") as file:
            file.write(path.read_bytes()[:20])
    assert [s.state for s in read_spans(copy, "trainer-0")] == ["busy"]
    assert read_steps(copy, "rollout-0").tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_rewards_that_failed_are_in_the_summary(tmp_path: Path) -> None:
    """By reason, with the first; a run that they ended says so, and nobody interrupted it."""
    faults = Faults(fail_reward=0.9)
    world = World(settings(max_error_permille=500), num_train=30, faults=faults, seed=3).run()
    write_log(tmp_path, world.log)
    summary = summarize_run(tmp_path)
    assert summary["exit_code"] == 1 and summary["interrupted"] is False
    assert "the reward failed on" in summary["failure"]
    assert summary["reward_error_first"] == "KeyError: 'x' (reward.py:4)"
    assert summary["reward_errors"]["error"] > summary["reward_answers"] / 2


def test_an_older_log_has_its_failed_rewards_counted_from_its_events(tmp_path: Path) -> None:
    world = World(settings(), num_train=30, faults=Faults(fail_reward=0.2), seed=3).run()
    write_log(tmp_path, world.log)
    summary = summarize_run(tmp_path)
    failed = {
        s.event.trajectory_id
        for s, _ in world.log
        if isinstance(s.event, ev.TrajectoryRewarded) and s.event.reason == "error"
    }
    assert summary["reward_errors"] == {"error": len(failed)} and summary["exit_code"] == 0


def test_calls_of_an_environment_are_counted(tmp_path: Path) -> None:
    """Of the log turns and what was read again, of the store how each call ended."""
    write_log(tmp_path, environment_world(0).run().log)
    assert summarize_run(tmp_path)["calls"] is None  # there is no store
    database, name = filled(tmp_path / "store.sqlite"), "0.0.0"
    slow = msgspec.structs.replace(DONE, seconds=3.0)
    said = [open_(name), append(name, (1,)), finish(name, 1), intend(name, (CALL,))]
    answers(database, *said, go_on(name, (7,), effects=(slow,)))
    database.close()
    found = summarize_run(tmp_path)["calls"]
    assert (found["made"], found["by_end"], found["seconds_p99"]) == (1, {"done": 1}, 3.0)
    assert found["tokens_read_again"] > found["turns_continued"] > 0
    assert calls_line(found).startswith("1 (done 1); p50 3 s, p99 3 s; ")
