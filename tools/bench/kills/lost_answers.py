"""Fate of the responses that a killed replica was sampling.

Reads   RUN/events/, RUN/store.sqlite, RUN/timeline/NAME.steps
Gives   Log, read_log; lost_answers of one kill; all_lost, the sums of many

lost          responses that it had been ordered to sample and had not finished
at_once       of those: placed on another replica by the event that reported the loss
went_on       of those: sampled or finished under a later placement, before the run ended
started_over  of those: restarted from the prompt, because no process had their weights
went_on_s     from the event that reported the loss until the last of them continued
again         tokens that it had sampled and that the store does not have
again_s       time that it took to sample them; except for responses that started over, little more
              than rollout.progress_interval_ms, at which tokens are sent to the store

A process that was killed before it joined had no orders.

No timeline has the steps that an engine makes between its last report and the loss. They are
estimated: each as long as the last one, with the mean of the sequences then and at the loss.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.run_log import parse_command, parse_event, read_records
from laminar.analysis.log.timeline import read_steps
from laminar.eventlog.record import DecisionRecord, EventRecord
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.events.reasons import PullPurpose
from laminar.names.ids import Purpose
from laminar.run.directory import STORE_FILE, run_config

COUNTS = ("lost", "at_once", "went_on", "started_over", "again")
TIMES = ("went_on_s", "again_s")
WENT_ON = (ev.TrajectoryStarted, ev.TrajectoryFinished)
"""Events of a continued response; one whose last token is stored finishes without a start."""


class Told(NamedTuple):
    """An event of the log with its time and sender."""

    at_ns: int  #: unix time
    seq: int
    peer: str  #: sender of the event
    event: Event


class Log(NamedTuple):
    """The history of a run."""

    events: list[Told]
    orders: list[tuple[int, Command]]  #: (seq of the causing event, command)


def read_log(run_dir: Path) -> Log:
    clock, log = WallClock(), Log([], [])
    for record in read_records(run_dir):
        if isinstance(record, EventRecord):
            said = parse_event(record)
            log.events.append(Told(clock.unix_ns(said), said.seq, said.peer, said.event))
        elif isinstance(record, DecisionRecord):
            log.orders.append((record.cause, parse_command(record)))
    return log


def tells_of_loss(event: Event, name: str) -> bool:
    """Return whether an event tells the coordinator that this process is gone."""
    if isinstance(event, ev.ActorJoined):
        return event.name == name
    return isinstance(event, ev.ProcessExited | ev.HeartbeatLost) and event.actor == name


def lost_answers(run_dir: Path, log: Log, name: str, pid: int) -> dict[str, Any]:
    """Return the figures of the kill of a replica's process, as listed above."""
    life = _life(log, name, pid)
    if life is None:
        return dict.fromkeys((*COUNTS, *TIMES), 0)
    joined, loss = life
    mine = [
        order
        for cause, order in log.orders
        if joined.seq <= cause < loss.seq
        and isinstance(order, cmd.GenerateTrajectory)
        and order.to == name
        and order.purpose == Purpose.TRAIN
    ]
    lost = {order.trajectory_id: order for order in _unfinished(log, mine, loss.seq)}
    found: dict[str, Any] = {"lost": len(lost), "at_once": 0, "started_over": 0}
    placed = set()
    for cause, order in log.orders:
        if cause < loss.seq or not isinstance(order, cmd.GenerateTrajectory):
            continue
        before = lost.get(order.trajectory_id)
        if before is None or order.trajectory_id in placed:
            continue
        placed.add(order.trajectory_id)
        found["at_once"] += cause == loss.seq
        found["started_over"] += order.attempt > before.attempt
    went_on = list(_went_on(log, lost, loss))
    found |= {"went_on": len(went_on), "went_on_s": round(max(went_on, default=0.0), 3)}
    return found | _again(run_dir, name, mine, len(lost), (joined.at_ns, loss.at_ns))


def all_lost(log: Log, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of the kills of one run, and the medians and maxima of their times."""
    sums = {key: sum(kill[key] for kill in found) for key in COUNTS}
    times = {
        key: {
            "median": round(float(np.median([kill[key] for kill in found])), 3),
            "max": max(kill[key] for kill in found),
        }
        for key in TIMES
    }
    pulls = (order for _, order in log.orders if isinstance(order, cmd.PullWeights))
    exact = sum(order.purpose == PullPurpose.RESUME for order in pulls)
    return {"kills": len(found), **sums, **times, "exact_reloads": exact}


def _life(log: Log, name: str, pid: int) -> tuple[Told, Told] | None:
    """Return the events of a process's start and loss, or None if it never joined."""
    joined = None
    for told in log.events:
        event = told.event
        if joined is not None and tells_of_loss(event, name):
            return joined, told
        if isinstance(event, ev.ActorJoined) and event.name == name and event.pid == pid:
            joined = told
    if joined is not None:
        raise RuntimeError(f"the log lacks the end of {name}, pid {pid}")
    return None


def _unfinished(
    log: Log, mine: Iterable[cmd.GenerateTrajectory], loss_seq: int
) -> Iterator[cmd.GenerateTrajectory]:
    """Yield the orders that the replica still had when the coordinator learned of its loss."""
    gone: set[tuple[str, int]] = set()
    for told in log.events:
        if told.seq >= loss_seq:
            break
        if isinstance(told.event, ev.TrajectoryFinished | ev.TrajectoryFailed):
            gone.add((told.event.trajectory_id, told.event.placement))
    for cause, order in log.orders:
        if cause >= loss_seq:
            break
        if isinstance(order, cmd.AbortTrajectories):
            gone |= {(item.trajectory_id, item.placement) for item in order.items}
        elif isinstance(order, cmd.EndTrajectories):
            gone |= {(ending.trajectory_id, ending.placement) for ending in order.endings}
    yield from (order for order in mine if (order.trajectory_id, order.placement) not in gone)


def _went_on(log: Log, lost: dict[Any, cmd.GenerateTrajectory], loss: Told) -> Iterator[float]:
    """Yield the seconds from the loss until each response continues on another replica."""
    waiting = dict(lost)
    for told in log.events:
        if not isinstance(told.event, WENT_ON) or told.seq < loss.seq:
            continue
        order = waiting.get(told.event.trajectory_id)
        if order is not None and told.event.placement > order.placement:
            del waiting[order.trajectory_id]
            yield (told.at_ns - loss.at_ns) / 1e9


def _again(
    run_dir: Path,
    name: str,
    mine: Iterable[cmd.GenerateTrajectory],
    lost: int,
    life_ns: tuple[int, int],
) -> dict[str, Any]:
    """Estimate the tokens that the process had sampled and the store does not have."""
    steps = read_steps(run_dir, name)
    steps = steps[(steps[:, 0] >= life_ns[0]) & (steps[:, 1] <= life_ns[1])]
    single = steps[steps[:, 2] > 0]  # the other rows aggregate many steps
    if not lost or not len(single):
        return {"again": 0, "again_s": 0.0}
    rollout = run_config(run_dir).rollout
    began_ns, ended_ns, sequences, _ = map(int, single[-1])
    step_ns, running = ended_ns - began_ns, min(lost, rollout.max_num_seqs)
    silent_ns = min(life_ns[1] - int(steps[-1, 1]), rollout.progress_interval_ms * 1_000_000)
    unreported = silent_ns / step_ns * (running + sequences) / 2
    again = max(float(steps[:, 3].sum()) + unreported - _stored(run_dir, mine), 0.0)
    return {"again": round(again), "again_s": round(again / running * step_ns / 1e9, 3)}


def _stored(run_dir: Path, mine: Iterable[cmd.GenerateTrajectory]) -> int:
    """Return the number of tokens in the store of these placements."""
    query = "SELECT COALESCE(SUM(num_tokens), 0) FROM chunks WHERE trajectory_id=? AND placement=?"
    path = (run_dir / STORE_FILE).resolve()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        return sum(
            db.execute(query, (order.trajectory_id, order.placement)).fetchone()[0]
            for order in mine
        )
