"""Rewards of one replica: from tokens in the store to a score in the store.

Reads   ScoreTrajectories commands; responses and prompts of the store
Writes  rewards (through the store)
Emits   TrajectoryRewarded, TrajectoryFailed

The function runs in worker processes with a time-out. A response on which the user's function
fails gets reward.error_score, counted by reason; a fault of the worker itself drops the sibling.
What went wrong is in the store for each response; events and log tell the first of each reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np

from laminar.actors.clients import StoreClient, TokensRemoved
from laminar.actors.host import Host
from laminar.core.scores import bits_of
from laminar.engines.protocol import LENGTH
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import FailureReason, RewardOutcome
from laminar.names.ids import Purpose
from laminar.storage import messages as m
from laminar.tasks.prompts import PromptRow
from laminar.tasks.rewards import (
    RewardCall,
    RewardResult,
    RewardWorkerLost,
    is_right,
    numbers_of,
)

DETAILS_MAX = 3
"""Details of each reason by one process: the run keeps the first, and the event log stays small."""


class RewardWorkers(Protocol):
    """What runs the user's function."""

    workers_lost: int  #: that died by themselves
    workers_killed: int  #: that took too long

    async def start(self) -> None:
        """Start the workers; returns when they have loaded the function. ConfigError,
        RewardWorkerLost."""

    async def score(self, call: RewardCall) -> list[RewardResult]:
        """One result per completion, in order; RewardWorkerLost."""
        ...

    async def close(self) -> None: ...


class Scorer:
    """The rewards of one replica, fed from the store."""

    def __init__(
        self,
        host: Host,
        store: StoreClient,
        pool: RewardWorkers,
        decode: Callable[[list[int]], str],
    ) -> None:
        """`decode`: the text of token ids, without special tokens."""
        self.host, self.store, self.pool, self._decode = host, store, pool, decode
        self._open = asyncio.Event()
        self._told: Counter[str] = Counter()  #: failures of each reason

    async def start(self) -> None:
        """Start the workers; calls of `score` wait until they have loaded the function."""
        await self.pool.start()
        self._open.set()

    async def close(self) -> None:
        await self.pool.close()
        lost, killed = self.pool.workers_lost, self.pool.workers_killed
        self.host.log.info("reward-pool-closed", workers_lost=lost, workers_killed=killed)

    async def score(self, order: cmd.Order, command: cmd.ScoreTrajectories) -> None:
        """Reward the siblings of one command, all with one call of the pool.

        A process that stood still may come to it when they have been dropped, and their tokens are
        gone: nobody waits for their rewards then.
        """
        await self._open.wait()
        wanted = [item.trajectory_id for item in command.items]
        try:
            rows = await self.store.fetch(wanted, with_prompt=True)
        except TokensRemoved as gone:
            self.host.log.info("scored-too-late", reason=str(gone))
            return
        completions = [(self._decode(tokens), tokens) for tokens in map(_ids, rows)]
        call = RewardCall(
            row=_prompt_row(rows[0]),
            completions=completions,
            step=rows[0].version_step or 0,
        )
        await self.host.reached("rollout-score")
        try:
            results = await self.pool.score(call)
        except RewardWorkerLost as error:
            for item in command.items:
                self._failed(order, item, FailureReason.REWARD_WORKER_LOST, str(error))
            return
        await self._put(order, command, rows, [text for text, _ in completions], results)

    async def _put(
        self,
        order: cmd.Order,
        command: cmd.ScoreTrajectories,
        rows: list[m.Trajectory],
        texts: list[str],
        results: list[RewardResult],
    ) -> None:
        items = tuple(
            m.RewardItem(
                trajectory_id=item.trajectory_id,
                placement=item.placement,
                score=result.score,
                reason=result.reason[:256],
                detail=result.detail[:2000],
                text=text,
                extras=result.extras,
            )
            for item, text, result in zip(command.items, texts, results, strict=True)
        )
        reply = await self.store.ask(m.PutRewards(items=items), m.PutRewardsReply)
        await self.host.reached("rollout-rewarded")
        for item, row, result, stored in zip(
            command.items, rows, results, reply.results, strict=True
        ):
            if stored.answer in ("ok", "already"):
                self._rewarded(order, item, row, stored, result)
            elif stored.answer == "refused":
                self._failed(order, item, FailureReason.STORE_REFUSED, stored.reason)

    def _rewarded(
        self,
        order: cmd.Order,
        item: cmd.Placed,
        row: m.Trajectory,
        stored: m.RewardResult,
        result: RewardResult,
    ) -> None:
        """`result` is of this attempt; where the store had a reward, that one stays."""
        reason = stored.reward_reason or "ok"
        if stored.score is None:
            return self._failed(
                order, item, FailureReason.UNSCORED, "no reward function could score it"
            )
        truncated = row.finish_reason == LENGTH
        event = ev.TrajectoryRewarded(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            score_bits=bits_of(stored.score),
            correct=is_right(stored.score, truncated=truncated),
            reason=RewardOutcome(reason),
            num_tokens=len(row.tokens) // 4,
            detail="" if reason == "ok" else self._first(order, item, reason, result.detail),
            truncated=truncated,
            extras=numbers_of(result.extras) if row.purpose == Purpose.EVAL else {},
        )
        self.host.emit(
            event, event_seq=order.cause, trajectory=item.trajectory_id, score=stored.score
        )

    def _first(self, order: cmd.Order, item: cmd.Placed, reason: str, detail: str) -> str:
        """The detail of a failure that is among the first of its reason, which is logged, too."""
        self._told[reason] += 1
        if self._told[reason] > DETAILS_MAX:
            return ""
        self.host.log.warning(
            "reward-failed",
            event_seq=order.cause,
            trajectory=item.trajectory_id,
            reason=reason,
            detail=detail,
        )
        return detail[:500]

    def _failed(
        self, order: cmd.Order, item: cmd.Placed, reason: FailureReason, detail: str
    ) -> None:
        event = ev.TrajectoryFailed(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            reason=reason,
            detail=detail[:500],
        )
        self.host.emit(event, event_seq=order.cause, trajectory=item.trajectory_id, reason=reason)


def _ids(row: m.Trajectory) -> list[int]:
    tokens: list[int] = np.frombuffer(row.tokens, dtype="<i4").tolist()
    return tokens


def _prompt_row(row: m.Trajectory) -> PromptRow:
    """The prompt as the reward functions take it."""
    if row.prompt is None:
        raise RuntimeError(f"the store sent {row.trajectory_id} without its prompt")
    payload = m.decode_prompt(row.prompt)
    return PromptRow(
        index=row.row_index,
        prompt=payload.prompt,
        ground_truth=payload.ground_truth,
        columns=payload.columns,
        data_source=payload.data_source,
    )
