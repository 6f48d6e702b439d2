"""Report on why a trajectory moved, and why repack left it in place.

Lists every placement after its first, with the events that caused it.

Reads   facts
Gives   explain_trajectory: sentences
Raises  ConfigError for a trajectory that the log does not have
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from laminar.analysis.facts.reader import Facts
from laminar.analysis.facts.repack_reasons import EMPTIED, NOT_STRAGGLING
from laminar.analysis.why.wording import (
    QUESTION_HINT,
    EventWords,
    Row,
    decision_lines,
    format_time,
    format_times,
)
from laminar.config import ConfigError
from laminar.names.ids import Purpose


def explain_trajectory(facts: Facts, name: str) -> Iterator[str]:
    """Yield the answer."""
    stays = sorted(facts.rows("placements", trajectory=name), key=lambda row: row["placement"])
    if not stays:
        raise ConfigError(f"the log has no trajectory {name}: {QUESTION_HINT}")
    [whole] = facts.rows("trajectories", trajectory=name)
    updates = facts.rows("updates", trajectory=name)
    words = EventWords(
        facts, [row[k] for row in stays for k in ("dispatched_event", "left_at_event")]
    )
    moves = [(a, b) for a, b in pairwise(stays) if b["moved_because"]]
    first = stays[0]
    yield f"{name} {f'moved {format_times(len(moves))}' if moves else 'never moved'}."
    yield (
        f"It was dispatched to {first['replica']} with v{first['version']} at "
        f"{format_time(first, 'dispatched')}, by {words.describe(first['dispatched_event'])}."
    )
    yield from _update_lines(first, updates)
    for before, after in moves:
        yield from _move_lines(before, after, words)
        yield from _update_lines(after, updates)
    yield from _turn_lines(stays, words)
    yield from _end_lines(facts, whole, stays[-1])
    yield from _stay_lines(facts, name, stays)


def _update_lines(stay: Row, updates: Sequence[Row]) -> Iterator[str]:
    for row in updates:
        if row["placement"] == stay["placement"]:
            yield (
                f"It continued with v{row['version']}, loaded in flight by {row['replica']} at "
                f"{format_time(row, 'loaded')}."
            )


def _move_lines(before: Row, after: Row, words: EventWords) -> Iterator[str]:
    lost, placed = before["left_at_event"], after["dispatched_event"]
    yield f"Placement {after['placement']}:"
    how = "released it" if before["left_how"] == "released" else "lost it"
    left_at = format_time(before, "left_at")
    yield f"  {before['replica']} {how} at {left_at}: {words.describe(lost)}."
    if after["moved_from"]:
        yield f"  {after['moved_from']}"
    if placed == lost:
        yield f"  {after['replica']} got it at once, by the same event."
    else:
        waited = after["dispatched"] - before["left_at"]
        yield (
            f"  {after['replica']} got it {waited:.3f} s later, at "
            f"{format_time(after, 'dispatched')}, by {words.describe(placed)}."
        )
    if after["attempt"] > before["attempt"]:
        yield (
            f"  It restarted as attempt {after['attempt']} with v{after['version']}: "
            f"{after['moved_because']}."
        )
    else:
        yield f"  It resumed: {after['moved_because']}. {_describe_tokens(after)}"


def _describe_tokens(stay: Row) -> str:
    if stay["started"] is None:
        return "It did not start there."
    at = format_time(stay, "started")
    if not stay["tokens_resumed"]:
        return f"The store had no tokens of it yet, so the attempt began again at {at}."
    return f"It continued from {stay['tokens_resumed']} stored tokens at {at}."


def _turn_lines(stays: Sequence[Row], words: EventWords) -> Iterator[str]:
    """Yield the turns that followed on another replica."""
    for before, after in pairwise(stays):
        if after["moved_because"] is None and before["replica"] != after["replica"]:
            yield (
                f"Turn {after['turn']} ran on {after['replica']} with v{after['version']} from "
                f"{format_time(after, 'dispatched')}, by "
                f"{words.describe(after['dispatched_event'])}."
            )


def _end_lines(facts: Facts, whole: Row, last: Row) -> Iterator[str]:
    if whole["finished"] is not None:
        turns = f" in {whole['turns']} turns" if whole["turns"] > 1 else ""
        yield (
            f"It finished on {whole['replica']} at {format_time(whole, 'finished')} "
            f"with {whole['tokens']} tokens{turns} ({whole['finish_reason']})."
        )
    if whole["ended_by"]:
        yield f"Its environment ended it ({whole['ended_by']}); the tokens so far were scored."
    if whole["ending"] is None:
        lost = last["left_how"] in ("lost", "released")
        yield f"At the end of the log it is {'lost' if lost else 'open'}."
        return
    how = whole["outcome"]
    how += f" ({whole['outcome_reason']})" if whole["outcome_reason"] else ""
    step = f" by step {whole['step']}" if whole["outcome"] == "trained" else ""
    yield f"It ended as {how}{step} at {format_time(whole, 'ending')}."
    if again := _find_repetition(facts, whole):
        yield f"The evaluation ran its prompt again as {again}."


def _find_repetition(facts: Facts, whole: Row) -> str:
    """Return the id under which an evaluation repeated a lost sample, in a separate group."""
    if whole["purpose"] != Purpose.EVAL or whole["outcome"] != "dropped":
        return ""
    group = whole["group_id"].partition("-")[0]
    found = [
        row
        for row in facts.rows("trajectories", purpose=Purpose.EVAL)
        if row["group_id"].partition("-")[0] == group and row["attempts"] > whole["attempts"]
    ]
    return str(min(found, key=lambda row: row["dispatched_event"])["trajectory"]) if found else ""


def _stay_lines(facts: Facts, name: str, stays: Sequence[Row]) -> Iterator[str]:
    """Yield why repack left it in place while its replica was a straggler."""
    replicas = {stay["replica"] for stay in stays}
    found = [
        row
        for row in facts.rows("repack_decisions", replica=replicas)
        if name in (row["trajectories"] or ()) and row["reason"] not in (EMPTIED, *NOT_STRAGGLING)
    ]
    if found:
        yield f"Repack found its replica straggling but left it there {format_times(len(found))}:"
        yield from decision_lines(found)
