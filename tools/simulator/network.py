"""Simulated links: delay, loss, duplicates, reorder, flipped bits, partitions, clogs.

Reads   what one process sends to another, and the weather that faults make
Gives   deliveries, later, in virtual time

A link is one direction between two processes. In fair weather it keeps the order and loses nothing.
A flipped bit is delivered only if it makes the frame unreadable: what a transport's checksum
(TCP, CURVE) would catch is lost instead, since no protocol above could tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from laminar.events.base import COORDINATOR
from laminar.events.families import WireError
from laminar.net.frames import decode_client, decode_server
from tools.simulator.scheduler import MS, Scheduler

Deliver = Callable[[Any], None]


class Garbage(bytes):
    """Frame that cannot be read."""


@dataclass(slots=True, frozen=True)
class Weather:
    """Disturbances of links, as probabilities per message."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    flip: float = 0.0
    extra_delay_ns: int = 0  #: longest added delay of an overtaken message

    @property
    def fair(self) -> bool:
        return not (self.loss or self.duplicate or self.reorder or self.flip)


@dataclass(slots=True)
class Link:
    """Direction between two processes."""

    source: str
    target: str
    last_ns: int = 0  #: when the last message in order arrives
    blocked: int = 0  #: partitions that cut the link
    clogged: bool = False
    held: list[tuple[Deliver, Any]] = field(default_factory=list)  #: messages while clogged


class Network:
    """All links of a world."""

    def __init__(self, scheduler: Scheduler, chance: random.Random, delay_ms: float) -> None:
        """`delay_ms`: mean one-way delay."""
        self.lost = 0
        self.weather = Weather()
        self._scheduler = scheduler
        self._chance = chance
        self._random = chance.random
        self._delay_ns = delay_ms * MS
        self._links: dict[tuple[str, str], Link] = {}

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._weather, self._fair = weather, weather.fair

    def link(self, source: str, target: str) -> Link:
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = Link(source, target)
        return found

    def send(self, link: Link, deliver: Deliver, message: Any) -> None:
        """Deliver the message later by a call of `deliver(message)`, unless it is lost."""
        if link.blocked:
            self.lost += 1
        elif link.clogged:
            link.held.append((deliver, message))
        elif self._fair:
            self._deliver_in_order(link, deliver, message)
        else:
            self._send_in_bad_weather(link, deliver, message)

    def _deliver_in_order(self, link: Link, deliver: Deliver, message: Any) -> None:
        scheduler = self._scheduler
        when = scheduler.now + int(self._delay_ns * (0.5 + self._random()))
        if when < link.last_ns:
            when = link.last_ns
        link.last_ns = when
        scheduler.at(when, deliver, message)

    def _send_in_bad_weather(self, link: Link, deliver: Deliver, message: Any) -> None:
        weather, chance = self.weather, self._chance
        for _ in range(1 + (chance.random() < weather.duplicate)):
            if chance.random() < weather.loss:
                self.lost += 1
                continue
            sent = message
            if weather.flip and chance.random() < weather.flip:
                sent = _flipped(link, message, chance)
                if sent is None:
                    self.lost += 1
                    continue
            if chance.random() < weather.reorder:
                late = chance.randrange(max(1, weather.extra_delay_ns))
                self._scheduler.after(int(self._delay_ns) + late, deliver, sent)
            else:
                self._deliver_in_order(link, deliver, sent)

    # --- partitions and clogs -----------------------------------------------------------------

    def cut(self, source: str, target: str, by: int) -> None:
        """Add (1) or remove (-1) a partition of one direction."""
        self.link(source, target).blocked += by

    def clog(self, source: str, target: str) -> None:
        """Hold what is sent until `unclog`: the connection stalls but does not break."""
        self.link(source, target).clogged = True

    def unclog(self, source: str, target: str) -> None:
        link = self.link(source, target)
        link.clogged = False
        held, link.held = link.held, []
        for deliver, message in held:
            self.send(link, deliver, message)

    def heal(self) -> None:
        """Restore fair weather on every link, without partitions and clogs."""
        self.weather = Weather()
        for link in list(self._links.values()):
            link.blocked = 0
            if link.clogged:
                self.unclog(link.source, link.target)


def _flipped(link: Link, message: Any, chance: random.Random) -> Garbage | None:
    """Return the frame with one bit flipped if it is unreadable, else None: lost to a checksum."""
    if not isinstance(message, bytes):
        return None
    garbled = bytearray(message)
    garbled[chance.randrange(len(garbled))] ^= 1 << chance.randrange(8)
    decode = decode_client if link.target == COORDINATOR else decode_server
    try:
        decode(bytes(garbled), len(garbled))
    except WireError:
        return Garbage(garbled)
    return None
