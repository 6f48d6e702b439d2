"""Planted bugs in the store: its actor, the handlers of its requests and its tables.

Gives   STORE_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from laminar.actors.store import READS, Store
from laminar.core import store_restarts
from laminar.names.ports import DiskError
from laminar.storage import messages as m
from laminar.storage.handlers import Handlers
from laminar.storage.rules import Row
from laminar.storage.tables import Tables
from tools.rows.planted import Planter

LATE_S = 0.05


class _Undone(Exception):
    """So that a transaction is rolled back."""


def _unwritten(store: Store, requests: Sequence[m.Request]) -> list[Any]:
    """What the answers would be; nothing is written."""
    database: Any = store.database
    tables, answers = database.tables, []
    saved, removed, full = dict(tables.saved), set(tables.without_payload), database.full
    sampled = {name: [*spans] for name, spans in tables._sampled.items()}
    try:
        with database._transaction():
            answers = [database._handle(request) for request in requests]
            raise _Undone
    except _Undone:
        tables.saved, tables.without_payload, database.full = saved, removed, full
        tables._sampled = sampled
    return answers


def _write_later(store: Store, requests: Sequence[m.Request]) -> None:
    assert store.database is not None
    asyncio.get_running_loop().call_later(LATE_S, store.database.handle_batch, requests)


def ends_are_reported_before_they_are_written(plant: Planter) -> None:
    async def planted(self: Store, requests: list[m.End]) -> list[Any]:
        answers = _unwritten(self, requests)
        _write_later(self, requests)
        return answers

    plant.replace(Store, "_handle", planted)


def answers_leave_before_the_commit(plant: Planter) -> None:
    answered = Store._answered

    def planted(self: Store, requests: list[m.Request]) -> list[Any]:
        if all(isinstance(request, (*READS, m.Open)) for request in requests):
            return answered(self, requests)
        answers = _unwritten(self, requests)
        _write_later(self, requests)
        return [self._reply(answer) for answer in answers]

    plant.replace(Store, "_answered", planted)


def full_disk_is_answered_as_if_there_were_room(plant: Planter) -> None:
    answered = Store._answered

    def planted(self: Store, requests: list[m.Request]) -> list[Any]:
        database: Any = self.database
        if not database.full:
            return answered(self, requests)
        return [self._reply(answer) for answer in _unwritten(self, requests)]

    plant.replace(Store, "_answered", planted)


def ends_that_come_during_a_write_are_forgotten(plant: Planter) -> None:
    handle = Store.handle

    def planted(self: Store, orders: Any) -> None:
        if not self._ending:
            handle(self, orders)

    plant.replace(Store, "handle", planted)


def full_disk_loses_the_ends(plant: Planter) -> None:
    """The transaction that had no room is not tried again."""
    handle = Store._handle

    async def planted(self: Store, requests: list[m.End]) -> list[Any]:
        try:
            return await handle(self, requests)
        except DiskError:
            return _unwritten(self, requests)

    plant.replace(Store, "_handle", planted)


def ends_are_reported_without_their_tokens(plant: Planter) -> None:
    report = Store._report_ends

    def planted(self: Store, order: Any, reply: m.EndReply) -> None:
        results = (msgspec.structs.replace(r, num_tokens=0, tokens_lost=0) for r in reply.results)
        report(self, order, m.EndReply(results=tuple(results)))

    plant.replace(Store, "_report_ends", planted)


def prompts_that_are_tokenised_together_are_mixed_up(plant: Planter) -> None:
    keep = Store._keep

    async def planted(self: Store, ids: Any) -> None:
        await keep(self, dict(zip(ids, [*ids.values()][::-1], strict=True)))

    plant.replace(Store, "_keep", planted)


def answers_of_a_turn_are_mixed_up(plant: Planter) -> None:
    handle_batch = Store._handle_batch

    def planted(self: Store, batch: Any) -> list[Any]:
        return handle_batch(self, batch)[::-1]

    plant.replace(Store, "_handle_batch", planted)


def chunk_is_taken_under_the_placement_of_its_row(plant: Planter) -> None:
    append_one = Handlers._append_one

    def planted(self: Handlers, item: m.AppendItem) -> m.Result:
        row = self._rows.row(item.trajectory_id)
        placement = row.placement if row is not None else item.placement
        return append_one(self, msgspec.structs.replace(item, placement=placement))

    plant.replace(Handlers, "_append_one", planted)


def chunks_are_of_the_replica_that_has_it_now(plant: Planter) -> None:
    """Not of the one that sampled them, when it is moved."""
    save = Tables.save

    def planted(self: Tables, before: Row | None, after: Row) -> None:
        save(self, before, after)
        sql = "UPDATE chunks SET replica = ? WHERE trajectory_id = ?"
        self._db.execute(sql, (after.replica, after.id))

    plant.replace(Tables, "save", planted)


def lost_tokens_are_not_saved(plant: Planter) -> None:
    save = Tables.save

    def planted(self: Tables, before: Row | None, after: Row) -> None:
        save(self, before, after._replace(tokens_lost=before.tokens_lost if before else 0))

    plant.replace(Tables, "save", planted)


def orders_die_with_the_store(plant: Planter) -> None:
    plant.replace(store_restarts, "waits", lambda state, command: False)


def orders_keep_the_address_of_the_dead_store(plant: Planter) -> None:
    plant.replace(store_restarts, "joined", lambda state, actor: None)


STORE_BUGS: tuple[Callable[[Planter], None], ...] = (
    ends_are_reported_before_they_are_written,
    answers_leave_before_the_commit,
    full_disk_is_answered_as_if_there_were_room,
    ends_that_come_during_a_write_are_forgotten,
    full_disk_loses_the_ends,
    ends_are_reported_without_their_tokens,
    prompts_that_are_tokenised_together_are_mixed_up,
    answers_of_a_turn_are_mixed_up,
    chunk_is_taken_under_the_placement_of_its_row,
    chunks_are_of_the_replica_that_has_it_now,
    lost_tokens_are_not_saved,
    orders_die_with_the_store,
    orders_keep_the_address_of_the_dead_store,
)
