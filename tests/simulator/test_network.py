"""Simulated links: good weather keeps everything in order, bad weather does what it says."""

from __future__ import annotations

import random

from laminar.events.base import COORDINATOR
from laminar.net.frames import Ack, encode
from tools.simulator.network import Network, Weather
from tools.simulator.scheduler import MS, Scheduler

FRAME = encode(Ack("boot", 7))


class Wire:
    """One link and what came over it."""

    def __init__(self, **weather: float) -> None:
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, random.Random(1), delay_ms=1.0)
        self.network.weather = Weather(**weather, extra_delay_ns=50 * MS)
        self.link = self.network.link("rollout-0", COORDINATOR)
        self.came: list[object] = []

    def send(self, *messages: object) -> None:
        for message in messages:
            self.network.send(self.link, self.came.append, message)

    def settle(self) -> list[object]:
        while self.scheduler.step():
            pass
        return self.came


def test_partition_is_one_way_and_counted() -> None:
    """Two partitions cut a link: it is whole when both are over."""
    wire = Wire()
    wire.network.cut("rollout-0", COORDINATOR, +1)
    wire.network.cut("rollout-0", COORDINATOR, +1)
    wire.send(1)
    back = wire.network.link(COORDINATOR, "rollout-0")
    wire.network.send(back, wire.came.append, "back")
    wire.network.cut("rollout-0", COORDINATOR, -1)
    wire.send(2)
    wire.network.cut("rollout-0", COORDINATOR, -1)
    wire.send(3)
    assert wire.settle() == ["back", 3]


def test_healing_ends_weather_partitions_and_clogs() -> None:
    wire = Wire(loss=1.0)
    wire.network.clog("rollout-0", COORDINATOR)
    wire.send(1)
    wire.network.cut("rollout-0", COORDINATOR, +1)
    wire.network.heal()
    wire.send(2)
    assert wire.settle() == [1, 2]
