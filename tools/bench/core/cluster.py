"""Running cluster of any size, for the benchmark of the coordinator's cost at scale.

Gives   Cluster: a state machine that events brought to a number of replicas and trajectories, and a
        Tick over it with a link to every process

Events reach the state machine directly, without a log; then a coordinator takes the state over, and
every process joins again. From then on the real tick handles frames.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from laminar.coordinator.tick import Frame, Tick
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.codec import encode
from laminar.names.ports import Disk
from laminar.net.session import ClientLink, Limits
from tools.kit.bench import MS, Bench, machine_of
from tools.kit.logs import begin_log

REPLICAS_PER_NODE = 8
GROUP_SIZE = 8
FRAMES = 256  #: processes that join in one turn


class Cluster(Bench):
    """A cluster of `replicas`, eight per machine with a relay, that run `trajectories` in all."""

    checked, numbered = False, False

    def __init__(
        self,
        *,
        replicas: int,
        trajectories: int,
        capacity: int,
        groups_per_step: int,
        **changes: Any,
    ) -> None:
        """Start all replicas with version 0 and as much work as the bound allows."""
        super().__init__(
            nodes=-(-replicas // REPLICAS_PER_NODE),
            replicas=REPLICAS_PER_NODE,
            capacity=capacity,
            num_train=4 * replicas * capacity // GROUP_SIZE + 1_000,
            num_eval=512,
            groups_per_step=groups_per_step,
            group_size=GROUP_SIZE,
            max_staleness=-(-trajectories // GROUP_SIZE // groups_per_step) - 1,
            groups_per_version=max(trajectories // GROUP_SIZE // replicas, 1),
            total_steps=1 << 20,
            shuffle=False,
            test_freq=1,
            resume_timeout_ms=60_000,
            batch_timeout_ms=600_000,
            start_timeout_ms=600_000,
            **changes,
        )
        del self.names[replicas:]
        self.tick: Tick | None = None
        self.turn_s = 0.0  #: CPU seconds of the last turn
        self._links: dict[str, ClientLink] = {}
        self.start()
        for t in list(self.state.work.trajectories.values()):
            if t.sibling:  # the first sibling of each group stays dispatched
                self.say(t.replica, self.begun(t.id))

    def spread(self, version: int) -> None:
        """Report the version from the head of the chain, then from every other relay."""
        for relay in self.relays:
            self.say(relay, self.weights(relay, version))

    def weights(self, relay: str, version: int) -> Event:
        """Return the event with which a relay reports a version."""
        head = relay == self.relays[0]
        return self.published(version, version) if head else self.received(version)

    # --- a coordinator with links ---------------------------------------------------------------

    def open(self, disk: Disk) -> None:
        """Start a coordinator on this state and let every process join."""
        self.tick = Tick(
            self.machine,
            begin_log(disk),
            boot="c1",
            lease_ms=600_000,
            node_lease_ms=600_000,
            stall_ms=600_000,
            clock_ns=self.now_ms * MS,
            observer=lambda *_: None,
            limits=Limits(),
        )
        names = list(self.state.members.actors)
        for first in range(0, len(names), FRAMES):
            some = names[first : first + FRAMES]
            self.turn([f for name in some for f in self._hello(name, self.boot_of(name))])

    def boot_of(self, name: str) -> str:
        return self.state.members.actors[name].boot_id

    def _hello(self, name: str, boot_id: str) -> list[Frame]:
        self._links[name] = ClientLink(
            name,
            name.partition("-")[0],
            boot_id,
            heartbeat_ns=1_000 * MS,
            now_ns=self.now_ms * MS,
            info={"node": machine_of(name), "pid": "7"},
        )
        return self._poll(name)

    def _poll(self, name: str) -> list[Frame]:
        link = self._links[name]
        return [(link.boot_id.encode(), frame) for frame in link.poll(self.now_ms * MS)]

    def joined(self, name: str) -> list[Frame]:
        """Return the frames with which a new process of that name joins."""
        return self._hello(name, self.boot_of(name) + "+")

    def replaced(self, name: str) -> None:
        """Replace a process with a new one of the same name."""
        self.silent(name)
        if self.tick is None:
            self.join(name, "b")
        else:
            self.turn(self.joined(name))

    def frames(self, name: str, *events: Event) -> list[Frame]:
        """Return the frames with which a process reports events."""
        link = self._links[name]
        for event in events:
            if isinstance(event, ev.TokenProgress):
                link.send_gauge(encode(event))
            else:
                link.send(encode(event))
        return self._poll(name)

    def turn(self, frames: Sequence[Frame] = (), own: Sequence[Event] = ()) -> list[Frame]:
        """Run one turn of the real tick and store its CPU seconds in `turn_s`."""
        assert self.tick is not None
        self.now_ms += 1
        begun = time.process_time()
        out = self.tick.run_turn(frames, own, self.now_ms * MS, True)
        self.turn_s = time.process_time() - begun
        for route, frame in out:
            link = self._links.get(route.decode().partition("/")[0])
            if link is not None and link.boot_id == route.decode():
                link.receive(frame, self.now_ms * MS)
        return out
