"""Audit of the trainer's record of trained steps against the log.

Reads   RUN/trainer_book.jsonl: one line per step, synced before the step was reported
Gives   BookLine, problems and notes, one sentence each

Each id must be trained once, and each step as ordered, as reported, and as ended in the ledger. A
step that was ordered again after its trainer was lost may have a line per order; the line of the
latest order counts, and the others were rolled back.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import xxhash

from laminar.analysis.audit.ledger_book import Account
from laminar.analysis.log.display import step_number
from laminar.analysis.log.timeline import whole_lines
from laminar.names.ids import TrajectoryId
from laminar.run.directory import TRAINER_BOOK_FILE


class BookLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line about one step: the ids that the trainer consumed, and those that it left out."""

    step: int
    version: int
    changed: bool
    digest: str
    ids: list[TrajectoryId]
    left_out: list[TrajectoryId] = []
    incarnation: int = 0  #: of the trainer; 0 in older books
    contents: str = ""  #: digest of the learner's input (storage/contents.py); empty in older books


def read_book(run_dir: Path) -> tuple[list[BookLine], list[str]]:
    """Return the lines, and the damaged ones as problems; skip a truncated last line."""
    lines, problems = [], []
    for number, text in whole_lines(run_dir / TRAINER_BOOK_FILE):
        try:
            lines.append(msgspec.json.decode(text, type=BookLine))
        except msgspec.MsgspecError as error:
            problems.append(f"trainer: line {number} of {TRAINER_BOOK_FILE} is damaged: {error}")
    return lines, problems


def book_problems(lines: list[BookLine], first: Account, latest: Account) -> list[str]:
    """Compare the book with `first`, read before and contained in it, and the later `latest`."""
    rolled_back = [line for line in lines if _is_rolled_back(line, latest)]
    lines = [line for line in lines if line not in rolled_back]
    counts = Counter(name for line in lines for name in line.ids)
    steps = Counter(line.step for line in lines)
    completed = [step for step, entry in first.steps.items() if entry.completed is not None]
    return [
        *(f"trainer: {name} was trained {n} times" for name, n in counts.items() if n > 1),
        *(
            f"trainer: step {step_number(step)} is recorded {n} times"
            for step, n in steps.items()
            if n > 1
        ),
        *(problem for line in lines for problem in _step_problems(line, latest)),
        *(problem for line in rolled_back for problem in _order_problems(line, latest)),
        *(
            f"trainer: step {step_number(step)} is completed in the log but is not in "
            f"{TRAINER_BOOK_FILE}"
            for step in completed
            if step not in steps
        ),
    ]


def _is_rolled_back(line: BookLine, latest: Account) -> bool:
    """Return whether the step of a line was ordered again, under another version."""
    ordered = (line.step, line.version) in latest.orders
    return ordered and latest.steps[line.step].command.version != line.version


def rolled_back(lines: list[BookLine], latest: Account) -> list[str]:
    """Describe steps recorded by trainers that were lost before the log had the report."""
    return [
        f"step {step_number(line.step)} is in {TRAINER_BOOK_FILE} under version {line.version}, "
        f"by {describe_trainer(line)}, which was lost; version "
        f"{latest.steps[line.step].command.version} counts"
        for line in lines
        if _is_rolled_back(line, latest)
    ]


def describe_trainer(line: BookLine) -> str:
    return f"incarnation {line.incarnation} of the trainer" if line.incarnation else "a trainer"


def find_unreported(lines: list[BookLine], latest: Account) -> list[str]:
    """Describe trained steps that do not count: in flight, lost with their trainer, or too late."""
    reported = {step for step, entry in latest.steps.items() if entry.completed is not None}
    return [
        f"step {step_number(line.step)} is in {TRAINER_BOOK_FILE}, but the log does not count "
        "it: its report was lost or arrived after the run failed"
        for line in lines
        if line.step in latest.steps
        and line.step not in reported
        and not _is_rolled_back(line, latest)
    ]


def _step_problems(line: BookLine, latest: Account) -> list[str]:
    """Compare a line with the order, its own digest, the report, and the ends of the ledger."""
    entry = latest.steps.get(line.step)
    if entry is None:
        return [f"trainer: step {step_number(line.step)} was never ordered"]
    report, problems = entry.completed, _order_problems(line, latest)
    if report is None:
        return problems
    if (line.digest, line.changed) != (report.digest, report.changed):
        problems.append(
            f"trainer: step {step_number(line.step)} was reported with other values than recorded"
        )
    reported = {name for part in report.left_out for name in part.trajectories}
    if reported != set(line.left_out):
        problems.append(
            f"trainer: step {step_number(line.step)} reported other left-out ids than it recorded"
        )
    if sorted(set(line.ids) - reported) != latest.list_trained(line.step):
        problems.append(
            f"trainer: step {step_number(line.step)} trained other ids than the ledger has for it"
        )
    return problems


def _order_problems(line: BookLine, latest: Account) -> list[str]:
    """Compare a line with its order and its own digest."""
    ordered = latest.orders.get((line.step, line.version))
    problems = []
    if ordered is None or line.ids != list(ordered.trajectories):
        problems.append(
            f"trainer: step {step_number(line.step)} has other ids or another version than ordered"
        )
    if line.digest != ids_digest(line.ids):
        problems.append(
            f"trainer: the ids of step {step_number(line.step)} do not match their digest"
        )
    return problems


def ids_digest(ids: list[TrajectoryId]) -> str:
    """Return the xxh3_128 (hex) of the MessagePack array of the ids, as the trainer forms it."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(ids))
