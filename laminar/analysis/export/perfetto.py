"""Export of a run as a trace for ui.perfetto.dev and chrome://tracing.

Reads   the facts of a run; timeline/, the processes' own records
Writes  one JSON file, renamed once it is complete
Raises  ConfigError for a file that cannot be written

Trajectories lie on the slots of their replica, versions on the relay, steps and publishes on the
trainer, phases, evaluations and lost work on the coordinator. Both ends of an arrow belong to one
event: a publish leads from the trainer's work to the version, a pull from the version to the
replica, a move (repack: work given away) from one placement to the next.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from laminar.analysis.export.perfetto_tracks import Span, Time, Trace
from laminar.analysis.facts.idle_reasons import DOWN, PULLING
from laminar.analysis.facts.reader import Facts
from laminar.analysis.facts.replica_facts import BUSY
from laminar.analysis.log.display import step_number
from laminar.analysis.log.timeline import read_spans
from laminar.config import ConfigError
from laminar.events.base import COORDINATOR
from laminar.run.renames import get_temp_path, rename

KINDS = (
    PHASE, EVALUATION, LOST_WORK, FLAGS, DOING, PUBLISHING,
    VERSION, PULL, REFUSED, MIGRATION, SLOT, REWARD, OWN,
) = (
    "phase", "evaluation", "lost work", "happenings", "work", "publishing",
    "version", "pull", "refused", "migration", "slot", "reward", "own record",
)  # fmt: skip
"""Tracks of a process, from top to bottom."""

ROLES = (COORDINATOR, "trainer", "relay", "rollout", "store", "node")  #: first, in this order

NOTABLE_EVENTS = {
    "coordinator-started", "timer-fired", "heartbeat-lost", "node-silent", "node-recovered",
    "drain-requested", "batch-proposed", "actor-joined", "actor-left", "actor-failed",
    "process-exited", "publish-skipped", "transfer-problem", "weights-rejected",
    "version-missing", "trajectory-failed",
}  # fmt: skip
"""Rare events that explain others."""

PUBLISHED, SKIPPED, MADE = "weights-published", "publish-skipped", "step-completed"
WORK = {"train-step": MADE, "publish-weights": PUBLISHED, "export-model": "model-exported"}
"""Orders to the trainer, with the reports that end them."""

Row = dict[str, Any]
Reports = dict[tuple[str, int], list[Row]]
"""Reports about weights, by type and version."""


def write_trace(facts: Facts, path: Path) -> int:
    """Write the trace of a run; return the number of its events."""
    trace, count, separator = _draw_run(facts), 0, '{"displayTimeUnit":"ms","traceEvents":[\n'
    new = get_temp_path(path)
    try:
        with open(new, "w") as file:
            for event in trace.list_events(Time(facts.events, facts.seconds)):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                count, separator = count + 1, ",\n"
            file.write("\n]}\n")
        rename(new, path, durable=False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        new.unlink(missing_ok=True)
    return count


def _rank_process(process: str) -> int:
    """Return a process's sort key: role, machine, number; rollout-3.0 is on machine 3 (from 0)."""
    role, _, place = process.rpartition("-")
    machine, _, number = place.rpartition(".")
    order = (*ROLES, role or process).index(role or process)
    return (order << 40) + (int(machine or 0) << 20) + (int(number) if role else 0)


def _draw_run(facts: Facts) -> Trace:
    trace = Trace(KINDS, _rank_process)
    _draw_placements(facts, trace)
    _draw_rewards(facts, trace)
    _draw_weights(facts, trace)
    _draw_replicas(facts, trace)
    _draw_coordinator(facts, trace)
    for row in facts.rows("events", type=NOTABLE_EVENTS):
        flag = {"ph": "i", "s": "t", "name": row["type"], "args": _select_fields(row)}
        trace.add_point(row["sender"], FLAGS, _get_time(row, "time"), flag)
    for name in dict.fromkeys(row["process"] for row in facts.rows("processes", ["process"])):
        for span in sorted(read_spans(facts.run_dir, name), key=lambda found: found.start_ns):
            begin = Time(facts.events, (span.start_ns - facts.header.first_ns) / 1e9)
            length = {"name": span.state, "cat": OWN, "dur": (span.end_ns - span.start_ns) / 1e3}
            if span.state != "waiting":
                trace.add_point(name, OWN, begin, {"ph": "X"} | length)
    return trace


def _draw_placements(facts: Facts, trace: Trace) -> None:
    """Draw each stay on a slot, and the way of lost work to its next place."""
    turns = {(row["trajectory"], row["finished_event"]): row for row in facts.rows("turns")}
    updates = defaultdict[tuple[str, int], list[Row]](list)
    for row in facts.rows("updates"):
        updates[row["trajectory"], row["placement"]].append(row)
    stays = defaultdict[str, list[tuple[Row, Span]]](list)
    for row in facts.rows("placements"):
        name = row["trajectory"]
        args = {key: row[key] for key in ("purpose", "version", "placement", "attempt")}
        times = _get_time(row, "dispatched"), _find_time(row, "left_at")
        span = trace.add_span(row["replica"], SLOT, name, *times, **args)
        span.end_args = {"how": row["left_how"]}
        if turn := turns.get((name, row["left_at_event"])):
            span.end_args |= {key: turn[key] for key in ("tokens", "finish_reason")}
        if started := _find_time(row, "started"):
            resumed = row["tokens_resumed"]
            trace.add_inner(span, started, "generating", tokens_resumed=resumed)
        for update in updates[name, row["placement"]]:
            text = f"continues with v{update['version']}"
            trace.add_inner(span, _get_time(update, "loaded"), text)
        stays[name].append((row, span))
    ends = {row["trajectory"]: row for row in facts.rows("trajectories")}
    for name, found in stays.items():
        found.sort(key=lambda stay: stay[1].begin)
        following: list[Span | None] = [*(span for _, span in found[1:]), None]
        for (row, before), after in zip(found, following, strict=True):
            if row["left_how"] in ("lost", "released"):
                _draw_move(trace, row, before, after, ends.get(name, {}))


def _draw_move(trace: Trace, row: Row, before: Span, after: Span | None, end: Row) -> None:
    """Draw an arrow, or lost work that waits for its next place with an arrow at both ends."""
    assert before.end is not None
    if after is not None and after.begin.event == before.end.event:
        released = row["left_how"] == "released"
        return trace.add_arrow("repack" if released else "move", after.begin, before, after)
    until = after.begin if after is not None else _find_time(end, "ending")
    lost = trace.add_span(COORDINATOR, LOST_WORK, row["trajectory"], before.end, until)
    trace.add_arrow("move", before.end, before, lost)
    if after is not None:
        trace.add_arrow("move", after.begin, lost, after)


def _draw_rewards(facts: Facts, trace: Trace) -> None:
    for row in facts.rows("trajectories"):
        if begin := _find_time(row, "scoring"):
            ends = [_find_time(row, name) for name in ("rewarded", "ending")]
            end = next((t for t in ends if t is not None and t >= begin), None)
            span = trace.add_span(row["scorer"], REWARD, row["trajectory"], begin, end)
            span.end_args = {"reward": row["reward"]}


def _draw_weights(facts: Facts, trace: Trace) -> None:
    """Draw the trainer's work, versions on relays, and pulls, with the arrows between them."""
    reports = defaultdict[tuple[str, int], list[Row]](list)
    for row in facts.rows("events", type={*WORK.values(), SKIPPED}):
        reports[row["type"], json.loads(row["fields"])["version"]].append(row)
    work, publishing = _draw_orders(facts, trace, reports), _draw_publishes(trace, reports)
    begins = [span.begin.event for span in work]
    held = defaultdict[int, list[Span]](list)
    for row in sorted(facts.rows("holdings"), key=lambda row: row["began_event"]):
        version, begin = row["version"], _get_time(row, "began")
        span = trace.add_span(row["relay"], VERSION, f"v{version}", begin, _find_time(row, "ended"))
        sources, name = held[version], "broadcast"
        if begin.event in [row["event"] for row in reports.get((PUBLISHED, version), ())]:
            sources, name = work[: bisect_right(begins, begin.event)][-4:], "publish"
            sources += [publishing[version]] if version in publishing else []
        for source in [s for s in sources if s.is_open(begin.event)][-1:]:
            trace.add_arrow(name, begin, source, span)
        held[version].append(span)
    nodes = {row["process"]: row["node"] for row in facts.rows("processes")}
    for row in facts.rows("loads"):
        name = f"pull v{row['version']}" + ("" if row["exact"] else " or newer")
        begin, args = _get_time(row, "ordered"), {k: row[k] for k in ("purpose", "source")}
        span = trace.add_span(row["replica"], PULL, name, begin, _find_time(row, "ended"), **args)
        span.end_args = {"ended_by": row["outcome"]}
        near = [s for s in held[row["version"]] if nodes[s.process] == nodes[row["replica"]]]
        for source in [s for s in near if s.is_open(begin.event) and not row["source"]]:
            trace.add_arrow("pull", begin, source, span)


def _draw_orders(facts: Facts, trace: Trace, reports: Reports) -> list[Span]:
    """Draw the trainer's orders until their report, the next order or the end of the trainer."""
    lives = [(row["process"], _find_time(row, "ended")) for row in facts.rows("processes")]
    work = []
    for kind, report in WORK.items():
        orders = facts.rows("decisions", type=kind)
        for row, following in zip(orders, [*orders[1:], Row()], strict=False):
            fields, receiver = json.loads(row["fields"]), row["receiver"]
            begin = _get_time(row, "time")
            version, name = fields["version"], f"{kind.partition('-')[0]} v{fields['version']}"
            if kind == "train-step":
                name = f"step {step_number(fields['step'])}"
            ends = [
                _find_time(found, "time")
                for found in (*reports.get((report, version), ()), following)
            ]
            ends += [time for process, time in lives if process == receiver]
            end = min((time for time in ends if time and time > begin), default=None)
            work.append(trace.add_span(receiver, DOING, name, begin, end, version=version))
    return sorted(work, key=lambda span: span.begin)


def _draw_publishes(trace: Trace, reports: Reports) -> dict[int, Span]:
    """Draw publishes that outlast the trainer's work, by version."""
    firsts = {key: _get_time(rows[0], "time") for key, rows in reports.items()}
    published = {version: time for (kind, version), time in firsts.items() if kind == PUBLISHED}
    drawn = {}
    for (kind, version), begin in firsts.items():
        if kind in (PUBLISHED, SKIPPED) or (SKIPPED, version) in firsts:
            continue
        later = (time for other, time in published.items() if other > version)
        end = published.get(version) or min(later, default=None)
        if end is None or end > begin:
            sender = reports[kind, version][0]["sender"]
            drawn[version] = trace.add_span(sender, PUBLISHING, f"publish v{version}", begin, end)
    return drawn


def _draw_replicas(facts: Facts, trace: Trace) -> None:
    """Draw the reasons of idle replicas, their migrations and gauges."""
    states = sorted(facts.rows("replica_states"), key=itemgetter("replica", "began_event"))
    for (replica, state), found in groupby(states, key=itemgetter("replica", "state")):
        if state not in (BUSY, PULLING, DOWN):
            parts = list(found)
            times = _get_time(parts[0], "began"), _find_time(parts[-1], "ended")
            trace.add_span(replica, REFUSED, state, *times, detail=parts[0]["detail"])
    for row in facts.rows("migrations"):
        name = f"gives {row['given']} to {row['destination']}"
        times = _get_time(row, "ordered"), _find_time(row, "freed") or _find_time(row, "done")
        trace.add_span(row["source"], MIGRATION, name, *times)
    latest: dict[str, tuple[int, ...]] = {}
    for row in facts.rows("gauges"):
        replica, at = row["replica"], _get_time(row, "reported")
        figures = row["kv_used"], row["running"], row["waiting"]
        if latest.get(replica) != figures:
            latest[replica] = figures
            sequences = {key: row[key] for key in ("running", "waiting")}
            for name, args in (("cache", {"tokens": row["kv_used"]}), ("sequences", sequences)):
                trace.add_point(replica, FLAGS, at, {"ph": "C", "name": name, "args": args})


def _draw_coordinator(facts: Facts, trace: Trace) -> None:
    """Draw phases and evaluations; an evaluation begins with its first sample."""
    for row in facts.rows("conditions", actor=""):
        phase = row["condition"].removeprefix("phase-")
        if phase != row["condition"]:
            times = _get_time(row, "began"), _find_time(row, "ended")
            trace.add_span(COORDINATOR, PHASE, phase, *times)
    done = {row["evaluation"]: row for row in facts.rows("evaluations")}
    samples: dict[int, list[Row]] = {}
    for row in facts.rows("trajectories", purpose="eval"):
        samples.setdefault(int(row["trajectory"].partition(".")[0][1:]), []).append(row)
    for number, rows in sorted(samples.items()):
        result = done.get(number, {})
        first = min(rows, key=lambda row: row["dispatched_event"])
        version = result.get("version", first["version"])
        name = f"evaluation {number} of v{version}"
        end = _find_time(result, "done")
        span = trace.add_span(COORDINATOR, EVALUATION, name, _get_time(first, "dispatched"), end)
        if result:
            span.end_args = {"correct": f"{result['correct']}/{result['total']}"}


def _find_time(row: Row, name: str) -> Time | None:
    """Return the time in a column, None if it has not come."""
    return None if row.get(name) is None else _get_time(row, name)


def _get_time(row: Row, name: str) -> Time:
    return Time(row["event" if name == "time" else f"{name}_event"], row[name])


def _select_fields(row: Row) -> Row:
    """Return the short fields of an event; the configuration is in the log."""
    fields: Row = json.loads(row["fields"])
    left_out = ("type", "config")
    short = {k: v for k, v in fields.items() if isinstance(v, str | int) and k not in left_out}
    return {"event": row["event"]} | short
