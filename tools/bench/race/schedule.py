"""Schedule of a run: its batches, the weights that sample each response, the time of each step.

Reads   Cell
Gives   RaceWorld, which yields a Batch per step

The core decides, as in tools/bench/repack/world.py. The time of a response depends on its seed, not
on its tokens, so a schedule needs no model, and learning cannot change it. A response waits in its
replica for a free slot; while a replica loads, its responses pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.events import commands as cmd
from laminar.events.base import Command, Settings
from laminar.names.ids import TrajectoryId
from tools.bench.repack.in_flight import Batch as PausingBatch
from tools.bench.repack.measures import Setup
from tools.bench.repack.world import RepackWorld

UNIT_S = 100.0  #: median time of a response, long against the world's constants (scoring, store)
UNIT_NS = UNIT_S * 1e9
TICKS = 1_000  #: parts of a unit in which a response progresses
TRAIN, UPDATE = 2.0, 0.1  #: units: of a step; of a publication, and again of a load
GROUPS, SIBLINGS = 16, 8  #: the quickstart's
Weights = list[tuple[int, float]]  #: their steps, each from a share of the response's time on
Response = tuple[cmd.GenerateTrajectory, Weights]
COLOCATED, DISAGGREGATED, DRAIN, IN_FLIGHT = "colocated", "disaggregated", "drain", "in-flight"


class Cell(NamedTuple):
    """Parameters of one run."""

    form: str
    bound: int
    seed: int
    rate: float = 3e-4
    corrected: bool = True  #: whether stale tokens are weighted: truncated importance sampling
    p99: float = 10.0
    slots: int = 64

    def make_setup(self) -> Setup:
        """Return the world's setup; colocated machines all generate, then all train (2 : 1)."""
        replicas, all_machines = 4 if self.form == DRAIN else 1, self.form == COLOCATED
        slots = self.slots * (3 if all_machines else 2) // (2 * replicas)
        return Setup(
            replicas=replicas, staleness=self.bound, policy="gain" if self.form == DRAIN else "",
            max_batch=slots, timing=EngineTiming(1e6 * UNIT_S / TICKS, 0.0, 1e12),
            lengths=ResponseLengths(TICKS, 1 << 30, self.p99), seed=self.seed, warm_steps=0,
            steps=0, slots=slots, groups_per_step=GROUPS, start_s=0.0, queued=SIBLINGS,
            train_s=UNIT_S * TRAIN / (3 if all_machines else 1),
            publish_s=UNIT_S * UPDATE, load_s=UNIT_S * UPDATE,
        )  # fmt: skip


class Batch(NamedTuple):
    """A training step; times in units."""

    responses: list[Response]
    begin: float
    staleness: float  #: mean over responses, by their oldest weights
    end: float = 0.0
    slots_used: float = 0.0  #: share of the slots' time until the end


class RaceWorld(RepackWorld):
    """A run whose batches are recorded."""

    make_batch = PausingBatch

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.make_setup())
        self._in_flight = cell.form == IN_FLIGHT
        self._responses: dict[TrajectoryId, Response] = {}
        self._ordered: deque[Batch] = deque()  #: the next may be ordered when one is trained

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the run, without end."""
        self._begin()
        while True:
            before = self.completed
            while self.completed == before:
                self._step()
            end, slots = self.now / UNIT_NS, self.setup.replicas * self.setup.slots
            used = sum(b.sampled for b in self._batches()) / TICKS / slots / end
            yield self._ordered.popleft()._replace(end=end, slots_used=used)

    def _make_settings(self) -> Settings:
        share = 0 if self._in_flight else self.setup.slots // SIBLINGS
        changes = {"in_flight": self._in_flight, "groups_per_version": share}
        return msgspec.structs.replace(super()._make_settings(), group_size=SIBLINGS, **changes)

    def _obey(self, command_id: int, command: Command) -> None:
        if isinstance(command, cmd.PullWeights):
            batch = self._replicas[command.to].batch
            batch.load(float(self.now), self.setup.load_s, recompute=False)
            self._changed[command.to] = None
        super()._obey(command_id, command)

    def _load(self, name: str) -> None:
        replica, step = self._replicas[name], self._step_of[self.machine.state.versions.newest]
        replica.batch.advance_to(float(self.now))
        self._report(replica)
        for known, done in replica.batch.unfinished().items():
            command, weights = self._responses[TrajectoryId(known)]
            weights.append((step, done / self._totals[command.trajectory_id]))
        super()._load(name)

    def _generate(self, command_id: int, command: cmd.GenerateTrajectory) -> None:
        response = command, [(command.version_step, 0.0)]
        self._responses.setdefault(command.trajectory_id, response)
        super()._generate(command_id, command)

    def _train(self, command: cmd.TrainStep) -> None:
        batch = [self._responses.pop(t) for t in command.trajectories]
        age = sum(command.step_index - weights[0][0] for _, weights in batch) / len(batch)
        self._ordered.append(Batch(batch, self.now / UNIT_NS, age))
        super()._train(command)
