"""The trainer of one process in parts, for tests and benchmarks.

Gives   OneLearner: learner and files of a configuration; make_files, around a learner that exists;
        named_weights, build_tensor_manifest: what it publishes, in another way than the trainer's
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from laminar.config import Config
from laminar.training.distributed_learner import (
    NoOtherRanks,
    RankedFiles,
    RankedLearner,
    RankWorker,
)
from laminar.training.learner import Learner
from laminar.training.model.policy import iter_weight_rows
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import build_manifest
from laminar.weights.version.shared_rows import RowWriter, describe_rows
from laminar.weights.version.tensors import write_tensors


class OneLearner(RankedLearner):
    """The learner of a configuration, with its files; it exists once loaded."""

    def __init__(self, config: Config, tokenizer_size: int) -> None:
        worker = RankWorker(config, 0, None, lambda: tokenizer_size, RowWriter())
        super().__init__(worker, NoOtherRanks())
        self.config = config
        self.files = RankedFiles(self.worker, NoOtherRanks(), config.model.name, describe_rows)

    @property
    def learner(self) -> Learner:
        return self.worker.learner

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.policy.model

    def get_weights(self) -> dict[str, torch.Tensor]:
        """Return the published tensors as they are now, without copies."""
        return {name: rows.data for name, rows in self.worker.iter_weight_rows()}


def make_files(learner: Any, source: Path | str) -> RankedFiles:
    """Return the files of a learner; `source`: the directory of the run's tokenizer."""
    worker = RankWorker(Config(), 0, None, lambda: 0, RowWriter())
    worker.learner = learner
    return RankedFiles(worker, NoOtherRanks(), str(source), describe_rows)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a trainer of one process publishes: whole tensors."""
    return ((name, rows.data) for name, rows in iter_weight_rows(model))


def build_tensor_manifest(
    *,
    version: int,
    step: int,
    specs: tuple[mf.TensorSpec, ...],
    tensors: Iterable[tuple[str, torch.Tensor]],
    probe: mf.Probe,
) -> mf.Manifest:
    """Build the manifest of a version of these tensors, as a relay would."""
    view = np.empty(mf.check_tensors(specs), dtype=np.uint8)
    write_tensors(view, specs, tensors)
    return build_manifest(view, version=version, step=step, tensors=specs, probe=probe)
