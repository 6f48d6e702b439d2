"""The audit of the store: silent on a sound book, and never silent when one row is missing."""

from __future__ import annotations

import shutil
import sqlite3
from typing import NamedTuple

import msgspec
import pytest

from laminar.config import ConfigError
from laminar.storage import books, payload_files
from laminar.storage.database import Database
from laminar.storage.rows import PromptKey
from tools.kit.store_samples import (
    PROMPTS,
    answers,
    append,
    end,
    filled,
    finish,
    ints,
    open_,
    prompt,
    reward,
    trajectory_rows,
)


class Expected(NamedTuple):
    """How a trajectory must have ended; None: not ended."""

    end: str | None
    reason: str | None
    step: int | None
    num_tokens: int


def compare(expected: dict[str, Expected], path) -> list[str]:
    """What an audit adds to `check_integrity`: an account of all trajectories ever issued."""
    stored = {
        row.id: Expected(row.end, row.end_reason, row.end_step, row.num_tokens)
        for row in trajectory_rows(path)
    }
    names = sorted(stored.keys() | expected.keys())
    return [f"trajectory {n} differs" for n in names if stored.get(n) != expected.get(n)]


REQUESTS = [
    open_("0.0.0"),
    append("0.0.0", (1, 2)),
    append("0.0.0", (3,), offset=2),
    append("0.0.0", (4,), offset=3),
    finish("0.0.0", 4),
    reward("0.0.0", 0.1),
    end("0.0.0", "trained", step=3),
    open_("e0.1.0"),
    append("e0.1.0", tuple(range(10_000))),
    finish("e0.1.0", 10_000),
    reward("e0.1.0", None),
    end("e0.1.0", "evaluated"),
    open_("0.0.1"),
    append("0.0.1", (1,)),
    append("0.0.1", (2, 3), offset=1),
    end("0.0.1", reason="batch-timeout", step=2),
    open_("0.0.2"),
    append("0.0.2", (1, 2)),
    open_("0.0.2", 2, attempt=2),
    append("0.0.2", (5, 6), placement=2),
    append("0.0.2", (7,), offset=2, placement=2),
    end("0.0.3", reason="quarantined"),
    open_("0.1.0"),
]
EXPECTED = {
    "0.0.0": Expected("trained", "", 3, 4),
    "e0.1.0": Expected("evaluated", "", 0, 10_000),
    "0.0.1": Expected("dropped", "batch-timeout", 2, 3),
    "0.0.2": Expected(None, None, None, 3),
    "0.0.3": Expected("dropped", "quarantined", 0, 0),
    "0.1.0": Expected(None, None, None, 0),
}


@pytest.fixture
def path(path):
    database = filled(path)
    assert set(answers(database, *REQUESTS)) == {"open", "ok"}
    database.close()
    return path


def _problems(path) -> list[str]:
    return books.check_integrity(path) + compare(EXPECTED, path)


def _execute(path, sql: str) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(sql).rowcount == 1
    db.close()


def test_a_sound_book_has_no_problems(path):
    assert _problems(path) == []


@pytest.mark.parametrize(
    ("table", "rows"), [("meta", 5), ("prompts", 6), ("trajectories", 6), ("chunks", 8)]
)
def test_any_one_deleted_row_is_noticed(path, table, rows):
    with sqlite3.connect(path) as db:
        numbers = [number for (number,) in db.execute(f"SELECT rowid FROM {table}")]
    db.close()
    assert len(numbers) == rows
    for number in numbers:
        copy = path.parent / f"{number}" / path.name
        copy.parent.mkdir()
        shutil.copy(path, copy)
        shutil.copytree(payload_files.folder_of(path), payload_files.folder_of(copy))
        assert _problems(copy) == []
        _execute(copy, f"DELETE FROM {table} WHERE rowid = {number}")
        assert _problems(copy), f"row {number} of {table} was deleted unnoticed"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE chunks SET tokens = x'09000000' WHERE trajectory_id = '0.0.0' AND \"offset\" = 3",
        "UPDATE chunks SET logprobs = x'' WHERE trajectory_id = '0.0.1' AND \"offset\" = 0",
        "UPDATE chunks SET attempt = 1 WHERE trajectory_id = '0.0.2' AND \"offset\" = 0",
        "UPDATE chunks SET replica = 'x' WHERE trajectory_id = '0.0.2' AND \"offset\" = 2",
        "UPDATE chunks SET weight_version = 6 WHERE trajectory_id = '0.0.0' AND \"offset\" = 3",
        "UPDATE trajectories SET num_tokens = 5 WHERE id = '0.0.0'",
        "UPDATE trajectories SET segments = 3 WHERE id = '0.0.0'",
        "UPDATE trajectories SET digest = 'x' WHERE id = '0.0.0'",
        "UPDATE trajectories SET status = 'generated' WHERE id = '0.0.0'",
        "UPDATE prompts SET payload = x'00' WHERE purpose = 'eval' AND row_index = 1",
        "UPDATE meta SET value = '5' WHERE key = 'train_prompts'",
    ],
)
def test_changes_are_noticed(path, change):
    _execute(path, change)
    assert books.check_integrity(path)


@pytest.fixture
def later(tmp_path):
    """A store whose prompts were tokenised when they were needed."""
    path = tmp_path / "later.sqlite"
    database = Database(path, 1)
    prompts = [msgspec.structs.replace(prompt(n), prompt_ids=b"") for n in range(PROMPTS)]
    database.load_prompts(prompts, prompts[:2], "data-1")
    keys = [PromptKey("train", 0), PromptKey("train", 1), PromptKey("eval", 1)]
    database.save_prompt_ids({key: ints(100, key.row_index) for key in keys})
    assert set(answers(database, *REQUESTS)) == {"open", "ok"}
    database.close()
    return path


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM prompt_ids WHERE purpose = 'eval'",
        "UPDATE prompt_ids SET ids = x'01000000' WHERE purpose = 'eval'",
        "UPDATE prompt_ids SET digest = 'x' WHERE purpose = 'eval'",
        "UPDATE prompt_ids SET row_index = 9 WHERE purpose = 'eval'",
    ],
)
def test_token_ids_that_are_gone_or_changed_are_noticed(later, change):
    assert _problems(later) == []
    _execute(later, change)
    assert f"eval prompt {9 if '9' in change else 1}" in _problems(later)[0]


def test_chunks_without_their_row_are_noticed_without_an_account(path):
    _execute(path, "DELETE FROM trajectories WHERE id = '0.0.1'")
    assert books.check_integrity(path) == ["2 chunks of 0.0.1 have no row"]


def test_a_missing_and_a_changed_file_are_noticed(path):
    (file,) = payload_files.folder_of(path).iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"\0\0")
    assert [file.name in problem for problem in books.check_integrity(path)] == [True]
    file.unlink()
    assert ["missing" in problem for problem in books.check_integrity(path)] == [True]


def test_a_live_store_is_read_as_of_one_moment(path):
    database = filled(path)
    with books.open_tables(path) as tables:
        before = list(tables.iter_rows())
        assert answers(database, open_("0.1.3")) == ["open"]
        assert list(tables.iter_rows()) == before
    assert len(list(trajectory_rows(path))) == len(before) + 1


def test_what_is_no_store_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        books.check_integrity(tmp_path / "store.sqlite")
    for content in (b"", b"no database" * 500):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ConfigError, match="not a store database"):
            books.check_integrity(tmp_path / "other")


def test_before_the_data_is_loaded_the_book_is_sound(tmp_path):
    path = tmp_path / "store.sqlite"
    Database(path, 1).close()
    assert books.check_integrity(path) + compare({}, path) == []
