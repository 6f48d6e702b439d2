"""Kill relays in the middle of a broadcast, again and again: does everybody else get the version?

Usage: python tools/bench/relay_kills.py [--quick] [--kills 100] [--seed 0]
Prints one JSON line per figure; exit code 1 if a survivor has a wrong version or none.

kill_large_*   one kill -9 during a broadcast of 256 MiB over six relays, RATE bytes per second
kill_*         --kills of them with 32 MiB each; the dead relay comes back at the end of the chain
splice_s       from the moment its predecessor noticed the death to the moment it is connected to
               its new successor; the largest (median beside it)
detect_s       from the kill to that notice
finish_s       from the kill until the last survivor holds the version
during_share   of the kills that hit when the relay behind the dead one had a part of the version
resent_share   bytes that went over the wire a second time, of a version, mean over survivors
wrong_digests, incomplete   of all survivors of all kills

The relays are the product's planes, a process each. This program does what a coordinator does: a
relay reports that its successor is gone, and is given the next one. Relay and moment are random.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.weights.chain.core import PlaneOptions  # noqa: E402
from laminar.weights.chain.reports import NeighbourDown, NeighbourUp, Report, Side  # noqa: E402
from laminar.weights.version.chunking import CHUNK_BYTES_MIN as CHUNK  # noqa: E402
from tools.bench.weights_relay import Happened, RelayProcess, digest_of  # noqa: E402

MIB = 1 << 20
RELAYS = 6
RATE = 200_000_000  #: bytes per second and connection: a broadcast takes long enough to be hit
LARGE, SMALL, TINY = 256 * MIB, 32 * MIB, 8 * MIB
SPLICE_S = 1.0


@dataclass
class Found:
    """What happened in all kills so far."""

    splice_s: list[float] = field(default_factory=list)
    detect_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    resent: list[float] = field(default_factory=list)
    during: list[bool] = field(default_factory=list)
    wrong_digests: int = 0
    incomplete: int = 0


def fill(version: int, view: np.ndarray) -> None:
    words = view.view(np.uint64)
    words[:] = np.arange(version << 32, (version << 32) + words.size, dtype=np.uint64)


class Chain:
    """Relays in the order in which versions pass them; the first one publishes."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.random = size, random.Random(seed)
        self.version, self.order, self.born = 0, 0, 0
        self.relays = [self._new(f"relay-{i}") for i in range(RELAYS)]
        for index in range(RELAYS - 1):
            self._link(index)
        self.relays[0].publish(0, CHUNK)
        for relay in self.relays[1:]:
            relay.received(0)

    def kill_one(self, found: Found) -> str:
        """Publish, kill a relay between the first and the last, splice; the name of the dead."""
        self.version += 1
        before = {relay.name: relay.status().bytes_received for relay in self.relays}
        digest, _ = self.relays[0].publish(self.version, CHUNK)
        time.sleep(self.random.uniform(0.0, self.size / RATE))
        index = self.random.randrange(1, len(self.relays) - 1)
        dead, predecessor = self.relays.pop(index), self.relays[index - 1]
        killed = time.monotonic()
        dead.kill()
        noticed = predecessor.wait_for(_lost(dead.name), since=killed)
        linked = self._link(index - 1)
        found.detect_s.append(noticed.at - killed)
        found.splice_s.append(linked.at - noticed.at)
        ended = [self._check(relay, digest, found) for relay in self.relays[1:]]
        found.finish_s.append(max(ended) - killed)
        found.during.append(_was_receiving(self.relays[index], self.version, killed))
        survivors = self.relays[1:]
        received = sum(r.status().bytes_received - before[r.name] for r in survivors)
        found.resent.append(received / len(survivors) / self.size - 1.0)
        return dead.name

    def revive(self, name: str) -> None:
        """The dead relay starts again, empty, and joins the end of the chain."""
        self.relays.append(self._new(name))
        self._link(len(self.relays) - 2)
        self.relays[-1].received(self.version)

    def close(self) -> None:
        for relay in self.relays:
            relay.close()

    def _new(self, name: str) -> RelayProcess:
        self.born += 1
        options = PlaneOptions(send_rate=RATE)
        return RelayProcess(name, self.size, fill, incarnation=self.born, options=options)

    def _link(self, index: int) -> Happened:
        """Feed the relay behind this one; when the two are connected."""
        self.order += 1
        ordered = time.monotonic()
        giver, taker = self.relays[index : index + 2]
        giver.set_successor(self.order, taker)
        return giver.wait_for(_fed(taker.name), since=ordered)

    def _check(self, relay: RelayProcess, digest: str, found: Found) -> float:
        """When the relay had the version; counts it if its bytes are not those published."""
        try:
            happened = relay.received(self.version)
        except TimeoutError:
            found.incomplete += 1
            return time.monotonic()
        report = happened.report
        if report.manifest.digest != digest or digest_of(relay.bytes_of(report.slot)) != digest:
            found.wrong_digests += 1
        return happened.at


def _was_receiving(relay: RelayProcess, version: int, at: float) -> bool:
    happened = relay.received(version)
    return happened.at - happened.report.seconds < at < happened.at


def _lost(name: str) -> Callable[[Report], bool]:
    return lambda report: isinstance(report, NeighbourDown) and report.name == name


def _fed(name: str) -> Callable[[Report], bool]:
    return lambda r: isinstance(r, NeighbourUp) and r.side == Side.SUCCESSOR and r.name == name


def run(size: int, kills: int, seed: int) -> Found:
    """So many kills, one after the other; the chain is complete again before the next one."""
    found, chain = Found(), Chain(size, seed)
    try:
        for _ in range(kills):
            chain.revive(chain.kill_one(found))
    finally:
        chain.close()
    return found


def show(prefix: str, size: int, found: Found) -> None:
    mib, kills = size // MIB, len(found.splice_s)
    for name in ("splice_s", "detect_s", "finish_s"):
        row = getattr(found, name)
        line = {"name": f"{prefix}_{name}", "value": round(max(row), 4), "unit": "s", "mib": mib}
        if name == "splice_s":
            line |= {"gate": f"<= {SPLICE_S}", "met": max(row) <= SPLICE_S}
        print(json.dumps({**line, "median": round(statistics.median(row), 4), "kills": kills}))
    for name, shares in (("resent", found.resent), ("during", found.during)):
        value = round(statistics.mean(shares), 4)
        print(json.dumps({"name": f"{prefix}_{name}_share", "value": value, "unit": "share"}))
    for name in ("wrong_digests", "incomplete"):
        value = getattr(found, name)
        print(json.dumps({"name": f"{prefix}_{name}", "value": value, "unit": "versions"}))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 MiB instead of 32 and 256")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad = 0
    for prefix, size, kills in (("kill_large", LARGE, 1), ("kill", SMALL, args.kills)):
        size = TINY if args.quick else size
        found = run(size, kills, args.seed)
        show(prefix, size, found)
        bad += found.wrong_digests + found.incomplete
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
