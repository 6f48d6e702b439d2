"""Thousands of real connections to one server: all accepted, all kept, and one more refused.

Usage: python tools/bench/connections.py [--server store|coordinator] [--clients 10000]
                                         [--processes 4] [--seconds 60]
Prints one JSON line per figure; exits 1 when a client was refused, lost or not heard.

Each client is a ZeroMQ socket and a session of its own (net/transport.py, net/session.py) that says
Hello, says it again while nobody answers, and sends the heartbeat of an actor. The server is the
one of the store (net/rpc_server.py), or a coordinator process that takes them for replicas and logs
them.

accepted_seconds    from the first connection until every client had its Welcome
kept                clients that had one and the same link for all of --seconds
unheard_seconds     the longest that a client did not hear the server, looked at twice a second
late_seconds        the longest that a process of clients let one wait for its turn to speak: beyond
                    a lease the machine is too small for so many clients, whatever the server does
server_cpu_percent  of one core, while they were only kept
turned_away         what the client after the last is told; only when --clients is all there may be
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import zmq

from laminar.config import dumps, load
from laminar.net.calls import Batch, RpcError
from laminar.net.client import read_address
from laminar.net.descriptors import clients_allowed
from laminar.net.rpc_server import RpcServer
from laminar.net.session import ClientLink, LinkState
from laminar.net.session_boxes import MS
from laminar.net.transport import ClientSocket
from laminar.run.directory import CONFIG_FILE, COORDINATOR_FILE

ROOT = Path(__file__).parents[2]
HEARTBEAT_MS, LEASE_MS = 1_000, 5_000  #: the defaults of a run
ROUND_S = 0.5
"""A process looks at all of its clients once in this time."""
WAIT_S = 300.0
START_S = 30.0
now_ns = time.monotonic_ns


class Kept(msgspec.Struct):
    """What became of the clients of one process."""

    same_link: int
    unheard_s: float
    late_s: float
    reasons: list[str]


class Client:
    """One connection, turned by hand: thousands of event loops' ticks would measure themselves."""

    def __init__(self, name: str, node: str, address: str) -> None:
        info = {"node": node, "pid": str(os.getpid())}
        boot = f"{name}:{os.getpid()}"
        beat = HEARTBEAT_MS * MS
        self.link = ClientLink(name, "rollout", boot, heartbeat_ns=beat, now_ns=now_ns(), info=info)
        self.first_link = ""
        self._socket = ClientSocket()
        self._socket.connect(address)

    def turn(self) -> None:
        now = now_ns()
        for frame in self._socket.drain():
            self.link.receive(frame, now)
        self.first_link = self.first_link or self.link.server_boot
        for frame in self.link.poll(now):
            self._socket.send(frame)

    def close(self) -> None:
        self._socket.close()


def hold(address: str, machine: int, count: int, report: Connection, stop: Any) -> None:
    """A process with `count` clients: says when all are answered, and at the end how it was."""
    clients_allowed()  # raises the limit of open files
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 2 * count + 64)
    node = f"node-{machine}"
    clients = [Client(f"rollout-{machine}.{i}", node, address) for i in range(count)]
    late_s = until(lambda: all(c.link.state is not LinkState.JOINING for c in clients), clients)
    report.send(None)
    unheard_ns = 0
    while not stop.is_set():
        late_s = max(late_s, turn_all(clients))
        unheard_ns = max(unheard_ns, *(c.link.silent_ns(now_ns()) for c in clients))
    up = [c for c in clients if c.link.state is LinkState.UP]
    same = sum(c.link.server_boot == c.first_link for c in up)
    reasons = sorted({c.link.reason for c in clients if c.link.reason})
    report.send(Kept(same, unheard_ns / 1e9, late_s, reasons))
    for client in clients:
        client.close()


def turn_all(clients: list[Client]) -> float:
    """One round, of ROUND_S or as long as it takes; gives the seconds that it took."""
    begin = time.monotonic()
    for client in clients:
        client.turn()
    time.sleep(max(0.0, begin + ROUND_S - time.monotonic()))
    return time.monotonic() - begin


def until(reached: Callable[[], bool], clients: list[Client]) -> float:
    """Rounds until it is reached; gives the seconds of the longest."""
    deadline, longest_s = time.monotonic() + WAIT_S, 0.0
    while not reached():
        if time.monotonic() > deadline:
            joining = sum(c.link.state is LinkState.JOINING for c in clients)
            raise TimeoutError(f"{joining} of {len(clients)} clients have no answer")
        longest_s = max(longest_s, turn_all(clients))
    return longest_s


# --- servers --------------------------------------------------------------------------------------


def serve_as_store(report: Connection) -> None:
    """The RPC server alone, in a process of its own."""

    async def serve() -> None:
        server = RpcServer(
            "127.0.0.1",
            0,
            _echo,
            boot_id="server",
            lease_ms=LEASE_MS,
            on_peer_lost=lambda boot: print(f"lost: {boot}", file=sys.stderr),
        )
        await server.start()
        report.send(server.address)
        await server.wait_closed()

    asyncio.run(serve())


def _echo(batch: Batch) -> list[bytes | RpcError | None]:
    return [body for _, _, body in batch]


@contextmanager
def store() -> Iterator[tuple[str, int]]:
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve_as_store, args=(theirs,))
    process.start()
    try:
        yield ours.recv(), process.pid or 0
    finally:
        process.kill()
        process.join()


@contextmanager
def coordinator() -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as above:
        files = [str(ROOT / "configs" / "quickstart.toml")]
        config = load(files, [f"run.output_dir={above}", "run.name=run"])
        config.run_dir.mkdir()
        (config.run_dir / CONFIG_FILE).write_text(dumps(config))
        command = [sys.executable, "-m", "laminar.cli.coord", str(config.run_dir)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            yield _address(config.run_dir / COORDINATOR_FILE), process.pid
        finally:
            process.kill()
            process.wait()


def _address(file: Path) -> str:
    deadline = time.monotonic() + START_S
    while (address := read_address(file)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the coordinator does not listen")
        time.sleep(0.1)
    return address


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the measurement ------------------------------------------------------------------------------


def measure(address: str, server_pid: int, arguments: argparse.Namespace) -> bool:
    """Prints the figures; True when all was well."""
    context, begin = mp.get_context("spawn"), time.monotonic()
    stop, reports = context.Event(), []
    for machine, count in enumerate(_shares(arguments.clients, arguments.processes), start=1):
        ours, theirs = context.Pipe()
        context.Process(
            target=hold, args=(address, machine, count, theirs, stop), daemon=True
        ).start()
        theirs.close()
        reports.append(ours)
    for report in reports:
        report.recv()
    tell("accepted_seconds", round(time.monotonic() - begin, 1))
    turned_away = arguments.clients < clients_allowed() or _one_more(address)
    before, began = cpu_s(server_pid), time.monotonic()
    time.sleep(arguments.seconds)
    share = (cpu_s(server_pid) - before) / (time.monotonic() - began)
    stop.set()
    found = [report.recv() for report in reports]
    kept = sum(one.same_link for one in found)
    tell("kept", kept)
    tell("unheard_seconds", round(max(one.unheard_s for one in found), 2))
    tell("late_seconds", round(max(one.late_s for one in found), 2))
    tell("server_cpu_percent", round(100 * share))
    for reason in sorted({reason for one in found for reason in one.reasons}):
        tell("refused", reason)
    return kept == arguments.clients and turned_away


def _shares(clients: int, processes: int) -> list[int]:
    return [clients // processes + (i < clients % processes) for i in range(processes)]


def _one_more(address: str) -> bool:
    """The client after the last; True when it is told why there is no room."""
    client = Client("rollout-99.0", "node-99", address)
    until(lambda: client.link.state is not LinkState.JOINING, [client])
    tell("turned_away", client.link.reason)
    client.close()
    return client.link.state is LinkState.REFUSED


def tell(name: str, value: Any) -> None:
    print(json.dumps({"name": name, "value": value}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--server", choices=("store", "coordinator"), default="store")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    serving = coordinator if arguments.server == "coordinator" else store
    with serving() as (address, pid):
        return 0 if measure(address, pid, arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
