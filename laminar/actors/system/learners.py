"""The learner of a run with its files, in one process or over ranks.

Reads   the configuration
Gives   LearnerParts, `parts_of`; is_ranked; worker_of, the work of a rank

Training, tasks and weights are combined here, identically for the trainer, its other ranks and
`laminar retrain`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from laminar.actors.model_files import ModelFiles
from laminar.actors.trainer import TrainerModel
from laminar.actors.weight_publisher import Attach
from laminar.config import Config
from laminar.net.addresses import LOCALHOST, interface_of
from laminar.tasks.data.tokenizer import get_tokenizer_size, load_tokenizer
from laminar.training.distributed_learner import (
    NoOtherRanks,
    RankedFiles,
    RankedLearner,
    RankWorker,
)
from laminar.training.learner import no_point
from laminar.training.rank_processes import RankProcesses
from laminar.training.rank_store import Submit
from laminar.training.ranks import RankStore, Rendezvous
from laminar.weights.version.hashes import Bytes
from laminar.weights.version.manifest import TensorSpec
from laminar.weights.version.shared_rows import RowWriter, describe_rows
from laminar.weights.version.slot_writer import SharedSlotWriter, SlotWriter
from laminar.weights.version.tensors import write_rows


class LearnerParts(NamedTuple):
    """The learner, its files and the arena of the trainer actor."""

    learner: TrainerModel
    files: ModelFiles
    attach: Attach


def is_ranked(config: Config) -> bool:
    """Return whether ranks hold the model: several, or one with its state in host memory."""
    return config.trainer.total_ranks > 1 or config.trainer.offload != "none"


def parts_of(
    config: Config,
    gang: RankProcesses | None,
    reached: Callable[[str], None] = no_point,
    address: str = LOCALHOST,
) -> LearnerParts:
    """Build the parts; `gang`: not started, None if not divided. `reached`: failpoints.

    `address`: of this machine, on the network of the ranks."""
    if gang is not None:
        worker = worker_of(config, 0, gang.submit, interface_of(address))
    else:
        worker = RankWorker(config, 0, None, _tokenizer_size(config), RowWriter(), reached)
    others = gang or NoOtherRanks()
    learner = RankedLearner(worker, others)
    files = RankedFiles(worker, others, config.model.name, describe_rows)
    if gang is not None:
        return LearnerParts(learner, files, partial(SharedSlotWriter, learner.put_weights))

    def fill(view: Bytes, specs: tuple[TensorSpec, ...]) -> None:
        rows = worker.iter_weight_rows()
        write_rows(view, specs, ((name, part.first, part.data) for name, part in rows))

    return LearnerParts(learner, files, partial(SlotWriter, fill))


def worker_of(
    config: Config,
    rank: int,
    submit: Submit,
    network: str,
    reached: Callable[[str], None] = no_point,
) -> RankWorker:
    """Build a rank's work; `submit`: the way to the table of rank 0, `network`: an interface."""

    def meet() -> Rendezvous:
        return Rendezvous(RankStore(rank, submit), network)

    return RankWorker(config, rank, meet, _tokenizer_size(config), RowWriter(), reached)


def _tokenizer_size(config: Config) -> Callable[[], int]:
    return lambda: get_tokenizer_size(load_tokenizer(config.model.name))
