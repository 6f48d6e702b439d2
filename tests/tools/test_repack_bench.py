"""The bench of repack: its world is that of the simulator, its rules are those it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.engines.timing import ResponseLengths
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.sim.config import load
from laminar.sim.faults.faults import KINDS
from laminar.sim.scenario import draw
from laminar.sim.world import World
from tools.bench import repack
from tools.bench.repack_fit import FITTED, Parameters, error, figures
from tools.bench.repack_in_flight import InFlight
from tools.bench.repack_measures import GROUP_SIZE, SECOND, Setup
from tools.bench.repack_paper import drains
from tools.bench.repack_world import RepackWorld

CONFIG = Path(__file__).parents[2] / "configs" / "sim_repack.toml"
SMALL = Setup(
    replicas=4,
    staleness=4,
    policy="gain",
    max_batch=16,
    timing=msgspec.structs.replace(FITTED.timing(), cache_tokens=10_000),
    lengths=ResponseLengths(median=300, limit=1_600, p99_to_median=3.39),
    seed=1,
    warm_steps=3,
    steps=5,
    slots=64,
    groups_per_step=8,
    start_s=1.0,
    train_s=0.5,
)


def simulated(setup: Setup) -> float:
    """Trained tokens a second of the same steps in the simulator, with the real actors."""
    config = load(CONFIG, KINDS)
    work = {
        "replicas": setup.replicas, "nodes": 1, "slots": setup.slots,
        "groups_per_step": setup.groups_per_step, "groups_per_version": setup.slots // GROUP_SIZE,
        "total_steps": 100,
    }  # fmt: skip
    time = {
        "train_s": setup.train_s * 4, "cache_tokens": setup.timing.cache_tokens, "start_s": 1.0,
        "median_tokens": setup.lengths.median, "max_tokens": setup.lengths.limit, "quantum_ms": 5,
    }  # fmt: skip
    changed: dict[str, Any] = {
        "work": msgspec.structs.replace(config.work, **work),
        "time": msgspec.structs.replace(config.time, **time),
        "repack": msgspec.structs.replace(config.repack, policy=setup.policy, max_batch=16),
    }
    tokens, ended = 0, []

    def listen(stamped: Any, commands: Any, state: Any) -> None:
        nonlocal tokens
        if isinstance(stamped.event, ev.StepCompleted):
            tokens += stamped.event.num_tokens
            ended.append((stamped.time_ns, tokens))

    with World(msgspec.structs.replace(config, **changed), setup.seed, listen) as world:
        world.begin()
        while len(ended) < setup.warm_steps + setup.steps:
            world.scheduler.step()
    (begin_ns, before), (end_ns, after) = ended[setup.warm_steps - 1], ended[-1]
    return (after - before) * SECOND / (end_ns - begin_ns)


@pytest.mark.parametrize("policy", ["", "gain"])
def test_the_core_alone_is_as_fast_as_with_the_actors(policy: str) -> None:
    """Delays, the lengths of steps and the starts are drawn by each in its own way."""
    setup = SMALL._replace(policy=policy)
    alone = RepackWorld(setup).run()
    both = alone.trained_per_s, simulated(setup)
    assert both[0] == pytest.approx(both[1], rel=0.1)


class Counting(RepackWorld):
    """How many trajectories a replica got from one time that it was empty to the next, at most."""

    most = 0

    def _begin(self) -> None:
        self.got: dict[str, int] = {}
        super()._begin()

    def _generate(self, command_id: int, command: cmd.GenerateTrajectory) -> None:
        busy = self._replicas[command.to].placements
        self.got[command.to] = self.got[command.to] + 1 if busy else 1
        self.most = max(self.most, self.got[command.to])
        super()._generate(command_id, command)


def test_the_papers_replicas_drain_a_batch_of_fixed_size() -> None:
    ours, papers = Counting(SMALL._replace(policy="")), Counting(SMALL._replace(policy=""))
    ours.run()
    with drains():
        papers.run()
    assert papers.most == SMALL.slots < ours.most


def test_nothing_that_drains_is_faster_than_weights_in_flight() -> None:
    ceiling = InFlight(SMALL).run()
    seen = RepackWorld(SMALL).run()
    assert seen.released and seen.moved >= seen.released
    assert ceiling.generated_per_s > 1.02 * seen.generated_per_s and not ceiling.moved
    assert ceiling.cache_use > seen.cache_use


def test_the_config_has_the_engine_that_was_fitted() -> None:
    scenario = draw(load(CONFIG, KINDS), 1)
    assert scenario.engine == FITTED.timing() and scenario.lengths == FITTED.lengths()
    setup = repack.Cell("gain").setup()
    assert (setup.slots, setup.groups_per_step) == (scenario.slots, 512)
    assert setup.train_s == scenario.train_s


def test_the_fit_is_better_than_what_is_beside_it() -> None:
    least = error(figures(FITTED))
    for changed in (FITTED._replace(step_us=28_000), FITTED._replace(median_tokens=1_900)):
        assert error(figures(Parameters(*changed))) > least


def test_runs_that_are_known_are_not_run_again(tmp_path: Path) -> None:
    cells = [repack.Cell(policy, seed) for policy in ("off", "gain") for seed in (1, 2)]
    speeds = {"off": 100.0, "gain": 120.0}
    shown = dict.fromkeys((*repack.SHOWN, "cpu_s"), 0.0)
    lines = [
        cell._asdict()
        | shown
        | {"trained_per_s": speeds[cell.policy] + cell.seed, "generated_per_s": 1}
        for cell in cells
    ]
    kept = tmp_path / "results.jsonl"
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(repack.results(cells, 1, kept)) == lines
    found = {line["name"]: line for line in repack.compared(lines)}
    ratio = found["gain / off: 16 replicas, staleness 4, prefill 20000, figure-9"]
    assert ratio["predicted"] and ratio["trained_per_s"] == "+19.7 % (+- 1.2)"
