"""The parts of the simulator by themselves: time, requests, engines, lengths, configs."""

from __future__ import annotations

import statistics
from operator import attrgetter
from pathlib import Path

import pytest

from laminar.engines.emulated.batch_clock import BatchClock, ClockSequence
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from tools.kit.sim_worlds import calm, list_differences
from tools.simulator.config import SWARM, WITH_REPACK, load
from tools.simulator.faults.faults import KINDS
from tools.simulator.run import make_world
from tools.simulator.scenario import BOUNDARIES, draw
from tools.simulator.scheduler import SECOND

ROOT = Path(__file__).parents[2]


# --- timing -------------------------------------------------------------------------------------


def test_response_lengths_have_a_long_tail() -> None:
    """p99 is ten times the median, and the same seed has the same length."""
    lengths = ResponseLengths(median=100, limit=10_000)
    drawn = sorted(lengths.draw_length(seed) for seed in range(20_000))
    assert drawn[0] >= 1 and lengths.draw_length(7) == lengths.draw_length(7)
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    assert drawn[19_800] == pytest.approx(1_000, rel=0.15)


# --- the engine ---------------------------------------------------------------------------------


class Bench:
    """An engine alone in a world."""

    def __init__(self, slots: int = 2) -> None:
        self.world = make_world(calm(), 1)
        self.process = self.world.processes["rollout-0"]
        self.process.boot, self.process.alive = 1, True
        self.process.model = self  # type: ignore[assignment]
        self.finished: list[str] = []
        timing = EngineTiming(step_us=1e6, sequence_us=0)  # a token a second
        self.engine = BatchClock(self.process, timing, slots, self._on_finished)

    def _on_finished(self, finished: list[ClockSequence]) -> None:
        self.finished += [sequence.id for sequence in finished]

    def add(self, name: str, total: int, done: int = 0, hangs: bool = False) -> ClockSequence:
        sequence = ClockSequence(name, done, total, hangs)
        self.engine.add(sequence)
        return sequence

    def pause(self) -> None:
        self.engine.advance_to_now()

    def resume(self) -> None:
        self.engine.resume_time()

    def until(self, second: float) -> None:
        marks: list[int] = []
        self.world.scheduler.at(int(second * SECOND), marks.append, 1)
        while not marks:
            self.world.scheduler.step()
        if not self.process.paused:
            self.engine.advance_to_now()


def test_sequences_advance_together_and_end_in_order() -> None:
    bench = Bench()
    long, short = bench.add("long", 10), bench.add("short", 4)
    bench.until(3.5)
    assert (bench.engine.count_tokens(long), bench.engine.count_tokens(short)) == (3, 3)
    assert bench.finished == []
    bench.until(4.5)
    assert bench.finished == ["short"]
    bench.until(10.5)
    assert bench.finished == ["short", "long"]


def test_aborted_and_hanging_sequences_never_end() -> None:
    bench = Bench()
    bench.add("hung", 3, hangs=True)
    bench.add("gone", 3)
    bench.until(1.5)
    bench.engine.abort_sequence("gone")
    bench.until(20)
    assert bench.finished == [] and bench.engine.running == 1


def test_slow_and_paused_engines_take_longer() -> None:
    bench = Bench()
    bench.add("s", 4)
    bench.until(2)
    bench.process.pause()
    bench.until(10)
    assert bench.finished == []
    bench.process.slow = 3.0
    bench.process.resume()
    bench.until(15.9)
    assert bench.finished == []
    bench.until(16.1)
    assert bench.finished == ["s"]


# --- configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "1024", "repack", "agents", "sources"])
def test_shipped_configs_are_legal(name: str) -> None:
    config = load(ROOT / "configs" / f"sim_{name}.toml", KINDS)
    for seed in range(20):
        draw(config, seed)


def test_every_choice_is_drawn_at_its_boundaries_too_and_what_is_none_is_not() -> None:
    often = load(SWARM, KINDS) | {"world.boundary_share": 0.3}
    drawn = [draw(often, seed) for seed in range(300)]
    for key, values in BOUNDARIES.items():
        if key in ("rollout.max_num_seqs", "world.fork_step"):
            continue  # a group fits in an engine; a fork has more than its step
        value_of = attrgetter(key.replace("async", "async_"))
        assert {value_of(d.config) for d in drawn} >= set(values), key
    forks = {d.origin.step for d in drawn if d.origin is not None}
    assert forks >= {1, 10} and min(d.config.rollout.max_num_seqs for d in drawn) == 2
    sizes = [(d.world.num_train, d.settings) for d in drawn]
    assert sum(size == s.groups_per_step * s.total_steps for size, s in sizes) > 30
    often |= {"rollout.replicas": 4, "world.num_train": 40, "trainer.total_training_steps": 3}
    drawn = [draw(often, seed) for seed in range(50)]
    assert {(d.config.rollout.replicas, d.world.num_train) for d in drawn} == {(4, 40)}


def test_a_world_with_a_policy_has_tails_and_is_the_same_otherwise() -> None:
    """The draw of everything else does not change with what [world.with_repack] replaces."""
    small = load(ROOT / "configs" / "sim_small.toml", KINDS)
    packed = 0
    for seed in range(1, 41):
        drawn, other = draw(small, seed), draw(small | {WITH_REPACK: {}}, seed)
        replaced = {WITH_REPACK}
        if drawn.settings.repack_policy:
            packed += 1
            assert drawn.settings.max_staleness > 0 and drawn.lengths.median == 200
            replaced |= small[WITH_REPACK].keys()
        assert list_differences(drawn, other) <= replaced
    assert 20 < packed < 40
