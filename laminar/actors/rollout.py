"""The rollout actor: one replica. Generates, stores tokens, scores responses, pulls weights.

Reads   GenerateTrajectory, ScoreTrajectories, PullWeights, AbortTrajectories, ReleaseTrajectories;
        the relay's slots
Writes  tokens, log-probs and rewards (through the store)
Emits   ReplicaReady, TrajectoryStarted/Finished/Failed/Rewarded, TrajectoriesReleased,
        TokenProgress, WeightsLoaded, ...

Data is durable in the store before any event refers to it. Tokens are stored at the interval of
progress reports, and at once when a response ends.

Trajectories that the coordinator takes back (by an abort, a pull, or a newer placement) end here in
any state and without a report, because the coordinator no longer needs one. A pull in flight takes
nothing back: sequences continue with the new weights. Their new tokens are held, neither stored nor
reported, until the weights are proved; if they prove wrong, the tokens are dropped and all
sequences are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from laminar.actors.active_sequence import ActiveSequence, digest_of_read, request_id
from laminar.actors.admission_requests import AdmissionRequests, Ordered, choose_temperature
from laminar.actors.engine_metrics import EngineMetrics, gauge_interval_s, largest_batch
from laminar.actors.host import Host
from laminar.actors.scoring import RewardWorkers, Scorer
from laminar.actors.service_clients import RelayClient, StoreClient
from laminar.actors.turns import make_turn, turn_seed
from laminar.actors.weight_loader import WeightFiles, WeightLoader
from laminar.config import ConfigError
from laminar.engines import protocol
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.events.reasons import FailureReason, FinishReason, PullPurpose
from laminar.names import ids
from laminar.names.ids import Purpose
from laminar.storage import messages as m
from laminar.tasks.environments.stop_strings import StopStrings

T = TypeVar("T")

FINISH_DELAY_S = 0.002  #: responses that end within this time share one commit of the store


class ReplicaParts(Protocol):
    """The parts of a replica other than its logic."""

    stop_ids: frozenset[int]  #: known once the engine has started

    @property
    def rewards(self) -> RewardWorkers: ...

    @property
    def weights(self) -> WeightFiles: ...

    async def start_engine(
        self, seed: int, on_deltas: Callable[[list[protocol.TokenDelta]], None]
    ) -> protocol.ReplicaEngine:
        """Load tokenizer and engine of the run's model; ConfigError.

        `seed`: for an engine with its own random numbers.
        """
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of a response or a turn, without its end token."""
        ...

    def record_steps(self, rows: bytes) -> None:
        """Record engine steps for the timeline: int64 rows of start, end, sequences, tokens.

        Times are ns of the day's clock.
        """


class Rollout:
    """The actor of one replica: an engine and its surroundings."""

    def __init__(self, host: Host, parts: ReplicaParts) -> None:
        self.host, self.config, self.parts = host, host.config, parts
        disk_full_timeout_s = self.config.coordinator.disk_full_timeout_s
        self.store = StoreClient(host.make_client("store-0"), disk_full_timeout_s)
        self.relay = RelayClient(host.make_client(ids.actor_name("relay", host.node, 0)))
        self.openings = AdmissionRequests(self.config.rollout, self.store, self._handle_opened)
        self.running: dict[str, ActiveSequence] = {}
        self._interval_s = self.config.rollout.progress_interval_ms / 1000
        self._flush_lock = asyncio.Lock()
        self._finish_due = False

    async def start(self) -> None:
        rollout, parts = self.config.rollout, self.parts
        self.engine = await _of_engine(parts.start_engine(self._engine_seed(), self._on_deltas))
        self.engine_reports = EngineMetrics(
            self.host, self.engine, parts.record_steps, self.running, self.openings
        )
        self.stop_ids = parts.stop_ids
        self.loader = WeightLoader(self.host, self.relay, self.engine, parts.weights)
        self.scorer = Scorer(self.host, self.store, parts.rewards, parts.decode)
        await self.store.start()
        await self.relay.start()
        if not self.config.has_sessions:  # else hosts of agents have the rewards
            self.host.spawn(self.scorer.start())  # needed when the first response has ended
        self.host.spawn(self._watch_engine())
        self.host.spawn(self.engine_reports.report_periodically(gauge_interval_s(self.config)))
        self.host.spawn(self._keep_tokens())
        stats = self.engine.get_stats()
        # One group waits in front of the engine, so that its slots never wait for the coordinator.
        taken = rollout.max_num_seqs + rollout.group_size
        ready = ev.ReplicaReady(
            max_num_seqs=taken,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            max_batch=largest_batch(rollout),
        )
        self.host.emit(ready)

    def _engine_seed(self) -> int:
        """Return a seed that differs for every restart, so that no numbers are drawn twice."""
        parts = (self.config.seed, "engine", self.host.name, self.host.incarnation)
        return ids.hash64(*parts) % (1 << 31)

    async def stop(self) -> None:
        if hasattr(self, "engine"):
            self.engine_reports.write_steps()
            await self.engine.close()
            await self.scorer.close()
        await self.store.close(0.5)
        await self.relay.close(0.5)

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        """Handle commands that arrived together; all openings are one request to the store."""
        opening: list[Ordered] = []
        for order, command in orders:
            if isinstance(command, cmd.GenerateTrajectory):
                self._let_go(command.trajectory_id, command.placement)
                self.openings.add_pending(order, command)
                opening.append((order, command))
            elif isinstance(command, cmd.ScoreTrajectories):
                self.host.spawn(self.scorer.score_trajectories(order, command))
            elif isinstance(command, cmd.PullWeights):
                if command.purpose != PullPurpose.IN_FLIGHT:
                    self._drop_all()
                if command.purpose == PullPurpose.STREAM:
                    self.loader.expect_version(command.version)
                self.host.spawn(self._pull_weights(order, command))
            elif isinstance(command, cmd.AbortTrajectories):
                self._abort_trajectories(order, command)
            elif isinstance(command, cmd.ReleaseTrajectories):
                self._release_trajectories(order, command)
        if opening:
            self.host.spawn(self.openings.open(opening))

    async def _pull_weights(self, order: cmd.Envelope, command: cmd.PullWeights) -> None:
        if self.running:  # otherwise the tokens would be lost
            await self._flush()
        await self.loader.pull_weights(order, command)
        if self.loader.version < 0:
            self._drop_all()
        elif any(running.finish_reason for running in self.running.values()):
            self._finish_soon()

    # --- starting a trajectory ------------------------------------------------------------------

    def _handle_opened(
        self, order: cmd.Envelope, command: cmd.GenerateTrajectory, result: m.OpenResult
    ) -> None:
        """Act on the store's answer for one trajectory."""
        if not self.openings.complete_opening(command):
            return
        facts = {"event_seq": order.cause, "trajectory": command.trajectory_id}
        if result.answer == "open":
            return self._start_generation(order, command, result)
        self.openings.mark_settled(order)
        if result.answer in ("generated", "rewarded"):  # only the report was lost
            reason = result.finish_reason or protocol.STOP
            report_finished(self.host, command, order.cause, result.num_tokens, reason)
        elif result.answer == "refused":
            refused = FailureReason.STORE_REFUSED
            report_failed(self.host, command, order.cause, refused, result.reason)
        else:
            self.host.log.info("not-opened", answer=result.answer, **facts)

    def _start_generation(
        self, order: cmd.Envelope, command: cmd.GenerateTrajectory, result: m.OpenResult
    ) -> None:
        if not self._can_serve(command):
            if self.loader.version < 0:  # sent before the coordinator knew
                return self.openings.mark_settled(order)
            wanted = f"{command.trajectory_id} needs version {command.version}"
            raise RuntimeError(f"{wanted}, but the engine serves {self.loader.version}")
        turn = make_turn(result)
        sampled = turn.begins + len(turn.done_ids)
        running = ActiveSequence(command, order.cause, sampled, turn.number, turn.begins)
        self.running[command.trajectory_id] = running
        started = ev.TrajectoryStarted(
            trajectory_id=command.trajectory_id,
            placement=command.placement,
            tokens_resumed=sampled,
            prompt_tokens=len(turn.prompt_ids) - turn.begins,
        )
        name, version = command.trajectory_id, command.version
        self.host.emit(started, event_seq=order.cause, trajectory=name, version=version)
        limit = self.config.data.max_response_length - turn.begins
        limit = min(limit, result.options.max_tokens or limit)
        stop = running.stop = StopStrings(result.options.stop, self.parts.decode, turn.done_ids)
        stopped = bool(turn.done_ids) and turn.done_ids[-1] in self.stop_ids
        if stopped or stop.is_found or len(turn.done_ids) >= limit:
            running.finish_reason = protocol.STOP if stopped or stop.is_found else protocol.LENGTH
            self.openings.mark_settled(order)
            return self._finish_soon()
        request = protocol.GenerateRequest(
            request_id=request_id(command),
            prompt_ids=turn.prompt_ids,
            done_ids=turn.done_ids,
            max_new_tokens=limit,
            temperature=choose_temperature(self.config.rollout, command.purpose),
            seed=turn_seed(command.seed, turn.number),
            stop_ids=self.stop_ids,
        )
        running.read = digest_of_read(request)
        # The engine has the request from here on, before any later abort or load.
        self.engine.add(request).add_done_callback(partial(self._check_accepted, order))

    def _can_serve(self, command: cmd.GenerateTrajectory) -> bool:
        """Return whether the engine serves this version; in flight, an order may cross a load."""
        older = self.config.rollout.in_flight and command.version < self.loader.version
        crossed = older and command.purpose == Purpose.TRAIN
        return crossed or command.version in (self.loader.version, self.loader.coming)

    def _check_accepted(self, order: cmd.Envelope, added: asyncio.Future[None]) -> None:
        """Raise EngineError, which ends the process, if the engine refused the request."""
        if not added.cancelled():
            added.result()
            self.openings.mark_settled(order)

    # --- trajectories that are no longer wanted here ---------------------------------------------

    def _release_trajectories(self, order: cmd.Envelope, command: cmd.ReleaseTrajectories) -> None:
        for item in command.items:
            self.openings.take_back(item.trajectory_id, item.placement)
        self.host.spawn(
            release_trajectories(self.host, self.engine, self.running, self._flush, order, command)
        )

    def _abort_trajectories(self, order: cmd.Envelope, command: cmd.AbortTrajectories) -> None:
        for item in command.items:
            self.host.log.info("abort", event_seq=order.cause, trajectory=item.trajectory_id)
            self._let_go(item.trajectory_id, item.placement)

    def _let_go(self, trajectory_id: str, placement: int) -> None:
        """Drop a trajectory under this placement and older ones."""
        self.openings.take_back(trajectory_id, placement)
        running = self.running.get(trajectory_id)
        if running is not None and running.command.placement <= placement:
            del self.running[trajectory_id]
            self.engine.abort_request(request_id(running.command))

    def _drop_all(self) -> None:
        """Drop all work, since nothing is wanted after a pull and an abort may have been lost."""
        self.openings.withdraw_all()
        for running in self.running.values():
            self.engine.abort_request(request_id(running.command))
        self.running.clear()

    # --- tokens ---------------------------------------------------------------------------------

    def _on_deltas(self, deltas: list[protocol.TokenDelta]) -> None:
        finished = False
        for delta in deltas:
            self.engine_reports.tokens_total += len(delta.token_ids)
            trajectory, _, placement = delta.request_id.rpartition("@")
            running = self.running.get(trajectory)
            if running is None or running.command.placement != int(placement):
                continue
            if running.finish_reason is not None:
                continue  # behind a stop string
            if running.add_delta(self.loader.get_weights(delta.load), delta):
                self.engine.abort_request(delta.request_id)
            finished = finished or running.finish_reason is not None
        if finished:
            self._finish_soon()

    def _finish_soon(self) -> None:
        if not self._finish_due:
            self._finish_due = True
            asyncio.get_running_loop().call_later(FINISH_DELAY_S, self._flush_now)

    def _flush_now(self) -> None:
        self._finish_due = False
        self.host.spawn(self._flush(everything=False))

    async def _flush(self, *, everything: bool = True) -> None:
        """Store new tokens, of ended responses or of all, then finish the ended ones.

        On return the store has acknowledged them, and those of earlier calls.
        """
        async with self._flush_lock:
            chosen = [r for r in self.running.values() if everything or r.finish_reason]
            chunks = [chunk for r in chosen for chunk in r.take_chunks(self.loader.proved)]
            ended = [r for r in chosen if r.finish_reason and not r.parts]
            if not ended:
                return await self._append(chunks)
            # Sent together, in this order on one link: the store takes both with one commit.
            await asyncio.gather(self._append(chunks), self._finish(ended))

    async def _append(self, chunks: list[m.AppendItem]) -> None:
        if not chunks:
            return
        await self.host.hit_failpoint("rollout-append")
        reply = await self.store.send_request(m.Append(items=tuple(chunks)), m.AppendReply)
        await self.host.hit_failpoint("rollout-appended")
        for chunk, result in zip(chunks, reply.results, strict=True):
            if result.answer != "ok":
                self._not_taken(chunk.placement, result)

    async def _finish(self, ended: list[ActiveSequence]) -> None:
        if not ended:
            return
        items = tuple(
            m.FinishItem(
                trajectory_id=r.command.trajectory_id,
                placement=r.command.placement,
                finish_reason=r.finish_reason or protocol.STOP,
                num_tokens=r.stored,
            )
            for r in ended
        )
        reply = await self.store.send_request(m.Finish(items=items), m.FinishReply)
        await self.host.hit_failpoint("rollout-finished")
        for running, result in zip(ended, reply.results, strict=True):
            if self.running.get(running.command.trajectory_id) is not running:
                continue  # refused with its last tokens, or aborted meanwhile
            if result.answer != "ok":
                self._not_taken(running.command.placement, result)
                continue
            del self.running[running.command.trajectory_id]
            reason = running.finish_reason or protocol.STOP
            report_finished(self.host, running.command, running.event_seq, running.stored, reason)

    def _not_taken(self, placement: int, result: m.Result) -> None:
        """Handle a refusal by the store: fenced (another replica has it) or refused (untrainable).

        A refusal of a placement that has ended here is only logged.
        """
        running = self.running.get(result.trajectory_id)
        current = running is not None and running.command.placement == placement
        self.host.log.warning(
            "not-stored",
            event_seq=running.event_seq if running is not None and current else 0,
            trajectory=result.trajectory_id,
            placement=placement,
            answer=result.answer,
            reason=result.reason,
        )
        if running is None or not current:
            return
        self._let_go(result.trajectory_id, placement)
        if result.answer == "refused":
            refused = FailureReason.STORE_REFUSED
            report_failed(self.host, running.command, running.event_seq, refused, result.reason)

    async def _keep_tokens(self) -> None:
        """Store the tokens so far, at the interval of the gauges."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self._flush()

    async def _watch_engine(self) -> None:
        await _of_engine(asyncio.shield(self.engine.failed))


async def _of_engine(work: Awaitable[T]) -> T:
    """Await engine work; convert exceptions to EngineError, except a user's ConfigError."""
    try:
        return await work
    except (ConfigError, protocol.EngineError):
        raise
    except Exception as error:
        raise protocol.EngineError(f"{type(error).__name__}: {error}") from error


def report_finished(
    host: Host, command: cmd.GenerateTrajectory, event_seq: int, num_tokens: int, reason: str
) -> None:
    """Report that the store has the whole response."""
    trajectory = command.trajectory_id
    finished = ev.TrajectoryFinished(
        trajectory_id=trajectory,
        placement=command.placement,
        num_tokens=num_tokens,
        finish_reason=FinishReason(reason),
    )
    host.emit(finished, event_seq=event_seq, trajectory=trajectory, num_tokens=num_tokens)


def report_failed(
    host: Host, command: cmd.GenerateTrajectory, event_seq: int, reason: FailureReason, detail: str
) -> None:
    """Report that it cannot be generated: the store refuses it."""
    trajectory = command.trajectory_id
    failed = ev.TrajectoryFailed(
        trajectory_id=trajectory, placement=command.placement, reason=reason, detail=detail[:500]
    )
    host.emit(failed, event_seq=event_seq, trajectory=trajectory, reason=reason, detail=detail)


async def release_trajectories(
    host: Host,
    engine: protocol.ReplicaEngine,
    running: dict[str, ActiveSequence],
    flush: Callable[[], Awaitable[None]],
    order: cmd.Envelope,
    command: cmd.ReleaseTrajectories,
) -> None:
    """Release trajectories that migrate to another replica, without losing a token.

    `flush`: must return once the store has all tokens and ended responses are reported. The engine
    stops first, since later tokens would be sampled again elsewhere. The coordinator does not wait:
    trajectories that it takes back, or orders under another placement, meanwhile are left alone,
    and the report comes too late to count.
    """
    leaving = [
        found
        for item in command.items
        if (found := running.get(item.trajectory_id)) is not None
        and found.command.placement <= item.placement
    ]
    await asyncio.gather(*(engine.abort_request(request_id(item.command)) for item in leaving))
    await flush()
    for item in leaving:
        trajectory = item.command.trajectory_id
        if running.get(trajectory) is item:  # else it has ended, or was taken back
            del running[trajectory]
    released = ev.TrajectoriesReleased(command_id=order.command_id)
    host.emit(released, event_seq=order.cause, trajectories=len(command.items))
