"""Cost of the weight plane: one hop, chains, a fetch during a broadcast, the trainer's ranks.

Usage: python -m tools.bench.weights [--quick] [--parts hop cpu chains fetch ranks]
Prints one JSON line per figure; a figure with a limit says whether it is met.

hop         hop_gb_s               2 GiB through one socket, network unlimited
cpu         over plain loopback, without emulated cards, per hop:
            hop_cpu_s_per_gb, hop_checked_cpu_s_per_gb (the receiver makes a relay's two hashes),
            plane_hop_cpu_s_per_gb (the plane to one relay),
            chain_cpu_s_per_gb     all CPU time of a chain to 4 relays, its hashes included
            chain_hashes_cpu_s_per_gb  of that the hashes, measured in a chain of its own
            chain_cpu_per_gb_vs_hop    (chain_cpu_s_per_gb - its hashes) / hop_cpu_s_per_gb
            chain_all_cpu_per_gb_vs_hop, chain_cpu_per_gb_vs_checked_hop  hashes included
            checksum_cpu_share     of the CPU time of the chain
            chain_delivered_vs_hop bytes per second at all relays / of one hop
chains      seconds and ratios of times over emulated network cards, for 1, 2, 4 and 8 relays:
            hop_seconds_N          one socket, in the same rounds as the chain to N
            chain_seconds_N        from publish to the last relay that holds the verified version,
                                   with the time by the formula (docs/weights.md)
            chainN_vs_hop
            last_relay_vs_wire_time  chain to 4 / bytes by the rate of a card
fetch       a chain to 4 over emulated cards, while a fifth relay outside the chain fetches the
            previous version from the head, or from the middle of the chain:
            fetch_slows_broadcast_X   a broadcast with the fetch / one without, in the same round
            fetch_seconds_X           until the fetch is done, including the concurrent broadcast
ranks       CPU time of two ranks of the trainer together, each with half of the rows:
            ranks_publish_cpu_s_per_gb, ranks_publish_vs_copy  each writes its rows to the slot;
                                   relative to a copy of the same rows to the same place

The chain is the product's plane, with a process for each relay. Chains and hops have one emulated
network card per machine (network.py), 200 MB/s each up to 4 relays and 100 MB/s for 8, so that two
cores suffice. Ratios are medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from laminar.actors.system.warm import COPY_TUNABLE
from tools.bench.weights import network as net
from tools.bench.weights.hop import Hop, buffers
from tools.bench.weights.ranks import layout, ranks_rounds
from tools.bench.weights.relay_process import ANSWER_S, RelayProcess

MIB = 1 << 20
MACHINES = 9
CHUNK = 2 * MIB  #: best for these sizes and speeds, by the formula of docs/weights.md
RELAYS = {1: 1600, 2: 1600, 4: 1600, 8: 800}  #: Mbit/s of a card, by relays in the chain
GATES = {
    "chain4_vs_hop": (">=", 0.90),
    "chain8_vs_hop": (">=", 0.88),
    "chain_cpu_per_gb_vs_hop": ("<=", 1.2),
    "last_relay_vs_wire_time": ("<=", 1.10),
    "checksum_cpu_share": ("<=", 0.35),
    "fetch_slows_broadcast_head": ("<=", 1.05),
    "fetch_slows_broadcast_middle": ("<=", 1.05),
    "ranks_publish_vs_copy": ("<=", 1.25),
}

Figure = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes and numbers of rounds."""

    large: int  #: bytes of the single hop
    size: int  #: bytes of a version
    rounds: int
    rounds_of_8: int  #: rounds of a chain to 8 relays, over cards half as fast


FULL = Scale(2048 * MIB, 256 * MIB, 9, 3)
QUICK = Scale(256 * MIB, 32 * MIB, 2, 1)


def figure(name: str, value: float, unit: str, **extra: Any) -> Figure:
    return {"name": name, "value": value, "unit": unit, **extra}


class Chain:
    """The product's relays, linked as far as a figure needs."""

    def __init__(self, machines: int, size: int, *, time_hashes: bool = False) -> None:
        """Start the relays; `time_hashes` makes `usage` measure hashing, which costs CPU time."""
        self.relays = [
            RelayProcess(f"relay-{i}", size, _stamp, host=net.host(i), time_hashes=time_hashes)
            for i in range(machines)
        ]
        self.length, self.version = 0, 0
        self.relays[0].publish(0, CHUNK)

    def extend(self, length: int) -> None:
        """Extend the chain; a new relay gets the current version first."""
        while self.length < length:
            last, new = self.relays[self.length : self.length + 2]
            last.set_successor(1, new)
            new.received(self.version)
            self.length += 1

    def broadcast(self, chunk: int = CHUNK) -> float:
        """Return the seconds from publish to the last relay; raise RuntimeError on a bad digest."""
        self.version += 1
        digest, begun = self.relays[0].publish(self.version, chunk)
        ended = [relay.received(self.version) for relay in self.relays[1 : self.length + 1]]
        if any(happened.report.manifest.digest != digest for happened in ended):
            raise RuntimeError(f"version {self.version} has a different digest at a relay")
        return max(happened.at for happened in ended) - begun

    def beside_fetch(self, holder: int) -> tuple[float, float]:
        """Return the seconds of a broadcast and of the fetch that the last relay began before."""
        fetcher, version = self.relays[-1], self.version
        begun = time.monotonic()
        fetcher.fetch(version, self.relays[holder])
        while not any(int.from_bytes(m[:8], "little") == version for m in fetcher.memory):
            if time.monotonic() > begun + ANSWER_S:
                raise RuntimeError(f"no bytes of version {version} arrived in {ANSWER_S:g} s")
            time.sleep(0.001)
        seconds = self.broadcast()
        return seconds, fetcher.received(version).at - begun

    def usage(self) -> tuple[float, float]:
        """Return the CPU seconds so far of (the plane, its hashing), summed over linked relays."""
        used = [relay.usage() for relay in self.relays[: self.length + 1]]
        return sum(u[0] for u in used), sum(u[1] for u in used)

    def close(self) -> None:
        for relay in self.relays:
            relay.close()


def _stamp(version: int, view: np.ndarray) -> None:
    """Mark every page of a slot with its version; fill the slot only the first time."""
    words = view.view(np.uint64)
    if not words[1]:
        words[:] = np.arange(words.size, dtype=np.uint64)
    words[::512] = version


# --- one machine, one hop -----------------------------------------------------------------------


def hop(scale: Scale) -> Iterator[Figure]:
    net.limit(MACHINES)
    single = Hop(buffers(scale.large))
    seconds = [single.round().seconds for _ in range(scale.rounds)]
    single.close()
    yield figure("hop_gb_s", scale.large / statistics.median(seconds) / 1e9, "GB/s")


def cpu(scale: Scale) -> Iterator[Figure]:
    """Measure CPU time over plain loopback."""
    with net.without_cards(MACHINES):
        rows = list(_cpu_rows(scale))
        clocked = Chain(5, scale.size, time_hashes=True)
        clocked.extend(4)
        hashing = [_spent(clocked)[1] for _ in range(scale.rounds + 1)]
        clocked.close()
    gb = scale.size / 1e9
    median = statistics.median
    hashed = median(hashing[1:])
    hops, proofs, singles, chains, delivered = zip(*rows[1:], strict=True)
    rest = [spent - hashed for spent in chains]
    yield figure("hop_cpu_s_per_gb", median(hops) / gb, "s/GB")
    yield figure("hop_checked_cpu_s_per_gb", median(proofs) / gb, "s/GB")
    yield figure("plane_hop_cpu_s_per_gb", median(singles) / gb, "s/GB")
    yield figure("chain_cpu_s_per_gb", median(chains) / gb, "s/GB")
    yield figure("chain_hashes_cpu_s_per_gb", hashed / gb, "s/GB")
    yield figure("chain_cpu_per_gb_vs_hop", _median_ratio(rest, hops), "ratio")
    yield figure("chain_all_cpu_per_gb_vs_hop", _median_ratio(chains, hops), "ratio")
    yield figure("chain_cpu_per_gb_vs_checked_hop", _median_ratio(chains, proofs), "ratio")
    yield figure("checksum_cpu_share", hashed / median(chains), "share")
    yield figure("chain_delivered_vs_hop", median(delivered), "ratio")


def _cpu_rows(scale: Scale) -> Iterator[tuple[float, ...]]:
    """Yield for each round the CPU seconds of the hops and of one hop of the chain, and speeds."""
    memory = buffers(scale.size)
    plain, checked = Hop(memory), Hop(memory, _Check())
    single, chain = Chain(2, scale.size), Chain(5, scale.size)
    single.extend(1)
    chain.extend(4)
    for _ in range(scale.rounds + 1):
        one, proved, alone = plain.round(), checked.round(), _spent(single)[0]
        begun = chain.usage()[0]
        seconds = chain.broadcast()
        spent = (chain.usage()[0] - begun) / chain.length
        yield one.cpu_seconds, proved.cpu_seconds, alone, spent, 4 * one.seconds / seconds
    for closing in (chain, single, plain, checked):
        closing.close()


def _spent(chain: Chain) -> tuple[float, float]:
    """Return the CPU seconds per hop of one broadcast: (the plane, its hashing)."""
    moving, hashing = chain.usage()
    chain.broadcast()
    moved, hashed = chain.usage()
    return (moved - moving) / chain.length, (hashed - hashing) / chain.length


class _Check:
    """The hashes that a relay computes of received bytes."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()

    def __call__(self, piece: memoryview) -> None:
        xxhash.xxh3_64_intdigest(piece)
        self._whole.update(piece)


# --- over emulated cards ------------------------------------------------------------------------


def chains(scale: Scale) -> Iterator[Figure]:
    """Compare chains of growing length with a single hop."""
    net.limit(MACHINES)
    memory = buffers(scale.size)
    np.frombuffer(memory[0], np.uint64)[:] = np.arange(scale.size // 8, dtype=np.uint64)
    chain, single = Chain(MACHINES, scale.size), Hop(memory)
    single.round()
    for relays, rate in RELAYS.items():
        net.limit(MACHINES)
        chain.extend(relays)
        for _ in range(3):
            chain.broadcast()  # touch every slot: the first access to a page is slow
        net.limit(MACHINES, rate)
        rounds = scale.rounds_of_8 if relays == 8 else scale.rounds
        times = [(chain.broadcast(), single.round().seconds) for _ in range(rounds)]
        yield from _compared(*zip(*times, strict=True), relays, rate, scale.size)
    single.close()
    chain.close()


def _compared(
    chained: tuple[float, ...], hops: tuple[float, ...], relays: int, rate_mbit: int, size: int
) -> Iterator[Figure]:
    card = f"{rate_mbit // 8} MB/s"
    chain_s, hop_s = statistics.median(chained), statistics.median(hops)
    formula_s = _formula(relays, size, hop_s)
    rounds = [round(seconds, 3) for seconds in chained]
    name = f"chain_seconds_{relays}"
    yield figure(name, chain_s, "s", card=card, rounds=rounds, formula_s=formula_s)
    rounds = [round(seconds, 3) for seconds in hops]
    yield figure(f"hop_seconds_{relays}", hop_s, "s", card=card, rounds=rounds)
    yield figure(f"chain{relays}_vs_hop", _median_ratio(hops, chained), "ratio")
    if relays == 4:
        wire_s = size / (rate_mbit * 1e6 / 8)
        yield figure("last_relay_vs_wire_time", chain_s / wire_s, "ratio")


def _formula(relays: int, size: int, hop_s: float) -> float:
    """Return the seconds by the paper's formula, with no cost per chunk."""
    chunks = -(-size // CHUNK)
    return round((relays + chunks - 1) * hop_s / chunks, 4)


def fetch(scale: Scale) -> Iterator[Figure]:
    """Measure a broadcast through the chain while a relay fetches an older version from it."""
    net.limit(MACHINES)
    chain = Chain(6, scale.size)
    chain.extend(4)
    for _ in range(3):
        chain.broadcast()
    net.limit(MACHINES, RELAYS[4])
    for name, holder in (("head", 0), ("middle", 2)):
        alone, beside, took = [], [], []
        for _ in range(scale.rounds):
            alone.append(chain.broadcast())
            seconds, fetched = chain.beside_fetch(holder)
            beside.append(seconds)
            took.append(fetched)
        ratios = [round(b / a, 3) for a, b in zip(alone, beside, strict=True)]
        slower = _median_ratio(beside, alone)
        yield figure(f"fetch_slows_broadcast_{name}", slower, "ratio", rounds=ratios)
        both = statistics.median(a + b for a, b in zip(alone, beside, strict=True))
        yield figure(f"fetch_seconds_{name}", statistics.median(took), "s", two_broadcasts_s=both)
    chain.close()


def _median_ratio(above: Any, below: Any) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# --- ranks --------------------------------------------------------------------------------------


def ranks(scale: Scale) -> Iterator[Figure]:
    specs = layout(scale.size)
    spent = list(ranks_rounds(specs, scale.rounds))
    published, copied = ([row[way] for row in spent] for way in ("publish", "copy"))
    gb = sum(spec.nbytes for spec in specs) / 1e9
    yield figure("ranks_publish_cpu_s_per_gb", statistics.median(published) / gb, "s/GB")
    yield figure("ranks_publish_vs_copy", _median_ratio(published, copied), "ratio")


# --- all ----------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Scale], Iterator[Figure]]] = {
    "hop": hop,
    "cpu": cpu,
    "chains": chains,
    "fetch": fetch,
    "ranks": ranks,
}


def show(line: Figure) -> None:
    line["value"] = round(line["value"], 3)
    if line["name"] in GATES:
        sign, limit = GATES[line["name"]]
        met = line["value"] <= limit if sign == "<=" else line["value"] >= limit
        line |= {"gate": f"{sign} {limit}", "met": met}
    print(json.dumps(line), flush=True)


def inside(parts: list[str], scale: Scale) -> None:
    """Run the parts inside a private network namespace."""
    net.open_network(MACHINES)
    for part in parts:
        for line in PARTS[part](scale):
            show(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small versions, few rounds")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return inside(args.parts, QUICK if args.quick else FULL)
    prefix = net.namespace()
    if prefix is None:
        sys.exit(
            "weights: a private network for emulated network cards is unavailable; "
            "install iproute2 and run as root or allow user namespaces"
        )
    environment = {**os.environ, "GLIBC_TUNABLES": COPY_TUNABLE}
    command = [*prefix, sys.executable, "-m", "tools.bench.weights", *sys.argv[1:], "--inside"]
    sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
