"""The agent actor: a host of agents and environments, the sessions of trajectories.

Reads   StartSession, ScoreTrajectories, AbortTrajectories; turns of the store
Writes  prompts, contexts, tool calls and rewards (through the store)
Emits   AgentReady, TurnRequested, TrajectoryRewarded, TrajectoryFailed

A session outlives the replicas that sample its turns, and ends with this process. What the model
reads is durable in the store before a turn is requested, and a turn before its session gets it.
"""

from __future__ import annotations

from typing import Protocol

from laminar.actors.admission_requests import AdmissionRequests, Ordered
from laminar.actors.host import Host
from laminar.actors.scoring import RewardWorkers, Scorer
from laminar.actors.service_clients import StoreClient
from laminar.actors.turns import Turns, TurnSessions
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.events.reasons import FailureReason
from laminar.storage import messages as m
from laminar.tasks.environments.turns import SessionLost


class HostParts(Protocol):
    """The parts of a host other than its logic."""

    @property
    def rewards(self) -> RewardWorkers: ...

    async def load_sessions(self) -> TurnSessions:
        """Load the tokenizer; return the sessions, not started. ConfigError."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of a turn, without its end token."""
        ...


class AgentHost:
    """The actor of one host."""

    def __init__(self, host: Host, parts: HostParts) -> None:
        self.host, self.parts = host, parts
        disk_full_timeout_s = host.config.coordinator.disk_full_timeout_s
        self.store = StoreClient(host.make_client("store-0"), disk_full_timeout_s)
        self.openings = AdmissionRequests(host.config.rollout, self.store, self._handle_opened)
        self.turns: Turns | None = None

    async def start(self) -> None:
        sessions, parts = await self.parts.load_sessions(), self.parts
        await sessions.start()
        self.turns = Turns(self.host, self.store, sessions)
        self.scorer = Scorer(self.host, self.store, parts.rewards, parts.decode, self.turns)
        await self.store.start()
        self.host.spawn(self.scorer.start())  # needed when the first trajectory has ended
        self.host.emit(ev.AgentReady())

    async def stop(self) -> None:
        if self.turns is not None:
            await self.scorer.close()
            await self.turns.sessions.close()
        await self.store.close(0.5)

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        """Handle commands that arrived together; all openings are one request to the store."""
        opening: list[Ordered] = []
        for order, command in orders:
            if isinstance(command, cmd.StartSession):
                self.openings.add_pending(order, command)
                opening.append((order, command))
            elif isinstance(command, cmd.ScoreTrajectories):
                self.host.spawn(self.scorer.score_trajectories(order, command))
            elif isinstance(command, cmd.AbortTrajectories):
                self._end_sessions(order, command)
        if opening:
            self.host.spawn(self.openings.open(opening))

    def _end_sessions(self, order: cmd.Envelope, command: cmd.AbortTrajectories) -> None:
        assert self.turns is not None
        for item in command.items:
            self.host.log.info("abort", event_seq=order.cause, trajectory=item.trajectory_id)
            self.openings.take_back(item.trajectory_id, item.placement)
            self.turns.sessions.end_session(item.trajectory_id)

    def _handle_opened(
        self, order: cmd.Envelope, command: cmd.StartSession, result: m.OpenResult
    ) -> None:
        if result.answer == "open":
            self.host.spawn(self._start_session(order, command, result))
        elif self.openings.complete_opening(command):
            self.openings.mark_settled(order)
            if result.answer == "refused":
                self._fail(order, command, FailureReason.STORE_REFUSED, result.reason)
            else:
                self.host.log.info(
                    "not-opened", answer=result.answer, trajectory=command.trajectory_id
                )

    async def _start_session(
        self, order: cmd.Envelope, command: cmd.StartSession, opened: m.OpenResult
    ) -> None:
        """Start a session and report its first request, unless it was taken back meanwhile."""
        assert self.turns is not None
        try:
            is_ours = await self.turns.open_session(command, opened)
        except SessionLost as lost:
            if self.openings.complete_opening(command):
                self.openings.mark_settled(order)
                self._fail(order, command, lost.reason, str(lost))
            return
        if self.openings.complete_opening(command):
            self.openings.mark_settled(order)
            if is_ours:
                self.scorer.report_requested(order, _place(command), len(opened.contexts))

    def _fail(
        self, order: cmd.Envelope, command: cmd.StartSession, reason: FailureReason, detail: str
    ) -> None:
        self.scorer.report_failed(order, _place(command), reason, detail)


def _place(command: cmd.StartSession) -> cmd.PlacedTrajectory:
    return cmd.PlacedTrajectory(trajectory_id=command.trajectory_id, placement=command.placement)
