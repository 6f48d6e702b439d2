"""Runs of seeds: one, with its outcome and, if a promise was broken, its story; or many.

Reads   Choices, seeds
Gives   Outcome; lines of text for people

A story comes from running the seed again with an observer, since the same seed is the same run: an
ordinary run need not remember anything for it.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import get_context

import msgspec

from laminar.analysis.log.story import Subject, describe_message
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.events.base import Command, Event, Stamped
from tools.simulator.checks.final_checks import AllChecks
from tools.simulator.config import Choices
from tools.simulator.faults.faults import Faults
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import SECOND
from tools.simulator.world import Observer, World

STORY_LINES = 40  #: number of lines that are kept of a story: its last ones


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one seed."""

    seed: int
    events: int  #: events logged by all coordinators
    happenings: int  #: calls of the scheduler
    virtual_s: float
    trajectories: int  #: trajectories issued
    coordinators: int
    replays: int  #: replays at the end, of the whole log and of what follows a snapshot
    faults: tuple[str, ...]  #: kinds that were active
    failure: str  #: reason, for a run that lost a process that it needs; else empty
    invariant: str  #: name of the broken promise; empty: none
    details: str
    subjects: tuple[str, ...]  #: ids of what the broken promise concerns
    coverage: dict[str, int]
    digest: str  #: digest of the last state


def make_world(choices: Choices, seed: int, observer: Observer | None = None) -> World:
    """Return a world with the faults of its seed, and all checks."""
    return World(choices, seed, AllChecks, Faults, observer)


def run_seed(choices: Choices, seed: int, observer: Observer | None = None) -> Outcome:
    """Run one seed to its end, or to its first broken promise."""
    world = make_world(choices, seed, observer)
    violation: Violation | None = None
    digest = ""
    try:
        digest = world.run()
    except Violation as found:
        violation = found
    except Exception as error:  # any exception of the product is a finding
        violation = Violation("nothing_raises", f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    state, over = world.coordinator.state, world.coordinator.over
    failed = over.failure if over else state.run.failed if state is not None else None
    return Outcome(
        seed=seed,
        events=world.checks.events,
        happenings=world.scheduler.made,
        virtual_s=world.scheduler.now / SECOND,
        trajectories=state.work.ledger.trajectories.issued if state is not None else 0,
        coordinators=world.coordinator.incarnations,
        replays=world.checks.replays,
        faults=tuple(world.faults.active),
        failure=failed.sentence if failed is not None else "",
        invariant=violation.invariant if violation else "",
        details=violation.details if violation else "",
        subjects=violation.subjects if violation else (),
        coverage=world.coverage.counts,
        digest=digest,
    )


def run_seeds(choices: Choices, seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Run seeds in `jobs` processes, and yield outcomes as they come."""
    run = partial(run_seed, choices)
    if jobs <= 1:
        gc.freeze()  # exclude the program from every run's garbage collections
        yield from map(run, seeds)
        return
    with get_context("spawn").Pool(jobs, gc.freeze) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=4)


# --- lines --------------------------------------------------------------------------------------


def event_line(stamped: Stamped, commands: list[Command]) -> str:
    """Format seq, virtual seconds, sender, incarnation, number, event and commands in columns."""
    leads_to = ", ".join(f"{type(command).__name__}>{command.to}" for command in commands)
    arrow = f"  => {leads_to}" if leads_to else ""
    return (
        f"{stamped.seq:>8} {stamped.time_ns / SECOND:>11.6f}  {stamped.peer:<13}"
        f"{stamped.incarnation:>4} {stamped.peer_seq:>5}  {describe_message(stamped.event)}{arrow}"
    )


def story(choices: Choices, outcome: Outcome) -> list[str]:
    """Return the events about the outcome's subjects, or the last events if it has none."""
    lines: deque[str] = deque(maxlen=STORY_LINES)
    subjects = [subject for name in outcome.subjects if (subject := _subject(name)) is not None]

    def listen(stamped: Stamped, commands: list[Command], state: State) -> None:
        if subjects:
            lines.extend(_chapter(subjects, stamped, commands))
        else:
            lines.append(event_line(stamped, commands))

    run_seed(choices, outcome.seed, listen)
    return list(lines)


def _subject(name: str) -> Subject | None:
    try:
        return Subject.parse(name)
    except ConfigError:
        return None


def _chapter(subjects: list[Subject], stamped: Stamped, commands: list[Command]) -> Iterator[str]:
    """Yield the event, if it concerns a subject, and what was decided about it."""
    told = any(_concerns(subject, stamped.event, stamped.peer) for subject in subjects)
    decided = [c for c in commands if any(_concerns(subject, c, c.to) for subject in subjects)]
    if told or decided:
        yield event_line(stamped, [])
    for command in decided:
        named = next((s for s in subjects if describe_message(command, s)), None)
        yield f"{'-> ':>24}{command.to:<13} {describe_message(command, named)}"


def _concerns(subject: Subject, message: Event | Command, process: str) -> bool:
    """Return whether the message names the subject, or goes to or comes from it."""
    here = subject.kind == "actor" and subject.name == process
    return here or bool(describe_message(message, subject))
