"""A state machine driven by hand: a test states events and inspects the decisions.

Reads   events that a test states, in virtual milliseconds
Gives   the commands of each; all invariants are checked after every event

Unlike the random world, it never answers by itself: a test tells one story, step by step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from laminar.core import invariants
from laminar.core.machine import StateMachine
from laminar.core.state.keys import OutstandingCommand
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.state.work import Group, Trajectory
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.names import ids
from laminar.names.ids import GroupId, TrajectoryId
from tools.kit.world_parts import coordinator_started, settings, step_completed

C = TypeVar("C", bound=Command)
MS = 1_000_000  #: nanoseconds


def only(kind: type[C], commands: Iterable[Command]) -> list[C]:
    """Return the commands of one kind, in order."""
    return [c for c in commands if isinstance(c, kind)]


def bits_of(score: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", score))[0])


def machine_of(name: str) -> str:
    """Return the machine of a process: "rollout-3.0" and "relay-3" run on node-3."""
    role, _, number = name.rpartition("-")
    machine, dot, _ = number.partition(".")
    return f"node-{machine}" if dot or role in ("node", "relay") else "node-0"


class Bench:
    """A run under test; `start` brings it to where every replica serves version 0.

    `replicas` is their number on each of the machines."""

    checked = True  #: check all invariants after every event; too slow for a large cluster
    numbered = True  #: number the events as a link does; off where real links send as well

    def __init__(
        self,
        *,
        replicas: int = 1,
        nodes: int = 1,
        capacity: int = 8,
        num_train: int = 40,
        num_eval: int = 0,
        origin: ev.ForkOrigin | None = None,
        **changes: Any,
    ) -> None:
        self.machine, self.origin = StateMachine(), origin
        self.now_ms = 0
        self.capacity, self.num_train, self.num_eval = capacity, num_train, num_eval
        self.nodes = [f"node-{i}" for i in range(nodes)]
        self.names = [
            str(ids.actor_name("rollout", n, i)) for n in self.nodes for i in range(replicas)
        ]
        self.relays = [str(ids.actor_name("relay", node, 0)) for node in self.nodes]
        self.commands: list[Command] = []  #: all commands so far
        self.step_of: dict[int, int] = {}  #: step by published version
        defaults: dict[str, Any] = {
            "groups_per_step": 2,
            "group_size": 2,
            "val_before_train": False,
        }
        self.settings = settings(**(defaults | changes))
        has_sessions = self.settings.has_environment
        self.hosts = [str(ids.actor_name("agent", n, 0)) for n in self.nodes if has_sessions]
        self.own(self.started())

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def seq(self) -> int:
        """Sequence number of the last event."""
        return self.state.seq if self.machine.started else 0

    # --- saying things ------------------------------------------------------------------------

    def hear(self, peer: str, incarnation: int, event: Event) -> list[Command]:
        seq = self.seq + 1
        stamped = Stamped(
            seq=seq,
            time_ns=self.now_ms * MS,
            peer=peer,
            incarnation=incarnation,
            peer_seq=seq if self.numbered else 0,
            event=event,
        )
        commands = self.machine.handle_event(stamped)
        if self.checked:
            invariants.check_invariants(self.state)
        self.commands.extend(commands)
        return commands

    def own(self, event: Event) -> list[Command]:
        """Report an event of the coordinator."""
        return self.hear(COORDINATOR, 0, event)

    def say(self, name: str, event: Event) -> list[Command]:
        """Report an event of the current process of that name."""
        return self.hear(name, self.state.members.actors[name].incarnation, event)

    def wait(self, ms: int) -> list[Command]:
        """Let time pass; every timer that falls due fires at its time."""
        end = self.now_ms + ms
        commands: list[Command] = []
        while True:
            timers = self.state.orders.timers
            name = min(timers, key=lambda n: timers[n], default="")
            if not name or timers[name] > end * MS:
                self.now_ms = end
                return commands
            self.now_ms = max(self.now_ms, timers[name] // MS)
            commands += self.own(ev.TimerFired(timer=name))

    # --- starting -----------------------------------------------------------------------------

    def started(self, incarnation: int = 1) -> ev.CoordinatorStarted:
        started = coordinator_started(self.settings, incarnation)
        return msgspec.structs.replace(started, origin=self.origin)

    def joining(self, name: str, boot: str = "a", node_boot: str = "") -> ev.ActorJoined:
        return ev.ActorJoined(
            name=name,
            role=name.rpartition("-")[0],
            boot_id=f"{name}/{boot}",
            node=machine_of(name),
            pid=1,
            node_boot=node_boot,
        )

    def join(self, name: str, boot: str = "a", node_boot: str = "") -> list[Command]:
        return self.hear(name, 0, self.joining(name, boot, node_boot))

    def ready(self, name: str) -> list[Command]:
        events: dict[str, Event] = {
            "store": ev.DataLoaded(
                num_train=self.num_train, num_eval=self.num_eval, overlap=0, digest="d"
            ),
            "relay": ev.RelayReady(address="here", chain_address=f"{name}:1"),
            "trainer": self.trainer_ready(),
            "rollout": ev.ReplicaReady(max_num_seqs=self.capacity, kv_capacity_tokens=100),
            "agent": ev.AgentReady(),
        }
        return self.say(name, events[name.rpartition("-")[0]])

    def trainer_ready(self, *checkpoints: ev.Checkpoint) -> ev.TrainerReady:
        """Return the ready event with these checkpoints, and before them the origin of a fork."""
        if (o := self.origin) is not None:
            first = ev.Checkpoint(version=o.version, step=o.step, path="origin", digest=o.digest)
            checkpoints = (first, *checkpoints)
        return ev.TrainerReady(num_parameters=1, weights_bytes=4, checkpoints=checkpoints)

    def start(self) -> list[Command]:
        """Start all processes, publish and load the first version, and return the last commands."""
        actors = ("store-0", *self.relays, "trainer-0", *self.names, *self.hosts)
        for name in (*self.nodes, *actors):
            self.join(name)
        for name in actors:
            self.ready(name)
        self.link_all()
        version, step = self.state.data.first_version, self.state.data.first_step
        if self.origin is not None:
            self.say("trainer-0", ev.CheckpointLoaded(version=version, step=step))
        self.publish(version, step)
        for name in self.state.members.relay_chain[1:]:
            self.receive(name, version)
        return self.load_all()

    # --- weights ------------------------------------------------------------------------------

    def publish(self, version: int, step: int, held: tuple[int, ...] = ()) -> list[Command]:
        """Publish a version; the relay keeps the one before it unless `held` says otherwise."""
        return self.say("relay-0", self.published(version, step, held))

    def published(self, version: int, step: int, held: tuple[int, ...] = ()) -> Event:
        self.step_of[version] = step
        held = held or tuple(v for v in (version - 1, version) if v >= 0)
        return ev.WeightsPublished(
            version=version, step=step, digest=f"d{step}", num_bytes=4, held=held
        )

    def receive(self, name: str, version: int, **changes: Any) -> list[Command]:
        """Report that a relay has received a version from its predecessor."""
        return self.say(name, msgspec.structs.replace(self.received(version), **changes))

    def received(self, version: int) -> ev.WeightsReceived:
        return ev.WeightsReceived(
            version=version,
            step=self.step_of.get(version, version),
            digest=f"d{self.step_of.get(version, version)}",
            kind="full",
            num_bytes=1_000_000,
            duration_ms=1_000,
            held=tuple(v for v in (version - 1, version) if v >= 0),
        )

    def link(self, name: str) -> list[Command]:
        """Report that the relay feeds its successor."""
        outstanding = self.state.orders.commands[f"forward:{name}"]
        assert isinstance(outstanding.command, cmd.ForwardWeights)
        successor = outstanding.command.successor
        linked = ev.RelayLinked(command_id=outstanding.command_id, successor=successor)
        return self.say(name, linked)

    def link_all(self) -> None:
        for name in list(self.state.members.relays):
            if f"forward:{name}" in self.state.orders.commands:
                self.link(name)

    def load(self, name: str) -> list[Command]:
        """Finish the pull that the replica was ordered to make."""
        pull = self.pull_of(name)
        assert pull is not None, f"{name} pulls nothing"
        version = pull.version if pull.exact else self.state.members.newest_for(self.replica(name))
        return self.say(name, self.loaded(version))

    def loaded(self, version: int) -> ev.WeightsLoaded:
        return ev.WeightsLoaded(
            version=version,
            step=self.step_of[version],
            digest=f"d{version}",
            probe_diff=0.0,
            seconds=0.1,
            reloaded=True,
        )

    def load_all(self) -> list[Command]:
        commands: list[Command] = []
        for name in self.names:
            if self.pull_of(name) is not None:
                commands += self.load(name)
        return commands

    def pull_of(self, name: str) -> cmd.PullWeights | None:
        outstanding = self.state.orders.commands.get(f"pull:{name}")
        command = outstanding.command if outstanding else None
        return command if isinstance(command, cmd.PullWeights) else None

    # --- trajectories -------------------------------------------------------------------------

    def trajectory(self, trajectory: str) -> Trajectory:
        return self.state.work.trajectories[TrajectoryId(trajectory)]

    def group(self, group: str) -> Group:
        return self.state.work.groups[GroupId(group)]

    def replica(self, name: str = "rollout-0") -> Replica:
        return self.state.members.replicas[name]

    def open_groups(self) -> list[str]:
        """Unfinished training groups, in order of dispatch."""
        groups = self.state.work.groups.values()
        return [g.id for g in groups if g.status == "open" and g.purpose == "train"]

    def finish(self, trajectory: str, num_tokens: int = 10) -> list[Command]:
        """Report that the trajectory's last token is durable."""
        return self.say(self.trajectory(trajectory).replica, self.finished(trajectory, num_tokens))

    def request_turn(self, trajectory: str, turn: int = 0) -> list[Command]:
        """Report that the trajectory's session requests a turn."""
        t = self.trajectory(trajectory)
        requested = ev.TurnRequested(trajectory_id=t.id, placement=t.placement, turn=turn)
        return self.say(self.scorer_of(t), requested)

    def request_turns(self) -> list[Command]:
        """Report that all sessions that have not had a turn request one."""
        waiting = [t.id for t in self.state.work.trajectories.values() if t.status == "waiting"]
        return [command for name in waiting for command in self.request_turn(name)]

    def scorer_of(self, trajectory: Trajectory) -> str:
        """Return the host of its session, or else its replica."""
        return self.state.work.sessions.get(trajectory.id, trajectory.replica)

    def finished(self, trajectory: str, num_tokens: int = 10) -> ev.TrajectoryFinished:
        t = self.trajectory(trajectory)
        return ev.TrajectoryFinished(
            trajectory_id=t.id, placement=t.placement, num_tokens=num_tokens, finish_reason="stop"
        )

    def begun(self, trajectory: str) -> ev.TrajectoryStarted:
        t = self.trajectory(trajectory)
        return ev.TrajectoryStarted(trajectory_id=t.id, placement=t.placement, tokens_resumed=0)

    def reward(self, trajectory: str, *score: Any, **changes: Any) -> list[Command]:
        """Report a reward; the arguments are those of `rewarded`."""
        rewarded = self.rewarded(trajectory, *score, **changes)
        return self.say(self.scorer_of(self.trajectory(trajectory)), rewarded)

    def rewarded(
        self,
        trajectory: str,
        score: float = 1.0,
        reason: str = "ok",
        detail: str = "",
        truncated: bool = False,
        **extras: float,
    ) -> ev.TrajectoryRewarded:
        t = self.trajectory(trajectory)
        return ev.TrajectoryRewarded(
            trajectory_id=t.id,
            placement=t.placement,
            reward_bits=bits_of(score),
            correct=score >= 1 and not truncated,
            reason=reason,
            num_tokens=t.num_tokens,
            detail=detail,
            truncated=truncated,
            extras=extras,
        )

    def fail(self, trajectory: str, reason: str = "unscored") -> list[Command]:
        t = self.trajectory(trajectory)
        failed = ev.TrajectoryFailed(
            trajectory_id=t.id, placement=t.placement, reason=reason, detail=""
        )
        return self.say(self.scorer_of(t), failed)

    def complete(self, *groups: str, scores: tuple[float, ...] = (0.0, 1.0)) -> list[Command]:
        """Generate and reward every sibling of these groups."""
        commands: list[Command] = []
        for group in groups:
            members = list(self.group(group).members)
            for member in members:
                commands += self.finish(member)
            for i, member in enumerate(members):
                commands += self.reward(member, scores[i % len(scores)])
        return commands

    # --- steps and ends -----------------------------------------------------------------------

    def train(self, *, publish: bool = True, left_out: Sequence[str] = ()) -> list[Command]:
        """Train the current batch except the rows `left_out`, and publish unless told otherwise."""
        done = self.trained(left_out)
        commands = self.say("trainer-0", done)
        return commands + (self.publish(done.version, done.step_index + 1) if publish else [])

    def trained(self, left_out: Sequence[str] = ()) -> ev.StepCompleted:
        batch = self.state.steps.batch
        assert batch is not None, "the trainer has no batch"
        return step_completed(batch.step_index, batch.version, left_out)

    def skip_publish(self) -> list[Command]:
        """Report that no slot was free for the weights of the current batch."""
        batch = self.state.steps.batch
        assert batch is not None
        skipped = ev.PublishSkipped(
            version=batch.version, step=batch.step_index + 1, reason="no slot"
        )
        return self.say("trainer-0", skipped)

    def write_ends(self) -> list[Command]:
        """Let the store answer every outstanding end."""
        commands: list[Command] = []
        for outstanding in list(self.state.orders.commands.values()):
            if isinstance(outstanding.command, cmd.EndTrajectories):
                commands += self.say("store-0", self.written(outstanding))
        return commands

    def written(self, outstanding: OutstandingCommand) -> ev.TrajectoriesEnded:
        assert isinstance(outstanding.command, cmd.EndTrajectories)
        rows = tuple(
            ev.EndedTrajectory(
                trajectory_id=ending.trajectory_id,
                num_tokens=self.trajectory(ending.trajectory_id).num_tokens,
                tokens_lost=0,
            )
            for ending in outstanding.command.endings
        )
        return ev.TrajectoriesEnded(command_id=outstanding.command_id, ended=rows)

    def kill(self, name: str = "rollout-0", *, restarting: bool = True) -> list[Command]:
        """Kill the process of an actor; its node reports that."""
        exited = ev.ProcessExited(
            actor=name,
            boot_id=self.state.members.actors[name].boot_id,
            code=-9,
            restarting=restarting,
        )
        return self.say(machine_of(name), exited)

    def silent(self, name: str) -> list[Command]:
        """Let the lease of an actor run out."""
        return self.own(self.silence(name))

    def silence(self, name: str) -> ev.HeartbeatLost:
        incarnation = self.state.members.actors[name].incarnation
        return ev.HeartbeatLost(actor=name, actor_incarnation=incarnation, silent_ms=3_000)

    def come_back(self, name: str = "rollout-0", boot: str = "b") -> list[Command]:
        """Join a restarted replica again, with its engine ready."""
        self.join(name, boot)
        return self.ready(name)

    def stop(self) -> None:
        """Let the store write all ends, then let every actor leave."""
        self.write_ends()
        for command in only(cmd.StopActor, self.commands):
            if self.state.members.is_actor_alive(command.to):
                self.say(command.to, ev.ActorLeft())


def start_bench(changes: dict[str, Any] | None = None, /, **settings: Any) -> Bench:
    """Start a run with these settings, some of which a test may change."""
    bench = Bench(**(settings | (changes or {})))
    bench.start()
    return bench
