"""Checks of a simulated run that has ended, one function and one name each.

Reads   the coordinator's last state and disk, the store's rows, the books of checks/safety.py
Gives   the digest of the last state; raises Violation
"""

from __future__ import annotations

from collections.abc import Collection

from laminar.core import invariants
from laminar.core.state.state import State, hash_state
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.eventlog.replay import replay_records
from laminar.eventlog.snapshot import read_snapshots
from laminar.events.base import Command, Settings, Stamped
from laminar.events.reasons import DropReason, EndKind, FinishReason
from laminar.storage import books
from laminar.storage.rules import Row, decode_reward
from tools.simulator.checks.safety import Checks
from tools.simulator.disk import SimDisk
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World

SNAPSHOTS_SAMPLE = 8
"""Runs per run that replays from every snapshot; the others replay from the newest only."""


class AllChecks(Checks):
    """All checks of one run, including those of its end."""

    def judge(self) -> str:
        """Check a run that has ended, and return the digest of its last state."""
        world = self.world
        state, disk, rows = world.coordinator.state, world.coordinator.disk, world.rows
        if world.coordinator.over is not None:
            return given_up_run_can_go_on(self, disk)
        if state is None:
            raise Violation("run_ends", "no coordinator ever made a turn")
        invariants.check_invariants(state)
        self.recoveries.run_failed_for_a_cause(state)
        self.training.none_to_go_on_from(state)
        store_agrees_with_itself(world)
        groups_are_filtered(world.scenario.settings, rows)
        if not _may_stay_open(world, state):
            books_are_closed(state, rows)
            self.prompts.every_prompt_ends(state)
        if state.run.failed is None:
            two_books(state, rows, self.training.book)
            work_is_done(state)
        events_once(self, disk)
        return replay_equal(self, disk, state)


def given_up_run_can_go_on(checks: Checks, disk: SimDisk) -> str:
    """Check that the log of a run whose disk stayed full is whole and replays to a state."""
    events_once(checks, disk)
    found = replay_records(disk)
    if found.difference is not None:
        raise Violation("replay_equal", str(found.difference))
    return hash_state(found.machine.state) if found.machine.started else ""


def groups_are_filtered(settings: Settings, rows: dict[str, Row]) -> None:
    """Check that exactly the groups without variance are dropped, and none without a filter."""
    flat, kept = dict[str, list[float]](), dict[str, list[float]]()
    for row in rows.values():
        if row.end_reason == DropReason.NO_VARIANCE:
            flat.setdefault(row.group_id, []).append(_measured(settings, row))
        elif row.end == EndKind.TRAINED or row.end_reason == DropReason.MISMATCH:
            kept.setdefault(row.group_id, []).append(_measured(settings, row))
    metric = settings.filter_metric
    for group, values in flat.items():
        if not metric or len(values) < 2 or len(set(values)) > 1:
            raise Violation("groups_are_filtered", f"{group} is dropped, its {metric}: {values}")
    for group, values in kept.items():
        if metric and len(values) > 1 and len(set(values)) == 1:
            raise Violation("groups_are_filtered", f"{group} is kept, its {metric}: {values}")


def _measured(settings: Settings, row: Row) -> float:
    score = decode_reward(row.reward_bits)
    assert score is not None, row
    if settings.filter_metric == "acc":
        return float(score >= 1 and row.finish_reason == FinishReason.STOP)
    return score


def _may_stay_open(world: World, state: State) -> bool:
    """Return whether the run failed and a fault ended the store (writer of ends) or its node."""
    store = next(process for process in world.processes.values() if process.role == "store")
    subject = state.run.failed.subject if state.run.failed is not None else ""
    lost = world.faults.has_lost(store) or subject in (store.name, store.node)
    return state.run.failed is not None and lost


def books_are_closed(state: State, rows: dict[str, Row]) -> None:
    """Check that nothing is live and that every row of the store has an end."""
    ledger = state.work.ledger
    for name, book in (("groups", ledger.groups), ("trajectories", ledger.trajectories)):
        if book.live:
            raise Violation("books_are_closed", f"{book.live} {name} have no end")
    for row in rows.values():
        if row.end is None:
            raise Violation("books_are_closed", f"{row.id} has no end in the store", row.id)


def store_agrees_with_itself(world: World) -> None:
    """Check that the store passes an audit of its file and has each row as it was last saved."""
    tables = world.database.tables
    for problem in books.find_contradictions(tables):
        raise Violation("nothing_is_damaged", problem)
    for trajectory in tables.changed():
        raise Violation("nothing_is_damaged", f"{trajectory} is not what was saved", trajectory)


def two_books(state: State, rows: dict[str, Row], trained: Collection[str]) -> None:
    """Check that the ledger, the store's rows and the trainer's book, kept separately, agree."""
    ledger, ends = state.work.ledger, [row.end for row in rows.values()]
    tokens = sum(row.num_tokens + row.tokens_lost for row in rows.values())
    claims = (
        ("issued", ledger.trajectories.issued, len(ends)),
        ("trained", ledger.trajectories.trained, ends.count("trained")),
        ("trained, by the trainer", ledger.trajectories.trained, len(trained)),
        ("evaluated", ledger.trajectories.evaluated, ends.count("evaluated")),
        ("tokens", ledger.tokens.issued, tokens),
        ("live tokens", ledger.tokens.live, 0),
    )
    for name, ledger_says, books_say in claims:
        if ledger_says != books_say:
            what = f"{name}: the ledger says {ledger_says}, the other book says {books_say}"
            raise Violation("two_books", what)
    for row in rows.values():
        if (row.end == "trained") != (row.id in trained):
            raise Violation("two_books", f"{row.id} ended as {row.end}", row.id)


def work_is_done(state: State) -> None:
    """Check that a run that was not asked to stop has made its steps and its last evaluation."""
    evaluations = state.evaluations
    if state.run.draining:
        return
    total = state.settings.total_steps
    if total and state.steps.completed != total:
        raise Violation("work_is_done", f"{state.steps.completed} of {total} steps are completed")
    if state.data.num_eval and not (evaluations.results and evaluations.results[-1].final):
        raise Violation("work_is_done", "the last evaluation is missing")


def events_once(checks: Checks, disk: SimDisk) -> None:
    """Check that every numbered event of a process is in the log once, in order, as it was sent."""
    logged: dict[tuple[str, int], int] = {}
    for _, record in read_log(disk):
        if not isinstance(record, EventRecord) or not record.peer_seq:
            continue
        key, number = (record.peer, record.incarnation), record.peer_seq
        last = logged.get(key, 0)
        boot_id, _ = checks.boots[key]
        if number != last + 1 or bytes(record.event) != checks.bodies[boot_id][last]:
            what = f"event {record.seq} is number {number} of {boot_id} after {last}"
            raise Violation("events_once", what, record.peer)
        logged[key] = number


def replay_equal(checks: Checks, disk: SimDisk, state: State) -> str:
    """Check that the log alone, and each snapshot with the events after it, lead to the same state.

    The log alone passes every snapshot on its way. Every run replays from the newest snapshot, a
    sample of the runs from the older ones, too.
    """
    live, kept = hash_state(state), read_snapshots(disk).usable
    known = {snapshot.seq: snapshot for snapshot in kept}

    def meet(stamped: Stamped, commands: list[Command], state: State) -> None:
        met = known.get(stamped.seq)
        if met is not None and hash_state(state) != met.digest:
            raise Violation("replay_equal", f"{met.name} has another state than the log")

    sampled = checks.world.scenario.seed % SNAPSHOTS_SAMPLE == 0
    for start in (None, *(kept if sampled else kept[:1])):
        found = replay_records(disk, observer=None if start else meet, snapshot=start)
        checks.replays += 1
        name = start.name if start is not None else "the first event"
        if found.difference is not None:
            raise Violation("replay_equal", f"from {name}: {found.difference}")
        if hash_state(found.machine.state) != live:
            raise Violation("replay_equal", f"from {name} on, replay leads to another state")
    return live
