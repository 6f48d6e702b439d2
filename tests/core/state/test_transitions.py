"""The tables of statuses and moves: complete, and kept to by random runs."""

from __future__ import annotations

from collections import Counter

import pytest

from laminar.core.state import transitions
from laminar.core.state.members import ActorState
from laminar.core.state.state import State
from laminar.core.state.transitions import (
    ACTOR,
    GROUP,
    RUN,
    TABLES,
    VERSION,
    TransitionTable,
    move_group,
    move_run,
)
from laminar.core.state.work import Group
from laminar.events.base import Command, Event
from tools.kit.bench import start_bench
from tools.kit.random_worlds import failing_world, random_world
from tools.kit.world import World

# --- all tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.of)
def test_every_status_has_a_meaning_and_is_reached(table: TransitionTable) -> None:
    first, *others = table.meaning
    assert set(others) <= set(table.moves.values()) <= set(table.meaning)
    assert {status for status, _ in table.moves} <= set(table.meaning)
    assert first in {status for status, _ in table.moves}


def actor_status(actor: ActorState | None) -> str:
    if actor is None:
        return "unknown"
    if not actor.alive:
        return "lost"
    return "silent" if actor.silent else "ready" if actor.ready else "joined"


def version_status(state: State, version: int) -> str:
    if version >= state.versions.next:
        return "unused"
    if version == state.versions.owed:
        return "owed"
    in_batch = state.steps.batch is not None and version == state.steps.batch.version
    if in_batch or ("export" in state.orders.commands and version == state.versions.export):
        return "ordered"
    if version == state.versions.newest:
        return "newest"
    if version > state.versions.newest:  # passed over, if a later one is published in its place
        return "gone" if version < state.versions.owed else "made"
    held = any(version in relay.held for relay in state.members.relays.values())
    return "older" if held or version in state.versions.checkpoint_paths else "gone"


class WatchedWorld(World):
    """A world that notes every change of an actor's and of a version's status."""

    seen: Counter[tuple[str, str, str]]

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        state = self.machine.state if self.machine.started else None
        actors = dict(state.members.actors) if state else {}
        before = {n: (actor_status(a), a.incarnation) for n, a in actors.items()}
        versions = [version_status(state, v) for v in range(state.versions.next)] if state else []
        commands = super().deliver(peer, incarnation, peer_seq, event)
        state = self.machine.state
        for name, actor in state.members.actors.items():
            old, number = before.get(name, ("unknown", actor.incarnation))
            if number != actor.incarnation and old != "lost":
                self._note("actor", old, "lost")  # replaced: both moves are of one event
                old = "lost"
            self._note("actor", old, actor_status(actor))
        for version in range(state.versions.next):
            old = versions[version] if version < len(versions) else "unused"
            self._note("version", old, version_status(state, version))
        return commands

    def _note(self, of: str, before: str, after: str) -> None:
        if before != after:
            self.seen[of, before, after] += 1


def changes(table: TransitionTable) -> set[tuple[str, str, str]]:
    return {(table.of, status, target) for (status, _), target in table.moves.items()}


def test_actors_and_versions_change_as_their_tables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """In random runs; most of what the tables have does happen there."""
    monkeypatch.setattr(WatchedWorld, "seen", Counter(), raising=False)
    for seed in range(20):
        random_world(seed, WatchedWorld).run()
        failing_world(seed, WatchedWorld).run()
    legal = changes(ACTOR) | changes(VERSION)
    assert set(WatchedWorld.seen) <= legal
    assert len(WatchedWorld.seen) > 0.7 * len(legal), legal - set(WatchedWorld.seen)


class UsedMoves(dict[tuple[str, str], str]):
    """A table's moves, and which of them were made."""

    def __init__(self, moves: dict[tuple[str, str], str]) -> None:
        super().__init__(moves)
        self.used: set[tuple[str, str]] = set()

    def __getitem__(self, key: tuple[str, str]) -> str:
        self.used.add(key)
        return super().__getitem__(key)


def test_every_move_of_groups_and_runs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {table.of: UsedMoves(table.moves) for table in (GROUP, RUN)}
    monkeypatch.setattr(transitions, "GROUP", GROUP._replace(moves=made["group"]))
    monkeypatch.setattr(transitions, "RUN", RUN._replace(moves=made["run"]))
    for seed in range(20):
        random_world(seed).run()
        failing_world(seed).run()
    missing = {(of, *move) for of, moves in made.items() for move in moves.keys() - moves.used}
    #: test_resumption.py, test_pausing.py, test_step_replay.py
    rare = ("resume", "restart", "stop now", "repeat export")
    assert {move for move in missing if move[2] not in rare} <= {("run", "ending", "end")}


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    bench = start_bench()
    state = bench.state
    group = next(iter(state.work.groups.values()))
    assert isinstance(group, Group)
    with pytest.raises(KeyError):
        move_group(group, "choose")
    with pytest.raises(KeyError):
        move_run(state, "stop")
