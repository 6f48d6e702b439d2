"""A small world for the pure machine: actors with random timing and faults, in virtual time.

It knows only events and commands (never the state), so what it finds wrong is wrong. After every
event all invariants are checked.
Random choices come from `random.Random(seed)`, so a failing seed can be run again.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from laminar.core import invariants
from laminar.core.machine import LOGIC_VERSION, Machine
from laminar.core.state import ENDED
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Settings, Stamped
from laminar.ids import TrajectoryId

SECOND = 1_000_000_000


def settings(**changes: Any) -> Settings:
    """Small defaults; a test names what matters to it."""
    values: dict[str, Any] = {
        "seed": 0,
        "groups_per_step": 4,
        "group_size": 4,
        "min_scored": 2,
        "max_staleness": 2,
        "groups_per_version": 2,
        "total_steps": 6,
        "total_epochs": 1,
        "shuffle": True,
        "drop_last": False,
        "test_freq": 0,
        "val_before_train": True,
        "batch_strategy": "deadline",
        "reward_scope": "trajectory",
        "resume_wait_ms": 3_000,
        "batch_wait_ms": 60_000,
        "start_timeout_ms": 60_000,
        "stall_ms": 600_000,
    }
    return Settings(**(values | changes))


@dataclass
class Faults:
    """Probabilities per opportunity, and mean virtual seconds."""

    kill_every_s: float = 0.0  #: mean time between deaths of one replica, 0: never
    skip_publish: float = 0.0
    fail_sibling: float = 0.0
    reject_weights: float = 0.0
    repeat_event: float = 0.0  #: an event arrives twice
    slow_tail: float = 0.1  #: share of trajectories that take ten times as long
    hang: float = 0.0  #: share of trajectories that never finish by themselves
    restart_s: float = 2.0
    train_s: float = 1.0


@dataclass
class Process:
    name: str
    role: str
    incarnation: int = 0
    boot: int = 0
    alive: bool = True
    peer_seq: int = 0
    version: int = -1
    work: dict[str, int] = field(default_factory=dict)


class World:
    """Drive a Machine to the end of a run."""

    def __init__(
        self,
        config: Settings,
        *,
        replicas: int = 2,
        capacity: int = 8,
        num_train: int = 40,
        num_eval: int = 0,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        self.settings, self.faults = config, faults or Faults()
        self.random = random.Random(seed)
        self.machine = Machine()
        self.capacity, self.num_train, self.num_eval = capacity, num_train, num_eval
        self.now = 0
        self.seq = 0
        self.queue: list[tuple[int, int, Process, Any, int]] = []
        self.order = 0
        self.log: list[tuple[Stamped, list[Command]]] = []
        self.processes: dict[str, Process] = {}
        self.strategy = Process(COORDINATOR, COORDINATOR)
        self.held: list[int] = []
        self.pinned = -1
        self.step_of: dict[int, int] = {}
        self.tokens: dict[str, int] = {}  #: the store's book: sampled tokens by trajectory
        self.ended: dict[str, str] = {}
        self.trained: list[str] = []  #: the trainer's book
        roles = [("node", 1), ("store", 1), ("relay", 1), ("trainer", 1), ("rollout", replicas)]
        for role, count in roles:
            for i in range(count):
                self.processes[f"{role}-{i}"] = Process(f"{role}-{i}", role)

    # --- running ------------------------------------------------------------------------------

    def run(self, max_events: int = 200_000) -> World:
        started = ev.CoordinatorStarted(
            incarnation=1, logic=LOGIC_VERSION, settings=self.settings, config=""
        )
        self.deliver(COORDINATOR, 0, 0, started)
        for process in self.processes.values():
            self._join(process)
            if process.role == "rollout" and self.faults.kill_every_s:
                self._schedule_kill(process)
        while self.machine.state.phase != ENDED:
            assert self.seq < max_events, "the run does not end"
            self._next()
        return self

    def _next(self) -> None:
        timers = self.machine.state.timers
        timer = min(timers, key=lambda name: timers[name], default=None)
        if self.queue and (timer is None or self.queue[0][0] <= timers[timer]):
            self.now, _, process, item, boot = heapq.heappop(self.queue)
            if process.boot == boot and isinstance(item, Kill):
                self._kill(process)
            elif process.boot == boot and process.alive:
                self._happen(process, item)
        else:
            assert timer is not None, ("nothing will ever happen", self.machine.state)
            self.now = max(self.now, timers[timer])
            self.deliver(COORDINATOR, 0, 0, ev.TimerFired(timer=timer))

    def later(self, process: Process, seconds: float, item: Any) -> None:
        self.order += 1
        when = self.now + int(seconds * SECOND)
        heapq.heappush(self.queue, (when, self.order, process, item, process.boot))

    def _say(self, process: Process, event: Event) -> None:
        for _ in range(1 + (self.random.random() < self.faults.repeat_event)):
            process.peer_seq += 1
            self.deliver(process.name, process.incarnation, process.peer_seq, event)

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        self.seq += 1
        stamped = Stamped(
            seq=self.seq,
            time_ns=self.now,
            peer=peer,
            incarnation=incarnation,
            peer_seq=peer_seq,
            event=event,
        )
        commands = self.machine.handle(stamped)
        self.log.append((stamped, commands))
        invariants.check(self.machine.state)
        for i, command in enumerate(commands):
            self._obey(command, (self.seq << 20) + i)
        return commands

    # --- what actors do -----------------------------------------------------------------------

    def _join(self, process: Process) -> None:
        joined = ev.ActorJoined(
            name=process.name,
            role=process.role,
            boot_id=f"{process.name}/{process.boot}",
            node="node-0",
            pid=1000 + process.boot,
        )
        self.deliver(process.name, 0, 0, joined)

    def _ready(self, process: Process) -> None:
        events: dict[str, Event] = {
            "store": ev.DataLoaded(
                num_train=self.num_train, num_eval=self.num_eval, overlap=0, digest="d"
            ),
            "relay": ev.RelayReady(address="here"),
            "trainer": ev.TrainerReady(num_parameters=1, weights_bytes=4),
            "rollout": ev.ReplicaReady(max_num_seqs=self.capacity, kv_capacity_tokens=100),
        }
        if process.role in events:
            self.later(process, self.random.uniform(0, 1), events[process.role])

    def _obey(self, command: Command, command_id: int) -> None:
        name = "_do_" + type(command).__name__
        process = self.processes.get(command.to)
        if process is None or process.alive or command.to == "strategy":
            getattr(self, name)(process, command, command_id)

    def _do_AcceptActor(self, process: Process, command: cmd.AcceptActor, _: int) -> None:
        if command.boot_id == f"{process.name}/{process.boot}":
            process.incarnation = command.incarnation
            self._ready(process)

    def _do_RefuseActor(self, process: Process, command: Command, _: int) -> None:
        process.alive = False

    def _do_StopActor(self, process: Process, command: Command, _: int) -> None:
        self.later(process, 0.1, ev.ActorLeft())

    def _do_RestartActor(self, node: Process, command: cmd.RestartActor, _: int) -> None:
        self._kill(self.processes[command.actor])

    def _do_PublishWeights(self, process: Process, command: cmd.PublishWeights, _: int) -> None:
        self._publish(command.version, command.step)

    def _publish(self, version: int, step: int) -> None:
        self.step_of[version] = step
        event = ev.WeightsPublished(
            version=version, step=step, digest=f"d{version}", num_bytes=4, held=()
        )
        self.later(self.processes["relay-0"], self.random.uniform(0.01, 0.3), event)

    def _do_TrainStep(self, process: Process, command: cmd.TrainStep, _: int) -> None:
        self.trained.extend(command.trajectories)
        seconds = self.faults.train_s * self.random.uniform(0.5, 1.5)
        if self.random.random() < self.faults.skip_publish:
            skipped = ev.PublishSkipped(version=command.version, step=command.step + 1, reason="")
            self.later(process, seconds, skipped)
        else:
            self.later(process, seconds, Publish(command.version, command.step + 1))
        done = ev.StepCompleted(
            step=command.step,
            version=command.version,
            changed=True,
            reason="",
            num_tokens=1,
            digest="",
            metrics={},
        )
        self.later(process, seconds, done)

    def _do_ExportModel(self, process: Process, command: cmd.ExportModel, _: int) -> None:
        self.later(process, 1.0, Publish(command.version, command.step))
        self.later(process, 1.0, ev.ModelExported(version=command.version, path="export"))

    def _do_PinVersion(self, process: Process, command: cmd.PinVersion, _: int) -> None:
        self.pinned = command.version

    def _do_PullWeights(self, process: Process, command: cmd.PullWeights, _: int) -> None:
        assert not process.work, "a replica pulls only when it is empty"
        self.later(process, self.random.uniform(0.01, 0.2), Load(command))

    def _do_GenerateTrajectory(
        self, process: Process, command: cmd.GenerateTrajectory, _: int
    ) -> None:
        assert process.version == command.version, (process, command)
        assert len(process.work) < self.capacity, "over capacity"
        assert command.trajectory not in self.ended
        process.work[command.trajectory] = command.placement
        started = ev.TrajectoryStarted(
            trajectory=command.trajectory,
            placement=command.placement,
            tokens_resumed=0,
            tokens_lost=self.tokens.get(command.trajectory, 0) if command.attempt > 1 else 0,
        )
        self.later(process, 0.001, started)
        if self.random.random() < self.faults.hang:
            return
        seconds = self.random.expovariate(1.0)
        if self.random.random() < self.faults.slow_tail:
            seconds *= 10
        self.later(process, 0.002 + seconds, Finish(command.trajectory, command.placement))

    def _do_ScoreTrajectories(
        self, process: Process, command: cmd.ScoreTrajectories, _: int
    ) -> None:
        for item in command.items:
            if self.random.random() < self.faults.fail_sibling:
                event: Event = ev.TrajectoryFailed(
                    trajectory=item.trajectory,
                    placement=item.placement,
                    reason="reward-worker-lost",
                    detail="",
                )
            else:
                event = ev.TrajectoryRewarded(
                    trajectory=item.trajectory,
                    placement=item.placement,
                    score_bits=self.random.choice([0, 4607182418800017408]),
                    correct=True,
                    reason="ok",
                    num_tokens=self.tokens[item.trajectory],
                )
            self.later(process, self.random.uniform(0, 0.1), event)

    def _do_AbortTrajectories(
        self, process: Process, command: cmd.AbortTrajectories, _: int
    ) -> None:
        for item in command.items:
            if process.work.get(item.trajectory, item.placement + 1) <= item.placement:
                del process.work[item.trajectory]

    def _do_EndTrajectories(
        self, process: Process, command: cmd.EndTrajectories, command_id: int
    ) -> None:
        rows = []
        for ending in command.endings:
            assert ending.trajectory not in self.ended, "ended twice"
            self.ended[ending.trajectory] = ending.end
            tokens = self.tokens.get(ending.trajectory, 0)
            rows.append(ev.EndedTrajectory(trajectory=ending.trajectory, num_tokens=tokens))
        ended = ev.TrajectoriesEnded(command_id=command_id, ended=tuple(rows))
        self.later(process, 0.01, ended)

    def _do_ProposeBatch(self, _: None, command: cmd.ProposeBatch, __: int) -> None:
        groups = [c.group for c in command.candidates]
        self.random.shuffle(groups)
        answer = ev.BatchProposed(step=command.step, groups=tuple(groups[: command.count]))
        self.later(self.strategy, 0.01, answer)

    # --- what happens in the world when its time comes ------------------------------------------

    def _happen(self, process: Process, item: Any) -> None:
        if isinstance(item, Publish):
            self._publish(item.version, item.step)
        elif isinstance(item, Load):
            self._load(process, item.command)
        elif isinstance(item, Finish):
            self._finish(process, item)
        elif isinstance(item, Start):
            self._start(self.processes[item.name])
        elif isinstance(item, ev.WeightsPublished):
            self._hold(item.version)
            self._say(process, msgspec.structs.replace(item, held=tuple(self.held)))
        else:
            self._say(process, item)
            if isinstance(item, ev.ActorLeft):
                process.alive = False

    def _finish(self, process: Process, item: Finish) -> None:
        if process.work.get(item.trajectory) != item.placement:
            return
        del process.work[item.trajectory]
        self.tokens[item.trajectory] = 10
        finished = ev.TrajectoryFinished(
            trajectory=TrajectoryId(item.trajectory),
            placement=item.placement,
            num_tokens=10,
            finish_reason="stop",
        )
        self._say(process, finished)

    def _hold(self, version: int) -> None:
        self.held = sorted({*self.held, version})
        while len(self.held) > 2:
            evictable = [v for v in self.held[:-1] if v != self.pinned]
            self.held.remove(evictable[0])

    def _load(self, process: Process, command: cmd.PullWeights) -> None:
        if command.exact and command.version not in self.held:
            return self._say(
                process, ev.VersionGone(version=command.version, held=tuple(self.held))
            )
        version = command.version if command.exact else self.held[-1]
        if self.random.random() < self.faults.reject_weights:
            process.version = -1
            return self._say(process, ev.WeightsRejected(version=version, reason="probe"))
        process.version = version
        self._say(
            process,
            ev.WeightsLoaded(
                version=version,
                step=self.step_of[version],
                digest="d",
                probe_diff=0.0,
                seconds=0.1,
                reloaded=True,
            ),
        )

    def _schedule_kill(self, process: Process) -> None:
        delay = self.random.expovariate(1 / self.faults.kill_every_s)
        self.later(process, delay, Kill())

    def _kill(self, process: Process) -> None:
        """The process dies; its node tells, and starts it again a little later."""
        if not process.alive:
            return
        node = self.processes["node-0"]
        dead = f"{process.name}/{process.boot}"
        process.boot += 1
        process.alive, process.version, process.peer_seq = False, -1, 0
        process.work.clear()
        self._say(
            node, ev.ProcessExited(actor=process.name, boot_id=dead, code=-9, restarting=True)
        )
        self.later(node, self.random.uniform(0.1, self.faults.restart_s), Start(process.name))

    def _start(self, process: Process) -> None:
        process.alive = True
        self._join(process)
        if self.faults.kill_every_s:
            self._schedule_kill(process)


@dataclass(frozen=True)
class Kill:
    """The process dies."""


@dataclass(frozen=True)
class Start:
    """A node has started the process again."""

    name: str


@dataclass(frozen=True)
class Publish:
    """The trainer has handed its weights to the relay."""

    version: int
    step: int


@dataclass(frozen=True)
class Load:
    """A replica maps the relay's slot."""

    command: cmd.PullWeights


@dataclass(frozen=True)
class Finish:
    """The last token is sampled, if the trajectory still runs there."""

    trajectory: str
    placement: int
