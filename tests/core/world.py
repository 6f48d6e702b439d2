"""A small world for the pure machine: actors with random timing and faults, in virtual time.

Reads   commands
Gives   events, to a Machine (or, in a subclass, to whatever stands in front of one)

It decides from events and commands only, never from the state (but for the next timer, which is the
coordinator's own), so what it finds wrong is wrong. After every event all invariants are checked.
Random choices come from `random.Random(seed)`, so a failing seed can be run again.
"""

from __future__ import annotations

import heapq
import random
from typing import Any

import msgspec

from laminar import ids
from laminar.core import invariants
from laminar.core.machine import LOGIC_VERSION, Machine
from laminar.core.state import ENDED, State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Settings, Stamped
from laminar.ids import TrajectoryId
from tests.core.world_parts import (
    LOSSES,
    SECOND,
    SILENCE_S,
    Die,
    Faults,
    Finish,
    Kill,
    Load,
    Lose,
    Process,
    Publish,
    Receive,
    Row,
    Silence,
    Start,
    Wake,
    rows_left_out,
)


class World:
    """Drive a Machine to the end of a run."""

    #: Commands reach all actors at once and in order. Without it (a wire that breaks, a coordinator
    #: that dies) one may come after another that was sent later to somebody else, or not at all.
    ordered = True

    def __init__(
        self,
        config: Settings,
        *,
        replicas: int = 2,
        nodes: int = 1,
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
        self.step_of: dict[int, int] = {}
        self.saved: list[int] = []  #: versions of which there are checkpoints
        self.rows: dict[str, Row] = {}  #: the store's book
        self.trained: list[str] = []  #: the trainer's book
        self._make_processes(nodes, replicas)

    def _make_processes(self, nodes: int, replicas: int) -> None:
        """One relay to a machine; the replicas are dealt out."""
        machines = [f"node-{i}" for i in range(nodes)]
        made = [Process(node, "node", node) for node in machines]
        made += [Process("store-0", "store")]
        made += [Process(ids.actor_name("relay", node, 0), "relay", node) for node in machines]
        made += [Process("trainer-0", "trainer")]
        for i in range(replicas):
            node = machines[i % nodes]
            name = ids.actor_name("rollout", node, i // nodes)
            made.append(Process(name, "rollout", node))
        self.processes = {process.name: process for process in made}

    @property
    def state(self) -> State:
        return self.machine.state

    # --- running ------------------------------------------------------------------------------

    def run(self, max_events: int = 200_000) -> World:
        self.begin()
        while self.state.phase != ENDED:
            assert self.seq < max_events, "the run does not end"
            self.step()
        return self

    def begin(self) -> None:
        self.say_own(self.started(1))
        for process in self.processes.values():
            self.join(process)
            self._schedule_faults(process)
        if self.faults.drain_at_s:
            drain = ev.DrainRequested(reason="SIGINT")
            self.later(self.strategy, self.faults.drain_at_s, drain)

    def started(self, incarnation: int) -> ev.CoordinatorStarted:
        return ev.CoordinatorStarted(
            incarnation=incarnation,
            logic=LOGIC_VERSION,
            settings=self.settings,
            clock_ns=0,
            config="",
        )

    def step(self) -> None:
        """The next thing happens: something in the world, or a timer."""
        timers = self.state.timers
        timer = min(timers, key=lambda name: timers[name], default=None)
        if self.queue and (timer is None or self.queue[0][0] <= timers[timer]):
            self.happen_next()
        else:
            assert timer is not None, ("nothing will ever happen", self.state)
            self.now = max(self.now, timers[timer])
            self.say_own(ev.TimerFired(timer=timer))

    def happen_next(self) -> None:
        self.now, _, process, item, boot = heapq.heappop(self.queue)
        if process.boot == boot and process.alive:
            if process.silent and not isinstance(item, Wake):
                process.waiting.append(item)
            else:
                self._happen(process, item)

    def later(self, process: Process, seconds: float, item: Any) -> None:
        self.order += 1
        when = self.now + int(seconds * SECOND)
        heapq.heappush(self.queue, (when, self.order, process, item, process.boot))

    def say(self, process: Process, event: Event) -> None:
        for _ in range(1 + (self.random.random() < self.faults.repeat_event)):
            process.peer_seq += 1
            self.deliver(process.name, process.incarnation, process.peer_seq, event)

    def say_own(self, event: Event) -> None:
        """An event of the coordinator itself."""
        self.deliver(COORDINATOR, 0, 0, event)

    def gauge(self, process: Process, event: Event) -> None:
        """An event that is neither numbered nor repeated."""
        self.deliver(process.name, process.incarnation, 0, event)

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
        invariants.check(self.state)
        for i, command in enumerate(commands):
            self.obey(command, (self.seq << 20) + i)
        return commands

    # --- what actors do -----------------------------------------------------------------------

    def join(self, process: Process) -> None:
        joined = ev.ActorJoined(
            name=process.name,
            role=process.role,
            boot_id=process.boot_id,
            node=process.node,
            pid=1000 + process.boot,
        )
        self.deliver(process.name, 0, 0, joined)

    def ready(self, process: Process) -> None:
        events: dict[str, Event] = {
            "store": ev.DataLoaded(
                num_train=self.num_train, num_eval=self.num_eval, overlap=0, digest="d"
            ),
            "relay": ev.RelayReady(address="here", bulk=process.boot_id),
            "trainer": ev.TrainerReady(num_parameters=1, weights_bytes=4),
            "rollout": ev.ReplicaReady(max_num_seqs=self.capacity, kv_capacity_tokens=100),
        }
        if process.role in events:
            self.later(process, self.random.uniform(0, 1), events[process.role])

    def obey(self, command: Command, command_id: int) -> None:
        """A command reaches its process, if that is there."""
        process = self.processes.get(command.to, self.strategy)
        if process.alive:
            getattr(self, "_do_" + type(command).__name__)(process, command, command_id)

    def _do_AcceptActor(self, process: Process, command: cmd.AcceptActor, _: int) -> None:
        if command.boot_id == process.boot_id:
            process.incarnation = command.incarnation
            self.ready(process)

    def _do_RefuseActor(self, process: Process, command: Command, _: int) -> None:
        process.alive = False

    def _do_StopActor(self, process: Process, command: Command, _: int) -> None:
        self.later(process, 0.1, ev.ActorLeft())

    def _do_RestartActor(self, node: Process, command: cmd.RestartActor, _: int) -> None:
        process = self.processes[command.actor]
        wait_s = SILENCE_S if node.silent else 0.0
        self.later(process, wait_s + self.random.uniform(0.1, 2.0), Kill())

    def _do_PublishWeights(self, process: Process, command: cmd.PublishWeights, _: int) -> None:
        self._publish(command.version, command.step)

    def _publish(self, version: int, step: int) -> None:
        """Into the relay of the trainer's machine, if it runs; what it had is lost with it."""
        self.step_of[version] = step
        event = ev.WeightsPublished(
            version=version, step=step, digest=f"d{step}", num_bytes=4, held=()
        )
        self.later(self.processes["relay-0"], self.random.uniform(0.01, 0.3), event)

    def _do_ForwardWeights(
        self, process: Process, command: cmd.ForwardWeights, command_id: int
    ) -> None:
        if self.random.random() < self.faults.deaf:
            return
        process.successor = command.successor
        linked = ev.RelayLinked(command_id=command_id, successor=command.successor)
        self.later(process, self.random.uniform(0.01, 0.2), linked)
        if process.held:
            self._feed(process, max(process.held), 0.2)

    def _feed(self, process: Process, version: int, least_s: float = 0.0) -> None:
        """Its successor gets this version a little later."""
        successor = self.processes.get(process.successor)
        if successor is None or self.random.random() < self.faults.deaf:
            return
        step, digest = process.held[version]
        if self.random.random() < self.faults.wrong_bytes:
            digest = "other bytes"
        seconds = least_s + self.random.choice([0.01, 0.1, 3.0])
        receive = Receive(version, step, digest, int(seconds * 1000))
        self.later(successor, seconds, receive)

    def _receive(self, process: Process, item: Receive) -> None:
        if item.version <= max(process.held, default=-1):
            return
        if self.random.random() < self.faults.damaged_chunk:
            trouble = ev.TransferTrouble(
                kind="damaged-chunk", relay="", version=item.version, detail=""
            )
            self.say(process, trouble)
        self._hold(process, item.version, item.step, item.digest)
        received = ev.WeightsReceived(
            version=item.version,
            step=item.step,
            digest=item.digest,
            kind="full",
            num_bytes=4,
            duration_ms=item.duration_ms,
            held=tuple(sorted(process.held)),
        )
        self.say(process, received)
        self._feed(process, item.version)

    def _do_TrainStep(self, process: Process, command: cmd.TrainStep, _: int) -> None:
        left_out = self._left_out(command)
        self.trained.extend(t for t in command.trajectories if t not in left_out)
        seconds = 0.3 + self.faults.train_s * self.random.uniform(0.5, 1.5)
        if self.random.random() < self.faults.skip_publish:
            skipped = ev.PublishSkipped(version=command.version, step=command.step + 1, reason="")
            self.later(process, seconds, skipped)
        else:
            ahead = self.random.uniform(0, 0.3)  # the copy is out before the trainer's book is
            self.later(process, seconds - ahead, Publish(command.version, command.step + 1))
        done = ev.StepCompleted(
            step=command.step,
            version=command.version,
            changed=True,
            reason="",
            num_tokens=1,
            digest="",
            metrics={},
            left_out=(rows_left_out(left_out),) if left_out else (),
        )
        self.later(process, seconds, done)
        if self.random.random() < self.faults.save:
            self._save(process, seconds + 0.2, command.version, command.step + 1)

    def _left_out(self, command: cmd.TrainStep) -> tuple[TrajectoryId, ...]:
        """Rows that the trainer does not train, from a generator of their own."""
        share, rows = self.faults.leave_out, command.trajectories
        draw = random.Random(f"left out {self.settings.seed} {command.step}").random
        return tuple(t for t in rows if draw() < share) if share else ()

    def _save(self, process: Process, seconds: float, version: int, step: int) -> None:
        """The last two checkpoints are kept."""
        self.saved = [*self.saved, version][-2:]
        saved = ev.CheckpointSaved(
            version=version, step=step, path=f"checkpoints/step_{step}", kept=tuple(self.saved)
        )
        self.later(process, seconds, saved)

    def _do_ExportModel(self, process: Process, command: cmd.ExportModel, _: int) -> None:
        self.later(process, 1.0, Publish(command.version, command.step))
        self.later(process, 1.0, ev.ModelExported(version=command.version, path="export"))

    def _do_PinVersion(self, process: Process, command: cmd.PinVersion, _: int) -> None:
        process.pinned = command.version

    def _do_PullWeights(self, process: Process, command: cmd.PullWeights, _: int) -> None:
        assert not (self.ordered and process.work), "a replica pulls only when it is empty"
        process.work.clear()  # what it was to stop, had the word of it not been lost
        self.later(process, self.random.uniform(0.01, 0.2), Load(command))

    def _do_GenerateTrajectory(
        self, process: Process, command: cmd.GenerateTrajectory, _: int
    ) -> None:
        assert process.version == command.version, (process, command)
        assert not self.ordered or len(process.work) < self.capacity, "over capacity"
        row = self._open(command)
        if row.placement != command.placement:
            return  # the store refused it: it has ended, or somebody else has it
        process.work[command.trajectory] = command.placement
        finish = Finish(command.trajectory, command.placement)
        if row.generated:  # by a replica that died before it could say so
            return self.later(process, 0.002, finish)
        started = ev.TrajectoryStarted(
            trajectory=command.trajectory,
            placement=command.placement,
            tokens_resumed=row.num_tokens,
        )
        self.later(process, 0.001, started)
        if self.random.random() < self.faults.hang:
            return
        seconds = self.random.expovariate(1.0)
        if self.random.random() < self.faults.slow_tail:
            seconds *= 10
        self.later(process, 0.002 + seconds, finish)

    def _open(self, command: cmd.GenerateTrajectory) -> Row:
        """The store fences lower placements; a new attempt throws the tokens away."""
        row = self.rows.setdefault(command.trajectory, Row())
        fenced = bool(row.end) or command.placement <= row.placement
        assert not (fenced and self.ordered), (row, command)
        if fenced:
            return row
        row.placement = command.placement
        if command.attempt != row.attempt and command.purpose == "train":
            row.attempt, row.generated = command.attempt, False
            row.tokens_lost, row.num_tokens = row.tokens_lost + row.num_tokens, 0
        return row

    def _do_ScoreTrajectories(
        self, process: Process, command: cmd.ScoreTrajectories, _: int
    ) -> None:
        for item in command.items:
            if self.random.random() < self.faults.fail_sibling:
                event: Event = self._failed(item.trajectory, item.placement, "unscored")
            else:
                broken = self.faults.fail_reward
                failed = broken > 0 and self.random.random() < broken
                event = ev.TrajectoryRewarded(
                    trajectory=item.trajectory,
                    placement=item.placement,
                    score_bits=self.random.choice([0, 4607182418800017408]),
                    correct=not failed,
                    reason="error" if failed else "ok",
                    num_tokens=self.rows[item.trajectory].num_tokens,
                    detail="KeyError: 'x' (reward.py:4)" if failed else "",
                )
            self.later(process, self.random.uniform(0, 0.1), event)

    def _failed(self, trajectory: str, placement: int, reason: str) -> ev.TrajectoryFailed:
        return ev.TrajectoryFailed(
            trajectory=TrajectoryId(trajectory), placement=placement, reason=reason, detail=""
        )

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
            row = self.rows.setdefault(ending.trajectory, Row())
            assert not row.end, "ended twice"
            row.end, row.placement = ending.end, ending.placement
            rows.append(
                ev.EndedTrajectory(
                    trajectory=ending.trajectory,
                    num_tokens=row.num_tokens,
                    tokens_lost=row.tokens_lost,
                )
            )
        ended = ev.TrajectoriesEnded(command_id=command_id, ended=tuple(rows))
        self.later(process, 0.01, ended)

    def _do_ProposeBatch(self, _: Process, command: cmd.ProposeBatch, __: int) -> None:
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
        elif isinstance(item, Kill):
            self._kill(process)
        elif isinstance(item, Die):
            self._die(process)
        elif isinstance(item, Lose):
            self._lose(process, item.how)
        elif isinstance(item, Start):
            self._start(self.processes[item.name])
        elif isinstance(item, Silence):
            self._pause_node(process)
        elif isinstance(item, Wake):
            self._wake_node(process)
        elif isinstance(item, ev.WeightsPublished):
            self._hold(process, item.version, item.step, item.digest)
            self.say(process, msgspec.structs.replace(item, held=tuple(sorted(process.held))))
            self._feed(process, item.version)
        elif isinstance(item, Receive):
            self._receive(process, item)
        elif process is self.strategy:
            self.say_own(item)
        else:
            self.say(process, item)
            if isinstance(item, ev.ActorLeft):
                process.alive = False

    def _finish(self, process: Process, item: Finish) -> None:
        row = self.rows[item.trajectory]
        if process.work.get(item.trajectory) != item.placement:
            return
        del process.work[item.trajectory]
        if item.placement < row.placement:
            return  # the store refused the last tokens: somebody else has it now
        if self.random.random() < self.faults.refuse_sibling:
            return self.say(process, self._failed(item.trajectory, item.placement, "bad-logprobs"))
        row.num_tokens, row.generated = 10, True
        if self.random.random() < 0.1:
            progress = ev.TokenProgress(
                tokens_total=self.seq, kv_used_tokens=0, running=len(process.work), waiting=0
            )
            self.gauge(process, progress)
        finished = ev.TrajectoryFinished(
            trajectory=TrajectoryId(item.trajectory),
            placement=item.placement,
            num_tokens=row.num_tokens,
            finish_reason="stop",
        )
        self.say(process, finished)

    def _hold(self, process: Process, version: int, step: int, digest: str) -> None:
        process.held[version] = step, digest
        while len(process.held) > 2:
            evictable = [v for v in sorted(process.held)[:-1] if v != process.pinned]
            del process.held[evictable[0]]

    def _load(self, process: Process, command: cmd.PullWeights) -> None:
        relay = self.processes[ids.actor_name("relay", process.node, 0)]
        held = sorted(relay.held)
        version = command.version if command.exact else max(held, default=-1)
        if command.checkpoint and self.random.random() < self.faults.damage_checkpoint:
            return self.say(process, ev.CheckpointRefused(version=version, reason="damaged"))
        if not command.checkpoint and (version not in held or version < command.version):
            return self.say(process, ev.VersionGone(version=command.version, held=tuple(held)))
        if self.random.random() < self.faults.reject_weights:
            process.version = -1
            return self.say(process, ev.WeightsRejected(version=version, reason="probe"))
        process.version = version
        self.say(
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

    # --- faults ---------------------------------------------------------------------------------

    def _schedule_faults(self, process: Process) -> None:
        if process.role == self.faults.fatal_role:
            self.later(process, self.faults.fatal_at_s, Die())
        if process.role == "rollout" and self.faults.lose_every_s:
            seconds = self.random.expovariate(1 / self.faults.lose_every_s)
            self.later(process, seconds, Lose(self.random.choice(LOSSES)))
        if process.role == "relay" and self.faults.lose_relay_every_s:
            seconds = self.random.expovariate(1 / self.faults.lose_relay_every_s)
            self.later(process, seconds, Lose(self.random.choice(LOSSES)))
        last = list(self.processes.values())[-1].node
        if process.node == last != "node-0" and self.faults.lose_machine_at_s and not process.boot:
            self.later(process, self.faults.lose_machine_at_s, Die())
        if process.name == last != "node-0" and self.faults.silent_node_at_s:
            self.later(process, self.faults.silent_node_at_s, Silence())

    def _pause_node(self, node: Process) -> None:
        """Its lease is over, and its actors speak; it tells and starts nothing meanwhile."""
        node.silent = True
        incarnation = node.incarnation
        self.say_own(ev.NodeSilent(node=node.name, node_incarnation=incarnation, silent_ms=9_000))
        self.later(node, SILENCE_S, Wake())

    def _wake_node(self, node: Process) -> None:
        node.silent = False
        self.say_own(ev.NodeHeard(node=node.name, node_incarnation=node.incarnation))
        waiting, node.waiting = node.waiting, []
        for item in waiting:
            self.later(node, 0, item)

    def _lose(self, process: Process, how: str) -> None:
        if how == "dies":
            self._kill(process)
        elif how == "falls silent":
            self._fall_silent(process)
        elif how == "is replaced":
            self._replace(process)
        elif how == "complains":
            self.say(process, ev.ActorFailed(reason="out of memory", user_error=False))
            self.later(process, 0.05, Kill())
        else:
            self.say(process, ev.ActorLeft())
            self._kill(process)

    def _kill(self, process: Process) -> None:
        """The process dies; its node tells, and starts it again a little later."""
        if process.alive:
            dead = self._end_process(process)
            self._exited(process, dead, restarting=True)
            node = self.processes[process.node]
            self.later(node, self.random.uniform(0.1, self.faults.restart_s), Start(process.name))

    def _replace(self, process: Process) -> None:
        """A new process joins before anybody has heard that the old one died."""
        dead = self._end_process(process)
        self._start(process)
        self._exited(process, dead, restarting=True)

    def _end_process(self, process: Process) -> str:
        """What it had sampled and flushed stays in the store; returns the dead boot id."""
        dead = process.boot_id
        for trajectory, placement in process.work.items():
            row = self.rows[trajectory]
            if not row.generated and row.placement == placement:
                row.num_tokens = self.random.randint(row.num_tokens, 9)
        process.boot += 1
        process.alive, process.version, process.peer_seq = False, -1, 0
        process.work.clear()
        process.held.clear()
        process.pinned, process.successor = -1, ""
        return dead

    def _exited(self, process: Process, dead: str, *, restarting: bool) -> None:
        exited = ev.ProcessExited(actor=process.name, boot_id=dead, code=-9, restarting=restarting)
        node = self.processes[process.node]
        if node.silent:
            node.waiting.append(exited)
        else:
            self.say(node, exited)

    def _die(self, process: Process) -> None:
        """Its node tells and starts nothing; of a node itself nothing is heard any more."""
        process.alive = False
        if process.role == "node":
            self._fall_silent(process)
        else:
            self._exited(process, process.boot_id, restarting=False)

    def _fall_silent(self, process: Process) -> None:
        """Nothing of it arrives any more; it works on until its node has killed it."""
        lost = ev.HeartbeatLost(
            actor=process.name, actor_incarnation=process.incarnation, silent_ms=3_000
        )
        self.say_own(lost)

    def _start(self, process: Process) -> None:
        process.alive = True
        self.join(process)
        self._schedule_faults(process)
