"""Traffic of a synthetic cluster through the real tick, for the coordinator's benchmarks.

Reads   the orders that a Tick sends, in virtual time
Gives   Traffic: actors behind real ClientLinks that obey every order, until a number of events is
        in the log; `turn_s` is the CPU time inside Tick.run_turn

Every actor obeys an order after a random time, replicas report their progress every half second,
and occasionally a replica dies and restarts. No frame is lost. The seed determines the log.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from typing import Any

from laminar.coordinator.tick import Frame, Tick
from laminar.core.machine import StateMachine
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Settings
from laminar.events.codec import decode_envelope, encode
from laminar.names.ports import Disk
from laminar.net.session import ClientLink, Limits
from tools.kit.logs import begin_log
from tools.kit.world_parts import coordinator_started, step_completed
from tools.kit.world_parts import settings as small_settings

MS, SECOND = 1_000_000, 1_000_000_000  #: nanoseconds
GROUP_SIZE = 8
QUANTUM_NS = 2 * MS  #: period whose frames are handled in one turn
TRAJECTORY_S = 10.0  #: mean duration of a trajectory, exponentially distributed
PROGRESS_NS = 500 * MS
LEASE_MS = 5_000
EVENTS_PER_LOSS = 20_000  #: approximate number of events between deaths of a replica


def settings(replicas: int, capacity: int) -> Settings:
    """Return settings in which a batch is half the cluster's capacity and the bound allows it."""
    groups = max(1, replicas * capacity // GROUP_SIZE)
    per_step = min(max(1, groups // 2), 2_048)
    return small_settings(
        groups_per_step=per_step,
        group_size=GROUP_SIZE,
        max_staleness=2 * groups // per_step,
        groups_per_version=max(1, capacity // GROUP_SIZE),
        total_steps=1 << 30,
        val_before_train=False,
        resume_timeout_ms=10_000,
        batch_timeout_ms=600_000,
        start_timeout_ms=600_000,
        stall_ms=120_000,
    )


@dataclass
class Peer:
    """A process slot with its link and, for a replica, its trajectories."""

    name: str
    role: str
    boot: int = 0
    ready: bool = False
    route: bytes = b""
    link: ClientLink | None = None
    poll_ns: int = -1  #: time of the scheduled poll
    tokens: int = 0
    running: dict[str, int] = field(default_factory=dict)  #: placement by trajectory

    @property
    def boot_id(self) -> str:
        return f"{self.name}/{self.boot}"


class Traffic:
    """A coordinator and its cluster of `replicas` with `capacity` trajectories each."""

    def __init__(self, disk: Disk, *, replicas: int, capacity: int, seed: int = 0) -> None:
        self.turn_s = 0.0  #: CPU seconds inside Tick.run_turn
        self.turns = 0
        self._random = random.Random(seed)
        self._now_ns = 0
        self._heap: list[tuple[int, int, Peer, int, Any]] = []
        self._order = 0
        self._steps: dict[int, int] = {}  #: step by version
        self._settings = settings(replicas, capacity)
        self._capacity = capacity
        roles = {"node": 1, "rollout": replicas, "store": 1, "relay": 1, "trainer": 1}
        self._peers = {
            f"{role}-{i}": Peer(f"{role}-{i}", role)
            for role, count in roles.items()
            for i in range(count)
        }
        self._by_route: dict[bytes, Peer] = {}
        self._speaking: dict[str, Peer] = {}  #: peers whose links have something to send
        self._next_loss = EVENTS_PER_LOSS
        writer = begin_log(disk)
        self.tick = Tick(
            StateMachine(),
            writer,
            boot="c1",
            lease_ms=LEASE_MS,
            node_lease_ms=LEASE_MS,
            stall_ms=100 * LEASE_MS,
            clock_ns=0,
            observer=lambda *_: None,
            limits=Limits(),
        )

    def run(self, events: int) -> None:
        """Run until the log holds at least so many events."""
        started = coordinator_started(self._settings)
        self._turn([], [started])
        for peer in self._peers.values():
            self._start(peer)
        while self.tick.machine.state.seq < events:
            self._now_ns = max(self._now_ns + QUANTUM_NS, self._next_ns())
            while self._heap and self._heap[0][0] <= self._now_ns:
                self._happen(*heapq.heappop(self._heap)[2:])
            self._turn(self._frames(), [])
            self._lose_one()
        self.tick.log_state_hash()
        self.tick.log.commit()
        self.tick.log.close()

    def _next_ns(self) -> int:
        """Return the time of the next action of a peer or timer of the coordinator."""
        if self._speaking:
            return self._now_ns
        timer_ns = self.tick.next_timer_ns()
        due_ns = self._heap[0][0]
        return due_ns if timer_ns is None else min(due_ns, timer_ns)

    # --- frames -------------------------------------------------------------------------------

    def _turn(self, frames: list[Frame], own: list[Event]) -> None:
        begun = time.process_time()
        out = self.tick.run_turn(frames, own, self._now_ns, True)
        self.turn_s += time.process_time() - begun
        self.turns += 1
        for route, frame in out:
            if route in self._by_route:
                self._receive(self._by_route[route], frame)

    def _frames(self) -> list[Frame]:
        frames = []
        speaking, self._speaking = self._speaking, {}
        for peer in speaking.values():
            assert peer.link is not None
            frames += [(peer.route, frame) for frame in peer.link.poll(self._now_ns)]
            self._schedule_poll(peer)
        return frames

    def _receive(self, peer: Peer, frame: bytes) -> None:
        link = peer.link
        assert link is not None
        for body in link.receive(frame, self._now_ns):
            order, command = decode_envelope(body)
            self._obey(peer, order.command_id, command)
        if link.incarnation and not peer.ready:
            peer.ready = True
            self._ready(peer)
        self._schedule_poll(peer)

    def _schedule_poll(self, peer: Peer) -> None:
        assert peer.link is not None
        due_ns = peer.link.next_due_ns()
        if due_ns <= self._now_ns:
            self._speaking[peer.name] = peer
        elif not self._now_ns < peer.poll_ns <= due_ns:
            peer.poll_ns = due_ns
            self._later(peer, due_ns - self._now_ns, None)

    def _say(self, peer: Peer, event: Event) -> None:
        assert peer.link is not None
        if isinstance(event, ev.TokenProgress):
            peer.link.send_gauge(encode(event))
        else:
            peer.link.send(encode(event))
        self._speaking[peer.name] = peer

    def _later(self, peer: Peer, delay_ns: int, item: Any) -> None:
        self._order += 1
        entry = (self._now_ns + max(delay_ns, 1), self._order, peer, peer.boot, item)
        heapq.heappush(self._heap, entry)

    # --- lives --------------------------------------------------------------------------------

    def _start(self, peer: Peer) -> None:
        peer.route = peer.boot_id.encode()
        peer.link = ClientLink(
            peer.name,
            peer.role,
            peer.boot_id,
            heartbeat_ns=SECOND,
            now_ns=self._now_ns,
            info={"node": "node-0", "pid": "7"},
        )
        self._by_route[peer.route] = peer
        self._speaking[peer.name] = peer

    def _ready(self, peer: Peer) -> None:
        events: dict[str, Event] = {
            "store": ev.DataLoaded(num_train=20_000, num_eval=0, overlap=0, digest="d"),
            "relay": ev.RelayReady(address="here", chain_address="here"),
            "trainer": ev.TrainerReady(num_parameters=1, weights_bytes=4),
            "rollout": ev.ReplicaReady(max_num_seqs=self._capacity, kv_capacity_tokens=1),
        }
        if peer.role in events:
            self._later(peer, self._random.randrange(SECOND), events[peer.role])
        if peer.role == "rollout":
            self._later(peer, self._random.randrange(PROGRESS_NS), self._progress(peer))

    def _progress(self, peer: Peer) -> ev.TokenProgress:
        peer.tokens += 10 * len(peer.running)
        running = len(peer.running)
        return ev.TokenProgress(
            tokens_total=peer.tokens, kv_used_tokens=0, running=running, waiting=0
        )

    def _lose_one(self) -> None:
        if self.tick.machine.state.seq < self._next_loss:
            return
        self._next_loss += EVENTS_PER_LOSS
        victim = self._random.choice(
            [p for p in self._peers.values() if p.role == "rollout" and p.ready]
        )
        exited = ev.ProcessExited(
            actor=victim.name, boot_id=victim.boot_id, code=-9, restarting=True
        )
        del self._by_route[victim.route]
        victim.boot += 1
        victim.ready, victim.tokens, victim.poll_ns = False, 0, -1
        victim.running.clear()
        self._speaking.pop(victim.name, None)
        self._say(self._peers["node-0"], exited)
        self._later(victim, 2 * SECOND, self._start)

    def _happen(self, peer: Peer, boot: int, item: Any) -> None:
        if boot != peer.boot:
            return
        if item is None:
            self._speaking[peer.name] = peer
        elif not isinstance(item, Event):
            item(peer)
        elif isinstance(item, ev.TrajectoryFinished):
            if peer.running.get(item.trajectory_id) == item.placement:
                del peer.running[item.trajectory_id]
                self._say(peer, item)
        else:
            self._say(peer, item)
            if isinstance(item, ev.TokenProgress):
                self._later(peer, PROGRESS_NS, self._progress(peer))

    # --- orders -------------------------------------------------------------------------------

    def _obey(self, peer: Peer, command_id: int, command: Command) -> None:
        if isinstance(command, cmd.GenerateTrajectory):
            self._generate(peer, command)
        elif isinstance(command, cmd.ScoreTrajectories):
            for item in command.items:
                self._later(peer, self._random.randrange(100 * MS), self._rewarded(item))
        elif isinstance(command, cmd.EndTrajectories):
            rows = tuple(
                ev.EndedTrajectory(trajectory_id=e.trajectory_id, num_tokens=100, tokens_lost=0)
                for e in command.endings
            )
            self._later(peer, 10 * MS, ev.TrajectoriesEnded(command_id=command_id, ended=rows))
        elif isinstance(command, cmd.PublishWeights):
            self._publish(command.version, command.step, 100 * MS)
        elif isinstance(command, cmd.TrainStep):
            self._train(peer, command)
        elif isinstance(command, cmd.PullWeights):
            self._later(peer, self._random.randrange(1, SECOND // 2), self._load)

    def _generate(self, peer: Peer, command: cmd.GenerateTrajectory) -> None:
        trajectory, placement = command.trajectory_id, command.placement
        peer.running[trajectory] = placement
        started = ev.TrajectoryStarted(
            trajectory_id=trajectory, placement=placement, tokens_resumed=0
        )
        finished = ev.TrajectoryFinished(
            trajectory_id=trajectory, placement=placement, num_tokens=100, finish_reason="stop"
        )
        self._later(peer, 2 * MS, started)
        seconds = self._random.expovariate(1 / TRAJECTORY_S)
        self._later(peer, 4 * MS + int(seconds * SECOND), finished)

    def _rewarded(self, item: cmd.PlacedTrajectory) -> ev.TrajectoryRewarded:
        return ev.TrajectoryRewarded(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            reward_bits=self._random.choice([0, 4607182418800017408]),
            correct=True,
            reason="ok",
            num_tokens=100,
        )

    def _train(self, peer: Peer, command: cmd.TrainStep) -> None:
        done = step_completed(command.step_index, command.version)
        self._later(peer, 3 * SECOND, done)
        self._publish(command.version, command.step_index + 1, 3 * SECOND)

    def _publish(self, version: int, step: int, delay_ns: int) -> None:
        self._steps[version] = step
        held = tuple(sorted(self._steps)[-2:])
        published = ev.WeightsPublished(
            version=version, step=step, digest=f"d{version}", num_bytes=4, held=held
        )
        self._later(self._peers["relay-0"], delay_ns, published)

    def _load(self, peer: Peer) -> None:
        version = self.tick.machine.state.versions.newest
        loaded = ev.WeightsLoaded(
            version=version,
            step=self._steps[version],
            digest=f"d{version}",
            probe_diff=0.0,
            seconds=0.1,
            reloaded=True,
        )
        self._say(peer, loaded)
