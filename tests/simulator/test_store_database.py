"""The database of the simulated store: the product's, on a disk that can be full."""

from __future__ import annotations

import pytest

from laminar.names.ports import DiskFull
from laminar.storage import messages as m
from laminar.storage.rows import PromptKey
from tools.kit.store_samples import finish, ints, open_, prompt
from tools.simulator.config import SimConfig
from tools.simulator.machine.database import StoreDatabase
from tools.simulator.world import World

LOOKS = [m.Fetch(ids=("0.0.0", "no"), with_prompt=True), m.SamplePrompts(count=1), m.Stats()]


@pytest.fixture
def database() -> StoreDatabase:
    found = World(SimConfig(), seed=1).database
    found.load_prompts([prompt(0), prompt(1)], [prompt(0)], "data-1")
    return found


def test_a_full_disk_refuses_what_writes_and_changes_nothing(database: StoreDatabase) -> None:
    database.handle_batch([open_("0.0.0")])
    before, database.full = list(database.tables.rows()), True
    with pytest.raises(DiskFull):
        database.handle_batch([m.Stats(), finish("0.0.0", 0)])
    with pytest.raises(DiskFull):
        database.keep_prompt_ids({PromptKey("train", 1): ints(1)})
    assert len(database.handle_batch(LOOKS)) == len(LOOKS)
    assert list(database.tables.rows()) == before != []


def test_the_next_process_finds_what_was_written(database: StoreDatabase) -> None:
    database.handle_batch([open_("0.0.0")])
    database.close()
    (reply,) = database.handle_batch([m.Stats()])
    assert isinstance(reply, m.StatsReply)
    assert [(total.state, total.trajectories) for total in reply.totals] == [("open", 1)]
