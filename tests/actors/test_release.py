"""A replica lets go of what goes on elsewhere: no token that it sampled is lost, none comes late.

What goes wrong is that the store is slow, that a response ends just then, and that the coordinator
does not wait for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from laminar.engines.protocol import STOP
from laminar.events import events as ev
from laminar.names.ids import TrajectoryId
from laminar.storage import messages as m
from tests.actors.held_replica import END_ID, Replica, T, abort, generate, ids, pull, release
from tests.actors.parts import until

OTHER = TrajectoryId("0.1.1")


@pytest_asyncio.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    made = Replica(tmp_path)
    yield made
    made.host.end()
    made.host.telemetry.wait_drained(60)


async def stored(replica: Replica) -> list[int]:
    """The tokens of the next request to the store, which takes them."""
    request, reply = await replica.store.next(m.Append)
    (chunk,) = request.items
    result = m.Result(trajectory_id=chunk.trajectory_id, answer="ok")
    reply.set_result(m.AppendReply(results=(result,)))
    tokens: list[int] = np.frombuffer(chunk.tokens, "<i4").tolist()
    return tokens


async def test_every_token_until_the_engine_has_stopped_is_stored_before_it_is_said(
    replica: Replica,
) -> None:
    await replica.runs()
    replica.sampled(1, 3, 4)
    replica.engine.busy = True
    replica.tell(release(1))
    await replica.settled()
    assert replica.store.asked == []
    replica.sampled(1, 5)
    replica.engine.end_step()
    await until(lambda: bool(replica.store.asked))
    assert replica.reports() == ["TrajectoryStarted"]
    assert await stored(replica) == [3, 4, 5]
    released = await replica.host.wait(ev.TrajectoriesReleased)
    await replica.settled()
    assert released.command_id == 2
    assert (replica.engine.running, replica.rollout.running) == (set(), {})
    assert replica.reports() == ["TrajectoryStarted", "TrajectoriesReleased"]


async def test_tokens_that_are_on_their_way_already_are_waited_for(replica: Replica) -> None:
    """Nothing new was sampled since; the store does not have them for that."""
    await replica.runs()
    replica.sampled(1, 3)
    replica.host.spawn(replica.rollout._flush())
    await until(lambda: bool(replica.store.asked))
    replica.tell(release(1))
    await replica.settled()
    assert replica.reports() == ["TrajectoryStarted"]
    assert await stored(replica) == [3]
    await replica.host.wait(ev.TrajectoriesReleased)


async def test_what_ends_meanwhile_is_reported_as_finished_first(replica: Replica) -> None:
    await replica.runs()
    replica.engine.busy = True
    replica.tell(release(1))
    await replica.settled()
    replica.sampled(1, 3, END_ID, finish_reason=STOP)
    replica.engine.end_step()
    assert await stored(replica) == [3, END_ID]
    await replica.settled()
    assert replica.reports() == ["TrajectoryStarted"]
    await replica.store.answer(m.Finish, "ok")
    await replica.host.wait(ev.TrajectoriesReleased)
    assert replica.reports() == ["TrajectoryStarted", "TrajectoryFinished", "TrajectoriesReleased"]


async def test_an_end_that_is_being_reported_is_reported_once(replica: Replica) -> None:
    await replica.runs()
    replica.sampled(1, END_ID, finish_reason=STOP)
    await until(lambda: len(replica.store.asked) == 2)  # its tokens and its end
    replica.tell(release(1))
    await replica.settled()
    assert await stored(replica) == [END_ID]
    await replica.store.answer(m.Finish, "ok")
    await replica.host.wait(ev.TrajectoriesReleased)
    assert replica.store.asked == []
    assert replica.reports() == ["TrajectoryStarted", "TrajectoryFinished", "TrajectoriesReleased"]


async def test_what_is_only_being_opened_is_let_go_at_once(replica: Replica) -> None:
    """Whatever the store answers: the next replica is told that, too."""
    replica.tell(generate())
    await until(lambda: bool(replica.store.asked))
    replica.tell(release(1))
    await replica.host.wait(ev.TrajectoriesReleased)
    await replica.store.answer_open("generated", num_tokens=3, finish_reason=STOP)
    await replica.settled()
    assert (replica.engine.added, replica.reports()) == ([], ["TrajectoriesReleased"])


async def test_a_newer_placement_is_left_alone(replica: Replica) -> None:
    await replica.runs(2)
    replica.tell(release(1))
    await replica.host.wait(ev.TrajectoriesReleased)
    assert replica.engine.running == {f"{T}@2"}
    assert replica.rollout.running[T].command.placement == 2


async def test_what_is_not_here_is_released(replica: Replica) -> None:
    """It ended, and that was said before the order came."""
    replica.tell(release(1))
    await replica.host.wait(ev.TrajectoriesReleased)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("fenced", ["TrajectoriesReleased"]),
        ("refused", ["TrajectoryFailed", "TrajectoriesReleased"]),
    ],
)
async def test_tokens_that_the_store_does_not_take(
    replica: Replica, answer: str, said: list[str]
) -> None:
    await replica.runs()
    replica.sampled(1, 3)
    replica.tell(release(1))
    await replica.store.answer(m.Append, answer)
    await replica.host.wait(ev.TrajectoriesReleased)
    assert replica.reports() == ["TrajectoryStarted", *said]
    assert replica.rollout.running == {}


async def test_a_coordinator_that_did_not_wait_gives_it_back_meanwhile(replica: Replica) -> None:
    """The store was away longer than the order has time: the work moved on, and came here again."""
    await replica.runs()
    replica.sampled(1, 3)
    replica.tell(release(1))
    request, reply = await replica.store.next(m.Append)
    replica.tell(abort(1), generate(3))
    await replica.store.answer_open(tokens=ids(9), num_tokens=1)
    await until(lambda: replica.engine.running == {f"{T}@3"})
    (chunk,) = request.items
    late = m.Result(trajectory_id=chunk.trajectory_id, answer="fenced")
    reply.set_result(m.AppendReply(results=(late,)))
    await replica.host.wait(ev.TrajectoriesReleased)
    assert replica.engine.running == {f"{T}@3"}
    assert replica.rollout.running[T].command.placement == 3
    replica.sampled(3, 8)
    replica.host.spawn(replica.rollout._flush())
    assert await stored(replica) == [8]


@pytest.mark.parametrize("while_engine_is_busy", [True, False])
async def test_weights_can_be_pulled_while_the_store_is_away(
    replica: Replica, while_engine_is_busy: bool
) -> None:
    """The coordinator has placed the work elsewhere; the answer comes when nobody needs it."""
    await replica.runs()
    replica.sampled(1, 3)
    replica.engine.busy = while_engine_is_busy
    replica.tell(release(1))
    await replica.settled()
    replica.tell(abort(1), pull())
    await until(lambda: replica.loader.version == 2)
    assert replica.loader.pulled == [set()]
    replica.engine.end_step()
    if not while_engine_is_busy:
        assert await stored(replica) == [3]
    await replica.host.wait(ev.TrajectoriesReleased)
    await asyncio.sleep(0)
    assert (replica.store.asked, replica.rollout.running) == ([], {})


async def test_what_the_engine_says_of_a_released_placement_counts_no_more(
    replica: Replica,
) -> None:
    await replica.runs()
    replica.tell(release(1))
    await replica.host.wait(ev.TrajectoriesReleased)
    replica.sampled(1, 3, END_ID, finish_reason=STOP)
    await replica.settled()
    await replica.rollout._flush()
    assert (replica.store.asked, len(replica.reports())) == ([], 2)
