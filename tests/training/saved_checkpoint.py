"""A checkpoint of a learner, as the trainer saves it after two steps."""

from __future__ import annotations

from pathlib import Path

from laminar.actors.model_files import save_model
from laminar.run.directory import RESUME_FILE
from laminar.training import trainer_state
from laminar.training.checkpoints import checkpoint
from laminar.training.learner import Learner
from laminar.training.trainer_state import ResumeState
from tools.kit.one_process import make_files


async def saved(learner: Learner, source: Path, directory: Path) -> Path:
    """The directory, with the learner's model, optimizer and trainer.json; `source`: of the model
    that it began with."""
    files = make_files(learner, str(source))  # type: ignore[arg-type]
    facts = learner.collect_facts()
    found = ResumeState(version=2, step=2, before="", batches=(("0.0.0",),), learner=facts)
    await save_model(
        files, directory, await files.copy(), {RESUME_FILE: trainer_state.encode(found)}
    )
    return directory


def load_checkpoint(directory: Path, learner: Learner) -> ResumeState:
    """Verify a checkpoint and restore the learner from it."""
    checkpoint.verify_checkpoint(directory)
    return checkpoint.restore_checkpoint(directory, learner)
