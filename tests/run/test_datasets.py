"""Any reasoning-gym dataset runs by changing two keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run.conftest import laminar, train

DATASETS = [
    ("basic_arithmetic", "{min_terms = 2, max_terms = 3}"),
    ("number_sorting", "{min_numbers = 3, max_numbers = 5}"),
    ("gcd", "{}"),
    ("caesar_cipher", "{max_words = 4}"),
]


@pytest.mark.long
def test_three_steps_with_closed_books(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "data.dataset=letter_counting",
        "data.dataset_config={}",
        "data.dataset_size=400",
        "data.val_size=16",
        "trainer.total_training_steps=3",
    )
    assert run.code == 0, run.output
    assert run.summary["steps"] == 3
    audit = laminar("audit", str(run.directory))
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.process
@pytest.mark.parametrize(("name", "config"), DATASETS, ids=[name for name, _ in DATASETS])
def test_a_dataset_is_built_and_scored(tmp_path: Path, name: str, config: str) -> None:
    """Its own answers are right by its own scorer, an empty one is not, and every row fits."""
    done = laminar(
        "train",
        "-c",
        "configs/quickstart.toml",
        "--dry-run",
        f"data.dataset={name}",
        f"data.dataset_config={config}",
        "data.dataset_size=400",
        "data.val_size=16",
        f"run.output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " training prompts, 16 held out" in done.stdout
    scores = re.findall(r"^  row .*: (\S+)$", done.stdout, re.MULTILINE)
    assert scores == ["1", "0"] * 3, done.stdout
