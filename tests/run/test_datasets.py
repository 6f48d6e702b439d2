"""Any reasoning-gym dataset runs by changing two keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from tests.run.conftest import ROOT, laminar, train

DATASETS = [
    ("basic_arithmetic", "{min_terms = 2, max_terms = 3}"),
    ("number_sorting", "{min_numbers = 3, max_numbers = 5}"),
    ("gcd", "{}"),
    ("caesar_cipher", "{max_words = 4}"),
]


@pytest.mark.long
def test_the_example_of_the_readme_earns_and_closes_its_books(tmp_path: Path) -> None:
    finished = train(
        tmp_path,
        "data.dataset=word_sequence_reversal",
        "data.dataset_config={min_words=1, max_words=1}",
        "data.dataset_size=400",
        "data.val_size=16",
        "trainer.total_training_steps=3",
    )
    assert finished.code == 0, finished.output
    assert finished.summary["steps"] == 3
    rewards = [line["reward/mean"] for line in finished.metrics() if "reward/mean" in line]
    assert len(rewards) == 3 and max(rewards) > 0
    audit = laminar("audit", str(finished.directory))
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.parametrize(("name", "config"), DATASETS, ids=[name for name, _ in DATASETS])
def test_a_dataset_is_built_and_scored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    config: str,
) -> None:
    """Its own answers are right by its own scorer, an empty one is not, and every row fits."""
    monkeypatch.chdir(ROOT)
    arguments = [
        f"data.dataset={name}",
        f"data.dataset_config={config}",
        "data.dataset_size=400",
        "data.val_size=16",
        f"run.output_dir={tmp_path}",
    ]
    code = run_command(["train", "-c", "configs/recipes/words/run.toml", "--dry-run", *arguments])
    shown = capsys.readouterr().out
    assert code == 0 and " training prompts, 16 held out" in shown
    scores = re.findall(r"^  row .*: (\S+)$", shown, re.MULTILINE)
    assert scores == ["1", "0"] * 3, shown
