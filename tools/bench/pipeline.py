"""Two machines that join share the layers of a model until each has all of it, or load it alone.

Usage: python tools/bench/pipeline.py [--rates MB/S ...] [--rounds 2]
Prints one JSON line per way and rate, then where the ways cross: ten minutes, as root or where user
namespaces are allowed.

Reads   nothing; weights are drawn from a seed
Gives   for each rate of a card: `first_token_s`, `all_tokens_s` (from the order to load until both
        machines have the first, the last token of all their rows), tokens/s once tokens come, and
        the same by formula; the rate below which the pipeline is sooner than each other way,
        measured and by formula; and how far tokens and log-probs of 100 sequences, which began in a
        pipeline and ended alone, are from those of one process that had all weights from the start

whole     both machines load everything, then prefill their rows and sample
stream    both prefill layer by layer, behind the layers that come
pipeline  one machine loads the lower half of the layers first, the other the upper half. When both
          are here, the rows of both go through the two as two batches. The other halves come
          meanwhile. After the step under way when all is here, each machine prefills its own rows
          with what was sampled and goes on alone

Each machine is a process with a card of its own (weights_net.py), a holder that sends it weights,
with a card of its own, too, and an emulated device: the model is run, and a layer takes 30 ms and
0.5 ms for each token, or what the processor takes if that is more. The layer loop is this bench's;
docs/scale-out.md says what the product has. Rows are greedy, in float32.

By formula, from bytes, rate B and what `whole` measures of a prefill P and a step s of a machine's
rows: whole M / B + P; stream max(M / B, P) + P / layers; pipeline H / B + 1.5 P, H the larger half:
two batches of half a prefill in each of two stages take three turns. Steps take s in each way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from anywhere

from laminar.engines.spans import Span, round_up
from tools.bench import weights_net as net
from tools.bench.pipeline_machine import (
    NETWORK,
    SPEC,
    Found,
    Pair,
    Places,
    Work,
    halves,
    new_model,
    prompts,
    write_weights,
)

RATES = (3, 4, 6, 9, 18, 54)  #: MB/s of a card
EQUAL, EQUAL_RATE = Work(rows=50, prompt=16, tokens=24), 1
"""Of the comparison with one process: 100 sequences on two machines; MB/s."""
LIMIT = 0.25  #: of the formula, to which a measured rate is held


# --- figures --------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """What a formula takes: bytes of everything and of the larger half; seconds of `whole`."""

    whole_bytes: int
    half_bytes: int
    prefill_s: float
    step_s: float

    def seconds(self, way: str, rate: float, work: Work) -> tuple[float, float]:
        """Until the first and the last token of all rows, at so many bytes/s."""
        whole_s, prefill_s, steps = self.whole_bytes / rate, self.prefill_s, work.tokens - 1
        if way == "whole":
            first = whole_s + prefill_s
            return first, first + steps * self.step_s
        if way == "stream":
            first = max(whole_s, prefill_s) + prefill_s / SPEC.num_layers
            return first, first + steps * self.step_s
        first = self.half_bytes / rate + 1.5 * prefill_s
        together = min(work.tokens, 1 + max(0, math.ceil((whole_s - first) / self.step_s)))
        last = first + (together - 1) * self.step_s
        if (left := work.tokens - together) > 0:
            last += prefill_s * (work.prompt + together) / work.prompt + (left - 1) * self.step_s
        return first, last


def line_of(way: str, rate: int, runs: list[list[Found]], work: Work) -> dict[str, Any]:
    """The round that took least: other work on the machine only adds."""
    run = min(runs, key=lambda run: max(one.times[-1] for one in run))
    line = {
        "way": way,
        "card_mb_s": rate,
        "first_token_s": min(max(one.times[0] for one in run) for run in runs),
        "all_tokens_s": max(one.times[-1] for one in run),
        "here_s": max(one.here_s for one in run),
        "tokens_per_s": 2 * work.rows / step_s(run),
    }
    if way == "pipeline":
        line["tokens_together"] = run[0].together
        if run[0].together > 1:
            line["together_tokens_per_s"] = 2 * work.rows / step_s(run, together=True)
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in line.items()}


def step_s(run: list[Found], together: bool = False) -> float:
    """Mean over the steps of both machines; `together`: those in the pipeline, else those alone."""
    steps = [
        after - before
        for one in run
        for before, after in itertools.pairwise(
            one.times[: one.together] if together else one.times[one.together :]
        )
    ]
    return statistics.mean(steps) if steps else math.nan


def crossing(rates: Sequence[float], gains: Sequence[float]) -> float | None:
    """Rate below which the gain is above 0. It is about linear in 1 / rate. None: it is nowhere, or
    everywhere, between these."""
    points = list(zip(rates, gains, strict=True))
    for (low, before), (high, behind) in itertools.pairwise(points):
        if before > 0 >= behind:
            share = before / (before - behind)
            return 1 / (1 / low + share * (1 / high - 1 / low))
    return None


def crossings(
    lines: list[dict[str, Any]], known: Measured, rates: Sequence[int], work: Work
) -> Iterator[dict[str, Any]]:
    """Below which rate the pipeline is sooner, measured and by formula."""
    fine = [rates[0] / 4 * 1.02**n for n in range(400)]
    by = {(line["way"], line["card_mb_s"]): line for line in lines}
    for number, name in enumerate(("first_token_s", "all_tokens_s")):
        for way in ("whole", "stream"):
            seen = [by[way, rate][name] - by["pipeline", rate][name] for rate in rates]
            formula = [
                known.seconds(way, rate * 1e6, work)[number]
                - known.seconds("pipeline", rate * 1e6, work)[number]
                for rate in fine
            ]
            found, expected = crossing(rates, seen), crossing(fine, formula)
            line = {"name": f"pipeline is sooner than {way} below, MB/s: {name}"}
            yield (
                line
                | {"measured": found and round(found, 1)}
                | {
                    "formula": expected and round(expected, 1),
                    "ratio": found and expected and round(found / expected, 2),
                }
            )


@torch.no_grad()
def equality(pair: Pair, path: Path, places: Places) -> dict[str, Any]:
    """100 sequences that began in a pipeline against the product's forward pass in one process."""
    found = pair.run("pipeline", EQUAL, EQUAL_RATE)
    model = new_model(2 * EQUAL.rows, max(2 * EQUAL.rows, EQUAL.prompt + EQUAL.tokens))
    content = path.read_bytes()
    for name, (offset, size) in places.items():
        target = model.weights.targets[name]
        drawn = torch.frombuffer(bytearray(content[offset : offset + size]), dtype=torch.float32)
        target.copy_(drawn.view(target.shape))
    ids, start = prompts(EQUAL).flatten(0, 1), 0
    tokens, logprobs = [], []
    for _ in range(EQUAL.tokens):
        positions = torch.arange(start, start + ids.shape[1])[None]
        span = Span(0, len(ids), round_up(start + ids.shape[1]))
        hidden = model.forward(ids, positions, [span])[:, -1]
        best, chosen = torch.log_softmax(model.logits(hidden), -1).max(-1)
        tokens.append(chosen)
        logprobs.append(best)
        start, ids = start + ids.shape[1], chosen[:, None]
    seen_tokens = np.concatenate([one.tokens for one in found])
    seen_logprobs = np.concatenate([one.logprobs for one in found])
    expected_tokens = torch.stack(tokens, 1).numpy()
    furthest = float(np.abs(seen_logprobs - torch.stack(logprobs, 1).numpy()).max())
    same = int((seen_tokens == expected_tokens).all(axis=1).sum())
    return {
        "name": "sequences with the tokens of one whole process",
        "value": same,
        "of": len(seen_tokens),
        "tokens_each": EQUAL.tokens,
        "of_these_in_the_pipeline": found[0].together,
        "logprob_furthest": furthest,
        "met": same == len(seen_tokens) and furthest <= 1e-4,
    }


def inside(rates: Sequence[int], rounds: int) -> None:
    """All of it, in a namespace of our own."""
    begun, work = time.monotonic(), Work()
    net.open_network(NETWORK)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        torch.set_num_threads(1)
        places = write_weights(path)
        pair = Pair(path, places)
        try:
            show(equality(pair, path, places))
            lines, known = measure(pair, halves(places), rates, rounds, work)
        finally:
            pair.close()
    for line in (*lines, known._asdict(), *crossings(lines, known, rates, work)):
        show(line)
    show({"name": "duration", "value": round(time.monotonic() - begun), "unit": "s"})


def measure(
    pair: Pair, sizes: tuple[int, int], rates: Sequence[int], rounds: int, work: Work
) -> tuple[list[dict[str, Any]], Measured]:
    """A line for each way and rate, ways in turn, so that other work on the machine meets all."""
    runs: dict[tuple[str, int], list[list[Found]]] = {}
    for _ in range(rounds):
        for rate in rates:
            for way in ("whole", "stream", "pipeline"):
                runs.setdefault((way, rate), []).append(pair.run(way, work, rate))
    alone = [run for (way, _), found in runs.items() if way == "whole" for run in found]
    known = Measured(
        *sizes,
        prefill_s=statistics.median(max(o.times[0] - o.here_s for o in run) for run in alone),
        step_s=statistics.median(map(step_s, alone)),
    )
    lines = []
    for (way, rate), found in runs.items():
        first, last = known.seconds(way, rate * 1e6, work)
        formula = {"formula_first_token_s": round(first, 3), "formula_all_tokens_s": round(last, 3)}
        lines.append(line_of(way, rate, found, work) | formula)
    return lines, known


def show(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="MB/s of a card")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if min(given.rates) < 1 or given.rounds < 1:
        parser.error("--rates and --rounds: give whole numbers of at least 1")
    if given.inside:
        return inside(sorted(given.rates), given.rounds)
    prefix = net.namespace()
    if prefix is None:
        sys.exit(
            "pipeline: no private network here, in which network cards could be emulated; "
            "install iproute2 and run it as root or allow user namespaces"
        )
    sys.exit(subprocess.run([*prefix, sys.executable, *sys.argv, "--inside"]).returncode)


if __name__ == "__main__":
    main()
