"""A cluster of any size that already runs: what the bench of cost at size looks at.

Gives   Cluster: a machine whose state holds so many replicas and trajectories, led there by events,
        and a Tick over it with a link to every process

The state is reached through the machine alone, which writes no log; then a coordinator comes back
to it, and every process introduces itself again. From there on the real tick handles frames.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

from laminar import ids
from laminar.coordinator.tick import Frame, Tick
from laminar.core.machine import LOGIC_VERSION, Machine
from laminar.core.state import State
from laminar.eventlog.reader import scan
from laminar.eventlog.writer import LogWriter
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Settings, Stamped
from laminar.events.codec import encode
from laminar.net.session import ClientLink, Limits
from laminar.ports import Disk

MS, SECOND = 1_000_000, 1_000_000_000  #: nanoseconds
REPLICAS_PER_NODE = 8
GROUP_SIZE = 8
SCORES = (0, 4607182418800017408)  #: bits of 0.0 and 1.0


def settings(replicas: int, trajectories: int, groups_per_step: int) -> Settings:
    """The staleness bound is reached when so many trajectories are under way."""
    return Settings(
        seed=0,
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        min_scored=2,
        max_staleness=-(-trajectories // GROUP_SIZE // groups_per_step) - 1,
        groups_per_version=max(trajectories // GROUP_SIZE // replicas, 1),
        total_steps=1 << 20,
        total_epochs=1,
        shuffle=False,
        drop_last=False,
        test_freq=1,
        val_before_train=False,
        batch_strategy="deadline",
        reward_scope="trajectory",
        resume_wait_ms=60_000,
        batch_wait_ms=600_000,
        start_timeout_ms=600_000,
        stall_ms=600_000,
    )


class Cluster:
    """`replicas` engines, eight to a machine with its relay, that run `trajectories` in all."""

    def __init__(
        self, *, replicas: int, trajectories: int, capacity: int, groups_per_step: int
    ) -> None:
        """Every replica serves version 0 and runs what the staleness bound allows."""
        self.machine = Machine()
        self.capacity = capacity
        self.now_ns = 0
        self.tick: Tick | None = None
        self.turn_s = 0.0  #: CPU seconds of the last turn
        self._links: dict[str, ClientLink] = {}
        nodes = [f"node-{i}" for i in range(-(-replicas // REPLICAS_PER_NODE))]
        self._node_of = {"store-0": "node-0", "trainer-0": "node-0"}
        self._node_of |= {node: node for node in nodes}
        self._node_of |= {ids.actor_name("relay", node, 0): node for node in nodes}
        self.relays = [ids.actor_name("relay", node, 0) for node in nodes]
        self.nodes = nodes
        self.rollouts = []
        for number in range(replicas):
            node, index = nodes[number // REPLICAS_PER_NODE], number % REPLICAS_PER_NODE
            self.rollouts.append(ids.actor_name("rollout", node, index))
            self._node_of[self.rollouts[-1]] = node
        self.own(self.started(1, settings(replicas, trajectories, groups_per_step)))
        self._join(progress_of(self._node_of, "processes join"))
        self.publish(0)
        for name in progress_of(self.rollouts, "replicas load"):
            self.say(name, self.loaded(0))
        for t in list(self.state.trajectories.values()):
            if t.sibling:  # the first ones are on their way
                self.say(t.replica, self.begun(t.id))

    @property
    def state(self) -> State:
        return self.machine.state

    def _join(self, names: Iterable[str]) -> None:
        num_train = 4 * len(self.rollouts) * self.capacity // GROUP_SIZE + 1_000
        for name in names:
            self.join(name)
            role = name.partition("-")[0]
            if role == "store":
                data = ev.DataLoaded(num_train=num_train, num_eval=512, overlap=0, digest="d")
                self.say(name, data)
            elif role == "trainer":
                self.say(name, ev.TrainerReady(num_parameters=1, weights_bytes=4))
            elif role == "relay":
                self.link_relays(self.say(name, ev.RelayReady(address="here", bulk="here")))
            elif role == "rollout":
                self.say(name, ev.ReplicaReady(max_num_seqs=self.capacity, kv_capacity_tokens=1))

    def join(self, name: str) -> None:
        self.own(self.joining(name), name)

    def joining(self, name: str) -> ev.ActorJoined:
        return ev.ActorJoined(
            name=name,
            role=name.partition("-")[0],
            boot_id=f"{name}/{self.state.next_incarnation}",
            node=self._node_of[name],
            pid=7,
        )

    def link_relays(self, commands: Sequence[Command]) -> None:
        first = self.state.seq << 20
        for index, command in enumerate(commands):
            if isinstance(command, cmd.ForwardWeights):
                linked = ev.RelayLinked(command_id=first + index, successor=command.successor)
                self.say(command.to, linked)

    def started(self, incarnation: int, settings: Settings) -> ev.CoordinatorStarted:
        return ev.CoordinatorStarted(
            incarnation=incarnation, logic=LOGIC_VERSION, settings=settings, clock_ns=0, config=""
        )

    # --- what happens ---------------------------------------------------------------------------

    def own(self, event: Event, peer: str = COORDINATOR) -> list[Command]:
        return self._handle(peer, 0, event)

    def say(self, name: str, event: Event) -> list[Command]:
        actor = self.state.actors[name]
        return self._handle(name, actor.incarnation, event)

    def _handle(self, peer: str, incarnation: int, event: Event) -> list[Command]:
        stamped = Stamped(
            seq=self.state.seq + 1 if self.machine.started else 1,
            time_ns=self.now_ns,
            peer=peer,
            incarnation=incarnation,
            peer_seq=0,
            event=event,
        )
        return self.machine.handle(stamped)

    def publish(self, version: int) -> None:
        """The head has it, then every other relay."""
        for relay in progress_of(self.relays, f"relays get version {version}"):
            self.say(relay, self.weights(relay, version))

    def weights(self, relay: str, version: int) -> Event:
        held = tuple(range(max(version - 2, 0), version + 1))
        if relay == self.relays[0]:
            return ev.WeightsPublished(
                version=version, step=version, digest=f"d{version}", num_bytes=4, held=held
            )
        return ev.WeightsReceived(
            version=version,
            step=version,
            digest=f"d{version}",
            kind="full",
            num_bytes=4,
            duration_ms=1,
            held=held,
        )

    def loaded(self, version: int) -> ev.WeightsLoaded:
        return ev.WeightsLoaded(
            version=version,
            step=version,
            digest=f"d{version}",
            probe_diff=0.0,
            seconds=0.1,
            reloaded=True,
        )

    def begun(self, trajectory: str) -> ev.TrajectoryStarted:
        t = self.state.trajectories[ids.TrajectoryId(trajectory)]
        return ev.TrajectoryStarted(trajectory=t.id, placement=t.placement, tokens_resumed=0)

    def finished(self, trajectory: str) -> ev.TrajectoryFinished:
        t = self.state.trajectories[ids.TrajectoryId(trajectory)]
        return ev.TrajectoryFinished(
            trajectory=t.id, placement=t.placement, num_tokens=100, finish_reason="stop"
        )

    def rewarded(self, trajectory: str) -> ev.TrajectoryRewarded:
        t = self.state.trajectories[ids.TrajectoryId(trajectory)]
        return ev.TrajectoryRewarded(
            trajectory=t.id,
            placement=t.placement,
            score_bits=SCORES[t.sibling % 2],
            correct=bool(t.sibling % 2),
            reason="ok",
            num_tokens=100,
        )

    # --- a coordinator with links ---------------------------------------------------------------

    def open(self, disk: Disk) -> None:
        """A coordinator has come back to this state, and every process introduces itself."""
        writer = LogWriter.begin(
            disk,
            scan(disk),
            logic=LOGIC_VERSION,
            incarnation=1,
            run="bench",
            seed=0,
            config_hash="",
        )
        self.tick = Tick(
            self.machine,
            writer,
            boot="c1",
            lease_ms=600_000,
            node_lease_ms=600_000,
            clock_ns=self.now_ns,
            observer=lambda *_: None,
            limits=Limits(),
        )
        names = list(self.state.actors)
        for first in progress_of(range(0, len(names), 256), "links"):
            frames = [frame for name in names[first : first + 256] for frame in self._hello(name)]
            self.turn(frames)

    def _hello(self, name: str) -> list[Frame]:
        actor = self.state.actors[name]
        link = ClientLink(
            name,
            actor.role,
            actor.boot_id,
            heartbeat_ns=SECOND,
            now_ns=self.now_ns,
            info={"node": actor.node, "pid": "7"},
        )
        self._links[name] = link
        return [(link.boot_id.encode(), frame) for frame in link.poll(self.now_ns)]

    def joined(self, name: str) -> list[Frame]:
        """What a new process of that name sends to join."""
        boot_id = self.joining(name).boot_id
        node = self._node_of[name]
        self._links[name] = ClientLink(
            name,
            name.partition("-")[0],
            boot_id,
            heartbeat_ns=SECOND,
            now_ns=self.now_ns,
            info={"node": node, "pid": "7"},
        )
        return [(boot_id.encode(), frame) for frame in self._links[name].poll(self.now_ns)]

    def come_back(self, name: str) -> None:
        """A new process of that name is a member."""
        if self.tick is None:
            self.join(name)
        else:
            self.turn(self.joined(name))

    def frames(self, name: str, *events: Event) -> list[Frame]:
        """What its process sends to say so."""
        link = self._links[name]
        for event in events:
            if isinstance(event, ev.TokenProgress):
                link.gauge(encode(event))
            else:
                link.send(encode(event))
        return [(link.boot_id.encode(), frame) for frame in link.poll(self.now_ns)]

    def turn(self, frames: Sequence[Frame] = (), own: Sequence[Event] = ()) -> list[Frame]:
        """One turn of the real tick; its CPU seconds are in `turn_s`."""
        assert self.tick is not None
        self.now_ns += MS
        begun = time.process_time()
        out = self.tick.turn(frames, own, self.now_ns, True)
        self.turn_s = time.process_time() - begun
        for route, frame in out:
            link = self._links.get(route.decode().partition("/")[0])
            if link is not None and link.boot_id == route.decode():
                link.receive(frame, self.now_ns)
        return out


def progress_of(items: Iterable[str] | Iterable[int], what: str) -> Iterable:  # type: ignore
    """The items, with their number on stderr every second."""
    begun = shown = time.monotonic()
    number = 0
    for number, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) - shown > 1.0:
            shown = now
            print(f"\r{what}: {number} ...", end="", file=sys.stderr, flush=True)
    print(f"\r{what}: {number} in {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
