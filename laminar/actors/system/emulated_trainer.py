"""The learner of an emulated run: a step takes its time and changes some of the weights.

Reads   samples, which are fetched and looked at as any; emulation.train_s
Gives   EmulatedLearner, the Learner of actors/trainer.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from laminar.actors.system.emulated_weights import EmulatedWeights
from laminar.config import Config
from laminar.engines.emulated import fingerprint, made_up_scores
from laminar.run.directory import RESUME_FILE
from laminar.training import steps
from laminar.training.resume import CheckpointError, LearnerFacts, Resume, decode


class EmulatedLearner:
    """Nothing is learnt."""

    def __init__(self, config: Config, weights: EmulatedWeights) -> None:
        self._train_s, self.weights = config.emulation.train_s, weights

    async def load(self) -> steps.ModelLayout:
        return self.weights.layout

    async def train_step(self, samples: Sequence[steps.TrainSample], step: int) -> steps.StepResult:
        await asyncio.sleep(self._train_s)
        await asyncio.to_thread(self.weights.change, step)
        return steps.StepResult(
            step=step,
            updates=(steps.Update(tuple(s.sample_id for s in samples), None, 0.0, 0.0, None),),
            metrics={
                "emulated": 1.0,
                "reward/mean": fmean(s.reward for s in samples),
                "response_length/mean": fmean(len(s.response_ids) for s in samples),
            },
            mismatch={},
            suspects={},
            left_out={},
            num_tokens=sum(len(s.response_ids) for s in samples),
            digest=steps.ids_digest(samples),
        )

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        weights = await asyncio.to_thread(fingerprint, self.weights.data)
        return made_up_scores(weights, sequences)

    async def reload(self, directory: Path) -> None:
        await asyncio.to_thread(self.weights.read, directory)

    async def restore(self, directory: Path) -> Resume:
        """There is no optimizer: its weights are all that a step depends on."""
        try:
            found = decode((directory / RESUME_FILE).read_bytes())
            await self.reload(directory)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"checkpoint {directory} cannot be read: {error}") from error
        return found

    def facts(self) -> LearnerFacts:
        return LearnerFacts(torch="none", threads=1, micro_batch_tokens=1, reference="", moved={})
