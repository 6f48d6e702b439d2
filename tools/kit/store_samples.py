"""Builders shared by the tests of the store: one prompt set, and requests with short arguments."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path
from typing import Any

from laminar.storage import books
from laminar.storage import messages as m
from laminar.storage.database import Database
from laminar.storage.rules import Row, digest_read_ids

PROMPTS = 4

#: A folder in memory, for stores whose durability is not tested; None: unavailable.
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def prompt(index: int) -> m.PromptPayload:
    return m.PromptPayload(
        prompt=[{"role": "user", "content": f"question {index}"}],
        ground_truth=str(index),
        columns={"level": index, "tags": ["a", None, 0.5]},
        data_source="sums",
        prompt_ids=ints(100, index),
    )


def trajectory_rows(path: Path) -> list[Row]:
    """Return every trajectory of a store, by id."""
    with books.open_tables(path) as tables:
        return list(tables.iter_rows())


def filled(path: Path) -> Database:
    database = Database(path, 1)
    prompts = [prompt(index) for index in range(PROMPTS)]
    database.load_prompts(prompts, prompts[:2], "data-1")
    return database


def identity(name: str) -> dict[str, object]:
    group, _, sibling = name.rpartition(".")
    purpose = "eval" if name.startswith("e") else "train"
    row_index = int(group.rpartition(".")[2]) % 2
    return {"group_id": group, "sibling": int(sibling), "purpose": purpose, "row_index": row_index}


def open_(name: str, placement: int = 1, attempt: int = 1, **changes: object) -> m.Open:
    fields = {"weight_version": 5, "version_step": 4, "replica": "rollout-0", "temperature": 0.7}
    fields |= {"trajectory_id": name, "attempt": attempt, "placement": placement}
    return m.Open(items=(m.OpenItem(**(identity(name) | fields | changes)),))


def append(
    name: str,
    tokens: tuple[int, ...],
    offset: int = 0,
    segment: int = 0,
    placement: int = 1,
    version: int = 5,
    read: tuple[int, ...] = (),
) -> m.Append:
    item = m.AppendItem(
        trajectory_id=name,
        placement=placement,
        segment=segment,
        offset=offset,
        tokens=ints(*tokens),
        logprobs=floats(*(-0.25 * (token % 7) for token in tokens)),
        weight_version=version,
        version_step=version - 1,
        read=digest_read_ids(ints(*read)) if read else "",
    )
    return m.Append(items=(item,))


def finish(name: str, num_tokens: int, placement: int = 1, reason: str = "stop") -> m.Finish:
    item = m.FinishItem(
        trajectory_id=name, placement=placement, finish_reason=reason, num_tokens=num_tokens
    )
    return m.Finish(items=(item,))


CALL = m.EffectItem(call=0, tool="add", arguments='{"a": 1}', status="intended")
DONE = m.EffectItem(call=0, tool="add", arguments='{"a": 1}', status="done", result="3")


def intend(
    name: str,
    effects: tuple[m.EffectItem, ...],
    turn: int = 0,
    placement: int = 1,
    owner: str = "rollout-0@1",
) -> m.Intend:
    return m.Intend(
        trajectory_id=name, placement=placement, turn=turn, owner=owner, effects=effects
    )


def go_on(
    name: str,
    tokens: tuple[int, ...],
    turn: int = 1,
    placement: int = 1,
    effects: tuple[m.EffectItem, ...] = (),
    parent: int | None = None,
) -> m.Continue:
    place = {"trajectory_id": name, "placement": placement, "turn": turn, "parent": parent}
    item = m.ContextItem(**place, tokens=ints(*tokens), effects=effects)
    return m.Continue(items=(item,))


def reward(name: str, score: float | None, placement: int = 1, **fields: Any) -> m.PutRewards:
    item = m.RewardItem(trajectory_id=name, placement=placement, reward=score, **fields)
    return m.PutRewards(items=(item,))


def end(
    name: str, how: str = "dropped", placement: int = 1, reason: str = "", step: int = 0, **changes
) -> m.End:
    fields = {
        "trajectory_id": name,
        "placement": placement,
        "end": how,
        "reason": reason,
        "step": step,
    }
    return m.End(items=(m.EndItem(**(identity(name) | fields | changes)),))


def one(database: Database, request: m.Request):
    """Return the only result of a request with one item."""
    (reply,) = database.handle_batch([request])
    (result,) = reply.results
    return result


def answers(database: Database, *requests: m.Request) -> list[str]:
    return [one(database, request).answer for request in requests]


def fetched(database: Database, name: str) -> m.StoredTrajectory:
    (reply,) = database.handle_batch([m.Fetch(ids=(name,), with_prompt=True)])
    (trajectory,) = reply.trajectories
    return trajectory


def contents(path: Path) -> dict[str, list[tuple]]:
    """Return every row of every table of a database, in key order."""
    with sqlite3.connect(path) as db:
        tables = ("meta", "prompts", "trajectories", "chunks", "contexts", "effects")
        return {name: sorted(db.execute(f"SELECT * FROM {name}"), key=repr) for name in tables}
