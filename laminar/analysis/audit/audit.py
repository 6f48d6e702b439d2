"""Audit of a run: three independently kept records must agree.

Reads   the event log (the coordinator's ledger), store.sqlite, trainer_book.jsonl
Gives   Audit: the closed ledger, failed rewards by reason, problems and notes
Raises  ConfigError when there is no run to audit

Each process wrote its book from its own actions, before it reported them. A loss in one book
therefore shows as a difference from another: a missing row, a sample trained twice, a changed
reward. A running run can be audited too: its log is read once before the other books, which must
hold at least as much, and once after them, when it must hold at least as much as they do.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from laminar.analysis.audit import store_book, trained_contents, trainer_book
from laminar.analysis.audit.ledger_book import Account, LedgerRow, ledger_problems, ledger_rows
from laminar.analysis.audit.store_book import StoreBook
from laminar.analysis.log.run_log import replay_log
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.eventlog.replay import Difference
from laminar.run.directory import STORE_FILE


@dataclass
class Audit:
    """Findings of an audit."""

    ledger: list[LedgerRow]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: unusual, but consistent
    bad_rewards: dict[str, int] = field(default_factory=dict)  #: stored rewards by reason, not "ok"


class _ReplayedLog(NamedTuple):
    """Coordinator's book, from one pass over the log."""

    state: State
    account: Account
    difference: Difference | None


def audit_run(run_dir: Path) -> Audit:
    """Compare the three books of a run."""
    first = _read_log(run_dir)
    found = Audit(ledger_rows(first.state))
    if first.difference is not None:
        found.problems.append(f"ledger: the log does not replay: {first.difference}")
        return found
    found.problems += ledger_problems(first.state, first.account)
    if first.state.run.stopped:
        live = first.state.work.ledger.trajectories.live
        how = "paused" if first.state.run.paused else "stopped"
        found.notes.append(f"the run is {how}: {live} trajectories continue when it resumes")
    store = _read_store(run_dir, first.account, found)
    lines, damaged = trainer_book.read_book(run_dir)
    found.problems += damaged
    last = first if first.state.run.phase == Phase.ENDED else _read_log(run_dir)
    latest = last.account
    if store is not None:
        found.bad_rewards = store.bad_rewards()
        found.problems += store_book.store_problems(store, first.account, latest)
        found.problems += store_book.removal_problems(store, last.state)
        found.notes += store_book.removal_notes(store)
    found.problems += trainer_book.book_problems(lines, first.account, latest)
    problems, notes = trained_contents.content_problems(run_dir, lines)
    found.problems += problems
    found.notes += notes
    found.notes += trainer_book.find_unreported(lines, latest)
    found.notes += trainer_book.rolled_back(lines, latest)
    return found


def _read_log(run_dir: Path) -> _ReplayedLog:
    account = Account()
    replayed = replay_log(run_dir, account, must_be_identical=False)
    if not replayed.machine.started:
        raise ConfigError(f"the log of {run_dir} does not replay: {replayed.difference}")
    return _ReplayedLog(replayed.machine.state, account, replayed.difference)


def _read_store(run_dir: Path, account: Account, found: Audit) -> StoreBook | None:
    """Read the store; None if that fails, which is a problem unless the run never had a store."""
    if not (run_dir / STORE_FILE).exists() and account.data is None and not account.started:
        found.notes.append("the run ended before it had a store")
        return None
    try:
        found.problems += store_book.own_problems(run_dir)
        return store_book.read_store(run_dir, in_flight=account.in_flight)
    except (ConfigError, sqlite3.Error) as error:
        found.problems.append(f"store: cannot be read: {error}")
        return None
