"""A replica's glue: what the coordinator has taken back is neither generated nor reported.

The store answers when the test lets it; commands arrive before, between and with its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from laminar.engines.protocol import LENGTH, STOP
from laminar.events import events as ev
from laminar.storage import messages as m
from laminar.storage.rules import digest_read_ids
from tests.actors.held_replica import (
    END_ID,
    Replica,
    T,
    abort,
    generate,
    ids,
    pull,
    pull_in_flight,
    stream,
)
from tests.actors.parts import until


@pytest_asyncio.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    made = Replica(tmp_path)
    yield made
    made.host.end()
    made.host.telemetry.wait_drained(60)


async def test_gauges_say_all_that_the_engine_does_and_wait_for_no_store(replica: Replica) -> None:
    replica.rollout._interval_s = 0.001
    await replica.runs()
    replica.sampled(1, 3)
    replica.host.spawn(replica.rollout._keep_tokens())
    replica.host.spawn(replica.rollout.engine_reports.report_periodically(0.001))
    await replica.store.next(m.Append)  # which is never answered
    before = len(replica.host.gauges)
    await until(lambda: len(replica.host.gauges) > before + 3)
    assert replica.host.gauges[-1] == ev.TokenProgress(
        tokens_total=1,
        kv_used_tokens=50,
        running=1,
        waiting=2,
        kv_capacity_tokens=900,
        preempted=3,
        prefix_cache_queries=400,
        prefix_cache_hits=100,
        max_batch=64,
        as_of=1,
    )


async def test_the_store_is_told_what_the_coordinator_said_it_is_generated_with(
    replica: Replica,
) -> None:
    """The trainer corrects for stale weights by this stamp, and nothing else tells them apart."""
    replica.tell(generate(placement=4, version=1))
    (item,) = (await replica.store.answer_open()).items
    assert (item.trajectory_id, item.group_id, item.sibling) == (T, "0.1", 0)
    assert (item.purpose, item.row_index) == ("train", 1)
    assert (item.attempt, item.placement, item.replica) == (1, 4, "rollout-0")
    assert (item.weight_version, item.version_step) == (1, 11)


@pytest.mark.parametrize(("purpose", "temperature"), [("train", 0.7), ("eval", 0.3)])
async def test_the_temperature_that_is_stored_is_the_one_that_is_sampled_with(
    replica: Replica, purpose: str, temperature: float
) -> None:
    replica.tell(generate(purpose=purpose))
    (item,) = (await replica.store.answer_open(prompt_ids=ids(1, 2))).items
    await until(lambda: bool(replica.engine.requests))
    (request,) = replica.engine.requests
    assert item.temperature == request.temperature == temperature
    assert (request.seed, request.prompt_ids, request.done_ids) == (5, (1, 2), ())
    assert (request.max_new_tokens, request.stop_ids) == (6, frozenset({END_ID}))


@pytest.mark.parametrize("reason", [STOP, LENGTH])
async def test_every_sampled_token_is_stored_with_the_reason_that_the_engine_gave(
    replica: Replica, reason: str
) -> None:
    """The stop token is part of the answer; whether it was cut off nobody else can know."""
    await replica.runs()
    replica.sampled(1, 3, 4)
    replica.sampled(1, END_ID, finish_reason=reason)
    request, reply = await replica.store.next(m.Append)
    (chunk,) = request.items
    assert np.frombuffer(chunk.tokens, "<i4").tolist() == [3, 4, END_ID]
    assert np.frombuffer(chunk.logprobs, "<f4").tolist() == [-0.5] * 3
    finish, _ = await replica.store.next(m.Finish)
    (item,) = finish.items
    assert (item.num_tokens, item.finish_reason, item.placement) == (3, reason, 1)
    reply.set_result(m.AppendReply(results=(m.Result(trajectory_id=T, answer="ok"),)))


@pytest.mark.parametrize(
    ("done", "reason"), [((3, END_ID), STOP), ((3, 4, 3, 4, 3, 4), LENGTH), ((3, 4), None)]
)
async def test_what_was_whole_when_it_was_lost_is_finished_and_what_was_not_goes_on(
    replica: Replica, done: tuple[int, ...], reason: str | None
) -> None:
    """A replica died between the last token and its report: the store has all of them. What goes on
    says what it was given to read."""
    replica.tell(generate(placement=2))
    await replica.store.answer_open(tokens=ids(*done), num_tokens=len(done))
    if reason is None:
        await until(lambda: bool(replica.engine.requests))
        assert replica.engine.requests[0].done_ids == done
        replica.sampled(2, 3)
        replica.host.spawn(replica.rollout._flush())
        first, reply = await replica.store.next(m.Append)
        reply.set_result(m.AppendReply(results=(m.Result(trajectory_id=T, answer="ok"),)))
        replica.sampled(2, END_ID, finish_reason=STOP)
        second, _ = await replica.store.next(m.Append)
        read = replica.engine.requests[0].prompt_ids + done
        assert first.items[0].read == digest_read_ids(ids(*read))
        assert second.items[0].read == ""
        return
    await replica.store.answer(m.Finish, "ok")
    event = await replica.host.wait(ev.TrajectoryFinished)
    assert (event.finish_reason, event.num_tokens) == (reason, len(done))
    assert replica.engine.added == []


async def test_an_abort_while_the_store_answers_ends_the_opening(replica: Replica) -> None:
    replica.tell(generate())
    await until(lambda: bool(replica.store.asked))
    replica.tell(abort())
    await replica.store.answer_open()
    await replica.settled()
    assert (replica.engine.added, replica.reports()) == ([], [])


async def test_a_pull_while_the_store_answers_ends_every_opening(replica: Replica) -> None:
    """Or old work would be generated by the new weights, under the stamp of the old ones."""
    replica.tell(generate())
    await until(lambda: bool(replica.store.asked))
    replica.tell(pull())
    await until(lambda: replica.loader.version == 2)
    await replica.store.answer_open()
    await replica.settled()
    assert (replica.engine.added, replica.reports()) == ([], [])


async def test_what_was_taken_back_is_not_reported_as_generated_either(replica: Replica) -> None:
    for answer in ("generated", "refused"):
        replica.tell(generate())
        await until(lambda: bool(replica.store.asked))
        replica.tell(abort())
        await replica.store.answer_open(answer, num_tokens=3, finish_reason=STOP)
        await replica.settled()
    assert replica.reports() == []


async def test_an_abort_right_behind_the_answer_finds_the_request_in_the_engine(
    replica: Replica,
) -> None:
    """The engine does its jobs in order: an abort in front of its request would do nothing."""
    replica.tell(generate())
    await until(lambda: bool(replica.store.asked))
    await replica.store.answer_open()
    while not replica.rollout.running:
        await asyncio.sleep(0)
    replica.tell(pull())
    await replica.settled()
    assert (replica.engine.running, replica.loader.pulled) == (set(), [set()])


async def test_a_newer_placement_ends_the_older_one_here(replica: Replica) -> None:
    """The abort between them may be lost with a coordinator: nobody would end it in the engine."""
    await replica.runs(1)
    await replica.runs(2)
    assert replica.engine.running == {f"{T}@2"}


async def test_the_answer_about_an_old_placement_leaves_the_new_one_alone(replica: Replica) -> None:
    await replica.runs(1)
    replica.sampled(1, 3, 4)
    flushing = asyncio.create_task(replica.rollout._flush(everything=True))
    await until(lambda: bool(replica.store.asked))
    replica.tell(abort(1))
    await replica.runs(2)
    await replica.store.answer(m.Append, "fenced")
    await flushing
    assert replica.engine.running == {f"{T}@2"}
    assert replica.rollout.running[T].command.placement == 2


async def test_what_the_store_refuses_ends_in_the_engine_and_is_reported(replica: Replica) -> None:
    await replica.runs(1)
    replica.sampled(1, 3, 4)
    flushing = asyncio.create_task(replica.rollout._flush(everything=True))
    await replica.store.answer(m.Append, "refused")
    await flushing
    assert (replica.engine.running, replica.rollout.running) == (set(), {})
    failed = replica.host.all(ev.TrajectoryFailed)
    assert [(f.placement, f.reason) for f in failed] == [(1, "store-refused")]


async def test_tokens_on_their_way_when_a_pull_comes_are_those_of_the_old_weights(
    replica: Replica,
) -> None:
    """They may be stored; the end of the response is not reported, and nothing is added to it."""
    await replica.runs(1)
    replica.sampled(1, 3, END_ID, finish_reason=STOP)
    append, stored = await replica.store.next(m.Append)
    replica.tell(pull())
    replica.sampled(1, 9)
    stored.set_result(m.AppendReply(results=(m.Result(trajectory_id=T, answer="ok"),)))
    await replica.store.answer(m.Finish, "ok")
    await replica.settled()
    await replica.rollout._flush(everything=True)
    (item,) = append.items
    assert np.frombuffer(item.tokens, "<i4").tolist() == [3, END_ID]
    assert (replica.store.asked, replica.reports()) == ([], ["TrajectoryStarted"])


async def test_work_of_a_version_that_the_engine_does_not_serve_ends_the_process(
    replica: Replica,
) -> None:
    """The coordinator is wrong about this replica; a new process is known to have nothing."""
    replica.tell(generate(version=3))
    await replica.store.answer_open()
    await until(lambda: bool(replica.host.failures))
    assert "version 3" in replica.host.failures[0] and "serves 1" in replica.host.failures[0]
    assert (replica.engine.added, replica.reports()) == ([], [])


# --- weights in flight ----------------------------------------------------------------------------


def weights_of(request: m.Append) -> list[tuple[int, int, list[int]]]:
    """(version, step, tokens) of each chunk."""
    return [
        (item.weight_version, item.version_step, np.frombuffer(item.tokens, "<i4").tolist())
        for item in request.items
    ]


async def in_flight(replica: Replica) -> asyncio.Future[bool]:
    """Two tokens of version 1, which the store has; version 2 is loaded, and not proved yet."""
    await replica.runs()
    replica.sampled(1, 3, 4, load=1)
    replica.loader.proof = asyncio.get_running_loop().create_future()
    replica.tell(pull_in_flight())
    request, reply = await replica.store.next(m.Append)
    assert weights_of(request) == [(1, 11, [3, 4])] and not replica.loader.pulled
    reply.set_result(m.AppendReply(results=(m.Result(trajectory_id=T, answer="ok"),)))
    await until(lambda: replica.loader.pulled == [{f"{T}@1"}])
    replica.sampled(1, 5, load=1)  # on its way when the load began
    replica.sampled(1, 6, END_ID, load=2, finish_reason=STOP)
    return replica.loader.proof


async def test_in_flight_tokens_are_stored_with_their_own_weights_once_these_are_proved(
    replica: Replica,
) -> None:
    proof = await in_flight(replica)
    replica.host.spawn(replica.rollout._flush())
    request, reply = await replica.store.next(m.Append)
    assert weights_of(request) == [(1, 11, [5])]
    reply.set_result(m.AppendReply(results=(m.Result(trajectory_id=T, answer="ok"),)))
    await replica.settled()
    assert replica.store.asked == [] and replica.reports() == ["TrajectoryStarted"]
    proof.set_result(True)
    request, reply = await replica.store.next(m.Append)
    assert weights_of(request) == [(2, 12, [6, END_ID])]
    reply.set_result(m.AppendReply(results=(m.Result(trajectory_id=T, answer="ok"),)))
    finish, _ = await replica.store.next(m.Finish)
    assert finish.items[0].num_tokens == 5


async def test_in_flight_tokens_of_weights_that_prove_wrong_are_dropped(replica: Replica) -> None:
    proof = await in_flight(replica)
    proof.set_result(False)
    await until(lambda: not replica.engine.running)
    await replica.rollout._flush()
    assert replica.store.asked == [] and replica.reports() == ["TrajectoryStarted"]


@pytest.mark.parametrize("proves", [True, False])
async def test_work_of_a_stream_waits_in_the_engine_and_ends_with_weights_that_prove_wrong(
    replica: Replica, proves: bool
) -> None:
    replica.loader.proof = asyncio.get_running_loop().create_future()
    replica.tell(stream(), generate(version=2))
    await replica.store.answer_open()
    await until(lambda: replica.engine.added == [f"{T}@1"])
    replica.loader.proof.set_result(proves)
    await replica.settled()
    assert bool(replica.engine.running) == proves == (replica.loader.version == 2)
    if not proves:  # what was sent before the coordinator heard of it
        replica.tell(generate(2, version=2))
        await replica.store.answer_open()
        await replica.settled()
        assert not replica.engine.running and replica.rollout.openings.as_of == 3


@pytest.mark.parametrize(
    ("version", "purpose", "taken"), [(1, "train", True), (1, "eval", False), (3, "train", False)]
)
async def test_in_flight_an_order_of_older_weights_that_crosses_a_load_is_taken(
    tmp_path: Path, version: int, purpose: str, taken: bool
) -> None:
    replica = Replica(tmp_path, 'rollout.weight_update="in-flight"', 'rollout.engine="emulated"')
    replica.tell(generate(version=version, purpose=purpose))
    await until(lambda: bool(replica.store.asked))
    replica.tell(pull_in_flight())
    await until(lambda: replica.loader.version == 2)
    await replica.store.answer_open(prompt_ids=ids(1))
    if taken:
        await until(lambda: replica.engine.added == [f"{T}@1"])
    else:
        await until(lambda: bool(replica.host.failures))
    replica.host.end()
    replica.host.telemetry.wait_drained(60)
