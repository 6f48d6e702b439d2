"""The last lines of `laminar train`: how the run went, whatever can still be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.cli.terminal import Terminal
from laminar.cli.train import _conclude
from laminar.coordinator.restarts import Over
from laminar.names import exit_codes
from laminar.run.directory import SUMMARY_FILE
from tests.kit.run_directory import make_run, world_log

GIVEN_UP = Over(exit_codes.LOG_UNWRITABLE, "the event log could not be written for 300 s")


def last_words(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    _conclude(run_dir, Terminal(), GIVEN_UP)
    return capsys.readouterr().out


def test_a_full_disk_takes_the_file_and_not_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", world_log()[:200])

    def full(path: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    text = last_words(tmp_path / "run", capsys)
    assert "the run FAILED   the event log could not be written for 300 s" in text
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
    assert said[-1] == "the run FAILED   the event log could not be written for 300 s"
