"""laminar retrain before it loads a model: layouts of ranks that would not give the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.analysis.facts.trained_steps import TrainedStep, TrainedSteps
from laminar.cli.retrain import check_layout
from laminar.config import Config, ConfigError, resolve_config
from laminar.names.ids import TrajectoryId
from laminar.run.directory import CHECKPOINTS_DIR, RESUME_FILE
from laminar.training.trainer_state import LearnerFacts, ResumeState, encode

BATCHES = tuple((TrajectoryId(f"{step}.0.0"),) for step in range(4))
STEPS = TrainedSteps(
    first_step=0,
    first_version=0,
    first_digest="",
    first_chain="",
    functions={},
    steps=tuple(
        TrainedStep(step_index=i, version=i + 1, trajectories=batch, digest="")
        for i, batch in enumerate(BATCHES)
    ),
)


def trainer_of(**keys: object) -> Config:
    """A config with these keys of [trainer]."""
    names = {"model.name": "unused", "data.dataset": "unused"}
    return resolve_config(names | {f"trainer.{key}": value for key, value in keys.items()})


def write_checkpoint(run_dir: Path, step: int, **layout: object) -> None:
    facts = LearnerFacts(
        torch="2", threads=1, micro_batch_tokens=1, reference="", moved={}, **layout
    )  # type: ignore[arg-type]
    before, batches = "", BATCHES[:step]
    resume = ResumeState(version=step, step=step, before=before, batches=batches, learner=facts)
    directory = run_dir / CHECKPOINTS_DIR / f"step_{step}"
    directory.mkdir(parents=True)
    (directory / RESUME_FILE).write_bytes(encode(resume))


def test_steps_of_another_layout_are_not_repeated(tmp_path: Path) -> None:
    """Those before the first step do not count: a fork may have another layout."""
    write_checkpoint(tmp_path, 2, nodes=2, ranks=3, shard="all")
    write_checkpoint(tmp_path, 4, ranks=3)
    present = trainer_of(ranks=3, shard="all")  # of one node, where both are the same
    check_layout(present, tmp_path, STEPS, begin=2)
    with pytest.raises(ConfigError) as caught:
        check_layout(present, tmp_path, STEPS, begin=0)
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints/step_2 was trained by trainer.nodes = 2, trainer.ranks = 3, "
        f"trainer.shard = all, but {tmp_path} now has trainer.nodes = 1, trainer.ranks = 3, "
        "trainer.shard = node, whose sums round differently; repeat the steps with a copy of the "
        "run whose config.toml has the former layout"
    )


@pytest.mark.parametrize("keys", [{"nodes": 2}, {"ranks": 2}, {"nodes": 2, "shard": "all"}])
def test_each_part_of_the_layout_counts(keys: dict[str, object], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)  # as before there were several nodes
    check_layout(trainer_of(), tmp_path, STEPS, begin=0)
    with pytest.raises(ConfigError, match=r"trainer\.nodes = 1, trainer\.ranks = 1"):
        check_layout(trainer_of(**keys), tmp_path, STEPS, begin=0)
