"""What a replica tells so that stragglers can be packed: how far it knows its orders, how long its
trajectories are, how many sequences decode together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from laminar.actors.engine_metrics import gauge_interval_s, largest_batch
from laminar.config import load_config
from laminar.engines.protocol import EngineStep
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from tests.actors.held_replica import Replica, T, abort, generate, ids, pull
from tests.actors.parts import MINIMAL, until

PACKED = ("repack.policy=gain", "rollout.max_num_seqs=16")
OTHER = TrajectoryId("0.1.1")


@pytest_asyncio.fixture
async def replica(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    made = Replica(tmp_path, *PACKED, *getattr(request, "param", ()))
    made.engine.waiting = 0
    yield made
    made.host.end()
    made.host.telemetry.wait_drained(60)


def told(replica: Replica) -> ev.TokenProgress:
    reports = replica.rollout.engine_reports
    reports.write_steps()
    return reports._add_straggler_fields(reports._measure_progress())


def decoded(*sizes_ms: tuple[int, float]) -> list[EngineStep]:
    return [EngineStep(0, int(ms * 1e6), size, size) for size, ms in sizes_ms]


async def test_an_order_is_known_once_the_engine_has_it(replica: Replica) -> None:
    assert told(replica).as_of == 0
    replica.engine.busy = True
    replica.tell(generate())
    assert told(replica).as_of == 0
    await replica.store.answer_open()
    await until(lambda: bool(replica.engine.added))
    assert told(replica).as_of == 0  # its thread has a step to end first
    replica.engine.end_step()
    await replica.settled()
    assert told(replica).as_of == 1


async def test_the_oldest_order_that_is_not_known_counts(replica: Replica) -> None:
    """The store answers in the order in which it likes."""
    replica.tell(generate())
    await until(lambda: bool(replica.store.asked))
    held = replica.store.asked.pop()
    replica.tell(generate(trajectory=OTHER))
    await replica.store.answer_open()
    await until(lambda: len(replica.engine.added) == 1)
    await replica.settled()
    assert told(replica).as_of == 0
    replica.store.asked.append(held)
    await replica.store.answer_open()
    await replica.settled()
    assert told(replica).as_of == 2


@pytest.mark.parametrize("taken_back_by", ["abort", "pull", "newer"])
async def test_what_is_taken_back_is_waited_for_no_longer(
    replica: Replica, taken_back_by: str
) -> None:
    replica.tell(generate())
    await until(lambda: bool(replica.store.asked))
    replica.tell({"abort": abort(), "pull": pull(), "newer": generate(2)}[taken_back_by])
    assert told(replica).as_of == 1


@pytest.mark.parametrize("answer", ["fenced", "refused", "generated"])
async def test_what_is_not_generated_is_known_too(replica: Replica, answer: str) -> None:
    replica.tell(generate())
    await replica.store.answer_open(answer)
    await until(lambda: told(replica).as_of == 1)


async def test_lengths_are_those_of_the_whole_response(replica: Replica) -> None:
    """With what an earlier replica sampled, whether it is stored yet or not."""
    replica.tell(generate(2))
    await replica.store.answer_open(tokens=ids(3, 4), num_tokens=2)
    await replica.settled()
    replica.sampled(2, 5)
    assert told(replica).lengths == {T: 3}
    replica.host.spawn(replica.rollout._flush())
    await until(lambda: bool(replica.store.asked))
    assert told(replica).lengths == {T: 3}


async def test_no_lengths_are_told_while_something_waits_for_a_slot(replica: Replica) -> None:
    await replica.runs()
    replica.engine.waiting = 1
    assert told(replica).lengths == {}


@pytest.mark.parametrize("replica", [("rollout.max_batch=1",)], indirect=True)
async def test_no_lengths_are_told_while_more_run_than_fit_into_a_batch(replica: Replica) -> None:
    await replica.runs()
    assert told(replica).lengths == {T: 0}
    await replica.runs(trajectory=OTHER)
    assert told(replica).lengths == {}


@pytest.mark.parametrize(
    ("replica", "told"),
    [(("repack.policy=off",), (0, 0, {})), ((), (16, 1, {T: 0}))],
    indirect=["replica"],
)
async def test_gauges_carry_it_unless_repack_is_off(
    replica: Replica, told: tuple[int, int, dict[str, int]]
) -> None:
    await replica.runs()
    replica.host.spawn(replica.rollout.engine_reports.report_periodically(0.001))
    await until(lambda: bool(replica.host.gauges))
    gauge = replica.host.gauges[-1]
    assert isinstance(gauge, ev.TokenProgress)
    assert (gauge.max_batch, gauge.as_of, gauge.lengths) == told


@pytest.mark.parametrize("replica", [("rollout.decode_budget_ms=20",)], indirect=True)
async def test_the_batch_is_measured_against_the_budget(replica: Replica) -> None:
    replica.engine.steps = decoded((2, 12.0))
    assert told(replica).max_batch == 16  # one size tells nothing
    replica.engine.steps = decoded((4, 14.0))
    assert told(replica).max_batch == 10


async def test_a_start_says_how_long_the_prompt_is(replica: Replica) -> None:
    replica.tell(generate(2))
    await replica.store.answer_open(prompt_ids=ids(1, 2, 3), tokens=ids(4), num_tokens=1)
    started = await replica.host.wait(ev.TrajectoryStarted)
    assert (started.prompt_tokens, started.tokens_resumed) == (3, 1)


@pytest.mark.parametrize(
    ("replicas", "nodes", "seconds"), [(8, 1, 0.5), (250, 1, 0.5), (8, 128, 2.048)]
)
def test_all_replicas_together_send_no_more_gauges_than_the_log_can_take(
    replicas: int, nodes: int, seconds: float
) -> None:
    config = load_config([], [*MINIMAL, f"rollout.replicas={replicas}", f"run.nodes={nodes}"])
    assert gauge_interval_s(config) == pytest.approx(seconds)


@pytest.mark.parametrize(("given", "batch"), [("auto", 16), (5, 5), (100, 16)])
def test_the_batch_of_the_settings(given: int | str, batch: int) -> None:
    config = load_config([], [*MINIMAL, "rollout.max_num_seqs=16", f"rollout.max_batch={given}"])
    assert largest_batch(config.rollout) == batch
