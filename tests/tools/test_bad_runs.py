"""The bad runs: each config is a whole one, and what they must be warned of is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from laminar.config import load
from tools import bad_runs


def test_each_run_is_a_config_and_differs_from_a_clean_one(tmp_path: Path) -> None:
    seen = set()
    for name, run in bad_runs.RUNS.items():
        bad_runs.make(tmp_path, name, run, rows=20)
        directory = tmp_path / name
        config = load([str(directory / "run.toml")], [])
        assert Path(config.model.name, "config.json").exists()
        assert config.run_dir == directory / "run"
        files = [*directory.rglob("*.json"), *directory.glob("*.py"), *directory.glob("*.jsonl")]
        texts = [file.read_text() for file in [directory / "run.toml", *sorted(files)]]
        seen.add("\n".join(texts).replace(str(directory), ""))
    assert len(seen) == len(bad_runs.RUNS)


@pytest.mark.parametrize(
    ("warned", "code"),
    [
        ({name for name in bad_runs.RUNS if not name.startswith("clean")}, 0),
        ({name for name in bad_runs.RUNS if name not in ("sign", "clean-1", "clean-2")}, 1),
        (set(bad_runs.RUNS), 1),
    ],
)
def test_every_bad_run_must_be_told_and_no_clean_one(
    warned: set[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in bad_runs.RUNS:
        (tmp_path / name / "run").mkdir(parents=True)
        summary = {"warnings": {"kind": "a text"} if name in warned else {}}
        (tmp_path / name / "run" / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(sys, "argv", ["bad_runs.py", str(tmp_path), "--told"])
    assert bad_runs.main() == code
    assert capsys.readouterr().out.count("kind") == len(warned)


def test_a_run_that_has_not_ended_is_not_well(tmp_path: Path) -> None:
    assert bad_runs.told(tmp_path) is False
