"""Contents of a moment: the event, its decisions and their reasons, and the state after it.

Reads   a Moment, and tables of facts
Gives   describe_event, list_decisions, list_reasons; list_tiles, list_replicas, list_waiting
"""

from __future__ import annotations

from collections import Counter
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

DECISIONS_MAX = 50  #: shown of one event
WAITS = ("who", "waits for", "by the event", "since", "until", "then")
REPLICAS = ("replica", "version", "running", "slots", "waiting", "KV in use", "doing")
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


class Reason(NamedTuple):
    """Explanation of what an event began, ended or decided."""

    subject: str
    text: str


def describe_event(moment: Moment) -> tuple[str, str]:
    """Return the type and sender of an event, and its fields, as in a story."""
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
    """Yield the reasons on record for what the event began, ended or decided."""
    for name, column, subject, text in REASONS:
        table = tables(name)
        for row in table.filter(pc.equal(table[column], event)).to_pylist():
            if row[text]:
                parts = (str(row[part]) for part in subject if row[part] is not None)
                yield Reason(" ".join(parts), str(row[text]))


def list_tiles(state: State) -> list[tuple[str, str]]:
    """Return the main figures of a state as (name, figure)."""
    work, steps, newest = state.work, state.steps, state.versions.newest
    statuses = Counter(str(trajectory.status) for trajectory in work.trajectories.values())
    return [
        ("phase", str(state.run.phase)),
        ("steps completed", f"{steps.completed} of {state.settings.total_steps}"),
        ("trainer", f"step {steps.batch.step_index + 1}" if steps.batch else "waits"),
        ("newest version", f"v{newest}" if newest >= 0 else "-"),
        ("groups open, ready", f"{len(work.groups) - len(work.ready):,}, {len(work.ready):,}"),
        ("trajectories", ", ".join(f"{n:,} {s}" for s, n in sorted(statuses.items())) or "-"),
        ("outstanding commands", f"{len(state.orders.commands):,}"),
    ]


def list_replicas(state: State, tables: Tables) -> list[tuple[Any, ...]]:
    """Return a row per replica, with the columns of REPLICAS."""
    gauges = _find_last_gauges(tables("gauges"), state.seq)
    found = []
    for name, replica in state.members.replicas.items():
        gauge = gauges.get(name, {})
        used, size = gauge.get("kv_used"), gauge.get("kv_capacity")
        alive = state.members.is_actor_alive(name)
        refused = find_not_admitted_reason(state, replica) if alive else "down"
        doing = "loading" if alive and replica.loading else str(refused or "takes new groups")
        cache = f"{used / size:.0%}" if used is not None and size else None
        figures = (replica.version, len(replica.running), replica.capacity, gauge.get("waiting"))
        found.append((name, *figures, cache, doing))
    return found


def list_waiting(moment: Moment) -> list[tuple[Any, ...]]:
    """Return a row per wait, with the columns of WAITS."""
    found: list[tuple[Any, ...]] = []
    for wait in list_waits(moment.state):
        since, until = (
            "-" if at is None else f"{moment.seconds + (at - moment.state.time_ns) / 1e9:,.1f} s"
            for at in (wait.since_ns, wait.until_ns)
        )
        event = f"{wait.event} of {wait.owner}"
        found.append((wait.waiter, wait.what, event, since, until, wait.then))
    return found


def _find_last_gauges(gauges: pa.Table, event: int) -> dict[str, dict[str, Any]]:
    """Return the last report of each replica at an event."""
    stop = int(np.searchsorted(gauges["reported_event"].to_numpy(), event, "right"))
    names = gauges["replica"].slice(0, stop).combine_chunks().dictionary_encode()
    codes = np.asarray(names.indices) if stop else np.zeros(0, np.int64)
    _, last = np.unique(codes[::-1], return_index=True)
    rows = gauges.take(pa.array(stop - 1 - last, pa.int64())).to_pylist()
    return {row["replica"]: row for row in rows}
