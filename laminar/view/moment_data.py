"""Contents of a moment: the event, its decisions and their reasons, and the state after it.

Reads   a Moment, and tables of facts
Gives   describe_event, list_decisions, list_reasons; list_tiles, list_replicas, list_waiting
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laminar.analysis.log.story import describe_message
from laminar.core.scheduling.admission import find_not_admitted_reason
from laminar.core.state.state import State
from laminar.core.waits import list_waits
from laminar.view.run_data import Moment
from laminar.view.timeline_data import Tables

WAITS = ("who", "waits for", "by the event", "since", "until", "then")
DECISIONS_MAX = 50  #: shown of one event


class Reason(NamedTuple):
    """Fact that the event began or decided, with its reason."""

    subject: str
    text: str


REASONS = (
    ("placements", "dispatched_event", ("trajectory", "replica"), "moved_because"),
    ("replica_states", "began_event", ("replica", "state"), "detail"),
    ("trainer_waits", "began_event", ("step", "reason"), "detail"),
    ("repack_decisions", "searched_event", ("replica", "reason"), "detail"),
    ("trajectories", "ending_event", ("trajectory", "outcome"), "outcome_reason"),
    ("loads", "ordered_event", ("replica", "purpose"), "source_detail"),
    ("processes", "ended_event", ("process",), "reason"),
    ("warnings", "given_event", ("kind",), "text"),
)
"""Tables whose rows explain an event: its column, what they are about, and the explanation."""


def describe_event(moment: Moment) -> tuple[str, str]:
    """Return the type and sender of an event, and its fields, as in its story."""
    name, _, fields = describe_message(moment.stamped.event).partition(" ")
    return f"{name} of {moment.stamped.peer}", fields


def list_decisions(moment: Moment) -> list[dict[str, str]]:
    """Return the commands that the event caused."""
    found = []
    for command in moment.commands[:DECISIONS_MAX]:
        name, _, fields = describe_message(command).partition(" ")
        found.append({"to": command.to, "command": name, "fields": fields})
    if more := len(moment.commands) - len(found):
        found.append({"to": "", "command": f"and {more:,} more", "fields": ""})
    return found


def list_reasons(tables: Tables, event: int) -> Iterator[Reason]:
    """Yield what the event began, ended or decided, where a reason is on record."""
    for name, column, subject, text in REASONS:
        table = tables(name)
        found = table.filter(pc.fill_null(pc.equal(table[column], event), False))
        for row in found.to_pylist():
            if row[text]:
                parts = [str(row[part]) for part in subject if row[part] is not None]
                yield Reason(" ".join(parts), str(row[text]))


def list_tiles(state: State) -> list[tuple[str, str]]:
    """Return the main figures of a state as (name, figure)."""
    work, steps = state.work, state.steps
    statuses: dict[str, int] = {}
    for trajectory in work.trajectories.values():
        statuses[trajectory.status] = statuses.get(trajectory.status, 0) + 1
    batch = f"step {steps.batch.step_index + 1}" if steps.batch else "waits"
    return [
        ("phase", str(state.run.phase)),
        ("steps completed", f"{steps.completed} of {state.settings.total_steps}"),
        ("trainer", batch),
        ("newest version", f"v{state.versions.newest}" if state.versions.newest >= 0 else "-"),
        ("groups open, ready", f"{len(work.groups) - len(work.ready):,}, {len(work.ready):,}"),
        ("trajectories", ", ".join(f"{n:,} {name}" for name, n in sorted(statuses.items())) or "-"),
        ("outstanding commands", f"{len(state.orders.commands):,}"),
    ]


def list_replicas(state: State, tables: Tables) -> list[dict[str, Any]]:
    """Return a row per replica: what it serves, runs and stores."""
    gauges = _find_last_gauges(tables("gauges"), state.seq)
    found = []
    for name, replica in sorted(state.members.replicas.items(), key=lambda item: item[0]):
        gauge = gauges.get(name, {})
        used, size = gauge.get("kv_used"), gauge.get("kv_capacity")
        alive = state.members.is_actor_alive(name)
        refused = find_not_admitted_reason(state, replica) if alive else None
        doing = "loading" if replica.loading else str(refused or "takes new groups")
        found.append(
            {
                "replica": name,
                "version": replica.version,
                "running": len(replica.running),
                "slots": replica.capacity,
                "waiting": gauge.get("waiting"),
                "KV in use": f"{used / size:.0%}" if used is not None and size else None,
                "doing": doing if alive else "down",
            }
        )
    return found


def list_waiting(moment: Moment) -> list[dict[str, str]]:
    """Return who waits for what: since when, until when, and what happens then."""
    found = []
    for wait in list_waits(moment.state):
        since, until = (
            "-" if at is None else f"{moment.seconds + (at - moment.state.time_ns) / 1e9:,.1f} s"
            for at in (wait.since_ns, wait.until_ns)
        )
        by = f"{wait.event} of {wait.owner}"
        found.append(
            dict(zip(WAITS, (wait.waiter, wait.what, by, since, until, wait.then), strict=True))
        )
    return found


def _find_last_gauges(gauges: pa.Table, event: int) -> dict[str, dict[str, Any]]:
    """Return the last report of each replica at an event."""
    stop = int(np.searchsorted(gauges["reported_event"].to_numpy(), event, "right"))
    names = gauges["replica"].slice(0, stop).combine_chunks().dictionary_encode()
    codes = np.asarray(names.indices) if stop else np.zeros(0, np.int64)
    _, last = np.unique(codes[::-1], return_index=True)
    rows = gauges.take(pa.array(sorted(stop - 1 - last), pa.int64())).to_pylist()
    return {row["replica"]: row for row in rows}
