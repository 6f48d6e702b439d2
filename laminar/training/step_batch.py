"""The batch of one training step, and its split into mini-batches and passes.

Reads   TrainSamples, as consumed
Gives   StepBatch, to which each stage of a step adds (learner.py); `plan_mini_batch`
Raises  ValueError for samples that cannot be trained
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.metrics import TokenFigures
from laminar.training.model.micro_batches import MicroBatch, select_unmasked
from laminar.training.steps import (
    CRITIC_WARMUP,
    MISMATCH,
    Ids,
    Mismatch,
    MismatchSource,
    Origin,
    TrainSample,
    Update,
    select_one_per_origin,
)


@dataclass(slots=True)
class MiniBatch:
    """Samples of one optimizer update."""

    sample_ids: tuple[str, ...]
    counts: BatchCounts  #: of all samples, read or not
    with_gradient: list[TrainSample]
    without_gradient: list[TrainSample]  #: read to compare their engines
    skipped: int  #: samples without gradient that are not read
    passes: list[MicroBatch]  #: of this rank: first those of `with_gradient`
    gradient_passes: int
    proximal: list[Tensor] = field(default_factory=list)  #: scores of each pass before the step


@dataclass(slots=True)
class StepBatch:
    """A consumed batch on its way through the stages of a step."""

    step: int
    rate: float
    trains_policy: bool  #: else the critic alone
    samples: Sequence[TrainSample]  #: with penalties and values; stage 1 adds advantages
    mini_batches: list[MiniBatch] = field(default_factory=list)  #: stage 2
    figures: TokenFigures = field(default_factory=TokenFigures)  #: stage 3, before the updates
    losses: tuple[float, float | None] | None = None  #: stage 3, if it computed the gradient
    mismatch: dict[Origin, Mismatch] = field(default_factory=dict)  #: stage 4, of all samples
    suspects: dict[Origin, MismatchSource] = field(default_factory=dict)  #: stage 4
    left_out: dict[str, tuple[Origin, ...]] = field(default_factory=dict)  #: stage 4, by sample id
    updates: tuple[Update, ...] = ()  #: stage 5
    update_figures: TokenFigures | None = None  #: stage 5, unless they are `figures`
    critic_metrics: dict[str, float] = field(default_factory=dict)  #: stage 5

    @property
    def kept(self) -> list[TrainSample]:
        return [s for s in self.samples if s.sample_id not in self.left_out]

    @property
    def read(self) -> list[TrainSample]:
        """Samples of the passes of all ranks, in order."""
        return [s for mini in self.mini_batches for s in mini.with_gradient + mini.without_gradient]

    def list_skipped_updates(self) -> tuple[Update, ...]:
        """Return the updates of a batch that does not train the policy; (): it does."""
        if not self.mini_batches:
            return (Update((), MISMATCH, 0.0, 0.0, None),)
        skipped = [] if self.trains_policy else self.mini_batches
        return tuple(Update(m.sample_ids, CRITIC_WARMUP, 0.0, 0.0, None) for m in skipped)


def plan_mini_batch(
    samples: list[TrainSample],
    truncated: str,
    reads_all: bool,
    build_passes: Callable[[Sequence[TrainSample]], list[MicroBatch]],
) -> MiniBatch:
    """Count all samples, then select those that are read.

    A masked sequence stays in the counts and in its group's baseline, without a gradient. So does
    a sequence without advantage, if only the advantage gives a gradient: of these, one for each
    replica and version is read, so that every engine is checked.
    """
    unmasked = select_unmasked(samples, truncated)
    with_gradient = [s for s in unmasked if reads_all or np.any(s.advantage)]
    flat = [s for s in unmasked if not (reads_all or np.any(s.advantage))]
    without_gradient = select_one_per_origin(flat)
    passes = build_passes(with_gradient)
    return MiniBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        counts=BatchCounts.from_samples(samples),
        with_gradient=with_gradient,
        without_gradient=without_gradient,
        skipped=len(flat) - len(without_gradient),
        passes=passes + build_passes(without_gradient),
        gradient_passes=len(passes),
    )


def check_samples(samples: Sequence[TrainSample], vocab_limit: int) -> None:
    if not samples:
        raise ValueError("the batch is empty; a training step needs at least one sample")
    if len({s.sample_id for s in samples}) != len(samples):
        raise ValueError("the batch has a sample id twice; sample ids must be unique")
    for sample in samples:
        check_ids(f"the prompt of sample {sample.sample_id}", sample.prompt_ids, vocab_limit)
        read = np.concatenate([sample.response_ids, *sample.contexts])
        check_ids(f"the response of sample {sample.sample_id}", read, vocab_limit)


def check_ids(what: str, ids: Ids, vocab_limit: int) -> None:
    if not len(ids):
        raise ValueError(f"{what} is empty")
    if ids.min() < 0 or ids.max() >= vocab_limit:
        raise ValueError(
            f"{what} has an id outside 0..{vocab_limit - 1}; engine and trainer must use one "
            "tokenizer"
        )
