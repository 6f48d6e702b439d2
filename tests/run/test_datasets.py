"""Any reasoning-gym dataset runs by changing two keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.conftest import laminar, train

DATASETS = [
    ("letter_counting", "{}"),
    ("basic_arithmetic", "{min_terms = 2, max_terms = 3}"),
    ("number_sorting", "{min_numbers = 3, max_numbers = 5}"),
    ("gcd", "{}"),
    ("caesar_cipher", "{max_words = 4}"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "config"), DATASETS, ids=[name for name, _ in DATASETS])
def test_three_steps_with_closed_books(tmp_path: Path, name: str, config: str) -> None:
    run = train(
        tmp_path,
        f"data.dataset={name}",
        f"data.dataset_config={config}",
        "data.dataset_size=400",
        "data.val_size=16",
        "trainer.total_training_steps=3",
    )
    assert run.code == 0, run.output
    assert run.summary["steps"] == 3
    audit = laminar("audit", str(run.directory))
    assert audit.returncode == 0, audit.stdout + audit.stderr
