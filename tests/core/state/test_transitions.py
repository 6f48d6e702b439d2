"""The tables of statuses and moves: complete, kept to, and for trajectories every pair of both."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from laminar.core.state import transitions
from laminar.core.state.state import Actor, Group, State, Trajectory
from laminar.core.state.transitions import (
    ACTOR,
    GROUP,
    IN_ENGINE,
    RUN,
    TABLES,
    TRAJECTORY_MOVES,
    UNFINISHED,
    VERSION,
    Table,
    move,
    move_group,
    move_run,
)
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.names.ids import GroupId, TrajectoryId
from tools.kit.bench import Bench, only
from tools.kit.random_worlds import failing_world, random_world
from tools.kit.world import World

STATUSES = ("dispatched", "running", "generated", "rewarded", "releasing", "lost", "ending")
TRIGGERS = (
    "started", "finished", "rewarded", "lose", "dispatch", "release", "hand over", "end",
    "continues",
)  # fmt: skip
#: Written down a second time, as a picture: rows are statuses, columns triggers, "." is illegal.
PICTURE = {
    "dispatched": ("running", "generated", ".", "lost", ".", "releasing", ".", "ending", "."),
    "running": (".", "generated", ".", "lost", ".", "releasing", ".", "ending", "."),
    "generated": (".", ".", "rewarded", ".", ".", ".", ".", "ending", "lost"),
    "rewarded": (".", ".", ".", ".", ".", ".", ".", "ending", "."),
    "releasing": ("releasing", "generated", ".", "lost", ".", ".", "dispatched", "ending", "."),
    "lost": (".", ".", ".", ".", "dispatched", ".", ".", "ending", "."),
    "ending": (".", ".", ".", ".", ".", ".", ".", ".", "."),
}
WITHOUT_REPACK = [status for status in STATUSES if status != "releasing"]


@pytest.mark.parametrize(("status", "trigger"), list(itertools.product(STATUSES, TRIGGERS)))
def test_every_pair(status: str, trigger: str) -> None:
    trajectory = Trajectory(id=TrajectoryId("0.0.0"), group=GroupId("0.0"), sibling=0)
    trajectory.status = status
    target = PICTURE[status][TRIGGERS.index(trigger)]
    assert move(trajectory, trigger) == (target != ".")
    assert trajectory.status == (status if target == "." else target)


def test_table_has_no_status_or_trigger_besides() -> None:
    assert {s for s, _ in TRAJECTORY_MOVES} | set(TRAJECTORY_MOVES.values()) == set(STATUSES)
    assert {t for _, t in TRAJECTORY_MOVES} == set(TRIGGERS)
    assert set(IN_ENGINE) <= set(UNFINISHED) <= set(STATUSES)


def in_status(status: str) -> Bench:
    """A run whose trajectory 0.0.0 is in this status."""
    bench = Bench(max_staleness=0, replicas=1, capacity=4, resume_wait_ms=10**6)
    bench.start()
    if status == "running":
        started = ev.TrajectoryStarted(
            trajectory_id=TrajectoryId("0.0.0"), placement=1, tokens_resumed=0
        )
        bench.say("rollout-0", started)
    if status in ("generated", "rewarded"):
        bench.finish("0.0.0")
    if status == "rewarded":
        bench.reward("0.0.0")
    if status == "lost":
        bench.kill()
        bench.come_back()
    if status == "ending":
        bench.fail("0.0.0")
    assert bench.trajectory("0.0.0").status == status
    return bench


@pytest.mark.parametrize("status", WITHOUT_REPACK)
@pytest.mark.parametrize("trigger", ["started", "finished", "rewarded"])
def test_illegal_event_changes_nothing_and_is_counted(status: str, trigger: str) -> None:
    """The same table, seen from outside: an event that is not legal now has no effect."""
    bench = in_status(status)
    trajectory = bench.trajectory("0.0.0")
    events: dict[str, ev.Event] = {
        "started": ev.TrajectoryStarted(
            trajectory_id=trajectory.id, placement=trajectory.placement, tokens_resumed=0
        ),
        "finished": ev.TrajectoryFinished(
            trajectory_id=trajectory.id,
            placement=trajectory.placement,
            num_tokens=3,
            finish_reason="stop",
        ),
        "rewarded": ev.TrajectoryRewarded(
            trajectory_id=trajectory.id,
            placement=trajectory.placement,
            score_bits=0,
            correct=False,
            reason="ok",
            num_tokens=3,
        ),
    }
    commands = bench.say("rollout-0", events[trigger])
    if PICTURE[status][TRIGGERS.index(trigger)] == ".":
        assert not commands and trajectory.status == status
        name = type(events[trigger]).__name__
        assert bench.state.ignored[f"{name}: old-placement"] == 1
    else:
        assert trajectory.status != status


def test_event_of_an_old_placement_is_ignored() -> None:
    """The answer was moved to another replica; the slow one finishes it all the same."""
    bench = Bench(groups_per_step=1, max_staleness=0, capacity=2, replicas=2, batch_wait_ms=1_000)
    bench.start()
    assert only(cmd.GenerateTrajectory, bench.wait(1_000))
    late = ev.TrajectoryFinished(
        trajectory_id=TrajectoryId("0.0.0"), placement=1, num_tokens=3, finish_reason="stop"
    )
    assert bench.say("rollout-0", late) == []
    assert bench.trajectory("0.0.0").status == "dispatched"
    assert bench.state.ledger.tokens.issued == 0


# --- all tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.of)
def test_every_status_has_a_meaning_and_is_reached(table: Table) -> None:
    first, *others = table.meaning
    assert set(others) <= set(table.moves.values()) <= set(table.meaning)
    assert {status for status, _ in table.moves} <= set(table.meaning)
    assert first in {status for status, _ in table.moves}


def actor_status(actor: Actor | None) -> str:
    if actor is None:
        return "unknown"
    if not actor.alive:
        return "lost"
    return "silent" if actor.silent else "ready" if actor.ready else "joined"


def version_status(state: State, version: int) -> str:
    if version >= state.next_version:
        return "unused"
    if version == state.owed:
        return "owed"
    in_batch = state.batch is not None and version == state.batch.version
    if in_batch or ("export" in state.commands and version == state.exported):
        return "ordered"
    if version == state.newest:
        return "newest"
    if version > state.newest:  # passed over, if a later one is published in its place
        return "gone" if version < state.owed else "made"
    held = any(version in relay.held for relay in state.relays.values())
    return "older" if held or version in state.saved else "gone"


class WatchedWorld(World):
    """A world that notes every change of an actor's and of a version's status."""

    seen: Counter[tuple[str, str, str]]

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        state = self.machine.state if self.machine.started else None
        actors = dict(state.actors) if state else {}
        before = {n: (actor_status(a), a.incarnation) for n, a in actors.items()}
        versions = [version_status(state, v) for v in range(state.next_version)] if state else []
        commands = super().deliver(peer, incarnation, peer_seq, event)
        state = self.machine.state
        for name, actor in state.actors.items():
            old, number = before.get(name, ("unknown", actor.incarnation))
            if number != actor.incarnation and old != "lost":
                self._note("actor", old, "lost")  # replaced: both moves are of one event
                old = "lost"
            self._note("actor", old, actor_status(actor))
        for version in range(state.next_version):
            old = versions[version] if version < len(versions) else "unused"
            self._note("version", old, version_status(state, version))
        return commands

    def _note(self, of: str, before: str, after: str) -> None:
        if before != after:
            self.seen[of, before, after] += 1


def changes(table: Table) -> set[tuple[str, str, str]]:
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
    #: test_resumption.py, test_pausing.py, test_redo.py
    rare = ("go on", "start again", "stop at once", "export again")
    assert {move for move in missing if move[2] not in rare} <= {("run", "ending", "end")}


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    state = in_status("dispatched").state
    group = next(iter(state.groups.values()))
    assert isinstance(group, Group)
    with pytest.raises(KeyError):
        move_group(group, "choose")
    with pytest.raises(KeyError):
        move_run(state, "stop")
