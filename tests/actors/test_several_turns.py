"""Limits, seeds and ends of a trajectory of several turns in its replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from laminar.actors.batch_fetch import sample_of
from laminar.actors.turns import Turns, turn_seed
from laminar.engines.protocol import LENGTH, STOP, TokenDelta
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import EndedBy
from laminar.names.ids import TrajectoryId
from laminar.storage import messages as m
from laminar.storage.rules import TokenSpan
from laminar.tasks.environments.turns import TrajectoryDone, TurnCall
from tests.actors.held_replica import END_ID, Replica, generate, ids
from tests.actors.parts import FakeHost, until
from tests.actors.test_scoring_replies import PROMPT

LIMITS = (
    "data.max_prompt_length=8", "data.max_response_length=20", "env.max_context_tokens=30",
    "env.path=unused.py",
)  # fmt: skip


def stored(**fields: Any) -> m.StoredTrajectory:
    known: dict[str, Any] = {
        field.name: None for field in msgspec.structs.fields(m.StoredTrajectory)
    }
    known |= {"trajectory_id": "0.1.0", "group_id": "0.1", "attempt": 1, "placement": 3}
    known |= {"purpose": "train", "row_index": 1, "prompt": PROMPT, "finish_reason": "stop"}
    known |= {"contexts": (), "effects": (), "call_seconds": 0.0, "extras": {}}
    return m.StoredTrajectory(**(known | fields))


class Asked:
    """An environment that ends each trajectory, and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[TurnCall] = []

    async def answer_turn(self, call: TurnCall, intend: Callable[..., Any]) -> TrajectoryDone:
        self.calls.append(call)
        return TrajectoryDone(None, "")


async def asked(run_dir: Path, row: m.StoredTrajectory, *settings: str) -> TurnCall:
    environment = Asked()
    host = FakeHost(run_dir, "agent-0", *LIMITS, *settings)
    turns = Turns(host, None, environment)  # type: ignore[arg-type]
    placed = cmd.PlacedTrajectory(trajectory_id=TrajectoryId(row.trajectory_id), placement=3)
    await turns.answer_turn(placed, row)
    (call,) = environment.calls
    return call


@pytest.mark.parametrize("seed", range(40))
async def test_a_turn_is_asked_about_with_what_the_limits_leave(tmp_path: Path, seed: int) -> None:
    """Contexts share one limit, from which a prompt takes what it has above its own."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 8, rng.integers(1, 5)).tolist()
    tokens = rng.integers(0, 40, sum(counts)).tolist()
    contexts = [rng.integers(40, 80, n).tolist() for n in rng.integers(1, 12, len(counts) - 1)]
    prompt = rng.integers(0, 40, rng.integers(1, 16)).tolist()
    row = stored(
        prompt_ids=ids(*prompt),
        tokens=ids(*tokens),
        segment_lengths=tuple(counts),
        contexts=tuple(ids(*context) for context in contexts),
        finish_reason=("stop", "length")[seed % 2],
        call_seconds=float(seed),
    )
    call = await asked(tmp_path, row)
    left, parts, unread = 30 - max(0, len(prompt) - 8), list[Any](), list(tokens)
    for count, context in zip(counts, [*contexts, []], strict=True):
        parts += [(True, tuple(unread[:count])), (False, tuple(context))]
        unread, left = unread[count:], left - len(context)
    assert call.room == (0 if len(tokens) >= 20 else max(0, left))
    assert (call.turn, call.prompt_ids, call.parts) == (
        len(contexts), tuple(prompt), tuple(parts[:-1]),
    )  # fmt: skip
    assert (call.finish_reason, call.seconds) == (row.finish_reason, seed)


async def test_what_branches_read_again_takes_room(tmp_path: Path) -> None:
    """Like contexts: the rows of a trajectory are in one pass of the trainer."""
    row: dict[str, Any] = {"prompt_ids": ids(1, 2), "tokens": ids(*range(6))}
    row |= {"segment_lengths": (3, 1, 1, 1), "contexts": (ids(7), ids(8, 9), ids(5))}
    line = await asked(tmp_path, stored(**row))
    tree = await asked(tmp_path, stored(**row, parents=(-1, 0, 0, -1)))
    assert (line.room, tree.room) == (26, 26 - 5)  # the first turn, with its prompt, in two rows
    assert tree.parents == (-1, 0, 0, -1) and tree.parts == line.parts


async def test_siblings_share_the_seed_of_their_environment(tmp_path: Path) -> None:
    """And every attempt at them, which would else begin in another world."""

    async def seed_of(name: str, attempt: int = 1, run: int = 0, purpose: str = "train") -> int:
        more: dict[str, Any] = {"group_id": name.rpartition(".")[0], "purpose": purpose}
        row = {"prompt_ids": ids(1), "tokens": ids(2), "segment_lengths": (1,)}
        found = stored(trajectory_id=name, attempt=attempt, **more, **row)
        session = (await asked(tmp_path, found, f"seed={run}")).session
        assert (session.trajectory_id, session.attempt, session.purpose) == (name, attempt, purpose)
        return session.seed

    siblings = {await seed_of(f"0.1.{i}", attempt) for i in range(3) for attempt in (1, 2)}
    others = {await seed_of(name) for name in ("0.2.0", "1.1.0", "10.1.0")}
    others |= {await seed_of("0.1.0", run=7), await seed_of("e0.1.0", purpose="eval")}
    assert len(siblings) == 1 and len(siblings | others) == 6


def test_each_turn_draws_numbers_of_its_own() -> None:
    found = [turn_seed(seed, turn) for seed in range(20) for turn in range(5)]
    assert found[::5] == list(range(20)) and len(set(found)) == 100


@pytest.mark.parametrize(
    ("turns", "done", "ends"),
    [
        ((1,), (), None),
        ((2, 3), (), None),
        ((2,), (4, 5), None),
        ((2,), (4, END_ID), STOP),
        ((2, 2), (4, 5), LENGTH),
        ((4, 2), (), LENGTH),
        ((2, 3), (END_ID,), STOP),
    ],
)
async def test_all_turns_share_one_limit_and_end_by_their_own_tokens(
    tmp_path: Path, turns: tuple[int, ...], done: tuple[int, ...], ends: str | None
) -> None:
    """The turn before ended with the token that would end this one; the limit is 6."""
    replica, before = Replica(tmp_path), [1, 2]
    sampled = list[int]()
    for count in turns:
        turn = [*[3] * (count - 1), END_ID]
        sampled += turn
        before += [*turn, 50, 51]
    replica.tell(generate(placement=2))
    await replica.store.answer_open(
        prompt_ids=ids(1, 2),
        tokens=ids(*sampled, *done),
        num_tokens=len(sampled) + len(done),
        segment_lengths=(*turns, len(done)) if done else turns,
        contexts=(ids(50, 51),) * len(turns),
    )
    if ends is None:
        await until(lambda: bool(replica.engine.requests or replica.store.asked))
        (request,) = replica.engine.requests
        assert (request.prompt_ids, request.done_ids) == (tuple(before), done)
        assert request.max_new_tokens == 6 - len(sampled)
        assert request.seed == turn_seed(5, len(turns)) != 5
    else:
        await replica.store.answer(m.Finish, "ok")
        event = await replica.host.wait(ev.TrajectoryFinished)
        assert (event.finish_reason, event.num_tokens) == (ends, len(sampled) + len(done))
    started = replica.host.all(ev.TrajectoryStarted)[0]
    assert started.tokens_resumed == len(sampled) + len(done)
    assert started.prompt_tokens == 2 + 2 * len(turns)  # all that nobody sampled
    replica.host.end()
    replica.host.telemetry.wait_drained(60)


def text_of(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


async def open_with(replica: Replica, options: m.TurnOptions, *done: int) -> None:
    """Begin the second turn, after two tokens, with these options."""
    replica.rollout.parts.decode = text_of  # type: ignore[method-assign]
    replica.tell(generate(placement=2))
    await replica.store.answer_open(
        prompt_ids=ids(1, 2),
        tokens=ids(3, END_ID, *done),
        num_tokens=2 + len(done),
        segment_lengths=(2, len(done)) if done else (2,),
        contexts=(ids(50),),
        options=options,
    )


async def finish_turn(replica: Replica) -> ev.TrajectoryFinished:
    await replica.store.answer(m.Finish, "ok")
    event: ev.TrajectoryFinished = await replica.host.wait(ev.TrajectoryFinished)
    replica.host.end()
    replica.host.telemetry.wait_drained(60)
    return event


@pytest.mark.parametrize(("limit", "most"), [(0, 4), (3, 3), (9, 4)])
async def test_a_turn_may_have_a_limit_of_its_own(tmp_path: Path, limit: int, most: int) -> None:
    replica = Replica(tmp_path)
    await open_with(replica, m.TurnOptions(max_tokens=limit))
    await until(lambda: bool(replica.engine.requests))
    assert replica.engine.requests[0].max_new_tokens == most
    replica.host.end()
    replica.host.telemetry.wait_drained(60)


async def test_a_turn_that_had_its_own_limit_is_not_sampled_further(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    await open_with(replica, m.TurnOptions(max_tokens=1), 4)
    event = await finish_turn(replica)
    assert (event.finish_reason, event.num_tokens) == (LENGTH, 3) and not replica.engine.requests


async def test_tokens_behind_a_stop_string_are_not_stored(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    await open_with(replica, m.TurnOptions(stop=("bcd",)), 1)
    await until(lambda: bool(replica.engine.requests))
    name = replica.engine.requests[0].request_id
    replica.rollout._on_deltas([TokenDelta(name, [2, 3, 4], [-1.0, -2.0, -3.0], None)])
    replica.rollout._on_deltas([TokenDelta(name, [5], [-4.0], None)])  # on its way meanwhile
    assert name not in replica.engine.running
    request, reply = await replica.store.next(m.Append)
    (item,) = request.items
    assert (item.tokens, item.offset) == (ids(2, 3), 1) and len(item.logprobs) == 8
    stored = m.Result(trajectory_id=item.trajectory_id, answer="ok")
    reply.set_result(m.AppendReply(results=(stored,)))
    event = await finish_turn(replica)
    assert (event.finish_reason, event.num_tokens) == (STOP, 5)


async def test_a_stop_string_that_was_found_elsewhere_ends_the_turn(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    await open_with(replica, m.TurnOptions(stop=("bc",)), 1, 2)
    event = await finish_turn(replica)
    assert (event.finish_reason, event.num_tokens) == (STOP, 4) and not replica.engine.requests


@pytest.mark.parametrize("reason", ["stop", "length", *filter(None, EndedBy)])
@pytest.mark.parametrize("score", [1.0, 0.5])
def test_a_sample_says_what_ended_it(reason: str, score: float) -> None:
    """Only what the model ended itself is whole, and only that can be correct."""
    row = stored(
        prompt_ids=ids(1),
        tokens=ids(2, 3),
        logprobs=np.array([-1.0, -2.0], "<f4").tobytes(),
        reward=score,
        temperature=0.7,
        finish_reason=str(reason),
        spans=(TokenSpan("rollout-0", 5, 4, 2),),
        segment_lengths=(2,),
    )
    sample = sample_of(row)
    assert (sample.truncated, sample.truncated_by) == (reason != "stop", reason)
    assert (sample.correct, sample.temperature) == (reason == "stop" and score == 1.0, 0.7)
