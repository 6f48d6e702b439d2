"""The simulator's database answers as SQLite does, whatever is asked in which order."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.actors.store import Database as Port
from laminar.ports import DiskFull
from laminar.sim.models.store import MemoryDatabase
from laminar.storage import books
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.storage.rows import NotTokenised, PromptKey
from laminar.testing.store_samples import MEMORY, finish, ints, open_, prompt
from tests.storage.test_storage_repeats import histories

LOOKS = [
    m.Fetch(ids=("0.0.0", "e0.1.0", "0.0.0", "no"), with_prompt=True),
    m.SamplePrompts(count=3),
    m.Stats(),
]


def answers(database: Port, requests: Sequence[m.Request]) -> list[Any]:
    """The last prompt of each purpose is tokenised when it is needed."""
    rows = [prompt(n) for n in range(2)]
    rows[1] = m.PromptPayload(prompt="", ground_truth="", columns={}, data_source="d")
    database.load_prompts(rows, rows, "data-1")
    found: list[Any] = [database.prompt_count()]
    for request in requests:
        (reply,) = database.handle_batch([request])
        if isinstance(reply, NotTokenised):
            found.append(reply.prompts)
            database.keep_prompt_ids({key: ints(key.row_index) for key in reply.prompts})
            (reply,) = database.handle_batch([request])
        if isinstance(reply, m.StatsReply):
            reply = m.StatsReply(
                train_prompts=reply.train_prompts,
                eval_prompts=reply.eval_prompts,
                totals=reply.totals,
                database_bytes=0,
            )
        found.append(reply)
    return found


@settings(max_examples=60, deadline=None)
@given(histories(), st.integers(0, 6), st.sampled_from((0, 16, 80)))
def test_it_answers_as_sqlite_does(history: list[m.Request], step: int, keep_bytes: int) -> None:
    memory = MemoryDatabase()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "store.sqlite"
        real = Database(path)
        removal = m.RemovePayloads(before_step=step, keep_bytes=keep_bytes)
        asked = [*history, *LOOKS, removal, *LOOKS, removal, *history[-3:], *LOOKS]
        assert answers(memory, asked) == answers(real, asked)
        real.close()
        with books.open_tables(path) as tables:
            assert [memory.rows[name] for name in sorted(memory.rows)] == list(tables.rows())


def test_a_full_disk_refuses_what_writes_and_changes_nothing() -> None:
    database = MemoryDatabase()
    answers(database, [open_("0.0.0")])
    before, database.full = dict(database.rows), True
    with pytest.raises(DiskFull):
        database.handle_batch([m.Stats(), finish("0.0.0", 0)])
    with pytest.raises(DiskFull):
        database.keep_prompt_ids({PromptKey("train", 1): ints(1)})
    assert len(database.handle_batch(LOOKS)) == len(LOOKS)
    assert database.rows == before
