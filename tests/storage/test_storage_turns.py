"""Turns in the store: what an environment answers opens a response again, once; calls of tools are
noted before they are made, by one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from laminar.actors.batch_fetch import sample_of
from laminar.actors.turns import make_turn, split_turns
from laminar.storage import books
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.storage.rules import TokenSpan, digest_payload
from tools.kit.store_samples import (
    CALL,
    DONE,
    answers,
    append,
    end,
    fetched,
    filled,
    finish,
    go_on,
    intend,
    ints,
    one,
    open_,
    reward,
)

NAME = "0.0.0"
SLOW = msgspec.structs.replace(DONE, seconds=1.5)


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    """With a turn that has ended."""
    database = filled(path)
    answered = answers(database, open_(NAME), append(NAME, (1, 2)), finish(NAME, 2))
    assert set(answered) <= {"open", "ok"}
    yield database
    database.close()


def test_the_next_turn_begins_behind_the_context(database: Database, path: Path) -> None:
    assert one(database, go_on(NAME, (7, 8), effects=(SLOW,))).answer == "ok"
    opened = one(database, open_(NAME, placement=2))
    assert (opened.answer, opened.contexts, opened.segment_lengths) == ("open", (ints(7, 8),), (2,))
    turn = make_turn(opened)
    assert (turn.number, turn.done_ids, turn.begins) == (1, (), 2)
    assert turn.prompt_ids == (100, 0, 1, 2, 7, 8)
    assert answers(database, append(NAME, (3,), segment=1, placement=2)) == ["ok"]
    assert make_turn(one(database, open_(NAME, placement=3))).done_ids == (3,)
    assert answers(
        database, finish(NAME, 3, placement=3), reward(NAME, 1.0, 3, finish_reason="max-turns")
    ) == ["ok", "ok"]
    row = fetched(database, NAME)
    assert row.call_seconds == 1.5
    assert split_turns(row) == ((True, (1, 2)), (False, (7, 8)), (True, (3,)))
    assert (row.finish_reason, row.tokens, row.segment_lengths) == (
        "max-turns",
        ints(1, 2, 3),
        (2, 1),
    )
    assert one(database, end(NAME, "trained", placement=3)).num_tokens == 3  # sampled ones
    assert books.check_integrity(path) == []


def test_the_limits_of_a_turn_are_kept_for_its_engine(database: Database) -> None:
    options = m.TurnOptions(max_tokens=5, stop=("é", "x"))
    (item,) = go_on(NAME, (7,)).items
    asked = m.Continue(items=(msgspec.structs.replace(item, options=options),))
    assert [one(database, asked).answer for _ in range(2)] == ["ok", "ok"]
    assert one(database, open_(NAME, placement=2)).options == options
    append_2 = append(NAME, (3,), placement=2, segment=1)
    assert answers(database, append_2, finish(NAME, 3, placement=2)) == ["ok", "ok"]
    assert one(database, go_on(NAME, (8,), turn=2, placement=2)).answer == "ok"
    assert one(database, open_(NAME, placement=3)).options == m.TurnOptions()


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        (None, ""),
        ((100, 0, 1, 2), "segment 1 offset 0"),
        ((100, 0, 1, 2, 8, 7), "segment 1 offset 0"),
        ((100, 0, 1, 2, 7, 8, 3, 3), "segment 1 offset 1"),
    ],
)
def test_an_audit_sees_that_an_engine_has_read_other_tokens(
    database: Database, path: Path, wrong: tuple[int, ...] | None, place: str
) -> None:
    turn, later = (100, 0, 1, 2, 7, 8), (100, 0, 1, 2, 7, 8, 3)
    if place.endswith("0"):
        turn = wrong or turn
    elif place:
        later = wrong or later
    said = [
        go_on(NAME, (7, 8)),
        open_(NAME, placement=2),
        append(NAME, (3,), segment=1, placement=2, read=turn),
        open_(NAME, placement=3),
        append(NAME, (4,), offset=1, segment=1, placement=3, read=later),
        append(NAME, (5,), offset=2, segment=1, placement=3),
    ]
    assert set(answers(database, *said)) == {"ok", "open"}
    problems = [f"trajectory {NAME} was sampled at {place} after other tokens"] if place else []
    found = books.check_integrity(path)
    assert len(found) == len(problems) and all(map(str.startswith, found, problems))


def test_what_an_environment_says_first_is_the_prompt(database: Database) -> None:
    assert answers(database, open_("0.1.0"), go_on("0.1.0", (50, 51), turn=0)) == ["open", "ok"]
    opened = one(database, open_("0.1.0", placement=2))
    assert opened.own_prompt and make_turn(opened).prompt_ids == (50, 51)
    assert answers(
        database, append("0.1.0", (1,), placement=2), go_on("0.1.0", (60,), turn=0, placement=2)
    ) == ["ok", "ok"]  # the first one stays
    assert fetched(database, "0.1.0").prompt_ids == ints(50, 51)


def test_the_first_answer_to_a_turn_stays(database: Database) -> None:
    assert answers(database, go_on(NAME, (7,)), go_on(NAME, (9, 9))) == ["ok", "ok"]
    assert fetched(database, NAME).contexts == (ints(7),)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (go_on(NAME, (7,), placement=0), "fenced"),
        (go_on(NAME, (7,), turn=2), "refused"),
        (go_on(NAME, ()), "refused"),
        (go_on(NAME, (-1,)), "refused"),
        (go_on("0.1.0", (7,)), "refused"),
    ],
)
def test_answers_that_are_not_taken(database: Database, request_: m.Continue, answer: str) -> None:
    assert answers(database, request_) == [answer]
    assert fetched(database, NAME).contexts == ()


def test_a_late_request_of_the_turn_before_changes_nothing(database: Database) -> None:
    """The turn after the context has no tokens yet, and is not over."""
    assert answers(database, go_on(NAME, (7,)), finish(NAME, 2)) == ["ok", "ok"]
    assert fetched(database, NAME).status == "open"
    assert answers(database, append(NAME, (3,), offset=2), reward(NAME, 1.0)) == ["refused"] * 2


def test_a_call_is_noted_by_one_process_before_it_is_made(database: Database) -> None:
    assert answers(database, intend(NAME, (CALL,)), intend(NAME, (CALL,))) == ["ok", "ok"]
    assert answers(database, intend(NAME, (CALL,), owner="rollout-1@4")) == ["refused"]
    assert fetched(database, NAME).effects == (CALL,)
    failed = msgspec.structs.replace(DONE, status="failed")
    assert answers(database, go_on(NAME, (7,), effects=(DONE,))) == ["ok"]
    assert answers(database, go_on(NAME, (7,), effects=(failed,))) == ["ok"]
    assert answers(database, intend(NAME, (CALL,))) == ["refused"]  # that turn is over


def test_a_call_without_an_end_is_lost_with_its_trajectory(database: Database, path: Path) -> None:
    assert answers(database, intend(NAME, (CALL,)), end(NAME, placement=1)) == ["ok", "ok"]
    assert [e.status for e in database_effects(path)] == ["lost"]
    told = m.FetchReply(trajectories=(fetched(database, NAME),))
    assert m.decode_reply(m.encode(told)) == told
    assert books.check_integrity(path) == []


def database_effects(path: Path) -> list[m.EffectItem]:
    with books.open_tables(path) as tables:
        row = tables.get_row(NAME)
        assert row is not None
        return tables.turns.get_effects(row, 0)  # type: ignore[return-value]


def test_an_attempt_that_begins_again_has_no_turns(database: Database) -> None:
    assert answers(database, go_on(NAME, (7,)), open_(NAME, placement=2, attempt=2)) == [
        "ok",
        "open",
    ]
    opened = one(database, open_(NAME, placement=3, attempt=2))
    assert (opened.contexts, opened.num_tokens, opened.tokens_lost) == ((), 0, 2)


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_a_sample_is_the_same_however_its_turns_were_cut(path: Path, chunk: int) -> None:
    """The learner sees no chunk, so loss and gradient cannot depend on them."""
    database, name = filled(path), "0.1.0"
    said: list[m.Request] = []
    for turn in range(2):
        ids = tuple(range(10 * turn, 10 * turn + 10))
        said.append(open_(name, placement=turn + 1))
        for at in range(0, 10, chunk):
            part = ids[at : at + chunk]
            said.append(append(name, part, offset=at, segment=turn, placement=turn + 1))
        said.append(finish(name, 10 * turn + 10, placement=turn + 1))
        said += [go_on(name, (7, 8))] if not turn else [reward(name, 1.0, placement=2)]
    assert set(answers(database, *said)) == {"open", "ok"}
    row = fetched(database, name)
    sample = sample_of(row)
    assert sample.response_ids.tolist() == list(range(20))
    assert sample.logprobs.tolist() == [-0.25 * (token % 7) for token in range(20)]
    assert sample.turns == (10, 10) and [c.tolist() for c in sample.contexts] == [[7, 8]]
    assert sample.spans == (TokenSpan("rollout-0", 5, 4, 20),)
    whole = ints(*range(20)), sample.logprobs.tobytes(), [ints(7, 8)]
    assert row.digest == digest_payload(*whole)
    database.close()
