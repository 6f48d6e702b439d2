"""What the readers of a run say of answers that went on with newer weights."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from laminar.analysis.audit.audit import audit_run
from laminar.config import dump_config, load_config
from laminar.run.directory import CONFIG_FILE
from tests.analysis.conftest import Cli
from tools.kit.run_directory import make_run, world_log

FLOWN = "last_version IS NOT NULL AND \"end\" = 'trained'"


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("flown") / "run"
    make_run(run_dir, world_log(in_flight=True))
    config = load_config(
        [], ['rollout.engine="emulated"']
    )  # no model is needed to read its samples
    (run_dir / CONFIG_FILE).write_text(dump_config(config))
    return run_dir


@pytest.fixture(scope="module")
def name(flown: Path) -> str:
    """Of an answer with tokens of two versions."""
    with sqlite3.connect(flown / "store.sqlite") as db:
        return db.execute(f"SELECT MIN(id) FROM trajectories WHERE {FLOWN}").fetchone()[0]


def test_the_books_of_a_run_with_weights_in_flight_agree(flown: Path, name: str) -> None:
    assert name and audit_run(flown).problems == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('UPDATE chunks SET weight_version = 9, version_step = 9 WHERE "offset" > 0', "version 9"),
        ("UPDATE chunks SET replica = 'rollout-9' WHERE \"offset\" > 0", "on rollout-9"),
        (
            'UPDATE chunks SET weight_version = 9, version_step = 9 WHERE "offset" = 0',
            "continued with older weights",
        ),
        ('DELETE FROM chunks WHERE "offset" > 0', "do not add up to its"),
    ],
)
def test_a_part_that_is_not_of_what_was_loaded_there_then_is_found(
    flown: Path, tmp_path: Path, name: str, change: str, words: str
) -> None:
    copy = Path(shutil.copytree(flown, tmp_path / "copy"))
    with sqlite3.connect(copy / "store.sqlite") as db:
        db.execute(f"{change} AND trajectory_id = '{name}'")
    problems = audit_run(copy).problems
    assert any(name in p and words in p for p in problems), problems


def test_every_reader_shows_the_change(flown: Path, name: str, cli: Cli) -> None:
    _, why = cli("log", "why", flown, name)
    assert "It continued with v" in why and "loaded in flight" in why
    _, story = cli("log", "story", flown, name)
    assert "purpose=in-flight" in story and "weights-loaded" in story
    _, shown = cli("samples", "--id", name, flown, "--jsonl")
    (sample,) = map(json.loads, shown.splitlines())
    versions = [span["weight_version"] for span in sample["spans"]]
    assert len(versions) == 2 and versions == sorted(set(versions))
    _, text = cli("samples", "--id", name, flown)
    assert f"by versions {versions[0]} to {versions[1]} (made by" in text
    assert cli("log", "trace", flown)[0] == 0
    trace = json.loads((flown / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert any(f"continues with v{versions[1]}" == event.get("name") for event in events)
