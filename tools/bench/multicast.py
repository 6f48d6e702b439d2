"""A chain beside a binomial pipeline and several sources, over real sockets with one card each.

Usage: python tools/bench/multicast.py [--quick]
Prints one JSON line per cell, then what the cells say together: five minutes, as root or where user
namespaces are allowed. --quick: eight machines, 4 and 16 blocks.

Reads   nothing
Gives   for 4 and 8 machines and 4 to 128 blocks, by situation (`cards`):
        equal      seconds until the last machine holds all blocks; `together_seconds`: until those
                   that receive hold every block between them, not each of them
        slow       the same for all machines but the last one, whose card is four times slower
                   (`slow_seconds` is its own time)
        joiners    from the moment when two machines join, half of the bytes after the start, until
                   the last of them holds all blocks (`others_seconds`: of the other machines)
        sources    the same when two machines hold the version at the start (`k-way`)
        and beside each `formula_seconds`: the same schedule, block by block, at the card's rate

chain     each machine sends to the next. A machine that joins is linked behind the last one; a
          slow card is the last one, as in the product
binomial  in tick t a machine exchanges a block with that whose number differs in bit t mod log2 p
          (arXiv:2502.09922): k + log2 p - 1 ticks. A machine that joins is served by a holder of
          its own that has no more to send
k-way     two sources with half of the receivers each, behind one another, and the second sends the
          second half of the blocks first

The last lines are the formulae alone for the bytes, cards, costs per block and numbers of machines
of real runs, each way with its best number of blocks: M bytes, B bytes/s, t seconds per block,
chain (p + k - 2)(M / kB + t), binomial (k + ceil(log2 p) - 1)(M / kB + t).

Why not the product's plane: a binomial pipeline is not in it, and one program should send both.
tools/bench/weights.py holds the plane's own chain against the formula.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import mmap
import multiprocessing as mp
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from anywhere

from tools.bench import weights_net as net
from tools.bench.weights_baselines import Group, Once, buffers

TOTAL_BYTES = 16 << 20
CARD_MBIT = 256  #: low enough for two processors to fill eight cards
BURST_BYTES = 192 << 10
"""What a card sends at once after a pause, 1 % of all: a process that waited for a processor for a
few milliseconds makes up for it."""
NEAR = 1.05
ROUNDS = {"equal": 6, "slow": 1}
"""A cell is repeated until it takes at most NEAR by the formula, at most so often (joiners, k-way:
twice). Its figure is the least: other work on the machine only adds."""
SLOWER = 4
JOINERS = 2
SOURCES = 2
BLOCKS = (4, 8, 16, 32, 64, 128)
FULL_BLOCKS = 16
"""A full version has more; less is one of adapters or of differences."""
DEADLINE_S = 60.0
WHOLE_S = TOTAL_BYTES * 8 / (CARD_MBIT * 1e6)

_CONTEXT = mp.get_context("fork")  #: that of Group

Sent = tuple[int, int, int]  #: from, to, block


class Cell(NamedTuple):
    """One way to send, in one situation."""

    way: str
    cards: str
    machines: int
    blocks: int

    @property
    def joiners(self) -> int:
        return JOINERS if self.cards == "joiners" else 0

    @property
    def sources(self) -> int:
        return SOURCES if self.way == "k-way" else 1

    @property
    def join_s(self) -> float:
        """When machines join, from the start."""
        return WHOLE_S / 2

    def plan(self) -> list[Sent]:
        """What is sent; a machine sends its part in this order."""
        if self.way == "chain":
            return chain(range(self.machines + self.joiners), range(self.blocks))
        if self.way == "binomial":
            last = self.machines - 1
            served = [(last - n, self.machines + n) for n in range(self.joiners)]
            late = [(holder, new, b) for holder, new in served for b in range(self.blocks)]
            return binomial(self.machines, self.blocks) + late
        found = []
        for source in range(SOURCES):
            first = source * self.blocks // SOURCES
            order = [(first + n) % self.blocks for n in range(self.blocks)]
            found += chain(range(source, self.machines, SOURCES), order)
        return found


# --- schedules ------------------------------------------------------------------------------------


def chain(machines: range, blocks: Any) -> list[Sent]:
    return [(a, b, n) for a, b in itertools.pairwise(machines) for n in blocks]


def binomial(machines: int, blocks: int) -> list[Sent]:
    """Tick by tick, for a power of two; the source sends the next block, the others their highest
    that the partner lacks."""
    dimensions = int(math.log2(machines))
    held = [set(range(blocks))] + [set[int]() for _ in range(machines - 1)]
    found: list[Sent] = []
    tick = 0
    while any(len(blocks_here) < blocks for blocks_here in held):
        sent = []
        for machine, here in enumerate(held):
            partner = machine ^ (1 << tick % dimensions)
            wanted = {min(tick, blocks - 1)} if machine == 0 else here
            if lacking := wanted - held[partner]:
                sent.append((machine, partner, max(lacking)))
        for _, partner, block in sent:
            held[partner].add(block)
        found += sent
        tick += 1
    return found


def arrivals_of(cell: Cell) -> NDArray[np.float64]:
    """The formula, block by block [machine, block], in seconds from the start.

    A card sends one block and takes one at a time. With equal cards the last entry is
    (p + k - 2) M / kB in a chain and (k + log2 p - 1) M / kB in a binomial pipeline.
    """
    count, tick_s = cell.machines + cell.joiners, WHOLE_S / cell.blocks
    here = np.full((count, cell.blocks), math.inf)
    here[: cell.sources] = 0.0
    sends = [0.0] * count
    takes = [0.0 if machine < cell.machines else cell.join_s for machine in range(count)]
    slow = cell.machines - 1 if cell.cards == "slow" else None
    for source, target, block in cell.plan():
        begun = max(sends[source], takes[target], here[source, block])
        ended = begun + tick_s * (SLOWER if slow in (source, target) else 1)
        sends[source] = takes[target] = here[target, block] = ended
    return here


# --- sockets --------------------------------------------------------------------------------------


class Machines:
    """Processes that follow a plan; `arrived` [machine, block] is in seconds of the clock.

    "Ready" and "it is here" go from a receiver to its sender past the cards.
    """

    def __init__(self, cell: Cell, memory: list[mmap.mmap]) -> None:
        self.cell, self.plan = cell, cell.plan()
        shared = mmap.mmap(-1, 8 * (1 + len(memory) * cell.blocks))
        times = np.frombuffer(shared, np.float64)
        self.started, self.arrived = times[:1], times[1:].reshape(len(memory), cell.blocks)
        self._listeners = [
            socket.create_server((net.host(n), 0), backlog=len(memory)) for n in range(len(memory))
        ]
        pairs = {sent[:2] for sent in self.plan}
        self._ready = {pair: _CONTEXT.Semaphore(0) for pair in pairs}
        self._proved = {pair: _CONTEXT.Semaphore(0) for pair in pairs}
        self._group = Group(self._machine, memory, cell.sources)
        for listener in self._listeners:
            listener.close()

    def round(self) -> NDArray[np.float64]:
        """One broadcast: arrivals in seconds from the start."""
        self._group.round()
        found: NDArray[np.float64] = self.arrived - self.started
        found[: self.cell.sources] = 0.0
        return found

    def close(self) -> None:
        self._group.close()

    def _machine(self, index: int, view: memoryview) -> Once:
        targets = sorted({target for source, target, _ in self.plan if source == index})
        sources = sorted({source for source, target, _ in self.plan if target == index})
        out, incoming = {}, {}
        for target in targets:
            address, here = self._listeners[target].getsockname(), (net.host(index), 0)
            out[target] = socket.create_connection(address, DEADLINE_S, source_address=here)
            out[target].sendall(bytes([index]))
        for _ in sources:
            sock, _ = self._listeners[index].accept()
            incoming[sock.recv(1)[0]] = sock
        for sock in (*out.values(), *incoming.values()):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(DEADLINE_S)
        return lambda: self._once(index, view, out, incoming)

    def _once(
        self,
        index: int,
        view: memoryview,
        out: dict[int, socket.socket],
        incoming: dict[int, socket.socket],
    ) -> None:
        if index == 0:
            self.started[0] = time.monotonic()
        if index >= self.cell.machines:
            time.sleep(self.cell.join_s)
        size = TOTAL_BYTES // self.cell.blocks
        parts = [view[n * size : (n + 1) * size] for n in range(self.cell.blocks)]
        here = [threading.Event() for _ in parts]
        if index < self.cell.sources:
            for event in here:
                event.set()

        def take(source: int, sock: socket.socket) -> None:
            self._ready[source, index].release()
            for block in [b for s, t, b in self.plan if (s, t) == (source, index)]:
                _fill(sock, parts[block])
                self.arrived[index, block] = time.monotonic()
                here[block].set()
                self._proved[source, index].release()

        threads = [threading.Thread(target=take, args=pair) for pair in incoming.items()]
        for thread in threads:
            thread.start()
        self._send(index, out, parts, here)
        for thread in threads:
            thread.join()

    def _send(
        self,
        index: int,
        out: dict[int, socket.socket],
        parts: list[memoryview],
        here: list[threading.Event],
    ) -> None:
        """In order. A block for another machine than the last one goes out when that one has all
        of its own, so that two never share the card; to the same machine they follow each other."""
        for target in out:
            _wait(self._ready[index, target], 1)
        unproved, last = dict.fromkeys(out, 0), index
        for target, block in [(t, b) for s, t, b in self.plan if s == index]:
            if last not in (index, target):
                _wait(self._proved[index, last], unproved[last])
                unproved[last] = 0
            if not here[block].wait(DEADLINE_S):
                raise TimeoutError(f"block {block} has not come within {DEADLINE_S:.0f} s")
            out[target].sendall(parts[block])
            unproved[target] += 1
            last = target
        for target, count in unproved.items():
            _wait(self._proved[index, target], count)


def _wait(words: Any, count: int) -> None:
    for _ in range(count):
        if not words.acquire(timeout=DEADLINE_S):
            raise TimeoutError(f"a machine has said nothing for {DEADLINE_S:.0f} s")


def _fill(sock: socket.socket, part: memoryview) -> None:
    while part.nbytes:
        count = sock.recv_into(part)
        if not count:
            raise ConnectionError("the machine before this one is gone")
        part = part[count:]


# --- figures --------------------------------------------------------------------------------------


def figures(cell: Cell, here: NDArray[np.float64]) -> dict[str, float]:
    """What is read from arrivals [machine, block]."""
    ends = here.max(axis=1)
    if cell.cards == "joiners":
        joined = float(ends[cell.machines :].max()) - cell.join_s
        return {"seconds": joined, "others_seconds": float(ends[: cell.machines].max())}
    if cell.cards == "slow":
        return {"seconds": float(ends[:-1].max()), "slow_seconds": float(ends[-1])}
    together = here[cell.sources :].min(axis=0).max()
    return {"seconds": float(ends.max()), "together_seconds": float(together)}


def measured(cell: Cell, memory: list[mmap.mmap]) -> dict[str, Any]:
    """Its line: the round that took least, beside the formula."""
    formula = figures(cell, arrivals_of(cell))
    rounds: list[dict[str, float]] = []
    machines = Machines(cell, memory[: cell.machines + cell.joiners])
    try:
        for _ in range(ROUNDS.get(cell.cards, 2)):
            rounds.append(figures(cell, machines.round()))
            if rounds[-1]["seconds"] <= NEAR * formula["seconds"]:
                break
    finally:
        machines.close()
    least = min(rounds, key=lambda one: one["seconds"])
    line: dict[str, Any] = cell._asdict() | {"rounds": len(rounds)}
    for name, seconds in least.items():
        line |= {name: round(seconds, 3), f"formula_{name}": round(formula[name], 3)}
    line["by_formula"] = round(least["seconds"] / formula["seconds"], 3)
    return line


def cells_of(quick: bool) -> list[Cell]:
    machines, blocks = ((8,), (4, 16)) if quick else ((4, 8), BLOCKS)
    return [
        Cell(way, cards, p, k)
        for cards, ways in (
            ("equal", ("chain", "binomial")),
            ("slow", ("chain", "binomial")),
            ("joiners", ("chain", "binomial")),
            ("sources", ("k-way",)),
        )
        for p in machines
        for k in blocks
        for way in ways
    ]


def together(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the cells say, each with its limit where it has one."""
    equal = [
        abs(line["by_formula"] - 1)
        for line in lines
        if (line["way"], line["cards"]) == ("chain", "equal") and line["blocks"] >= 8
    ]
    furthest = max(equal)
    yield {"name": "chain_from_formula_most", "value": round(furthest, 3)} | {
        "limit": 0.10,
        "met": furthest <= 0.10,
        "cells": len(equal),
    }
    seconds = {tuple(line[n] for n in Cell._fields): line["seconds"] for line in lines}
    for name, least in (("full_version", FULL_BLOCKS), ("fewer_blocks", 0)):
        pairs = {
            cell[1:]: seconds["chain", *cell[1:]] / value
            for cell, value in seconds.items()
            if cell[0] == "binomial" and (cell[3] >= FULL_BLOCKS) == bool(least)
        }
        wins = [cell for cell, ratio in pairs.items() if ratio >= 1.1]
        loses = [cell for cell, ratio in pairs.items() if ratio <= 1 / 1.1]
        yield {"name": f"binomial_wins_by_10_percent_{name}", "value": len(wins)} | {
            "of_cells": len(pairs),
            "chain_wins_by_10_percent": len(loses),
            "where": [f"{cards}, {p} machines, {k} blocks" for cards, p, k in wins],
        }


def by_formula() -> Iterator[dict[str, Any]]:
    """Seconds of both ways, each with its best number of blocks, for versions of real runs."""
    versions = (("32B", 65e9), ("32B, differences", 65e9 / 140), ("adapter", 1e8))
    for (version, size), gbit, cost_us in (
        (version, gbit, cost_us)
        for version in versions
        for gbit in (10, 100, 400)
        for cost_us in (10, 100)
    ):
        wire_s, cost_s = size * 8 / (gbit * 1e9), cost_us / 1e6
        ratios = {
            str(machines): [
                round(_best_s(extra, wire_s, cost_s) / wire_s, 3)
                for extra in (machines - 2, math.ceil(math.log2(machines)) - 1)
            ]
            for machines in (8, 16, 64, 128, 512)
        }
        line = {"name": "chain, binomial / wire", "version": version, "gbit": gbit}
        yield line | {"us_per_block": cost_us, "wire_s": round(wire_s, 3)} | ratios


def _best_s(extra: int, wire_s: float, cost_s: float) -> float:
    """Least (k + extra)(wire / k + cost) over whole numbers of blocks k."""
    best = math.sqrt(extra * wire_s / cost_s)
    around = {max(1, math.floor(best)), math.ceil(best)}
    return min((k + extra) * (wire_s / k + cost_s) for k in around)


def inside(quick: bool) -> None:
    """All cells, in a namespace of our own."""
    begun = time.monotonic()
    most = 8 + JOINERS
    net.open_network(most)
    memory = buffers(most, TOTAL_BYTES)
    memory[0][:] = np.random.default_rng(1).bytes(TOTAL_BYTES)
    net.limit(most, CARD_MBIT, BURST_BYTES)
    lines = []
    for cell in cells_of(quick):
        for source in range(1, cell.sources):
            memory[source][:] = memory[0][:]
        if cell.cards == "slow":
            with net.slower_card(cell.machines - 1, CARD_MBIT // SLOWER, BURST_BYTES):
                lines.append(measured(cell, memory))
            net.limit(most, CARD_MBIT, BURST_BYTES)
        else:
            lines.append(measured(cell, memory))
        print(json.dumps(lines[-1]), flush=True)
    for line in (*together(lines), *by_formula()):
        print(json.dumps(line))
    print(json.dumps({"name": "duration", "value": round(time.monotonic() - begun), "unit": "s"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="eight machines, 4 and 16 blocks")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return inside(given.quick)
    prefix = net.namespace()
    if prefix is None:
        sys.exit(
            "multicast: no private network here, in which network cards could be emulated; "
            "install iproute2 and run it as root or allow user namespaces"
        )
    sys.exit(subprocess.run([*prefix, sys.executable, *sys.argv, "--inside"]).returncode)


if __name__ == "__main__":
    main()
