"""Speed of in-flight weight updates relative to draining: real processes against the model.

Usage: python -m tools.bench.in_flight [--seeds 3] [--warm-steps 5] [--steps 15] [--keep DIR]
           [key=value ...]
Prints one JSON line per run and per ratio; exits 1 if a run fails, its books do not agree, its log
does not replay, a trained group is older than the bound, or the mean ratio of an in-flight mode to
the drain differs from the model's by more than APART.

The runs of a seed use configs/emulated_4.toml with each update mode, one after the other; the next
seed reverses the order, so that other load on the machine affects all modes alike. Engines, trainer
and prompts are emulated: a ratio compares decisions, not kernels. The measurement starts at the end
of the last warm step; the run is stopped after the last step.

The model (tools/bench/repack: world.py, in_flight.py) gets the settings of the run, the same
responses, and the median publish and load times of the drain run; it has no prompts, store or
sockets.

trained_per_s     tokens of the completed batches; generated_per_s: tokens that engines sampled
staleness_group   in steps, of a trained group by its oldest token: mean and largest; the measured
                  ones are of the whole run
staleness_token   in steps, of a token by its own weights: mean
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from laminar.analysis.log.timeline import read_steps
from laminar.config import Config, ConfigError
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.run.directory import run_config
from tools.bench.kills.lost_answers import Log, read_log
from tools.bench.repack.in_flight import InFlight
from tools.bench.repack.measures import GROUP_SIZE, Seen, Setup
from tools.bench.repack.world import RepackWorld
from tools.kit.real_run import BadRun, Run, check, read_json

CONFIG = "configs/emulated_4.toml"
DRAIN = "drain"
MODES = {
    DRAIN: ("rollout.weight_update=drain", "repack.policy=off"),
    "keep": ("rollout.weight_update=in-flight", "rollout.kv_on_update=keep"),
    "recompute": ("rollout.weight_update=in-flight", "rollout.kv_on_update=recompute"),
}
APART = 0.10
SPEEDS = ("trained_per_s", "generated_per_s")
Figures = dict[str, Any]


def measured(run_dir: Path, settings: Sequence[str], warm: int, steps: int) -> Figures:
    """Make a real run and return its figures; raise BadRun if it fails."""
    with Run(run_dir, CONFIG, settings) as training:
        training.until_step(warm + steps)
        training.drain()
    check(run_dir)
    oldest = read_json(run_dir / "summary.json")["staleness_max"]
    if oldest > (bound := run_config(run_dir).async_.max_staleness):
        raise BadRun(f"{run_dir}: trained a group of staleness {oldest}, the bound is {bound}")
    return figures(run_dir, read_log(run_dir), warm, warm + steps)


def figures(run_dir: Path, log: Log, first: int, last: int) -> Figures:
    """Measure from the end of step `first` to the end of step `last`, both counted from 1."""
    ends = [told.at_ns for told in log.events if isinstance(told.event, ev.StepCompleted)]
    begin_ns, end_ns = ends[first - 1], ends[last - 1]
    lengths = {
        told.event.trajectory_id: told.event.num_tokens
        for told in log.events
        if isinstance(told.event, ev.TrajectoryFinished)
    }
    batches = [order for _, order in log.orders if isinstance(order, cmd.TrainStep)]
    trained = sum(lengths[t] for batch in batches[first:last] for t in batch.trajectories)
    sampled = 0
    for name in sorted({told.peer for told in log.events if told.peer.startswith("rollout-")}):
        rows = read_steps(run_dir, name)
        sampled += int(rows[(rows[:, 1] > begin_ns) & (rows[:, 1] <= end_ns), 3].sum())
    seconds = (end_ns - begin_ns) / 1e9
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    ages = [line["staleness/token_mean"] for line in lines if "staleness/token_mean" in line]
    summary = read_json(run_dir / "summary.json")
    return {
        "seconds": round(seconds, 1),
        "trained_per_s": round(trained / seconds, 1),
        "generated_per_s": round(sampled / seconds, 1),
        "staleness_group": [round(summary["staleness_mean"], 2), summary["staleness_max"]],
        "staleness_token": round(mean(ages[first:last]), 2),
    } | _delays(log)


def _delays(log: Log) -> Figures:
    """Return the median seconds from the end of a step to its publication, and of a load."""
    done = {t.event.version: t.at_ns for t in log.events if isinstance(t.event, ev.StepCompleted)}
    published: dict[int, float] = {}
    loads = []
    for told in log.events:
        if isinstance(told.event, ev.WeightsPublished) and told.event.version in done:
            taken = (told.at_ns - done[told.event.version]) / 1e9
            published.setdefault(told.event.version, max(taken, 0.0))
        elif isinstance(told.event, ev.WeightsLoaded) and told.event.reloaded:
            loads.append(told.event.seconds)
    return {"publish_s": round(median(published.values()), 3), "load_s": round(median(loads), 3)}


def predicted(config: Config, mode: str, delays: Figures, warm: int, steps: int) -> Seen:
    """Return the model's prediction for such a run."""
    rollout, emulation = config.rollout, config.emulation
    if rollout.group_size != GROUP_SIZE:
        raise ConfigError(
            f"rollout.group_size = {rollout.group_size}: the model needs {GROUP_SIZE}"
        )
    setup = Setup(
        replicas=config.total_replicas,
        staleness=config.async_.max_staleness,
        policy="",
        max_batch=rollout.max_num_seqs,
        timing=EngineTiming(
            step_us=emulation.step_us,
            sequence_us=emulation.sequence_us,
            prefill_tokens_per_s=emulation.prefill_tokens_per_s,
            token_us=emulation.token_us,
            cache_tokens=emulation.kv_capacity_tokens,
        ),
        lengths=ResponseLengths(emulation.median_response, config.data.max_response_length),
        seed=config.seed,
        warm_steps=warm,
        steps=steps,
        slots=rollout.max_num_seqs,
        groups_per_step=config.data.train_batch_size,
        start_s=0.0,
        train_s=emulation.train_s,
        queued=rollout.group_size,
        publish_s=delays["publish_s"],
        load_s=delays["load_s"],
    )
    world = RepackWorld(setup) if mode == DRAIN else InFlight(setup, mode == "recompute")
    return world.run()


def pair(place: Path, seed: int, args: argparse.Namespace) -> Iterator[Figures]:
    """Yield the measured and predicted figures of every update mode with this seed."""
    modes = list(MODES) if seed % 2 else list(reversed(MODES))
    found, configs = {}, {}
    for mode in modes:
        run_dir = place / f"{mode}-{seed}"
        settings = (f"seed={seed}", *MODES[mode], *args.settings)
        found[mode] = measured(run_dir, settings, args.warm_steps, args.steps)
        configs[mode] = run_config(run_dir)
    for mode in modes:
        model = predicted(configs[mode], mode, found[DRAIN], args.warm_steps, args.steps)
        expected = {
            "trained_per_s": round(model.trained_per_s, 1),
            "generated_per_s": round(model.generated_per_s, 1),
            "staleness_group": [round(model.staleness_group_mean, 2), model.staleness_group_max],
            "staleness_token": round(model.staleness_token_mean, 2),
        }
        yield {"mode": mode, "seed": seed, "measured": found[mode], "predicted": expected}


def ratios(lines: Sequence[Figures]) -> Iterator[Figures]:
    """Yield the ratio of each in-flight mode to the drain of the same seed."""
    drains = {line["seed"]: line for line in lines if line["mode"] == DRAIN}
    for mode in MODES:
        for speed in SPEEDS if mode != DRAIN else ():
            found: Figures = {"name": f"{mode} / {DRAIN}", "of": speed}
            for kind in ("measured", "predicted"):
                by_seed = [
                    round(line[kind][speed] / drains[line["seed"]][kind][speed], 3)
                    for line in lines
                    if line["mode"] == mode
                ]
                found[kind] = {"mean": round(mean(by_seed), 3), "seeds": by_seed}
            found["apart"] = round(found["measured"]["mean"] / found["predicted"]["mean"] - 1, 3)
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm-steps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--keep", type=Path, help="directory that keeps the runs")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        place = (args.keep or Path(directory)).absolute()
        for seed in range(1, args.seeds + 1):
            try:
                for line in pair(place, seed, args):
                    print(json.dumps(line), flush=True)
                    lines.append(line)
            except (BadRun, ConfigError) as error:
                print(error, file=sys.stderr)
                return 1
    off = False
    for line in ratios(lines):
        print(json.dumps(line), flush=True)
        off = off or abs(line["apart"]) > APART
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
