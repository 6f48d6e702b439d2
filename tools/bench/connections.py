"""Cost of encryption: messages with CURVE and without, a thousand clients, a whole run.

Usage: python -m tools.bench.connections [--parts messages,clients,run] [--rounds 3]
Prints one JSON line per figure; exits 1 if CURVE more than doubles the CPU time of a message of
150 bytes, or increases that of a whole run by more than 5 %.

The sockets are those of laminar/net/transport.py in two processes, under uvloop. Laminar cannot
run without keys: "without" is the same code with the two methods that set keys on a socket
disabled, in a run by a sitecustomize.py on PYTHONPATH, which all its processes load. Runs with keys
load the same file, which then disables nothing. Rounds with and without keys alternate; a ratio is
that of their medians.

messages  cpu_us_per_message: CPU time of both ends, by message size; messages_per_s
clients   1,000 clients that connect to one server at once: seconds until all got a reply; CPU
          seconds of the server's process, and of its thread that checks keys (ZAP)
run       cpu_s: CPU seconds of all processes of an emulated run of 12 steps, from start to end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from laminar.net.auth import RunKeys
from laminar.net.transport import ClientSocket, ServerSocket
from tools.kit.real_run import ROOT, laminar
from tools.kit.secrets import KEYS, SECRET

SIZES = {150: 100_000, 4_096: 20_000, 65_536: 2_000}  #: messages of each size in one round
CLIENTS, CLIENT_PROCESSES = 1_000, 4
"""Clients per process are limited: ZeroMQ allows 1,023 sockets, and a client takes two."""
MESSAGE_RATIO_MAX, RUN_RATIO_MAX = 2.0, 1.05
RUN = (
    "rollout.engine=emulated",
    "rollout.replicas=4",
    "rollout.group_size=4",
    "rollout.max_num_seqs=16",
    "data.dataset_size=2000",
    "data.val_size=0",
    "data.max_prompt_length=32",
    "data.max_response_length=400",
    "data.train_batch_size=8",
    "trainer.test_freq=0",
    "trainer.save_freq=5",
    "trainer.total_training_steps=12",
    "emulation.median_response=100",
    "emulation.train_s=1",
    "emulation.weights_mb=8",
)
LOADED = "from laminar.net.auth import RunKeys\n"
TAKEN_OUT = "RunKeys.secure_server = RunKeys.secure_client = lambda self, socket: None\n"
READY, DONE = b"ready", b"done"


class NoKeys(RunKeys):
    """Keys that leave sockets unencrypted."""

    def secure_server(self, socket: Any) -> None:
        pass

    def secure_client(self, socket: Any) -> None:
        pass


def keys_of(curve: bool) -> RunKeys:
    return KEYS if curve else NoKeys(SECRET)


def tell(name: str, value: Any) -> None:
    print(json.dumps({"name": name, "value": value, "kind": "measured"}), flush=True)


@contextmanager
def beside(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `work` in another process, with the other end of a pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    try:
        yield ours
    finally:
        process.join()


# --- messages ---------------------------------------------------------------------------------


def send_messages(pipe: Connection, curve: bool, address: str, size: int, count: int) -> None:
    """Run a client; send its CPU seconds and its wall time through the pipe."""
    client = ClientSocket(keys_of(curve))
    came: list[bytes] = []

    async def work() -> tuple[float, float]:
        client.connect(address)
        client.attach_loop(asyncio.get_running_loop(), lambda: came.extend(client.drain_frames()))
        client.send(READY)
        await _until(lambda: came)
        began, used, frame = time.monotonic(), time.process_time(), bytes(size)
        for number in range(count):
            while not client.send(frame):
                await asyncio.sleep(0.0005)
            if number % 256 == 0:
                await asyncio.sleep(0)
        await _until(lambda: DONE in came)
        return time.process_time() - used, time.monotonic() - began

    pipe.send(uvloop.run(work()))
    client.close()


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.0005)


def message_costs(curve: bool, size: int, count: int) -> tuple[float, float]:
    """Return the CPU microseconds of both ends per message, and the messages per second."""
    server = ServerSocket("127.0.0.1", 0, keys_of(curve))
    arrived, used = 0, 0.0

    async def work(pipe: Connection) -> tuple[float, float]:
        nonlocal used
        server.attach_loop(asyncio.get_running_loop(), take)
        await _until(pipe.poll)
        client_s, seconds = pipe.recv()
        return (client_s + used) / count * 1e6, count / seconds

    def take() -> None:
        nonlocal arrived, used
        for route, frame in server.drain_frames():
            if frame == READY:
                used -= time.process_time()
                server.send(route, READY)
                continue
            arrived += 1
            if arrived == count:
                used += time.process_time()
                server.send(route, DONE)

    try:
        with beside(send_messages, curve, server.address, size, count) as pipe:
            return uvloop.run(work(pipe))
    finally:
        server.close()


def messages(rounds: int) -> bool:
    fine = True
    for size, count in SIZES.items():
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(rounds):
            for curve, kept in found.items():
                kept.append(message_costs(curve, size, count))
        plain, curve = ([median(each) for each in zip(*found[c], strict=True)] for c in found)
        ratio = curve[0] / plain[0]
        for name, at, digits in (("cpu_us_per_message", 0, 1), ("messages_per_s", 1, None)):
            both = {"without": round(plain[at], digits), "curve": round(curve[at], digits)}
            tell(f"{name}/{size}", both)
        tell(f"cpu_ratio/{size}", round(ratio, 2))
        fine = fine and (size != min(SIZES) or ratio <= MESSAGE_RATIO_MAX)
    return fine


# --- clients ----------------------------------------------------------------------------------


def connect_many(pipe: Connection, curve: bool, address: str, count: int) -> None:
    """Connect clients on request, all at once, and wait until each has a reply."""
    clients = [ClientSocket(keys_of(curve)) for _ in range(count)]
    pipe.send(READY)
    pipe.recv()
    for client in clients:
        client.connect(address)
        client.send(READY)
    waiting = list(clients)
    while waiting:
        waiting = [client for client in waiting if not client.drain_frames()]
        time.sleep(0.005)
    pipe.send(DONE)
    for client in clients:
        client.close()


def thread_s(name: str) -> float:
    """Return the CPU seconds of the thread with this name, or 0 if there is none."""
    ids = [each.native_id for each in threading.enumerate() if each.name == name]
    files = [Path(f"/proc/self/task/{number}/schedstat") for number in ids]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def client_costs(curve: bool) -> dict[str, float]:
    server = ServerSocket("127.0.0.1", 0, keys_of(curve))

    async def work(pipes: list[Connection]) -> dict[str, float]:
        server.attach_loop(asyncio.get_running_loop(), answer)
        for pipe in pipes:
            await _until(pipe.poll)
            pipe.recv()
        began, used, asked = time.monotonic(), time.process_time(), thread_s("zap")
        for pipe in pipes:
            pipe.send(READY)
        for pipe in pipes:
            await _until(pipe.poll)
        return {
            "seconds": round(time.monotonic() - began, 2),
            "cpu_s": round(time.process_time() - used, 3),
            "zap_thread_s": round(thread_s("zap") - asked, 3),
        }

    def answer() -> None:
        for route, _ in server.drain_frames():
            server.send(route, DONE)

    each = CLIENTS // CLIENT_PROCESSES
    try:
        with ExitStack() as ends:
            made = [
                ends.enter_context(beside(connect_many, curve, server.address, each))
                for _ in range(CLIENT_PROCESSES)
            ]
            return uvloop.run(work(made))
    finally:
        server.close()


def clients(rounds: int) -> bool:
    for curve, name in ((False, "without"), (True, "curve")):
        found = [client_costs(curve) for _ in range(rounds)]
        tell(f"{CLIENTS}_clients/{name}", {key: median(f[key] for f in found) for key in found[0]})
    return True


# --- a whole run ------------------------------------------------------------------------------


def run_cpu_s(curve: bool, directory: Path) -> float:
    """Return the CPU seconds of all processes of a run; each waits for its children."""
    patch = directory / "sitecustomize.py"
    patch.write_text(LOADED + ("" if curve else TAKEN_OUT))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    place = (f"run.output_dir={directory}", "run.name=run")
    done = subprocess.run(
        laminar("train", *RUN, *place),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the run failed: {done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def whole_run(rounds: int) -> bool:
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for curve, kept in found.items():
            with tempfile.TemporaryDirectory() as directory:
                kept.append(run_cpu_s(curve, Path(directory)))
    ratio = median(found[True]) / median(found[False])
    for curve, name in ((False, "without"), (True, "curve")):
        tell(f"run_cpu_s/{name}", [round(each, 2) for each in found[curve]])
    tell("run_cpu_ratio", round(ratio, 3))
    return ratio <= RUN_RATIO_MAX


PARTS = {"messages": messages, "clients": clients, "run": whole_run}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if not set(chosen) <= set(PARTS):
        parser.error(f"--parts {arguments.parts}: choose from {', '.join(PARTS)}")
    tell("load", {"before": os.getloadavg()[0], "cores": os.cpu_count()})
    fine = [PARTS[part](arguments.rounds) for part in chosen]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
