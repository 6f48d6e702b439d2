"""The store's model: the real rules of storage/rules.py over rows in memory.

Reads   requests of rollouts and trainer; EndTrajectories commands
Emits   DataLoaded, TrajectoriesEnded

A commit takes no time here, and what is answered is durable: losing the store ends a run anyway.
Tokens are those of the trajectory's seed (`tokens_of`), so a response that was put together by
several replicas can be compared with what one would have generated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from laminar import ids
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.sim.models.idle import Idle
from laminar.sim.scenario import seconds
from laminar.sim.violation import Violation
from laminar.storage import rules
from laminar.storage.rules import Chunk, Row

_STREAM = 1 << 16
_TOKENS = np.random.Generator(np.random.PCG64(1)).integers(0, 50_000, 2 * _STREAM).astype("<i4")
_TOKEN_BYTES = _TOKENS.tobytes()
_LOGPROB_BYTES = np.full(_STREAM, -0.5, "<f4").tobytes()


def tokens_of(seed: int, start: int, end: int) -> bytes:
    """Tokens [start, end) of the response that belongs to a trajectory seed."""
    offset = seed % _STREAM
    return _TOKEN_BYTES[4 * (offset + start) : 4 * (offset + end)]


def logprobs_of(count: int) -> bytes:
    return _LOGPROB_BYTES[: 4 * count]


class Open(NamedTuple):
    """Take a trajectory over; the reply is an Opened."""

    row: Row


class Opened(NamedTuple):
    answer: str
    reason: str
    num_tokens: int
    finish_reason: str


class Append(NamedTuple):
    trajectory: str
    placement: int
    chunk: Chunk


class Finish(NamedTuple):
    trajectory: str
    placement: int
    finish_reason: str
    num_tokens: int


class Flush(NamedTuple):
    """New tokens, then what has ended with them; the reply is a (answer, reason) for each."""

    appends: tuple[Append, ...]
    finishes: tuple[Finish, ...]


class Fetch(NamedTuple):
    """The rows of trajectories; the reply is a tuple of Row."""

    trajectories: tuple[str, ...]


class Reward(NamedTuple):
    trajectory: str
    placement: int
    score: float | None
    reason: str


class Rewarded(NamedTuple):
    """Score and reason are the stored ones: the first of a trajectory stays."""

    answer: str
    score: float | None
    reason: str


class Rewards(NamedTuple):
    """The reply has a Rewarded for each."""

    items: tuple[Reward, ...]


class Store(Idle):
    """Rows and chunks of one run."""

    def start(self) -> None:
        self.rows = self.world.rows
        self.chunks: dict[str, list[Chunk]] = {}
        self.process.compute(self.chance.uniform(0, self.scenario.start_s), self._loaded)

    def _loaded(self) -> None:
        loaded = ev.DataLoaded(
            num_train=self.scenario.num_train,
            num_eval=self.scenario.num_eval,
            overlap=0,
            digest="data",
        )
        self.process.emit(loaded)

    # --- requests -------------------------------------------------------------------------------

    def answer(self, client: str, request: Any) -> Any:
        if isinstance(request, Flush):
            return self._flush(request)
        if isinstance(request, Open):
            return self._open(request.row)
        if isinstance(request, Rewards):
            return tuple(self._reward(item) for item in request.items)
        if isinstance(request, Fetch):
            return tuple(self.rows[trajectory] for trajectory in request.trajectories)
        return super().answer(client, request)

    def _open(self, asked: Row) -> Opened:
        row = self.rows.get(asked.id)
        verdict = rules.judge_open(row, asked)
        self.world.marks.hit(f"store:open-{verdict.answer}-{verdict.change}")
        if verdict.change != "none":
            if verdict.change == "restart":
                self.chunks.pop(asked.id, None)
            row = rules.opened(row, verdict.change, asked)
            self._save(row, asked.placement)
        tokens = row.num_tokens if row is not None else 0
        finish = row.finish_reason if row is not None else None
        return Opened(verdict.answer, verdict.reason, tokens, finish or "stop")

    def _flush(self, request: Flush) -> tuple[tuple[str, str], ...]:
        return (
            *(self._append(item) for item in request.appends),
            *(self._finish(item) for item in request.finishes),
        )

    def _append(self, item: Append) -> tuple[str, str]:
        row, chunk = self.rows.get(item.trajectory), item.chunk
        stored = None
        if row is not None and rules.is_behind(row, chunk.segment, chunk.offset):
            chunks = self.chunks.get(item.trajectory, [])
            stored = next((c for c in chunks if c.offset == chunk.offset), None)
        verdict = rules.judge_append(row, item.placement, chunk, stored)
        if row is not None and verdict.changes:
            self.chunks.setdefault(row.id, []).append(chunk)
            self._save(rules.grown(row, chunk), item.placement)
        elif verdict.answer != "ok":
            self.world.marks.hit(f"store:append-{verdict.answer}")
        return verdict.answer, verdict.reason

    def _finish(self, item: Finish) -> tuple[str, str]:
        row = self.rows.get(item.trajectory)
        verdict = rules.judge_finish(row, item.placement, item.finish_reason, item.num_tokens)
        if row is not None and verdict.changes:
            self._require_own_tokens(row)
            row = row._replace(status="generated", finish_reason=item.finish_reason)
            self._save(row, item.placement)
        elif verdict.answer != "ok":
            self.world.marks.hit(f"store:finish-{verdict.answer}")
        return verdict.answer, verdict.reason

    def _require_own_tokens(self, row: Row) -> None:
        """Whoever generated which part: the response is the one of its seed."""
        group, sibling = ids.GroupId(row.group_id), row.sibling
        seed = ids.trajectory_seed(self.scenario.settings.seed, group, sibling, row.attempt)
        found = b"".join(chunk.tokens for chunk in self.chunks.get(row.id, []))
        if found != tokens_of(seed, 0, row.num_tokens):
            raise Violation("tokens_continue", f"{row.id} has tokens of another seed", row.id)

    def _reward(self, item: Reward) -> Rewarded:
        row = self.rows.get(item.trajectory)
        verdict = rules.judge_reward(row, item.placement, item.score, item.reason, "")
        if row is not None and verdict.changes:
            row = row._replace(
                status="rewarded",
                reward_bits=rules.score_bits(item.score),
                reward_reason=item.reason,
                reward_detail="",
            )
            self._save(row, item.placement)
        if verdict.answer != "ok":
            self.world.marks.hit(f"store:reward-{verdict.answer}")
        bits, reason = (row.reward_bits, row.reward_reason) if row else (None, None)
        return Rewarded(verdict.answer, rules.score_of(bits), reason or "ok")

    def _save(self, row: Row, placement: int) -> None:
        self.world.checks.stored(row, placement)
        self.rows[row.id] = row

    # --- ends -----------------------------------------------------------------------------------

    def handle(self, order: cmd.Order, command: Command) -> None:
        if isinstance(command, cmd.EndTrajectories):
            ended = tuple(self._end(ending) for ending in command.endings)
            event = ev.TrajectoriesEnded(command_id=order.command_id, ended=ended)
            self.process.after(seconds(0.002), self.process.emit, event)

    def _end(self, ending: cmd.Ending) -> ev.EndedTrajectory:
        asked = Row(
            id=ending.trajectory,
            group_id=ending.group,
            sibling=ending.sibling,
            purpose=ending.purpose,
            row_index=ending.row_index,
            attempt=0,
            placement=ending.placement,
            end=ending.end,
            end_reason=ending.reason,
            end_step=max(ending.step, 0),
        )
        row = self.rows.get(asked.id)
        verdict = rules.judge_end(row, asked)
        if verdict.answer != "ok":
            raise Violation("store_takes_every_end", f"{asked.id}: {verdict.reason}", asked.id)
        if verdict.changes:
            row = rules.ended(row, asked)
            self._save(row, asked.placement)
        return ev.EndedTrajectory(
            trajectory=ending.trajectory,
            num_tokens=row.num_tokens if row else 0,
            tokens_lost=row.tokens_lost if row else 0,
        )
