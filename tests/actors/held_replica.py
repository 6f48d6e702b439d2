"""A replica whose store, engine and loader answer when the test lets them.

Gives   Replica, a Rollout over HeldStore, FakeEngine and FakeLoader; commands about trajectory T
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from laminar.actors.active_sequence import LoadedWeights
from laminar.actors.engine_metrics import EngineMetrics
from laminar.actors.rollout import Rollout
from laminar.actors.system.replica import RealParts
from laminar.engines.protocol import EngineStats, EngineStep, GenerateRequest, TokenDelta
from laminar.events import commands as cmd
from laminar.names.ids import GroupId, TrajectoryId
from laminar.run.directory import TIMELINE_DIR
from laminar.storage import messages as m
from tests.actors.parts import FakeHost, until

END_ID = 7
T = TrajectoryId("0.1.0")
SAMPLING = (
    "rollout.temperature=0.7", "rollout.val_kwargs.temperature=0.3", "data.max_response_length=6"
)  # fmt: skip


class HeldStore:
    """Keeps every request until the test answers it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, asyncio.Future[Any]]] = []

    async def send_request(self, request: Any, answer: type) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((request, reply))
        return await reply

    async def next(self, kind: type) -> tuple[Any, asyncio.Future[Any]]:
        """The oldest request of this kind that nobody has answered."""
        await until(lambda: any(isinstance(request, kind) for request, _ in self.asked))
        found = next(pair for pair in self.asked if isinstance(pair[0], kind))
        self.asked.remove(found)
        return found

    async def answer_open(self, answer: str = "open", **facts: Any) -> m.Open:
        request, reply = await self.next(m.Open)
        results = [
            m.OpenResult(trajectory_id=item.trajectory_id, answer=answer, **facts)  # type: ignore[arg-type]
            for item in request.items
        ]
        reply.set_result(m.OpenReply(results=tuple(results)))
        return request  # type: ignore[no-any-return]

    async def answer(self, kind: type, answer: str) -> None:
        """The same answer for every item of an Append or a Finish."""
        request, reply = await self.next(kind)
        results = [
            m.Result(trajectory_id=item.trajectory_id, answer=answer, reason="told so")  # type: ignore[arg-type]
            for item in request.items
        ]
        replies: dict[type, Any] = {m.Append: m.AppendReply, m.Finish: m.FinishReply}
        reply.set_result(replies[kind](results=tuple(results)))


class FakeEngine:
    """Jobs are done in the order in which they were given, as the engine's thread does; when it is
    `busy`, once the test lets it."""

    def __init__(self) -> None:
        self.busy = False  #: with a step
        self._jobs: list[tuple[asyncio.Future[Any], Any]] = []
        self.waiting = 2
        self.steps: list[EngineStep] = []
        self.running: set[str] = set()
        self.added: list[str] = []
        self.requests: list[GenerateRequest] = []

    def _done(self, value: Any = None) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.append((future, value))
        if not self.busy:
            self.end_step()
        return future

    def end_step(self) -> None:
        """Its jobs are done."""
        for future, value in self._jobs:
            future.set_result(value)
        self._jobs.clear()

    def add(self, request: GenerateRequest) -> asyncio.Future[Any]:
        self.running.add(request.request_id)
        self.added.append(request.request_id)
        self.requests.append(request)
        return self._done()

    def abort_request(self, request_id: str) -> asyncio.Future[Any]:
        found = request_id in self.running
        self.running.discard(request_id)
        return self._done(found)

    def get_stats(self) -> EngineStats:
        return EngineStats(50, 900, len(self.running), self.waiting, 3, 400, 100)

    def drain_steps(self) -> list[EngineStep]:
        steps, self.steps = self.steps, []
        return steps


class FakeLoader:
    """Serves another version as soon as it is told to; `proof`: its future decides whether that
    proves right."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.version = engine, 1
        self.proved = self.loads = 1
        self.coming = -1
        self.pulled: list[set[str]] = []  #: what ran at each load
        self.proof: asyncio.Future[bool] | None = None

    async def pull_weights(self, order: cmd.Envelope, command: cmd.PullWeights) -> None:
        self.pulled.append(set(self.engine.running))
        self.loads += 1
        if self.proof is not None and not await self.proof:
            self.version = self.coming = -1
            return
        self.version, self.proved = command.version, self.loads
        self.coming = -1

    def expect_version(self, version: int) -> None:
        self.version, self.coming = -1, version

    def get_weights(self, load: int) -> LoadedWeights:
        load = load or self.loads
        return LoadedWeights(load, load, load + 10)


class Replica:
    """A rollout that has started, with version 1 in its engine."""

    def __init__(self, run_dir: Path, *settings: str) -> None:
        (run_dir / TIMELINE_DIR).mkdir()
        self.host = FakeHost(run_dir, "rollout-0", *SAMPLING, *settings)
        self.rollout = Rollout(self.host, RealParts(self.host))  # type: ignore[arg-type]
        self.store, self.engine = HeldStore(), FakeEngine()
        self.loader = FakeLoader(self.engine)
        parts = {"store": self.store, "engine": self.engine, "loader": self.loader}
        for name, part in parts.items():
            setattr(self.rollout, name, part)
        self.rollout.stop_ids = frozenset({END_ID})
        self.rollout.openings.store = self.store  # type: ignore[assignment]
        self.rollout.engine_reports = EngineMetrics(
            self.host,  # type: ignore[arg-type]
            self.engine,  # type: ignore[arg-type]
            lambda rows: None,
            self.rollout.running,
            self.rollout.openings,
        )
        self._commands = 0

    def tell(self, *commands: Any) -> None:
        """Commands that arrive together."""
        orders = []
        for command in commands:
            self._commands += 1
            orders.append(
                (cmd.Envelope(command_id=self._commands, cause=1, command=command), command)
            )
        self.rollout.handle_orders(orders)

    async def runs(self, placement: int = 1, trajectory: TrajectoryId = T) -> None:
        """The trajectory is opened and generates."""
        self.tell(generate(placement, trajectory=trajectory))
        await self.store.answer_open()
        await until(lambda: f"{trajectory}@{placement}" in self.engine.running)

    def sampled(
        self,
        placement: int,
        *tokens: int,
        finish_reason: str | None = None,
        trajectory: TrajectoryId = T,
        load: int = 0,
    ) -> None:
        name = f"{trajectory}@{placement}"
        delta = TokenDelta(name, list(tokens), [-0.5] * len(tokens), finish_reason, load)
        self.rollout._on_deltas([delta])

    async def settled(self) -> None:
        """Everything that could follow has followed."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert not self.host.failures, self.host.failures

    def reports(self) -> list[str]:
        return [type(event).__name__ for event in self.host.events]


def generate(
    placement: int = 1, version: int = 1, purpose: str = "train", trajectory: TrajectoryId = T
) -> cmd.GenerateTrajectory:
    return cmd.GenerateTrajectory(
        to="rollout-0",
        trajectory_id=trajectory,
        group=GroupId("0.1"),
        sibling=0,
        purpose=purpose,
        row_index=1,
        attempt=1,
        placement=placement,
        version=version,
        version_step=version + 10,
        seed=5,
    )


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def abort(placement: int = 1) -> cmd.AbortTrajectories:
    placed = cmd.PlacedTrajectory(trajectory_id=T, placement=placement)
    return cmd.AbortTrajectories(to="rollout-0", items=(placed,))


def release(placement: int, *trajectories: TrajectoryId) -> cmd.ReleaseTrajectories:
    items = tuple(
        cmd.PlacedTrajectory(trajectory_id=t, placement=placement) for t in trajectories or (T,)
    )
    return cmd.ReleaseTrajectories(to="rollout-0", items=items)


def pull(version: int = 2) -> cmd.PullWeights:
    return cmd.PullWeights(to="rollout-0", version=version, exact=False, purpose="newer")


def pull_in_flight(version: int = 2) -> cmd.PullWeights:
    return cmd.PullWeights(to="rollout-0", version=version, exact=True, purpose="in-flight")


def stream(version: int = 2) -> cmd.PullWeights:
    return cmd.PullWeights(to="rollout-0", version=version, exact=True, purpose="stream")
