"""What a machine that joins costs a run on 1,024 GPUs, in virtual time.

Usage: python tools/bench/join_cost.py
Prints one JSON line per card and way to load; seconds of CPU time.

Reads   tools/bench/paper.toml: the engine of 32B on four GPUs
Gives   `first_token_s` from the first byte; `tokens`: of the replica in the first ten minutes;
        `gained`: more than by `whole`; `lost`: less than of one that had its weights at once; both
        as shares of what the run samples in an hour, so for one join an hour

whole     the version comes (65 GB), is copied to the GPUs and checked, then prompts are prefilled
stream    prefill follows the layers that come
pipeline  2, 4 or 8 machines join at once, each loads its share of the layers first, and their rows
          go through all of them until each has everything and prefills its own again. With as many
          batches under way as there are stages each machine samples as if it were alone

The replica takes 64 new groups of 16 with prompts of 300 tokens and begins a group when one has
ended. Half of the GPUs generate: 128 replicas. Processes start before (docs/scale-out.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from anywhere

from laminar.engines.emulated.timed_batch import TimedBatch
from laminar.names import ids
from tools.bench.paper import K, lengths_of, timing
from tools.bench.repack_measures import GROUP_SIZE, SECOND

MODEL = "32B"
VERSION_BYTES = 65e9
COPY_BYTES_S = 112e9
"""From host memory to a replica's GPUs (arXiv:2510.12633, Figure 14)."""
PROBE_S = 0.3
REPLICAS = 128
GROUPS, PROMPT = 64, 300
HORIZON_S = 600.0
CARDS_GBIT = (10, 100, 400)
STAGES = (2, 4, 8)


class Replica:
    """An engine that always has as many groups as it takes."""

    def __init__(self) -> None:
        self.batch = TimedBatch(
            timing(MODEL, K["gpus_per_replica"][MODEL], "layers"), K["concurrency"]
        )
        self.lengths = lengths_of(MODEL)
        self.groups: dict[int, list[str]] = {}
        self.begun = 0

    def take(self, now: float) -> None:
        while len(self.groups) < GROUPS:
            members = [f"{self.begun}.{sibling}" for sibling in range(GROUP_SIZE)]
            for sibling, name in enumerate(members):
                seed = ids.trajectory_seed(1, ids.train_group(0, self.begun), sibling, 1)
                prompt = 0 if sibling else PROMPT  # siblings share it
                self.batch.add(name, prompt, 0, self.lengths.of(seed), now)
            self.groups[self.begun] = members
            self.begun += 1

    def run(self, until: float) -> None:
        """To that time, in ns."""
        while self.batch.next_ns <= until:
            now = self.batch.next_ns
            self.batch.advance(now)
            for number, members in list(self.groups.items()):
                if not any(map(self.batch.has, members)):
                    del self.groups[number]
            self.take(now)
        self.batch.advance(until)


def sampled(begins_s: float, prefilled_s: float, again_s: float | None) -> int:
    """Tokens until the horizon of a replica that prefills from `begins_s`, of which `prefilled_s`
    are done by then, and once more at `again_s`."""
    replica = Replica()
    start = (begins_s - prefilled_s) * SECOND
    replica.take(start)
    replica.batch.advance(start)
    if again_s is not None:
        replica.run(again_s * SECOND)
        replica.batch.prefill_again(again_s * SECOND)
        replica.batch.advance(again_s * SECOND)
    replica.run(HORIZON_S * SECOND)
    return replica.batch.sampled


def ways(gbit: int) -> Iterator[tuple[str, float, int]]:
    """Name, seconds to the first token, tokens until the horizon."""
    wire_s = VERSION_BYTES * 8 / (gbit * 1e9)
    behind_s = VERSION_BYTES / COPY_BYTES_S + PROBE_S
    prefill_s = GROUPS * PROMPT / K["prefill_tokens_per_s"]
    whole_s = wire_s + behind_s
    yield "whole", whole_s + prefill_s, sampled(whole_s, 0.0, None)
    layers = K["layers"][MODEL]
    # A layer is copied when it is here: behind the last one are its own copy and the probe.
    here_s = wire_s + behind_s / layers + PROBE_S
    saved_s = min(wire_s, prefill_s) * (1 - 1 / layers)
    yield "stream", here_s + prefill_s - saved_s, sampled(here_s, saved_s, None)
    for stages in STAGES:
        begins_s = whole_s / stages
        fill_s = prefill_s * (stages - 1) / stages  # until the last batch is through all stages
        first_s = begins_s + fill_s + prefill_s
        if first_s > whole_s:  # all is here before the first token
            first_s = whole_s + prefill_s
        yield f"pipeline of {stages}", first_s, sampled(begins_s + fill_s, 0.0, whole_s)


def main() -> None:
    full = sampled(0.0, 0.0, None)
    hour = full / HORIZON_S * 3_600 * REPLICAS
    for gbit in CARDS_GBIT:
        found = list(ways(gbit))
        for way, first_s, tokens in found:
            line: dict[str, Any] = {"gbit": gbit, "way": way, "first_token_s": round(first_s, 1)}
            line |= {"tokens": tokens, "gained": tokens - found[0][2], "lost": full - tokens}
            for name in ("gained", "lost"):
                line[f"{name}_percent_of_an_hour"] = round(100 * line[name] / hour, 4)
            print(json.dumps(line))


if __name__ == "__main__":
    main()
