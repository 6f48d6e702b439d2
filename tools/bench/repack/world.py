"""Replicas, relay and trainer in virtual time around the coordinator's real core.

Reads   the commands that core/machine.py decides
Gives   RepackWorld: a run without faults, with its measures

The core drives the engines directly, without sockets, log or actors, whose milliseconds are
negligible against the minutes measured here. A run is ten times cheaper than in the simulator
(tools/simulator), where the same core works with the real actors. Engines are
engines/emulated/timed_batch.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from laminar.core.context import COMMANDS_PER_EVENT_MAX
from laminar.core.machine import StateMachine
from laminar.core.state.indexes import due_timers, get_next_timer_ns
from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Settings, Stamped
from laminar.names.ids import TrajectoryId
from tools.bench.repack.measures import GROUP_SIZE, SAMPLE_S, SECOND, Meter, Seen, Setup
from tools.kit.world_parts import coordinator_started, settings, step_completed

NODE, STORE, RELAY, TRAINER = "node-0", "store-0", "relay-0", "trainer-0"
SCORE_S, STORE_S = 0.1, 0.05
GAUGE_S = 30.0
NEVER_MS = 1 << 40


class Replica:
    """An engine with its batch and the coordinator's latest order."""

    def __init__(self, name: str, batch: TimedBatch) -> None:
        self.name, self.batch = name, batch
        self.placements: dict[TrajectoryId, int] = {}
        self.as_of = 0
        self.plan = 0


class RepackWorld:
    """A run from its start until enough steps are measured."""

    make_batch = TimedBatch

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0
        self.machine = StateMachine()
        self.meter = Meter(setup)
        self.completed = 0
        self._chance = random.Random(f"repack/{setup.seed}")
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._replicas: dict[str, Replica] = {}
        self._changed: dict[str, None] = {}  #: replicas whose next change must be scheduled
        self._tokens: dict[TrajectoryId, int] = {}  #: tokens in the store, of released trajectories
        self._totals: dict[TrajectoryId, int] = {}
        self._issued: dict[TrajectoryId, int] = {}
        self._untrained: set[TrajectoryId] = set()
        self._step_of: dict[int, int] = {}

    def run(self) -> Seen:
        self._begin()
        while self.completed < self.setup.warm_steps + self.setup.steps:
            self._step()
        return self.meter.seen(self.now, self._batches(), self._live())

    # --- time -----------------------------------------------------------------------------------

    def _after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._at(self.now + int(seconds * SECOND), action, *args)

    def _at(self, when: int, action: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heappush(self._heap, (when, self._order, action, args))

    def _step(self) -> None:
        timer = get_next_timer_ns(self.machine.state)
        if timer is not None and timer <= self._heap[0][0]:
            self.now = max(self.now, timer)
            for name in due_timers(self.machine.state, self.now):
                self._hear(COORDINATOR, 0, ev.TimerFired(timer=name))
        else:
            self.now, _, action, args = heappop(self._heap)
            action(*args)
        for name in self._changed:
            self._plan(self._replicas[name])
        self._changed.clear()

    # --- the coordinator ------------------------------------------------------------------------

    def _hear(self, peer: str, incarnation: int, event: Event) -> None:
        seq = self.machine.state.seq + 1 if self.machine.started else 1
        stamped = Stamped(
            seq=seq, time_ns=self.now, peer=peer, incarnation=incarnation, peer_seq=0, event=event
        )
        for number, command in enumerate(self.machine.handle_event(stamped)):
            self._obey(seq * COMMANDS_PER_EVENT_MAX + number, command)

    def _say(self, name: str, event: Event) -> None:
        self._hear(name, self.machine.state.members.actors[name].incarnation, event)

    def _obey(self, command_id: int, command: Command) -> None:
        if isinstance(command, cmd.GenerateTrajectory):
            self._generate(command_id, command)
        elif isinstance(command, cmd.ScoreTrajectories):
            for item in command.items:
                self._after(SCORE_S, self._say, command.to, _rewarded(item))
        elif isinstance(command, cmd.EndTrajectories):
            self._after(STORE_S, self._ended, command_id, command)
        elif isinstance(command, cmd.TrainStep):
            self._train(command)
        elif isinstance(command, cmd.PublishWeights):
            self._after(self.setup.publish_s, self._publish, command.version, command.step)
        elif isinstance(command, cmd.PullWeights):
            self._after(self.setup.load_s, self._load, command.to)
        elif isinstance(command, cmd.ReleaseTrajectories):
            self._release(command_id, command)
        elif isinstance(command, cmd.AbortTrajectories):
            self._abort(command)

    # --- the start ------------------------------------------------------------------------------

    def _make_settings(self) -> Settings:
        setup = self.setup
        return settings(
            seed=setup.seed,
            groups_per_step=setup.groups_per_step,
            group_size=GROUP_SIZE,
            max_staleness=setup.staleness,
            groups_per_version=setup.slots // GROUP_SIZE,
            total_steps=1 << 20,
            shuffle=False,
            val_before_train=False,
            resume_timeout_ms=10_000,
            batch_timeout_ms=NEVER_MS,
            start_timeout_ms=NEVER_MS,
            stall_ms=NEVER_MS,
            repack_policy=setup.policy,
            repack_interval_ms=5_000 if setup.policy else 0,
            repack_release_timeout_ms=2_000 if setup.policy else 0,
            repack_prefill_tokens=self._prefilled_per_step() if setup.policy else 0,
        )

    def _begin(self) -> None:
        self._hear(COORDINATOR, 0, coordinator_started(self._make_settings()))
        for name in (NODE, STORE, RELAY, TRAINER):
            self._join(name)
        data = ev.DataLoaded(num_train=1 << 20, num_eval=0, overlap=0, digest="d")
        self._say(STORE, data)
        self._say(RELAY, ev.RelayReady(address="here", chain_address="here"))
        self._say(TRAINER, ev.TrainerReady(num_parameters=1, weights_bytes=4))
        self._publish(0, 0)
        for number in range(self.setup.replicas):
            self._after(
                self._chance.uniform(0, self.setup.start_s), self._start, f"rollout-0.{number}"
            )
        self._after(SAMPLE_S, self._sample)

    def _prefilled_per_step(self) -> int:
        """Return the tokens prefilled in the time of a step of max_batch with a half-full cache."""
        timing = self.setup.timing
        step_ns = timing.step_ns(self.setup.max_batch, timing.cache_tokens // 2)
        return max(1, int(timing.prefill_tokens_per_s * step_ns / SECOND))

    def _join(self, name: str) -> None:
        role = name.partition("-")[0]
        boot = f"{name}/a"
        self._hear(name, 0, ev.ActorJoined(name=name, role=role, boot_id=boot, node=NODE, pid=1))

    def _start(self, name: str) -> None:
        batch = self.make_batch(self.setup.timing, self.setup.slots)
        self._replicas[name] = Replica(name, batch)
        self._join(name)
        ready = ev.ReplicaReady(
            max_num_seqs=self.setup.capacity,
            kv_capacity_tokens=self.setup.timing.cache_tokens,
            max_batch=self.setup.max_batch,
        )
        self._say(name, ready)
        self._after(self._chance.uniform(0, GAUGE_S), self._gauge, self._replicas[name])

    # --- replicas -------------------------------------------------------------------------------

    def _generate(self, command_id: int, command: cmd.GenerateTrajectory) -> None:
        replica, trajectory_id = self._replicas[command.to], command.trajectory_id
        total = self._totals.get(trajectory_id)
        if total is None:
            total = self._totals[trajectory_id] = self.setup.lengths.draw_length(command.seed)
            self._issued[trajectory_id] = self.now
            self._untrained.add(trajectory_id)
        done = self._tokens.get(trajectory_id, 0)
        replica.batch.add(trajectory_id, 0, done, total, float(self.now))
        replica.placements[trajectory_id] = command.placement
        replica.as_of = command_id
        started = ev.TrajectoryStarted(
            trajectory_id=trajectory_id, placement=command.placement, tokens_resumed=done
        )
        self._at(self.now, self._say, command.to, started)
        self._changed[command.to] = None

    def _plan(self, replica: Replica) -> None:
        """Schedule the next change of the batch."""
        replica.batch.advance_to(float(self.now))
        self._report(replica)
        replica.plan += 1
        if replica.batch.next_ns < math.inf:
            self._at(math.ceil(replica.batch.next_ns), self._wake, replica, replica.plan)

    def _wake(self, replica: Replica, plan: int) -> None:
        if plan == replica.plan:
            self._plan(replica)

    def _report(self, replica: Replica) -> None:
        """Schedule the reports of finished sequences for the end of this instant."""
        for name in replica.batch.finished:
            trajectory_id = TrajectoryId(name)
            self._at(self.now, self._finished, replica, trajectory_id)
        replica.batch.finished.clear()

    def _finished(self, replica: Replica, trajectory_id: TrajectoryId) -> None:
        placement = replica.placements.pop(trajectory_id, None)
        if placement is None:
            return
        self.meter.latency(self.now - self._issued.pop(trajectory_id))
        finished = ev.TrajectoryFinished(
            trajectory_id=trajectory_id,
            placement=placement,
            num_tokens=self._totals[trajectory_id],
            finish_reason="stop",
        )
        self._say(replica.name, finished)

    def _take_out(self, replica: Replica, item: cmd.PlacedTrajectory) -> None:
        """Remove a trajectory from a replica and keep its tokens in the store."""
        trajectory_id = item.trajectory_id
        if replica.placements.get(trajectory_id, item.placement + 1) > item.placement:
            return
        if not replica.batch.has_sequence(trajectory_id):
            return  # it has finished, which will be reported
        self._tokens[trajectory_id] = replica.batch.count_tokens(trajectory_id)
        replica.batch.remove(trajectory_id, float(self.now))
        del replica.placements[trajectory_id]
        self._changed[replica.name] = None

    def _release(self, command_id: int, command: cmd.ReleaseTrajectories) -> None:
        replica = self._replicas[command.to]
        replica.batch.advance_to(float(self.now))
        self._report(replica)
        for item in command.items:
            self._take_out(replica, item)
        self.meter.add("released", 1)
        self.meter.add("moved", len(command.items))
        released = ev.TrajectoriesReleased(command_id=command_id)
        self._after(STORE_S, self._say, command.to, released)

    def _abort(self, command: cmd.AbortTrajectories) -> None:
        replica = self._replicas[command.to]
        replica.batch.advance_to(float(self.now))
        self._report(replica)
        for item in command.items:
            self._take_out(replica, item)

    def _gauge(self, replica: Replica) -> None:
        batch = replica.batch
        batch.advance_to(float(self.now))
        self._report(replica)
        tail = not batch.waiting and batch.running <= self.setup.max_batch
        names = [t for t in replica.placements if batch.has_sequence(t)] if tail else []
        gauge = ev.TokenProgress(
            tokens_total=batch.sampled,
            kv_used_tokens=batch.cached,
            running=batch.running,
            waiting=batch.waiting,
            max_batch=self.setup.max_batch,
            as_of=replica.as_of,
            lengths={name: batch.count_tokens(name) for name in names},
        )
        self._say(replica.name, gauge)
        self._after(GAUGE_S, self._gauge, replica)

    def _load(self, name: str) -> None:
        version = self.machine.state.versions.newest
        loaded = ev.WeightsLoaded(
            version=version,
            step=self._step_of[version],
            digest=f"d{version}",
            probe_diff=0.0,
            seconds=self.setup.load_s,
            reloaded=True,
        )
        self._say(name, loaded)

    # --- store and trainer ----------------------------------------------------------------------

    def _ended(self, command_id: int, command: cmd.EndTrajectories) -> None:
        rows = tuple(
            ev.EndedTrajectory(
                trajectory_id=ending.trajectory_id,
                num_tokens=self._totals.pop(ending.trajectory_id),
                tokens_lost=0,
            )
            for ending in command.endings
        )
        self._say(STORE, ev.TrajectoriesEnded(command_id=command_id, ended=rows))

    def _train(self, command: cmd.TrainStep) -> None:
        self.meter.train_begins(self.now)
        rows, step = command.trajectories, command.step_index
        known = self.machine.state.work.trajectories
        ages = [step - known[t].step for t in rows]
        totals = [self._totals[t] for t in rows]
        aged = sum(age * tokens for age, tokens in zip(ages, totals, strict=True))
        self.meter.chosen(ages, sum(totals), aged)
        self._after(self.setup.trains_for_s(step), self._trained, step, command.version, rows)

    def _trained(self, step: int, version: int, rows: tuple[TrajectoryId, ...]) -> None:
        self.completed += 1
        self.meter.trained(self.now, sum(self._totals[t] for t in rows))
        self._untrained.difference_update(rows)
        if self.completed == self.setup.warm_steps:
            self.meter.begin(self.now, self._batches())
        self._after(self.setup.publish_s, self._publish, version, step + 1)
        self._say(TRAINER, step_completed(step, version))

    def _publish(self, version: int, step: int) -> None:
        self._step_of[version] = step
        published = ev.WeightsPublished(
            version=version,
            step=step,
            digest=f"d{version}",
            num_bytes=4,
            held=tuple(sorted(self._step_of)[-2:]),
        )
        self._say(RELAY, published)

    # --- measuring ------------------------------------------------------------------------------

    def _batches(self) -> list[TimedBatch]:
        return [replica.batch for replica in self._replicas.values()]

    def _live(self) -> int:
        """Return the untrained tokens: in engines, migrating, or finished."""
        tokens = {t: self._totals[t] for t in self._untrained}
        tokens |= {t: self._tokens.get(t, 0) for t in self._issued}
        for replica in self._replicas.values():
            replica.batch.advance_to(float(self.now))
            for t in replica.placements:
                there = replica.batch.has_sequence(t)
                tokens[t] = replica.batch.count_tokens(t) if there else self._totals[t]
        return sum(tokens.values())

    def _sample(self) -> None:
        self.meter.sample(self.now, self._batches())
        self._changed |= dict.fromkeys(r.name for r in self._replicas.values() if r.batch.finished)
        self._after(SAMPLE_S, self._sample)


def _rewarded(item: cmd.PlacedTrajectory) -> ev.TrajectoryRewarded:
    return ev.TrajectoryRewarded(
        trajectory_id=item.trajectory_id,
        placement=item.placement,
        reward_bits=0,
        correct=False,
        reason="ok",
        num_tokens=0,
    )
