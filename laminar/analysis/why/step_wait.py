"""Report on the wait before a step: the trainer's idle time and the last groups of its batch.

Reads   facts
Gives   explain_step: sentences
Raises  ConfigError for a step that was never ordered
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laminar.analysis.facts.reader import Facts
from laminar.analysis.facts.replica_facts import BUSY
from laminar.analysis.why.wording import (
    QUESTION_HINT,
    EventWords,
    Row,
    format_time,
    sum_by_reason,
    wait_lines,
)
from laminar.config import ConfigError
from laminar.events import events as ev

LAST_GROUPS = 3  #: of a batch, in the report


def explain_step(facts: Facts, number: int) -> Iterator[str]:
    """Yield the answer; steps are counted from 1."""
    found = facts.rows("steps", step=number)
    if not found:
        steps = facts.table("steps", ["step"])["step"].to_pylist()
        last = f"the last is step {max(steps)}" if steps else "no step was ordered"
        raise ConfigError(f"step {number} was never ordered ({last}): {QUESTION_HINT}")
    [step], waits = found, facts.rows("trainer_waits", step=number)
    cause = EventWords(facts, [step["ordered_event"]]).describe(step["ordered_event"])
    if not waits:
        yield (
            f"Step {number} did not wait: its batch was complete when the trainer became free, at "
            f"{format_time(step, 'ordered')}, by {cause}."
        )
    else:
        yield (
            f"Step {number} waited {step['ordered'] - waits[0]['began']:.3f} s: the trainer became "
            f"free at {format_time(waits[0], 'began')}, by {waits[0]['cause']}, and got its batch "
            f"at {format_time(step, 'ordered')}, by {cause}."
        )
        yield from wait_lines(waits, "reason", facts.seconds)
    yield from _group_lines(facts, step, waits)


def _group_lines(facts: Facts, step: Row, waits: Sequence[Row]) -> Iterator[str]:
    ids = step["trajectories"]
    lives = {row["trajectory"]: row for row in facts.rows("trajectories", trajectory=set(ids))}
    groups: dict[str, list[Row]] = {}
    for name in ids:
        groups.setdefault(lives[name]["group_id"], []).append(lives[name])
    chosen = {"complete": step["ordered"], "complete_event": step["ordered_event"]}
    complete: dict[str, Row] = dict.fromkeys(groups, chosen)
    found = facts.rows("groups", group_id=set(groups))
    complete |= {row["group_id"]: row for row in found if row["complete"] is not None}
    free = waits[0]["began_event"] if waits else step["ordered_event"]
    missing = [group for group in groups if complete[group]["complete_event"] > free]
    if missing:
        yield f"{len(missing)} of its {len(groups)} groups were not complete then."
    order = sorted(groups, key=lambda group: complete[group]["complete_event"], reverse=True)
    last = [max(groups[g], key=lambda row: row["rewarded_event"] or 0) for g in order[:LAST_GROUPS]]
    stays = {
        row["trajectory"]: row
        for row in facts.rows("placements", trajectory={life["trajectory"] for life in last})
        if row["placement"] == lives[row["trajectory"]]["placements"]
    }
    if missing:
        yield _share_line(last[0], stays[last[0]["trajectory"]], waits, step)
    words = EventWords(facts, [stay["dispatched_event"] for stay in stays.values()])
    for life in last:
        yield (
            f"Group {life['group_id']} was complete at "
            f"{format_time(complete[life['group_id']], 'complete')}, "
            f"with {life['trajectory']} as its last:"
        )
        yield from _part_lines(facts, life, stays[life["trajectory"]], step, words)


def _part_lines(facts: Facts, life: Row, stay: Row, step: Row, words: EventWords) -> Iterator[str]:
    """Yield the stages from dispatched to chosen, each with its length."""
    yield (
        f"  dispatched at {format_time(stay, 'dispatched')} to {stay['replica']} "
        f"with v{stay['version']}, by {words.describe(stay['dispatched_event'])}"
    )
    yield from _before_lines(facts, life, stay, words)
    tokens = f"{life['tokens']} tokens, {life['finish_reason']}"
    rewarded = life["reward"] is not None
    score = f"by {life['scorer']}, reward {life['reward']:.3g}" if rewarded else ""
    before = stay["dispatched"]
    for name, row, column, detail in (
        ("started", stay, "started", stay["replica"]),
        ("finished", life, "finished", tokens),
        ("rewarded", life, "rewarded", score),
        ("chosen", step, "ordered", f"for step {step['step']}"),
    ):
        if row[column] is not None:
            seconds, event = row[column] - before, row[f"{column}_event"]
            yield f"  {name} {seconds:.3f} s later (#{event}): {detail}"
            before = row[column]


def _before_lines(facts: Facts, life: Row, stay: Row, words: EventWords) -> Iterator[str]:
    """Yield the preceding idle time of its replica, and the weights that ended it."""
    replica, placed = stay["replica"], stay["dispatched_event"]
    states = facts.rows("replica_states", replica=replica)
    ended = [row for row in states if row["ended_event"] == placed and row["state"] != BUSY]
    cause = words[placed]
    if ended:
        since = ended[-1]["idle_since_event"]
        parts = [row for row in states if row["idle_since_event"] == since]
        spent = sum_by_reason(parts, stay["dispatched"]).items()
        listed = ", ".join(f"{reason} {seconds:.3f} s" for reason, seconds in spent)
        yield f"    {replica} had been idle since {format_time(parts[0], 'began')}: {listed}"
    elif isinstance(cause.event, ev.TrajectoryFinished) and cause.peer == replica:
        yield f"    {replica} had no room for it earlier"
    for row in facts.rows("versions", version=stay["version"]):
        yield f"    v{stay['version']} was published at {format_time(row, 'published')}"
    if stay["placement"] > life["turns"]:
        yield f"    placement {stay['placement']}: see `laminar log why` of the trajectory"


def _share_line(life: Row, stay: Row, waits: Sequence[Row], step: Row) -> str:
    """Divide the trainer's wait among the stages of the last sibling."""
    parts = (
        ("not dispatched", stay["dispatched"]),
        ("queued at its replica", stay["started"]),
        ("generated", life["finished"]),
        ("rewarded", life["rewarded"]),
        ("complete (its batch was not)", step["ordered"]),
    )
    shares, before = [], waits[0]["began"] if waits else step["ordered"]
    for name, until in parts:
        if until is not None and until > before:
            shares.append(f"{name} for {until - before:.3f} s")
            before = until
    return f"While the trainer waited, {life['trajectory']}, the last, was {', '.join(shares)}."
