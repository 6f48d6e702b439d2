"""The last lines of `laminar train`: how the run went, whatever can still be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.analysis.report.summary import summary_of
from laminar.coordinator.restarts import GiveUp
from laminar.core.state.failures import FailureKind
from laminar.core.state.process_failures import ProcessFailures
from laminar.launch.terminal import Terminal
from laminar.launch.train import report_end, summary_lines
from laminar.names import exit_codes
from laminar.run.directory import SUMMARY_FILE
from tools.kit.logs import write_log
from tools.kit.run_directory import make_run, world_log
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings

FULL = "the event log could not be written for 300 s"
GIVEN_UP = GiveUp.after_failure(FailureKind.DISK_FAILED, "coordinator", FULL)


def last_words(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    report_end(run_dir, Terminal(), GIVEN_UP)
    return capsys.readouterr().out


def test_a_full_disk_takes_the_file_and_not_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", world_log()[:200])

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    text = last_words(tmp_path / "run", capsys)
    assert f"the run FAILED   the disk of the run fails: {FULL}" in text
    assert f"what to do       {FailureKind.DISK_FAILED.record.remedy}" in text
    assert "trajectories trained" in text
    assert f"{SUMMARY_FILE} cannot be written" in text and "No space left" in text
    assert f"laminar report {tmp_path / 'run'}" in text
    assert not (tmp_path / "run" / SUMMARY_FILE).exists()


def test_a_run_without_a_summary_has_its_reason_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its coordinator never came to log anything."""
    (tmp_path / "run").mkdir()
    said = last_words(tmp_path / "run", capsys).strip().splitlines()
    assert said[0].startswith("no summary: ")
    assert said[-1] == f"the run FAILED   the disk of the run fails: {FULL}"


def test_a_run_that_an_event_ended_has_its_reason_in_the_words_of_its_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The event log has nothing of it."""
    make_run(tmp_path / "run", world_log()[:200])
    over = report_end(tmp_path / "run", Terminal(), GiveUp(exit_codes.FAILED))
    assert f"the run FAILED   {over.failure.sentence}" in capsys.readouterr().out
    assert over.failure.kind == FailureKind.NOT_HANDLED


def test_why_processes_were_lost_is_said_last(tmp_path: Path) -> None:
    """By the log, also of a run that went well in the end: those with one reason together."""
    faults = Faults(lose_every_s=4.0, slow_tail=0.0)
    world = World(settings(total_steps=3), num_train=30, faults=faults, seed=3).run()
    losses = ProcessFailures()
    for stamped, commands in world.log:
        losses.record_event(stamped, commands)
    assert losses.why
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "run", world.log)
    summary = summary_of(tmp_path / "run")
    assert summary["lost_by"] == losses.why

    summary["lost_by"] = {f"rollout-{n}": "head_dim=20 is unknown" for n in range(3)}
    lines = summary_lines(summary, tmp_path / "run", GiveUp(exit_codes.COMPLETE))
    said = [line for line in lines if line.startswith("lost ")]
    assert said == ["lost             rollout-0: head_dim=20 is unknown"]
    summary["lost_by"] = {f"rollout-{n}": f"reason {n}" for n in range(9)}
    lines = summary_lines(summary, tmp_path / "run", GiveUp(exit_codes.COMPLETE))
    said = [line for line in lines if line.startswith("lost ")]
    assert len(said) == 5 and "9 processes in all" in said[-1]
