"""Turns that follow an earlier turn, or none: what engines read, rows of training, the audit."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.actors.batch_fetch import sample_of
from laminar.actors.turns import make_turn
from laminar.analysis.audit.trained_contents import _build_content
from laminar.analysis.report.samples import SampleFilter, find_samples
from laminar.storage import books
from laminar.storage import messages as m
from laminar.storage.branches import count_read_again, find_path, list_paths
from laminar.storage.contents import digest_batch
from laminar.storage.database import Database
from laminar.training.steps import iter_contents
from tools.kit.store_samples import (
    answers,
    append,
    contents,
    fetched,
    filled,
    finish,
    go_on,
    ints,
    one,
    open_,
    reward,
)

NAME = "0.1.0"
PROMPT = (100, 1)
#: context, the turn that it follows, what the turn reads, what it samples
TURNS = (
    ((), -1, PROMPT, (1, 2)),
    ((60, 61, 62), -1, (60, 61, 62), (3,)),  # a sub-agent
    ((70,), 0, (*PROMPT, 1, 2, 70), (4, 5)),  # its parent resumes
    ((80,), 1, (60, 61, 62, 3, 80), (6,)),
    ((90,), 2, (*PROMPT, 1, 2, 70, 4, 5, 90), (7,)),
    ((91,), 2, (*PROMPT, 1, 2, 70, 4, 5, 91), (8, 9)),  # repeated sampling
)
PARENTS = tuple(parent for _, parent, _, _ in TURNS)


def play(*, read: dict[int, tuple[int, ...]] | None = None) -> Iterator[m.Request]:
    """The requests of all turns; `read`: what engines say that they read, unless the truth."""
    count = 0
    for turn, (context, parent, before, sampled) in enumerate(TURNS):
        if turn:
            yield go_on(NAME, context, turn=turn, placement=turn, parent=parent)
        yield open_(NAME, placement=turn + 1)
        before = (read or {}).get(turn, before)
        yield append(NAME, sampled, segment=turn, placement=turn + 1, read=before)
        count += len(sampled)
        yield finish(NAME, count, placement=turn + 1)


def test_paths_of_a_tree() -> None:
    assert list_paths(PARENTS, 6) == [[1, 3], [0, 2, 4], [0, 2, 5]]
    assert list_paths((), 3) == [[0, 1, 2]] and find_path(PARENTS, 4) == [0, 2, 4]
    assert count_read_again(PARENTS, [1, 10, 100, 1000, 0, 0]) == 101
    assert count_read_again((), [1, 2]) == count_read_again(PARENTS[:4], [1, 2, 4, 8]) == 0


def test_each_turn_reads_its_own_path(database: Database, path: Path) -> None:
    """And so does a second engine that continues it."""
    for request in play():
        (answer,) = answers(database, request)
        assert answer in ("ok", "open")
        if isinstance(request, m.Open):
            number = request.items[0].placement - 1
            turn = make_turn(one(database, request))
            assert (turn.number, turn.prompt_ids, turn.done_ids) == (number, TURNS[number][2], ())
            assert turn.begins == sum(len(sampled) for *_, sampled in TURNS[:number])
    row = fetched(database, NAME)
    assert row.parents == PARENTS and row.contexts == tuple(ints(*c) for c, *_ in TURNS[1:])
    assert books.check_integrity(path) == []


def test_a_sample_has_a_row_for_each_branch_and_each_token_once(
    database: Database, path: Path
) -> None:
    answers(database, *play(), reward(NAME, 1.0, placement=6))
    sample = sample_of(fetched(database, NAME))
    rows = [(row.ids.tolist(), row.ids[row.places].tolist()) for row in sample.list_rows()]
    assert rows == [
        ([60, 61, 62, 3, 80, 6], [3, 6]),
        ([*PROMPT, 1, 2, 70, 4, 5, 90, 7], [1, 2, 4, 5, 7]),
        ([*PROMPT, 1, 2, 70, 4, 5, 91, 8, 9], [8, 9]),
    ]
    assert sorted(i for row in sample.list_rows() for i in row.tokens) == list(range(9))
    assert sample.length == sum(len(ids) for ids, _ in rows)
    with books.open_tables(path) as tables:
        audited = digest_batch([_build_content(tables, NAME)])
    assert audited == digest_batch(iter_contents([sample]))


def test_a_reader_sees_each_branch(database: Database, path: Path) -> None:
    answers(database, *play())
    (sample,) = find_samples(path.parent, SampleFilter(name=NAME), lambda i: " ".join(map(str, i)))
    assert (sample.prompt, sample.response) == (
        "100 1",
        f"[{NAME}/1]\n60 61 62 3 80 6\n[{NAME}/2]\n1 2 70 4 5 90 7\n"
        f"[{NAME}/3, after turn 3]\n91 8 9",
    )


def test_the_digest_covers_where_turns_belong(database: Database, path: Path) -> None:
    answers(database, *play())
    database.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE contexts SET parent = 1 WHERE turn = 4")
    (digest, read) = books.check_integrity(path)
    assert "does not match its digest" in digest
    assert "was sampled at segment 4 offset 0 after other tokens" in read
    with sqlite3.connect(path) as db:
        db.execute("UPDATE contexts SET parent = 9 WHERE turn = 4")
    assert any("has a turn 4 that follows turn 9" in p for p in books.check_integrity(path))


@pytest.mark.parametrize("turn", range(1, 6))
def test_an_audit_sees_an_engine_that_read_another_branch(
    database: Database, path: Path, turn: int
) -> None:
    other = next(before for *_, before, _ in TURNS if before != TURNS[turn][2])
    answers(database, *play(read={turn: other}))
    (problem,) = books.check_integrity(path)
    assert f"was sampled at segment {turn} offset 0 after other tokens" in problem


@pytest.mark.parametrize("parent", [1, 2])
def test_a_context_cannot_follow_a_turn_that_is_not_there(database: Database, parent: int) -> None:
    answers(database, *list(play())[:3])
    assert answers(database, go_on(NAME, (7,), parent=parent)) == ["refused"]


def test_a_line_is_stored_as_ever(tmp_path: Path) -> None:
    """Whether or not the parent of its turns is given."""
    found = []
    for name, parent in (("a", None), ("b", 0)):
        (folder := tmp_path / name).mkdir()
        database = filled(folder / "store.sqlite")
        said = [go_on(NAME, (7,), parent=parent), append(NAME, (3,), segment=1), finish(NAME, 3)]
        assert set(answers(database, *list(play())[:3], *said)) == {"ok", "open"}
        assert fetched(database, NAME).parents == ()
        database.close()
        found.append(contents(folder / "store.sqlite"))
    assert found[0] == found[1]
