"""Requests between simulated processes: what a server does with those of a peer that is gone."""

from __future__ import annotations

import pytest

from laminar.net.calls import Batch
from tools.kit.sim_worlds import calm
from tools.simulator.run import make_world
from tools.simulator.runtime.boot import Boot
from tools.simulator.runtime.rpc import AGAIN_NS, Message, SimServer
from tools.simulator.world import World


class Desk:
    """A server of the test's own on the first relay, in a world that has just begun."""

    def __init__(self, world: World, *, ready: bool) -> None:
        """`ready`: whether requests can be handled, or have to come again."""
        self.ready, self.told = ready, list[str]()
        self._scheduler = world.scheduler
        world.begin()
        while not all(world.processes[name].alive for name in ("relay-0", "rollout-0")):
            world.scheduler.step()
        self.client: Boot = world.processes["rollout-0"].current
        here = world.processes["relay-0"].current
        self.server = SimServer(here, self._handle, lambda boot_id: self.told.append("lost"))
        here.loop.enter(here.loop.create_task, self.server.start())

    def _handle(self, batch: Batch) -> list[bytes | None]:
        became = "handled" if self.ready else "later"
        self.told += [f"{body.decode()} {became}" for _, _, body in batch]
        return [b"done" if self.ready else None] * len(batch)

    def ask(self) -> None:
        self.server.receive(self.client, Message(1, 0, ((1, b"lease"),)))

    def say_bye(self) -> None:
        self.server.receive(self.client, Message(2, 0, (), bye=True))

    def wait(self, delay_ns: int) -> None:
        until = self._scheduler.now + delay_ns
        while self._scheduler.now < until:
            self._scheduler.step()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_peer_that_has_said_bye_is_given_nothing_any_more(leaves: bool) -> None:
    with make_world(calm(nodes=1, replicas=2), 3) as world:
        desk = Desk(world, ready=True)
        desk.ask()
        if leaves:
            desk.say_bye()
        desk.wait(AGAIN_NS)
        assert desk.told == (["lost"] if leaves else ["lease handled"])


def test_nor_when_its_request_could_not_be_handled_at_first() -> None:
    with make_world(calm(nodes=1, replicas=2), 3) as world:
        desk = Desk(world, ready=False)
        desk.ask()
        desk.wait(AGAIN_NS // 2)
        desk.say_bye()
        desk.ready = True
        desk.wait(2 * AGAIN_NS)
        assert desk.told == ["lease later", "lost"]
