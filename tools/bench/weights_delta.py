"""How much smaller a delta is than the version it makes, and how much sooner a relay has it.

Usage: python tools/bench/weights_delta.py [--quick]
Prints one JSON line per figure.

delta_bytes_ratio            bytes of a version / of its delta from the version one step before
delta_bytes_ratio_N          the same from N steps before
delta_speedup_Rmbit          time of a full version over one hop of R Mbit/s / time of the delta
delta_encode_gb_per_cpu_s    of the full version, one thread
delta_apply_gb_per_cpu_s     likewise, copy of the base included

The versions are those of a Qwen2 of 34 M parameters (random start, float32 master weights, AdamW,
learning rate 1e-6, a policy gradient on random tokens) published in bfloat16 after real optimizer
steps. Adam's first steps change most, so the last of STEPS is taken, and said.

A hop is two processes. The clock runs from the first byte encoded to the answer of the receiver,
which is the xxh3_128 of what lies in its slot, hashed block by block in either way of sending. A
block is encoded while the one before it is on the wire. The full version waits for the wire and the
delta for the processors, so on a busy machine a median would say what the neighbours do: the
shortest of interleaved rounds is taken for both. The network card is emulated by a traffic
class in a private network namespace, or, where that is not allowed, by pacing the socket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import queue
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.weights.arena.arena import SHARED_MEMORY  # noqa: E402
from laminar.weights.delta.codec import (  # noqa: E402
    Block,
    Bytes,
    apply_block,
    encode_blocks,
    spans,
)
from laminar.weights.version import manifest as mf  # noqa: E402
from laminar.weights.version.tensors import write_tensors  # noqa: E402
from tools.bench import weights_net as net  # noqa: E402

ITEM_BYTES = 2
STEPS, STEPS_QUICK = 30, 17
BACK = (1, 2, 4, 8, 16)  #: steps from a base to the last version
ROUNDS = {1600: 4, 200: 2}  #: by rate of the hop, Mbit/s
DELTAS = 10  #: sent in a round, for one full version
SEQUENCES, TOKENS = 4, 32  #: of a training batch
MACHINES = 2
HEADER = struct.Struct("<IQ")  #: of a block on the wire: bytes of the payload, checksum
FULL, DELTA, QUIT = b"f", b"d", b"q"
BURST_BYTES = 128 << 10  #: what the emulated card sends at once; less than a delta
_SO_MAX_PACING_RATE = 47  # Python's socket has no name for it


# --- versions ---------------------------------------------------------------------------------


def small_model() -> torch.nn.Module:
    """33.7 M parameters, 67 MB in bfloat16."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1632,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def policy_loss(model: torch.nn.Module) -> torch.Tensor:
    """Of one group of random sequences with random rewards."""
    tokens = torch.randint(0, 4096, (SEQUENCES, TOKENS + 1))
    rewards = torch.randn(SEQUENCES)
    advantages = (rewards - rewards.mean()) / rewards.std()
    logprobs = torch.log_softmax(model(input_ids=tokens[:, :-1]).logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -(advantages[:, None] * chosen).mean()


def publish(model: torch.nn.Module) -> Bytes:
    named = [(name, tensor) for name, tensor in model.named_parameters()]
    specs = mf.layout([(name, tensor.shape) for name, tensor in named], "bfloat16")
    view = np.empty(mf.check_tensors(specs), np.uint8)
    write_tensors(view, specs, named)
    return view


def train(steps: int) -> dict[int, Bytes]:
    """Published versions by how many steps they are before the last, 0 being the last."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95))
    versions = {}
    for left in reversed(range(steps)):
        optimizer.zero_grad()
        policy_loss(model).backward()
        optimizer.step()
        if left == 0 or left in BACK:
            versions[left] = publish(model)
    return versions


# --- codec ------------------------------------------------------------------------------------


def codec_figures(versions: dict[int, Bytes], steps: int) -> Iterator[dict[str, Any]]:
    new = versions[0]
    for back in BACK:
        size = sum(len(block.payload) for block in encode_blocks(versions[back], new, ITEM_BYTES))
        name = "delta_bytes_ratio" if back == 1 else f"delta_bytes_ratio_{back}"
        changed = np.count_nonzero(versions[back].view("<u2") != new.view("<u2"))
        yield {
            **figure(name, new.nbytes / size, "ratio"),
            "step": steps,
            "changed": round(changed / new.nbytes * ITEM_BYTES, 5),
        }
    base, out = versions[1], np.zeros_like(new)
    blocks = list(encode_blocks(base, new, ITEM_BYTES))
    encode_s = cpu_median(lambda: list(encode_blocks(base, new, ITEM_BYTES)))
    apply_s = cpu_median(lambda: [apply_block(block, base, out) for block in blocks])
    if not np.array_equal(out, new):
        raise RuntimeError("the delta does not rebuild the version")
    yield figure("delta_encode_gb_per_cpu_s", new.nbytes / encode_s / 1e9, "GB/s")
    yield figure("delta_apply_gb_per_cpu_s", new.nbytes / apply_s / 1e9, "GB/s")


def cpu_median(operation: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        operation()
        times.append(time.process_time() - start)
    return statistics.median(times)


# --- one hop ----------------------------------------------------------------------------------


def hop_figures(base: Bytes, new: Bytes, quick: bool) -> Iterator[dict[str, Any]]:
    """Runs this file again, in a namespace of its own if that is allowed."""
    prefix = net.namespace()
    emulation = "pacing" if prefix is None else "htb"
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        np.save(Path(directory) / "base.npy", base)
        np.save(Path(directory) / "new.npy", new)
        program = [sys.executable, __file__, "--hop", directory, "--emulation", emulation]
        command = [*(prefix or ()), *program, *(["--quick"] if quick else [])]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    for rate, (full_s, delta_s) in json.loads(answer).items():
        yield {
            **figure(f"delta_speedup_{rate}mbit", full_s / delta_s, "ratio"),
            "full_s": round(full_s, 4),
            "delta_s": round(delta_s, 4),
            "emulation": emulation,
        }


def hop(directory: Path, emulation: str, quick: bool) -> dict[int, tuple[float, float]]:
    """(seconds of the full version, of the delta) by rate; the shortest of interleaved rounds."""
    base, new = (np.load(directory / name) for name in ("base.npy", "new.npy"))
    if emulation == "htb":
        net.open_network(MACHINES)
    with connected(base) as connection:
        exchange(connection, FULL, base, new)  # the first one warms up and is not counted
        exchange(connection, DELTA, base, new)
        results = {}
        limit = limit_by_card if emulation == "htb" else limit_by_pacing
        for rate, rounds in ROUNDS.items():
            limit(connection, rate)
            full, delta = [], []
            for _ in range(1 if quick else rounds):
                full.append(exchange(connection, FULL, base, new))
                delta += [exchange(connection, DELTA, base, new) for _ in range(DELTAS)]
            results[rate] = (min(full), min(delta))
        connection.sendall(QUIT)
    return results


@contextlib.contextmanager
def connected(base: Bytes) -> Iterator[socket.socket]:
    """A connection to a second process that holds `base` and rebuilds what it is sent."""
    with socket.socket() as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        listener.bind((net.host(0), 0))
        listener.listen()
        context = multiprocessing.get_context("fork")
        receiver = context.Process(target=receive, args=(listener.getsockname(), base), daemon=True)
        receiver.start()
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection
    receiver.join()


def exchange(connection: socket.socket, mode: bytes, base: Bytes, new: Bytes) -> float:
    """Seconds until the receiver holds the new version and has proved it."""
    wanted = xxhash.xxh3_128_digest(new.data)
    connection.sendall(mode)
    read(connection, memoryview(bytearray(1)))  # its slot is cleared
    start = time.perf_counter()
    if mode == FULL:
        connection.sendall(new.data)
    else:
        send_delta(connection, base, new)
    found = bytearray(len(wanted))
    read(connection, memoryview(found))
    seconds = time.perf_counter() - start
    if found != wanted:
        raise RuntimeError("the receiver holds another version than the sender")
    return seconds


def send_delta(connection: socket.socket, base: Bytes, new: Bytes) -> None:
    """One thread encodes, another one sends."""
    encoded: queue.Queue[Block | None] = queue.Queue()

    def send() -> None:
        while (block := encoded.get()) is not None:
            connection.sendall(HEADER.pack(len(block.payload), block.checksum))
            connection.sendall(block.payload)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for block in encode_blocks(base, new, ITEM_BYTES):
        encoded.put(block)
    encoded.put(None)
    sender.join()


def receive(address: tuple[str, int], base: Bytes) -> None:
    """The other process: versions until QUIT, each answered with its digest."""
    base, out = base.copy(), np.zeros_like(base)
    with socket.create_connection(address, source_address=(net.host(1), 0)) as connection:
        mode = bytearray(1)
        while True:
            read(connection, memoryview(mode))
            if mode == QUIT:
                return
            out[:] = 0
            connection.sendall(mode)
            digest = xxhash.xxh3_128()
            for offset, nbytes in spans(out.nbytes, ITEM_BYTES):
                part = out[offset : offset + nbytes]
                if mode == FULL:
                    read(connection, part.data)
                else:
                    apply_block(read_block(connection, offset, nbytes), base, out)
                digest.update(part.data)
            connection.sendall(digest.digest())


def read_block(connection: socket.socket, offset: int, nbytes: int) -> Block:
    header = bytearray(HEADER.size)
    read(connection, memoryview(header))
    size, checksum = HEADER.unpack(header)
    payload = bytearray(size)
    read(connection, memoryview(payload))
    return Block(offset, nbytes, ITEM_BYTES, checksum, payload)


def read(connection: socket.socket, view: memoryview) -> None:
    """Fill the view."""
    while view.nbytes:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the other side of the hop is gone")
        view = view[received:]


# --- the rate of the hop ----------------------------------------------------------------------


def limit_by_card(_: socket.socket, rate_mbit: int) -> None:
    net.limit(MACHINES, rate_mbit, BURST_BYTES)


def limit_by_pacing(connection: socket.socket, rate_mbit: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate_mbit * 1_000_000 // 8)


# --- all --------------------------------------------------------------------------------------


def figure(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": round(value, 2), "unit": unit}


def figures(quick: bool) -> Iterator[dict[str, Any]]:
    """All of them; `quick` takes fewer training steps and rounds."""
    steps = STEPS_QUICK if quick else STEPS
    versions = train(steps)
    yield from codec_figures(versions, steps)
    yield from hop_figures(versions[1], versions[0], quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer training steps and rounds")
    parser.add_argument("--hop", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--emulation", choices=("htb", "pacing"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hop:
        print(json.dumps(hop(args.hop, args.emulation, args.quick)))
        return
    for line in figures(args.quick):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
