"""What publishing costs a trainer and pulling a replica, beside one copy of the same bytes.

Gives   figures

Both work on the slots of relays between which a broadcast is going on all the time. Publishing is
what the trainer does: all tensors of a model into a slot that was granted ahead, and the hand-over
to the relay. Pulling is what a replica does: a lease on the latest version of a relay that is
receiving the next one, all tensors out of its slot, the end of the lease. The ratios are of
processor time, medians of interleaved rounds, because the machine may be busy; times by the clock
stand beside them. A model's tensors are copied one by one, and all bytes at once are what they are
compared with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from laminar.weights.version import manifest as mf
from laminar.weights.version.chunking import CHUNK_BYTES_MIN
from laminar.weights.version.tensors import tensor_view, write_tensors
from tools.bench import weights_net as net
from tools.bench.weights_baselines import buffers
from tools.bench.weights_relay import RelayProcess, digest_of

RATE_MBIT = 1600
HIDDEN, KV, MLP = 1024, 256, 2816


def model_shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Decoder layers of a 0.5B-sized model, 43 MiB each in float32."""
    attention = [(HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN)]
    shapes = [*attention, (MLP, HIDDEN), (MLP, HIDDEN), (HIDDEN, MLP), (HIDDEN,), (HIDDEN,)]
    return [(f"{layer}.{i}", shape) for layer in range(layers) for i, shape in enumerate(shapes)]


@dataclass
class Times:
    """Of one operation, in every round."""

    cpu: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)

    def measure(self, operation: Callable[[], object]) -> None:
        cpu, clock = time.process_time(), time.perf_counter()
        operation()
        self.cpu.append(time.process_time() - cpu)
        self.clock.append(time.perf_counter() - clock)

    def ratio(self, other: Times) -> tuple[float, float]:
        """(of processor time, by the clock), the first round left out: it warms up."""
        pairs = ((self.cpu, other.cpu), (self.clock, other.clock))
        cpu, clock = (statistics.median(a[1:]) / statistics.median(b[1:]) for a, b in pairs)
        return cpu, clock


class Machines:
    """A trainer's relay, the relay of a replica, and the memory of both processes."""

    def __init__(self, layers: int) -> None:
        self.specs = mf.layout(model_shapes(layers), "float32")
        self.total = mf.check_tensors(self.specs)
        names = ("trainers", "replicas")
        self.relays = [
            RelayProcess(name, self.total, lambda version, view: None, host=net.host(index))
            for index, name in enumerate(names)
        ]
        self.relays[0].set_successor(1, self.relays[1])
        self.tensors = {spec.name: torch.randn(spec.shape) for spec in self.specs}
        self.engine = {spec.name: torch.ones(spec.shape).numpy() for spec in self.specs}
        # From torch, like the tensors: numpy's huge pages alone would make a copy 10 % faster.
        self.plain = torch.ones(self.total, dtype=torch.uint8).numpy()
        self.shared = np.frombuffer(buffers(1, self.total)[0], np.uint8)
        self.manifest = self._manifest()
        self.version = 0
        self.slot = self.relays[0].grant()

    def publish(self) -> None:
        """As the trainer does."""
        view = np.frombuffer(self.relays[0].bytes_of(self.slot), np.uint8)
        write_tensors(view, self.specs, self.tensors.items())
        self.relays[0].commit(self.slot, self.version, CHUNK_BYTES_MIN)

    def prepare(self) -> None:
        """The slot for the next publish, which a trainer has before it needs it."""
        self.version += 1
        self.slot = self.relays[0].grant()
        self.tensors["0.0"][0, 0] += 1.0

    def pull(self, slot: int) -> None:
        view = np.frombuffer(self.relays[1].bytes_of(slot), np.uint8)
        for spec in self.specs:
            np.copyto(self.engine[spec.name], tensor_view(view, spec).numpy())

    def close(self) -> None:
        for relay in self.relays:
            relay.close()

    def _manifest(self) -> mf.Manifest:
        """Where the tensors are; nobody looks at its hashes."""
        like = mf.Draft(
            version=0, step=0, kind="full", dtype="float32", total_bytes=self.total,
            tensors=self.specs, parts=(mf.Part(rank=0, offset=0, nbytes=self.total),),
            chunk_bytes=CHUNK_BYTES_MIN, probe=None,
        )  # fmt: skip
        return mf.seal(like, [0] * mf.num_chunks(like), "0" * 32)


def figures(layers: int, rounds: int) -> Iterator[dict[str, Any]]:
    """RuntimeError if a version that was pulled is not the one that was received."""
    net.limit(2)
    machines = Machines(layers)
    try:
        machines.publish()
        machines.relays[1].received(0)
        machines.prepare()
        net.limit(2, RATE_MBIT)
        publish, copy_in, pull, copy_out = (Times() for _ in range(4))
        during = 0
        for _ in range(rounds + 1):
            publish.measure(machines.publish)
            copy_in.measure(lambda: np.copyto(machines.shared, machines.plain))
            machines.prepare()
            lease, slot, version = machines.relays[1].lease()
            pull.measure(lambda slot=slot: machines.pull(slot))
            copy_out.measure(lambda: np.copyto(machines.plain, machines.shared))
            _check(machines.relays[1], version, slot)
            during += machines.relays[1].status().receiving >= 0
            machines.relays[1].release(lease)
    finally:
        machines.close()
    stall, stall_clock = publish.ratio(copy_in)
    speed, speed_clock = copy_out.ratio(pull)
    extra = {"mib": machines.total >> 20, "rounds_during_broadcast": f"{during} of {rounds + 1}"}
    yield {"name": "publish_stall_ratio", "value": stall, "unit": "ratio", **extra}
    yield {"name": "publish_stall_ratio_by_clock", "value": stall_clock, "unit": "ratio"}
    yield {"name": "pull_ratio", "value": speed, "unit": "ratio", **extra}
    yield {"name": "pull_ratio_by_clock", "value": speed_clock, "unit": "ratio"}


def _check(relay: RelayProcess, version: int, slot: int) -> None:
    """What is leased is what was received."""
    wanted = relay.received(version).report.manifest.digest
    if digest_of(relay.bytes_of(slot)) != wanted:
        raise RuntimeError(f"version {version} in slot {slot} is not what was received")
