"""Payloads that no trainer needs again go, the oldest first, and their rows stay."""

from __future__ import annotations

import sqlite3

import pytest

from laminar.storage import books, payload_files
from laminar.storage import messages as m
from laminar.storage.database import Database
from tools.kit.store_samples import (
    append,
    end,
    fetched,
    filled,
    finish,
    one,
    open_,
    reward,
    trajectory_rows,
)

TOKENS = (1, 2, 3, 4)
BYTES = 8 * len(TOKENS)
LARGE = tuple(range(1, 20_001))


def life(database: Database, name: str, *, tokens: tuple[int, ...] = TOKENS, **how) -> None:
    """From its opening to its end; without an end if nothing is said of it."""
    requests = [open_(name), append(name, tokens), finish(name, len(tokens))]
    requests.append(reward(name, 1.0, text=f"text of {name}"))
    if how:
        requests.append(end(name, **how))
    for request in requests:
        assert one(database, request).answer in ("open", "ok")


def remove(database: Database, before_step: int, keep_bytes: int) -> int:
    request = m.RemovePayloads(before_step=before_step, keep_bytes=keep_bytes)
    (reply,) = database.handle_batch([request])
    return reply.removed


def database_bytes(database: Database) -> int:
    (reply,) = database.handle_batch([m.Stats()])
    return reply.database_bytes


def names(path) -> list[str]:
    with books.open_tables(path) as tables:
        return sorted(tables.removed_payloads())


@pytest.fixture
def database(path):
    """One trajectory of each of the steps 0 to 3, one whose end is not there, one that the
    trainer left out of its batch, and one that was given up; weights are of step 4."""
    found = filled(path)
    for step in (2, 0, 3, 1):
        life(found, f"0.{step}.0", how="trained", step=step)
    life(found, "0.4.0")
    life(found, "0.5.0", how="dropped", reason="mismatch", step=0)
    life(found, "0.6.0", how="dropped", reason="run-ended", step=0)
    yield found
    found.close()


def test_the_oldest_go_until_the_rest_has_room(path, database):
    before = trajectory_rows(path)
    assert remove(database, 4, 3 * BYTES) == 2
    assert names(path) == ["0.0.0", "0.1.0"]
    assert remove(database, 4, 3 * BYTES) == 0
    assert trajectory_rows(path) == before
    assert books.check_integrity(path) == []


def test_what_a_trainer_may_need_stays(path, database):
    """What no kept checkpoint covers, what has not ended, and what was left out of a batch: nothing
    says of which."""
    assert remove(database, 2, 0) == 2 and names(path) == ["0.0.0", "0.1.0"]
    assert remove(database, 4, 0) == 2
    assert remove(database, 5, 0) == 1
    assert names(path) == ["0.0.0", "0.1.0", "0.2.0", "0.3.0", "0.6.0"]
    assert remove(database, 100, 0) == 0
    assert fetched(database, "0.4.0").tokens == fetched(database, "0.5.0").tokens != b""


def test_a_part_goes_at_a_time(database, monkeypatch):
    monkeypatch.setattr("laminar.storage.handlers.REMOVED_AT_ONCE", 3)
    assert [remove(database, 9, 0) for _ in range(3)] == [3, 2, 0]


def test_whoever_asks_for_one_is_told(database):
    remove(database, 1, 0)
    (reply,) = database.handle_batch([m.Fetch(ids=("0.3.0", "0.0.0"), with_prompt=False)])
    assert isinstance(reply, m.FetchReply)
    assert ([row.trajectory_id for row in reply.trajectories], reply.removed) == (
        ["0.3.0"],
        ("0.0.0",),
    )
    (again,) = database.handle_batch([append("0.0.0", TOKENS)])
    assert again.results[0].answer == "refused"
    assert one(database, end("0.0.0", how="trained", step=0)).answer == "ok"


def test_files_go_with_their_rows(path):
    """One that another row names as well stays."""
    database = filled(path)
    folder = payload_files.folder_of(path)
    for step in (0, 1):
        life(database, f"0.{step}.0", tokens=LARGE, how="trained", step=step)
    life(database, "0.2.0", tokens=LARGE[::-1], how="trained", step=0)
    assert len(list(folder.iterdir())) == 2
    assert remove(database, 1, 0) == 2
    assert len(list(folder.iterdir())) == 1 and fetched(database, "0.1.0").tokens
    assert books.check_integrity(path) == []
    database.close()


def test_room_in_the_file_is_used_again(path):
    database = filled(path)
    for group in range(40):
        life(database, f"0.{group}.0", tokens=LARGE[:4000], how="trained", step=0)
    size = database_bytes(database)
    while remove(database, 1, 0):
        pass
    for group in range(40, 70):
        life(database, f"0.{group}.0", tokens=LARGE[:4000], how="trained", step=1)
    assert database_bytes(database) <= 1.02 * size
    database.close()


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        (
            "UPDATE trajectories SET payload_removed = 1 WHERE id = '0.3.0'",
            "the payload of trajectory 0.3.0 was removed, but a part remains",
        ),
        (
            "UPDATE chunks SET tokens = NULL, logprobs = NULL WHERE trajectory_id = '0.3.0'",
            "trajectory 0.3.0: the tokens of 0.3.0 are no longer in the store",
        ),
        (
            "UPDATE trajectories SET \"end\" = NULL WHERE id = '0.0.0'",
            "the payload of trajectory 0.0.0 was removed before its end",
        ),
        (
            "UPDATE trajectories SET num_tokens = 5 WHERE id = '0.0.0'",
            "trajectory 0.0.0 counts 5 tokens, its chunks had 4",
        ),
    ],
)
def test_what_was_not_removed_so_is_noticed(path, database, sql, problem):
    remove(database, 1, 0)
    database.close()
    with sqlite3.connect(path) as db:
        db.execute(sql)
    db.close()
    assert problem in books.check_integrity(path)
