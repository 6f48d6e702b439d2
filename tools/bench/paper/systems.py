"""Systems that the paper compares, and this project's policies, as runs in virtual time.

Reads   constants.toml
Gives   Run; runs_of a cell; measured, the line of a run; K, the constants
"""

from __future__ import annotations

import math
import time
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.names import ids
from tools.bench.repack.drains import drains
from tools.bench.repack.in_flight import InFlight
from tools.bench.repack.measures import GROUP_SIZE, SECOND, Seen, Setup, all_tokens_are_there
from tools.bench.repack.world import RepackWorld

CONSTANTS = Path(__file__).with_name("constants.toml")
SOURCES = ("read", "fitted", "derived", "guessed")
FITTED_MODEL = "32B"
NO_BOUND = 1_000
HEAD, BYTES = 128, 2  #: dimensions of a head; bytes of a number


def constants(text: str) -> dict[str, Any]:
    """Parse the constants by name; refuse a constant without a source."""
    found = {}
    for name, entry in tomllib.loads(text).items():
        if entry.get("source") not in SOURCES or not entry.get("note"):
            known = ", ".join(SOURCES)
            raise SystemExit(f"constants.toml: {name}: give it a source ({known}) and a note")
        found[name] = entry["value"]
    return found


K = constants(CONSTANTS.read_text())


# --- models ---------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """A mixture of lognormals, cut at a limit."""

    parts: tuple[tuple[float, ResponseLengths], ...]

    def draw_length(self, seed: int) -> int:
        """Return the length of the response for a trajectory's seed, in tokens."""
        drawn, upto = ids.hash64(seed, "part") / 2**64, 0.0
        for share, lengths in self.parts[:-1]:
            upto += share
            if drawn < upto:
                return lengths.draw_length(seed)
        return self.parts[-1][1].draw_length(seed)


def lengths_of(model: str) -> Lengths:
    limit = K["length_limit"]
    parts = (
        (share, ResponseLengths(median, limit, ratio))
        for share, median, ratio in K["lengths"][model]
    )
    return Lengths(tuple(parts))


def weight_bytes(model: str) -> float:
    return float(BYTES * K["parameters"][model])


def timing(model: str, gpus: int, scaling: str) -> EngineTiming:
    """Return the timing of a replica: the engine of Figure 4, slowed down to Figure 9."""
    layers, traffic = K["layers"][model], K["bytes_per_s"] * gpus
    token_bytes = 2 * layers * K["kv_heads"][model] * HEAD * BYTES
    step_us = K["step_us"] + 1e6 * weight_bytes(model) / traffic
    step_us += K["all_reduce_us"] * layers * (gpus > 1)
    step_us += K["overhead_us"] * (
        layers / K["layers"][FITTED_MODEL] if scaling == "layers" else 1.0
    )
    flop = K["parameters"][FITTED_MODEL] / K["gpus_per_replica"][FITTED_MODEL]
    return EngineTiming(
        step_us=step_us,
        sequence_us=K["sequence_us"],
        prefill_tokens_per_s=K["prefill_tokens_per_s"] * flop * gpus / K["parameters"][model],
        token_us=K["token_share"] * 1e6 * token_bytes / traffic,
        cache_tokens=int((K["cache_share"] * 80e9 * gpus - weight_bytes(model)) / token_bytes),
    )


@cache
def totals(model: str, seed: int) -> tuple[int, ...]:
    """Return the response lengths of a step, sibling by sibling."""
    lengths = lengths_of(model)
    return tuple(
        lengths.draw_length(ids.trajectory_seed(seed, ids.train_group(0, order), sibling, 1))
        for order in range(K["batch"] // GROUP_SIZE)
        for sibling in range(GROUP_SIZE)
    )


def train_s(model: str, gpus: int) -> float:
    """Return the seconds of a training step on `gpus` GPUs."""
    work = [K["parameters"][m] * sum(totals(m, 1)) for m in (model, FITTED_MODEL)]
    return float(K["train_gpu_s"] / gpus * work[0] / work[1])


# --- systems --------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A run of one system on one cell."""

    model: str
    gpus: int
    system: str
    scaling: str = "layers"
    per_pull: int = 1_024

    @property
    def trainer_gpus(self) -> int:
        if self.system == "areal":
            return int(K["split_areal"].get(str(self.gpus), self.gpus // 2))
        return int(K["split"][self.model][str(self.gpus)])

    def setup(self, staleness: int, policy: str = "", pause_s: float = 0.0) -> Setup:
        """Return the setup; `pause_s` is the trainer's pause after each step."""
        gpus = K["gpus_per_replica"][self.model]
        return Setup(
            replicas=(self.gpus - self.trainer_gpus) // gpus,
            staleness=staleness,
            policy=policy,
            max_batch=K["max_batch"],
            timing=timing(self.model, gpus, self.scaling),
            lengths=lengths_of(self.model),
            seed=1,
            warm_steps=K["warm_steps"],
            steps=K["steps"],
            slots=self.per_pull,
            train_s=train_s(self.model, self.trainer_gpus) + pause_s,
        )

    def seen(self) -> Seen:
        if self.system == "areal":
            ratio = weight_bytes(self.model) / weight_bytes(FITTED_MODEL)
            pause_s = K["areal_update_s"] * ratio
            setup = self.setup(NO_BOUND, pause_s=pause_s)
            return InFlight(setup._replace(load_s=pause_s), recompute=True).run()
        if self.system == "keep":
            return InFlight(self.setup(K["bound"])).run()
        if self.system == "gain":
            return RepackWorld(self.setup(K["bound"], "gain")).run()
        with drains():
            bound = K["bound"] if self.system == "bounded" else NO_BOUND
            return RepackWorld(self.setup(bound, "best-fit")).run()

    def batches(self) -> dict[str, float]:
        """Return the tokens/s and staleness of a system that generates batch by batch."""
        speeds = [
            self._synchronous(seed) if self.system == "synchronous" else self._one_step(seed)
            for seed in (1, 2, 3)
        ]
        staleness = float(self.system == "one-step")
        return {
            "trained_per_s": sum(speeds) / len(speeds),
            "staleness_group_mean": staleness,
            "staleness_group_max": staleness,
            "staleness_token_mean": staleness,
        }

    def _synchronous(self, seed: int) -> float:
        seconds = self._generates_s(self.gpus, seed) + train_s(self.model, self.gpus)
        return sum(totals(self.model, seed)) / seconds

    def _one_step(self, seed: int) -> float:
        """Return the tokens/s with the GPU split that the paper names, or else the fastest."""
        unit, named = K["trainer_unit"][self.model], K["split_one_step"][self.model]
        splits = range(unit, self.gpus - unit + 1, unit * max(1, self.gpus // (8 * unit)))
        trainers = [named[str(self.gpus)]] if str(self.gpus) in named else splits
        seconds = min(
            max(self._generates_s(self.gpus - gpus, seed), train_s(self.model, gpus))
            for gpus in trainers
        )
        return sum(totals(self.model, seed)) / seconds

    def _generates_s(self, gpus: int, seed: int) -> float:
        """Return the seconds until the last replica has drained its part of a batch."""
        size = K["gpus_per_replica_verl"][self.model]
        replicas, engine = gpus // size, timing(self.model, size, self.scaling)
        last, sampled = 0.0, 0
        for replica in range(replicas):
            batch = TimedBatch(engine, K["concurrency"])
            for number, total in enumerate(totals(self.model, seed)):
                if number // GROUP_SIZE % replicas == replica:
                    batch.add(str(number), 0, 0, total, 0.0)
            batch.advance_to(0.0)
            while batch.next_ns < math.inf:
                last = max(last, batch.next_ns)
                batch.advance_to(batch.next_ns)
            sampled += batch.sampled
        all_tokens_are_there(sampled, sum(totals(self.model, seed)), 0)
        return last / SECOND


def measured(run: Run) -> dict[str, Any]:
    """Make a run and return its line."""
    begun = time.process_time()
    if run.system in ("synchronous", "one-step"):
        found = run.batches()
    else:
        seen = run.seen()
        found = {"trained_per_s": seen.trained_per_s} | seen._asdict()
    rounded = {name: round(value, 3) for name, value in found.items()}
    return run._asdict() | rounded | {"cpu_s": round(time.process_time() - begun, 1)}


def runs_of(model: str, gpus: int) -> list[Run]:
    """Return the runs of one cell; models other than the fitted one use two engine scalings."""
    scalings = ["layers"] if model == FITTED_MODEL else ["layers", "constant"]
    pulls, size = sorted(K["per_pull"]), K["gpus_per_replica"][model]
    predicted = [
        Run(model, gpus, system, scaling)
        for system in ("synchronous", "one-step", "areal")
        for scaling in scalings
    ]
    # The ends of the interval: the slower engine with fewer trajectories, the faster with more.
    scalings.sort(key=lambda scaling: -timing(model, size, scaling).step_us)
    ends = ((scalings[0], pulls[0]), (scalings[-1], pulls[-1]))
    predicted += [Run(model, gpus, "paper", *end) for end in ends]
    systems = ("bounded", "gain", "keep")
    return predicted + [Run(model, gpus, s, per_pull=pull) for s in systems for pull in pulls]
