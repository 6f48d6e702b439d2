"""Audit of the store's rows against the log.

Reads   RUN/store.sqlite, in one read transaction
Gives   StoreBook, and problems, one sentence each
Raises  ConfigError or sqlite3.Error when the database cannot be read

Ended trajectories must match exactly: end, tokens, reward. In a running run, live trajectories may
be further in the store than in the log read before it, so only an end without a decision is an
error. A dropped one may have the context of a turn that its host, since lost, never requested.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from laminar.analysis.audit.ledger_book import Account
from laminar.core.state.state import State
from laminar.names.ids import TrajectoryId
from laminar.run.directory import STORE_FILE
from laminar.storage import books
from laminar.storage.rules import Row, TokenSpan


class EndRecord(NamedTuple):
    """End of a trajectory according to one record."""

    end: str | None
    reason: str | None
    step: int | None
    num_tokens: int


class StoreBook(NamedTuple):
    """Contents of the database."""

    rows: dict[TrajectoryId, Row]
    meta: dict[str, str]
    removed: set[str]  #: trajectories whose tokens were removed
    #: replica and weights of each part, by trajectory; only with weight updates in flight
    spans: dict[TrajectoryId, tuple[TokenSpan, ...]]

    def bad_rewards(self) -> dict[str, int]:
        """Count the stored rewards that no reward function gave, by reason."""
        rewarded = (row.reward_reason for row in self.rows.values() if row.status == "rewarded")
        return dict(Counter(reason for reason in rewarded if reason and reason != "ok"))


def read_store(run_dir: Path, *, in_flight: bool) -> StoreBook:
    with books.open_tables(run_dir / STORE_FILE) as tables:
        rows = {TrajectoryId(row.id): row for row in tables.iter_rows()}
        spans = {
            name: tables.get_spans(row) for name, row in rows.items() if in_flight and row.replica
        }
        return StoreBook(rows, tables.get_meta(), tables.removed_payloads(), spans)


def own_problems(run_dir: Path) -> list[str]:
    """Return the contradictions within the database."""
    return [f"store: {problem}" for problem in books.check_integrity(run_dir / STORE_FILE)]


def store_problems(store: StoreBook, first: Account, latest: Account) -> list[str]:
    """Compare the store with `first`, read before and contained in it, and the later `latest`."""
    problems = _data_problems(store, first)
    for name in first.issued:
        row = store.rows.get(name)
        if row is None and (name in first.closed or name in first.started):
            problems.append(f"store: trajectory {name} is missing")
        elif row is not None and name in first.closed:
            problems += _closed_problems(name, row, first)
            problems += _span_problems(name, row, store.spans.get(name, ()), first)
    for name, row in store.rows.items():
        if name not in latest.issued:
            problems.append(f"store: trajectory {name} is stored but was never issued")
        elif name not in first.closed:
            problems += _live_problems(name, row, latest)
    return problems


def removal_problems(store: StoreBook, state: State) -> list[str]:
    """Return the removed tokens that a trainer lost at the end of the log would need again."""
    trained = state.steps.trained
    covered = min(state.versions.saved_steps, default=0)
    if trained and trained[0].step_index > 0:  # the step of the oldest checkpoint
        covered = trained[0].step_index + 1
    return [
        f"store: the tokens of {name} were removed, but no kept checkpoint includes step "
        f"{step.step_index + 1}, which trained them"
        for step in trained
        if step.step_index >= covered
        for name in step.trajectory_ids.split(" ")
        if name in store.removed
    ]


def removal_notes(store: StoreBook) -> list[str]:
    if not store.removed:
        return []
    return [
        f"the tokens of {len(store.removed)} trajectories were removed (store.payload_gb): their "
        "digests can no longer be checked"
    ]


def _data_problems(store: StoreBook, account: Account) -> list[str]:
    """Compare the stored prompts with those reported in the log."""
    if account.data is None:
        return []
    logged = {
        "train_prompts": str(account.data.num_train),
        "eval_prompts": str(account.data.num_eval),
        "data_digest": account.data.digest,
    }
    return [
        f"store: {key} is {store.meta.get(key)!r}, the log has {value!r}"
        for key, value in logged.items()
        if store.meta.get(key) != value
    ]


def _closed_problems(name: TrajectoryId, row: Row, account: Account) -> list[str]:
    """Compare a stored ended trajectory with everything the log says about it."""
    ending, num_tokens, tokens_lost = account.closed[name]
    end = EndRecord(ending.end, ending.reason, max(ending.step, 0), num_tokens)
    stored_end = EndRecord(row.end, row.end_reason, row.end_step, row.num_tokens)
    pairs: list[tuple[str, object, object]] = [
        ("end", stored_end, end),
        ("tokens lost to restarts", row.tokens_lost, tokens_lost),
    ]
    ordered = account.stamps.get(name, {}).get(row.attempt)
    if ordered is not None and not account.in_flight:
        pairs.append(("weights (version, step)", (row.weight_version, row.version_step), ordered))
    finished, rewarded = account.finished.get(name), account.rewarded.get(name)
    if finished is not None and (rewarded is not None or row.turns < row.segments):
        ended_by = rewarded.ended_by if rewarded is not None else ""
        pairs.append(("finish reason", row.finish_reason, ended_by or finished.finish_reason))
    if rewarded is not None:
        bits = struct.pack("<Q", rewarded.reward_bits)
        stored_reward = (row.reward_bits, row.reward_reason or "ok")
        pairs.append(("reward", stored_reward, (bits, rewarded.reason)))
    return [
        f"store: trajectory {name}: {what} is {stored}, in the log {logged}"
        for what, stored, logged in pairs
        if stored != logged
    ]


def _span_problems(
    name: TrajectoryId, row: Row, spans: Sequence[TokenSpan], account: Account
) -> list[str]:
    """Check the parts of a trajectory of a run with in-flight weight updates.

    They must add up to its tokens, name weights loaded there at the time, and never return to older
    weights. (In other runs the weights are compared above.)
    """
    if not account.in_flight:
        return []
    problems, known = [], account.sources.get(name, set())
    if sum(span.num_tokens for span in spans) != row.num_tokens:
        problems.append(f"store: the parts of {name} do not add up to its {row.num_tokens} tokens")
    problems += [
        f"store: {span.num_tokens} tokens of {name} are of version {span.weight_version} on "
        f"{span.replica}, which by the log did not have it with that version"
        for span in spans
        if (span.replica, span.weight_version) not in known
    ]
    weights = [(span.weight_version, span.version_step) for span in spans]
    if any(b[0] < a[0] or b[1] < a[1] for a, b in pairwise(weights)):
        problems.append(f"store: {name} continued with older weights: {weights}")
    ordered = account.stamps.get(name, {}).get(row.attempt)
    if weights and ordered is not None and weights[0] < tuple(ordered):
        problems.append(
            f"store: {name} begins with weights {weights[0]}, older than ordered: {ordered}"
        )
    return problems


def _live_problems(name: TrajectoryId, row: Row, latest: Account) -> list[str]:
    """Report an end in the store that was never decided."""
    ending = latest.commanded.get(name)
    decided = (ending.end, ending.reason) if ending else None
    if row.end is None or (row.end, row.end_reason) == decided:
        return []
    return [f"store: trajectory {name} ended as {row.end}, but the log did not decide that"]
