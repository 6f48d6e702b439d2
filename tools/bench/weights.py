"""What the weight plane costs: one hop, chains, and the other ways to broadcast.

Usage: python tools/bench/weights.py [--quick] [--parts hop cpu topologies chunks fetch ranks]
Prints one JSON line per figure; one that has a limit says whether it is met.

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
topologies  seconds and ratios of times over emulated network cards, for 1, 2, 4 and 8 relays:
            hop_seconds_N          one socket, beside the chain to N
            chain_seconds_N        from publish to the last relay that holds the verified version,
                                   beside the time of the formula (version/chunking.py)
            star_seconds_N, gloo_seconds_N, gloo_chunked_seconds_N, chainN_vs_...
            last_relay_vs_wire_time  chain to 4 / bytes by the rate of a card
chunks      chain_seconds_4_chunk_M  the same for chunks of M MiB, beside the formula
fetch       a chain to 4 over emulated cards, while a fifth relay, which is not in it, fetches the
            version before from the head, or from the middle of the chain:
            fetch_slows_broadcast_X   a broadcast beside that / one without, in the same round
            fetch_seconds_X           until it is there, the broadcast beside it included
ranks       CPU time of two ranks of the trainer together, of which each has half of the rows:
            ranks_publish_cpu_s_per_gb, ranks_publish_vs_copy  each puts its rows into the slot, by
                                   a copy of the same rows to the same place
            ranks_gather_vs_copy   rank 0 is sent all rows and writes them

The chain is the product's plane, a process for each relay. Topologies are compared with one
emulated network card per machine (weights_net.py), 200 MB/s each up to 4 relays and 100 MB/s for 8,
so that two cores suffice. Ratios are medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.actors.system.warm import COPY_TUNABLE  # noqa: E402
from laminar.weights.version.chunking import CHUNK_BYTES_MIN, broadcast_seconds  # noqa: E402
from tools.bench import weights_net as net  # noqa: E402
from tools.bench.weights_baselines import Group, buffers, gloo, star  # noqa: E402
from tools.bench.weights_ranks import layout, ranks_rounds  # noqa: E402
from tools.bench.weights_relay import ANSWER_S, RelayProcess  # noqa: E402

MIB = 1 << 20
MACHINES = 9
CHUNK = CHUNK_BYTES_MIN
"""What laminar.weights.version.chunking.chunk_bytes gives for these sizes and speeds."""
SWEEP_MIB = (1, 4, 16, 64)
RELAYS = {1: 1600, 2: 1600, 4: 1600, 8: 800}  #: Mbit/s of a card, by relays in the chain
COMPARED = (4, 8)  #: chains that are compared with a star and with gloo
GATES = {
    "chain4_vs_hop": (">=", 0.90),
    "chain8_vs_hop": (">=", 0.88),
    "chain4_vs_gloo": (">=", 3.5),
    "chain8_vs_gloo": (">=", 5.0),
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
    """How large and how often."""

    large: int  #: bytes of the one hop
    size: int  #: bytes of a version
    rounds: int  #: gloo's time scatters by a fifth, so that few say little
    rounds_of_8: int  #: a star to 8 relays takes 8 times as long as one hop


FULL = Scale(2048 * MIB, 256 * MIB, 9, 3)
QUICK = Scale(256 * MIB, 32 * MIB, 2, 1)


def figure(name: str, value: float, unit: str, **extra: Any) -> Figure:
    return {"name": name, "value": value, "unit": unit, **extra}


class Chain:
    """The product's relays; as many of them are linked as a figure needs."""

    def __init__(self, machines: int, size: int, *, time_hashes: bool = False) -> None:
        """`time_hashes`: for `usage`; reading the clock costs processor time itself."""
        self.relays = [
            RelayProcess(f"relay-{i}", size, _stamp, host=net.host(i), time_hashes=time_hashes)
            for i in range(machines)
        ]
        self.length, self.version = 0, 0
        self.relays[0].publish(0, CHUNK)

    def extend(self, length: int) -> None:
        """Feed so many relays; one that is new gets the present version first."""
        while self.length < length:
            last, new = self.relays[self.length : self.length + 2]
            last.set_successor(1, new)
            new.received(self.version)
            self.length += 1

    def broadcast(self, chunk: int = CHUNK) -> float:
        """Seconds from publish to the last relay; RuntimeError for a wrong digest."""
        self.version += 1
        digest, begun = self.relays[0].publish(self.version, chunk)
        ended = [relay.received(self.version) for relay in self.relays[1 : self.length + 1]]
        if any(happened.report.manifest.digest != digest for happened in ended):
            raise RuntimeError(f"a relay holds another version {self.version}")
        return max(happened.at for happened in ended) - begun

    def beside_fetch(self, holder: int) -> tuple[float, float]:
        """Seconds of a broadcast, and of the fetch that the last relay began before it."""
        fetcher, version = self.relays[-1], self.version
        begun = time.monotonic()
        fetcher.fetch(version, self.relays[holder])
        while not any(int.from_bytes(m[:8], "little") == version for m in fetcher.memory):
            if time.monotonic() > begun + ANSWER_S:
                raise RuntimeError(f"nothing of version {version} came in {ANSWER_S:g} s")
            time.sleep(0.001)
        seconds = self.broadcast()
        return seconds, fetcher.received(version).at - begun

    def usage(self) -> tuple[float, float]:
        """CPU seconds until now of (all that the plane does, hashing), of all linked relays."""
        used = [relay.usage() for relay in self.relays[: self.length + 1]]
        return sum(u[0] for u in used), sum(u[1] for u in used)

    def close(self) -> None:
        for relay in self.relays:
            relay.close()


def _stamp(version: int, view: np.ndarray) -> None:
    """Bytes that say which version they are, on every page; written whole only once."""
    words = view.view(np.uint64)
    if not words[1]:
        words[:] = np.arange(words.size, dtype=np.uint64)
    words[::512] = version


# --- one machine, one hop -----------------------------------------------------------------------


def hop(scale: Scale) -> Iterator[Figure]:
    net.limit(MACHINES)
    group = star(buffers(2, scale.large))
    seconds = [group.round().seconds for _ in range(scale.rounds)]
    group.close()
    yield figure("hop_gb_s", scale.large / statistics.median(seconds) / 1e9, "GB/s")


def cpu(scale: Scale) -> Iterator[Figure]:
    """Processor time, over plain loopback."""
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
    """Of each round: CPU seconds of the hops and of one of the chain; bytes delivered / hop's."""
    memory = buffers(2, scale.size)
    plain, checked = star(memory), star(memory, check=_Check())
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
    """CPU seconds per hop of one broadcast: (all that the plane does, its hashing)."""
    moving, hashing = chain.usage()
    chain.broadcast()
    moved, hashed = chain.usage()
    return (moved - moving) / chain.length, (hashed - hashing) / chain.length


class _Check:
    """The hashes that a relay makes of what it receives."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()

    def __call__(self, piece: memoryview) -> None:
        xxhash.xxh3_64_intdigest(piece)
        self._whole.update(piece)


# --- topologies ---------------------------------------------------------------------------------


def topologies(scale: Scale) -> Iterator[Figure]:
    """A chain that grows; beside each length the hop and, for some, the other ways."""
    net.limit(MACHINES)
    memory = buffers(MACHINES, scale.size)
    np.frombuffer(memory[0], np.uint64)[:] = np.arange(scale.size // 8, dtype=np.uint64)
    chain = Chain(MACHINES, scale.size)
    for relays, rate in RELAYS.items():
        net.limit(MACHINES)
        chain.extend(relays)
        for _ in range(3):
            chain.broadcast()  # every slot once: the first touch of a page is slow
        with tempfile.TemporaryDirectory() as directory:
            others = _others(memory, relays, Path(directory))
            for group in others.values():
                group.round()
        net.limit(MACHINES, rate)
        rounds = scale.rounds_of_8 if relays == 8 else scale.rounds
        times = _interleaved(chain, others, rounds)
        for group in others.values():
            group.close()
        yield from _compared(times, relays, rate, scale.size)
    chain.close()


def _others(memory: list[Any], relays: int, directory: Path) -> dict[str, Group]:
    """`directory`: may go when every group has done its first round."""
    others = {"hop": star(memory[:2])}
    if relays in COMPARED:
        machines = memory[: relays + 1]
        others["star"] = star(machines)
        others["gloo"] = gloo(machines, directory / "whole", chunked=False)
        others["gloo_chunked"] = gloo(machines, directory / "chunked", chunked=True)
    return others


def _interleaved(chain: Chain, others: dict[str, Group], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by name."""
    times: dict[str, list[float]] = {name: [] for name in ("chain", *others)}
    for _ in range(rounds):
        times["chain"].append(chain.broadcast())
        for name, group in others.items():
            times[name].append(group.round().seconds)
    return times


def _compared(
    times: dict[str, list[float]], relays: int, rate_mbit: int, size: int
) -> Iterator[Figure]:
    card = f"{rate_mbit // 8} MB/s"
    hop_s = statistics.median(times["hop"])
    for name, row in times.items():
        extra: Figure = {"card": card, "rounds": [round(seconds, 3) for seconds in row]}
        if name == "chain":
            extra["formula_s"] = _formula(relays, CHUNK, size, hop_s)
        yield figure(f"{name}_seconds_{relays}", statistics.median(row), "s", **extra)
    for name, row in times.items():
        if name != "chain":
            ratio = _median_ratio(row, times["chain"])
            yield figure(f"chain{relays}_vs_{name}", ratio, "ratio")
    if relays == 4:
        wire_s = size / (rate_mbit * 1e6 / 8)
        last = statistics.median(times["chain"]) / wire_s
        yield figure("last_relay_vs_wire_time", last, "ratio")


def _formula(relays: int, chunk: int, size: int, hop_s: float) -> float:
    """Of the paper, for chunks that cost nothing to start."""
    chunks = -(-size // chunk)
    return round(broadcast_seconds(relays + 1, chunks, size, hop_s / size, 0.0), 4)


def chunks(scale: Scale) -> Iterator[Figure]:
    """The chain to 4 relays against the size of a chunk."""
    net.limit(MACHINES)
    chain = Chain(5, scale.size)
    chain.extend(4)
    for _ in range(3):
        chain.broadcast()
    single = star(buffers(2, scale.size))
    single.round()
    net.limit(MACHINES, RELAYS[4])
    fitting = [mib for mib in SWEEP_MIB if mib * MIB <= scale.size]
    times: dict[int, list[float]] = {mib: [] for mib in fitting}
    hops = []
    for _ in range(max(1, scale.rounds // 2)):
        hops.append(single.round().seconds)
        for mib in fitting:
            times[mib].append(chain.broadcast(mib * MIB))
    chain.close()
    single.close()
    for mib, row in times.items():
        formula_s = _formula(4, mib * MIB, scale.size, statistics.median(hops))
        name = f"chain_seconds_4_chunk_{mib}"
        yield figure(name, statistics.median(row), "s", formula_s=formula_s)


def fetch(scale: Scale) -> Iterator[Figure]:
    """A version goes through the chain while somebody fetches an older one from it."""
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
    published, copied, gathered = ([row[w] for row in spent] for w in ("publish", "copy", "gather"))
    gb = sum(spec.nbytes for spec in specs) / 1e9
    yield figure("ranks_publish_cpu_s_per_gb", statistics.median(published) / gb, "s/GB")
    yield figure("ranks_publish_vs_copy", _median_ratio(published, copied), "ratio")
    yield figure("ranks_gather_vs_copy", _median_ratio(gathered, copied), "ratio")


# --- all ----------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Scale], Iterator[Figure]]] = {
    "hop": hop,
    "cpu": cpu,
    "topologies": topologies,
    "chunks": chunks,
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
    """All parts, in a namespace of our own."""
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
            "weights: no private network here, in which network cards could be emulated; "
            "install iproute2 and run it as root or allow user namespaces"
        )
    environment = {**os.environ, "GLIBC_TUNABLES": COPY_TUNABLE}
    command = [*prefix, sys.executable, *sys.argv, "--inside"]
    sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
