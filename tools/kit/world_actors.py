"""The actors of the test world: each command, and its effects a little later.

Reads   commands
Gives   Actors, the base of World
"""

from __future__ import annotations

from typing import Any

import msgspec

from laminar.core.machine import StateMachine
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Settings
from laminar.events.reasons import PullPurpose
from laminar.names import ids
from laminar.names.ids import TrajectoryId
from tools.kit.world_parts import (
    GAUGE_S,
    PROMPT_TOKENS,
    SILENCE_S,
    TURNS_MAX,
    Answer,
    Die,
    Finish,
    Gauge,
    Kill,
    Load,
    Lose,
    Process,
    Publish,
    Receive,
    Replace,
    Row,
    Save,
    Silence,
    Start,
    Wake,
)
from tools.kit.world_trainer import Trainers


class Actors(Trainers):
    """The store, trainer, relays, replicas and strategy; World adds the clock and `say`."""

    machine: StateMachine
    settings: Settings
    strategy: Process
    now: int
    seq: int
    capacity: int
    max_batch: int
    kv_capacity: int
    num_train: int
    num_eval: int

    def join(self, process: Process) -> None:
        joined = ev.ActorJoined(
            name=process.name,
            role=process.role,
            boot_id=process.boot_id,
            node=process.node,
            pid=1000 + process.boot,
            node_boot="" if process.role == "node" else self.processes[process.node].boot_id,
            start=0 if process.role == "node" else process.boot,
        )
        self.deliver(process.name, 0, 0, joined)

    def ready(self, process: Process) -> None:
        events: dict[str, Event] = {
            "store": ev.DataLoaded(
                num_train=self.num_train, num_eval=self.num_eval, overlap=0, digest="d"
            ),
            "relay": ev.RelayReady(address="here", chain_address=process.boot_id),
            "trainer": ev.TrainerReady(
                num_parameters=1, weights_bytes=4, checkpoints=self._checkpoints()
            ),
            "rollout": ev.ReplicaReady(max_num_seqs=self.capacity, kv_capacity_tokens=100),
            "agent": ev.AgentReady(),
        }
        if process.role in events:
            self.later(process, self.random.uniform(0, 1), events[process.role])

    def obey(self, command: Command, command_id: int) -> None:
        """Carry out a command if its process is alive."""
        process = self.processes.get(command.to, self.strategy)
        if process.alive:
            getattr(self, "_do_" + type(command).__name__)(process, command, command_id)

    def _do_AcceptActor(self, process: Process, command: cmd.AcceptActor, _: int) -> None:
        if command.boot_id == process.boot_id:
            process.incarnation = command.incarnation
            self.ready(process)
            for waiting in list(self.machine.state.orders.commands.values()):
                if waiting.command.to == process.name and waiting.command is not command:
                    self.obey(waiting.command, waiting.command_id)

    def _do_RefuseActor(self, process: Process, command: Command, _: int) -> None:
        process.alive = False

    def _do_StopActor(self, process: Process, command: Command, _: int) -> None:
        self.later(process, 0.1, ev.ActorLeft())

    def _do_RestartActor(self, node: Process, command: cmd.RestartActor, _: int) -> None:
        process = self.processes[command.actor]
        if process.boot_id != command.boot_id:
            return
        wait_s = SILENCE_S if node.silent else 0.0
        self.later(process, wait_s + self.random.uniform(0.1, 2.0), Kill())

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
        """Send this version to the successor a little later."""
        successor = self.processes.get(process.successor)
        evicted = version not in process.held
        if successor is None or evicted or self.random.random() < self.faults.deaf:
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
            trouble = ev.TransferProblem(
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

    def _do_PinVersion(self, process: Process, command: cmd.PinVersion, _: int) -> None:
        process.pinned, process.unfinished = command.version, command.unfinished

    def _do_PullWeights(self, process: Process, command: cmd.PullWeights, _: int) -> None:
        in_flight = command.purpose == PullPurpose.IN_FLIGHT
        assert in_flight or not process.work, "a replica pulls only when it is empty"
        assert all(t[0] != "e" for t in process.work), "an evaluation sample has one version"
        self.later(process, self.random.uniform(0.01, 0.2), Load(command))

    def _do_GenerateTrajectory(
        self, process: Process, command: cmd.GenerateTrajectory, command_id: int
    ) -> None:
        assert process.version == command.version, (process, command)
        assert len(process.work) < self.capacity, "over capacity"
        row = self._open(command)
        process.as_of = command_id
        self._gauge_soon(process)
        process.work[command.trajectory_id] = command.placement
        finish = Finish(command.trajectory_id, command.placement)
        if row.generated:  # by a replica that died before it reported it
            return self.later(process, 0.002, finish)
        started = ev.TrajectoryStarted(
            trajectory_id=command.trajectory_id,
            placement=command.placement,
            tokens_resumed=row.num_tokens,
            prompt_tokens=PROMPT_TOKENS,
        )
        self.later(process, 0.001, started)
        if self.random.random() < self.faults.hang:
            return
        seconds = self.random.expovariate(1.0)
        if self.random.random() < self.faults.slow_tail:
            seconds *= 10
        self.later(process, 0.002 + seconds, finish)

    def _do_StartSession(self, process: Process, command: cmd.StartSession, _: int) -> None:
        self._open(command)
        process.sessions[command.trajectory_id] = command.attempt
        seconds = self.random.choice([0.01, 0.3, 2.0])
        self.later(process, seconds, Answer(command.trajectory_id, command.placement))

    def _open(self, command: cmd.OpeningCommand) -> Row:
        """Open a placement: lower ones are fenced, and a new attempt discards the tokens."""
        row = self.rows.setdefault(command.trajectory_id, Row())
        assert not row.end and command.placement > row.placement, (row, command)
        row.placement = command.placement
        if command.attempt != row.attempt and command.purpose == "train":
            row.attempt, row.generated, row.version, row.turns = command.attempt, False, -1, 0
            row.tokens_lost, row.num_tokens = row.tokens_lost + row.num_tokens, 0
        if not row.generated:
            same = command.version == row.version
            may_rise = self.settings.in_flight and command.version > row.version
            assert not row.num_tokens or same or may_rise, (row, command)
        return row

    def _do_ScoreTrajectories(
        self, process: Process, command: cmd.ScoreTrajectories, _: int
    ) -> None:
        for item in command.items:
            if self._goes_on(process, item):
                continue
            if self.random.random() < self.faults.fail_sibling:
                event: Event = self._failed(item.trajectory_id, item.placement, "unscored")
            else:
                broken = self.faults.fail_reward
                failed = broken > 0 and self.random.random() < broken
                bits = self.random.choice([0, 4607182418800017408])
                event = ev.TrajectoryRewarded(
                    trajectory_id=item.trajectory_id,
                    placement=item.placement,
                    reward_bits=bits,
                    # Without a filter, which may use it as its metric, all are correct.
                    correct=(bits > 0 or not self.settings.filter_metric) and not failed,
                    reason="error" if failed else "ok",
                    num_tokens=self.rows[item.trajectory_id].num_tokens,
                    detail="KeyError: 'x' (reward.py:4)" if failed else "",
                )
            self.later(process, self.random.uniform(0, 0.1), event)

    def _goes_on(self, process: Process, item: cmd.PlacedTrajectory) -> bool:
        """Return whether an environment answers the turn later, or has lost its session."""
        row, name = self.rows[item.trajectory_id], item.trajectory_id
        if not self.settings.has_environment or row.end:
            return False
        if process.sessions.get(name) != row.attempt or self._dies_answering(process, name):
            if not self.faults.repeat_effects and row.turns:
                lost = self._failed(name, item.placement, "env-lost")
                self.later(process, 0.01, lost)
                return True
            process.sessions[name] = row.attempt
        said = not row.generated  # its report was lost
        if said or (row.turns < TURNS_MAX and self.random.random() < self.faults.turns):
            seconds = self.random.choice([0.01, 0.3, 8.0])
            self.later(process, seconds, Answer(name, item.placement))
            return True
        del process.sessions[name]
        return False

    def _dies_answering(self, process: Process, name: str) -> bool:
        dies = self.random.random() < self.faults.lost_answer
        if dies:
            process.sessions.pop(name, None)
        return dies

    def _answer(self, process: Process, item: Answer) -> None:
        """Record an answer; the store fences older placements, and keeps the first answer."""
        row = self.rows[item.trajectory_id]
        if row.placement != item.placement or row.end:
            return
        if row.generated:
            row.generated, row.turns = False, row.turns + 1
        requested = ev.TurnRequested(
            trajectory_id=TrajectoryId(item.trajectory_id), placement=item.placement, turn=row.turns
        )
        self.say(process, requested)

    def _failed(self, trajectory_id: str, placement: int, reason: str) -> ev.TrajectoryFailed:
        return ev.TrajectoryFailed(
            trajectory_id=TrajectoryId(trajectory_id), placement=placement, reason=reason, detail=""
        )

    def _do_AbortTrajectories(
        self, process: Process, command: cmd.AbortTrajectories, _: int
    ) -> None:
        for item in command.items:
            if process.work.get(item.trajectory_id, item.placement + 1) <= item.placement:
                del process.work[item.trajectory_id]
            process.sessions.pop(item.trajectory_id, None)

    def _do_ReleaseTrajectories(
        self, process: Process, command: cmd.ReleaseTrajectories, command_id: int
    ) -> None:
        self._do_AbortTrajectories(process, cmd.AbortTrajectories(to="", items=command.items), 0)
        slow = self.random.random() < self.faults.slow_release
        seconds = self.random.uniform(0.0, 5.0 if slow else 0.5)
        self.later(process, seconds, ev.TrajectoriesReleased(command_id=command_id))

    def _gauge_soon(self, process: Process) -> None:
        """Schedule a gauge, because the work has changed."""
        if self.settings.repack_policy and not process.gauge_due:
            process.gauge_due = True
            self.later(process, GAUGE_S, Gauge())

    def _tell_gauges(self, process: Process) -> None:
        """Report the gauges that repack plans by."""
        process.gauge_due = False
        lengths = {TrajectoryId(t): self.rows[t].num_tokens for t in process.work}
        gauge = ev.TokenProgress(
            tokens_total=process.sampled,
            kv_used_tokens=PROMPT_TOKENS * len(process.work) + sum(lengths.values()),
            running=len(process.work),
            waiting=0,
            kv_capacity_tokens=self.kv_capacity,
            max_batch=self.max_batch,
            as_of=process.as_of,
            lengths=lengths,
        )
        self.gauge(process, gauge)

    def _do_EndTrajectories(
        self, process: Process, command: cmd.EndTrajectories, command_id: int
    ) -> None:
        rows = []
        for ending in command.endings:
            row = self.rows.setdefault(ending.trajectory_id, Row())
            assert row.end in ("", ending.end), "ended twice"  # again, by another process
            row.end, row.placement = ending.end, ending.placement
            rows.append(
                ev.EndedTrajectory(
                    trajectory_id=ending.trajectory_id,
                    num_tokens=row.num_tokens,
                    tokens_lost=row.tokens_lost,
                )
            )
        ended = ev.TrajectoriesEnded(command_id=command_id, ended=tuple(rows))
        self.later(process, 0.01, ended)

    def _do_ProposeBatch(self, _: Process, command: cmd.ProposeBatch, __: int) -> None:
        groups = [c.group for c in command.candidates]
        self.random.shuffle(groups)
        answer = ev.BatchProposed(
            step_index=command.step_index, groups=tuple(groups[: command.count])
        )
        self.later(self.strategy, 0.01, answer)

    # --- scheduled things of the world ----------------------------------------------------------

    def _happen(self, process: Process, item: Any) -> None:
        if isinstance(item, Publish):
            self._publish(item)
        elif isinstance(item, Load):
            self._load(process, item.command)
        elif isinstance(item, Save):
            self._save(process, item)
        elif isinstance(item, Gauge):
            self._tell_gauges(process)
        elif isinstance(item, Finish):
            self._finish(process, item)
        elif isinstance(item, Answer):
            self._answer(process, item)
        elif isinstance(item, Kill):
            self._kill(process)
        elif isinstance(item, Die):
            self._die(process)
        elif isinstance(item, Lose):
            self._lose(process, item.how)
        elif isinstance(item, Start):
            self._start(self.processes[item.name])
        elif isinstance(item, Replace):
            self._replace_machine(process)
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
        row = self.rows[item.trajectory_id]
        if process.work.get(item.trajectory_id) != item.placement:
            return
        del process.work[item.trajectory_id]
        if item.placement < row.placement:
            return  # the store refused the last tokens: another replica has it now
        if self.random.random() < self.faults.refuse_sibling:
            return self.say(
                process, self._failed(item.trajectory_id, item.placement, "store-refused")
            )
        row.num_tokens, row.generated, row.version = 10 * (row.turns + 1), True, process.version
        process.sampled += 10
        self._gauge_soon(process)
        if self.random.random() < 0.1:
            progress = ev.TokenProgress(
                tokens_total=self.seq, kv_used_tokens=0, running=len(process.work), waiting=0
            )
            self.gauge(process, progress)
        finished = ev.TrajectoryFinished(
            trajectory_id=TrajectoryId(item.trajectory_id),
            placement=item.placement,
            num_tokens=row.num_tokens,
            finish_reason="stop",
        )
        self.say(process, finished)

    def _hold(self, process: Process, version: int, step: int, digest: str) -> None:
        process.held[version] = step, digest
        while len(process.held) > 2:
            evictable = [v for v in sorted(process.held)[:-1] if v != process.pinned]
            del process.held[min(evictable, key=lambda v: (v in process.unfinished, v))]

    def _load(self, process: Process, command: cmd.PullWeights) -> None:
        relay = self.processes[ids.actor_name("relay", process.node, 0)]
        held = sorted(relay.held)
        version = command.version if command.exact else max(held, default=-1)
        if command.checkpoint and self.random.random() < self.faults.damage_checkpoint:
            return self.say(process, ev.CheckpointRefused(version=version, reason="damaged"))
        if not command.checkpoint and (version not in held or version < command.version):
            return self.say(process, ev.VersionMissing(version=command.version, held=tuple(held)))
        if self.random.random() < self.faults.reject_weights:
            process.version = -1
            process.work.clear()  # tokens sampled since are discarded
            return self.say(process, ev.WeightsRejected(version=version, reason="probe"))
        assert not process.work or version >= process.version, (process, version)
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
