"""Rewards of one replica or host: from tokens in the store to a score in the store.

Reads   ScoreTrajectories commands; responses and prompts of the store
Writes  rewards (through the store)
Emits   TrajectoryRewarded, TurnRequested, TrajectoryFailed

The function runs in worker processes with a timeout. A response on which the user's function fails
gets reward.error_score and is counted by reason; a fault of the worker itself drops the sibling.
The store has the error of each response; events and log have only the first of each reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from laminar.actors.host import Host
from laminar.actors.service_clients import StoreClient, TokensRemoved
from laminar.actors.turns import Turns, effect_items, prompt_row
from laminar.core.state.scores import bits_of
from laminar.engines.protocol import is_cut_off
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.reasons import EndedBy, FailureReason, RewardOutcome
from laminar.names.ids import Purpose
from laminar.storage import messages as m
from laminar.tasks.environments.turns import NextTurn, SessionLost, TrajectoryDone
from laminar.tasks.rewards.results import (
    RewardCall,
    RewardResult,
    RewardWorkerLost,
    is_correct,
    select_numbers,
)

DETAILS_MAX = 3
"""Details per reason and process that are reported, so that the event log stays small."""


class RewardWorkers(Protocol):
    """A pool of workers that run the user's reward function."""

    workers_lost: int  #: workers that died by themselves
    workers_killed: int  #: workers killed because they exceeded the time limit

    async def start(self) -> None:
        """Start the workers; return once the function is loaded. ConfigError, RewardWorkerLost."""

    async def compute_rewards(self, call: RewardCall) -> list[RewardResult]:
        """Return one result per completion, in order; RewardWorkerLost."""
        ...

    async def close(self) -> None: ...


class Scorer:
    """The rewards of one process, computed from the store's data."""

    def __init__(
        self,
        host: Host,
        store: StoreClient,
        pool: RewardWorkers,
        decode: Callable[[list[int]], str],
        turns: Turns | None = None,
    ) -> None:
        """Score with `pool`.

        `decode`: returns the text of a response, without its end token. `turns`: environments that
        answer instead of a score, or give it.
        """
        self.host, self.store, self.pool, self._decode = host, store, pool, decode
        self.turns = turns
        self._open = asyncio.Event()
        self._told: Counter[str] = Counter()  #: failures by reason

    async def start(self) -> None:
        """Start the workers; `score_trajectories` waits until they have loaded the function."""
        await self.pool.start()
        self._open.set()

    async def close(self) -> None:
        await self.pool.close()
        lost, killed = self.pool.workers_lost, self.pool.workers_killed
        self.host.log.info("reward-pool-closed", workers_lost=lost, workers_killed=killed)

    async def score_trajectories(self, order: cmd.Envelope, command: cmd.ScoreTrajectories) -> None:
        """Reward the siblings of one command, all with one call of the pool.

        A process that was stopped for long may find them dropped and their tokens removed; their
        rewards are not needed then.
        """
        await self._open.wait()
        if self.turns is not None:
            for item in command.items:
                await self._give_turn(self.turns, order, item)
            return
        wanted = [item.trajectory_id for item in command.items]
        try:
            rows = await self.store.fetch(wanted, with_prompt=True)
        except TokensRemoved as gone:
            self.host.log.info("scored-too-late", reason=str(gone))
            return
        completions = [(self._decode(tokens), tokens) for tokens in map(_decode_token_ids, rows)]
        call = RewardCall(
            row=prompt_row(rows[0]), completions=completions, step=rows[0].version_step or 0
        )
        await self.host.hit_failpoint("rollout-score")
        try:
            results = await self.pool.compute_rewards(call)
        except RewardWorkerLost as error:
            for item in command.items:
                self.report_failed(order, item, FailureReason.REWARD_WORKER_LOST, str(error))
            return
        await self._put_rewards(
            order, command.items, rows, [text for text, _ in completions], results
        )

    async def _give_turn(
        self, turns: Turns, order: cmd.Envelope, item: cmd.PlacedTrajectory
    ) -> None:
        """Give a session its turn; if it has answered before, only report that."""
        try:
            (row,) = await self.store.fetch([item.trajectory_id], with_prompt=True)
        except TokensRemoved as gone:
            self.host.log.info("scored-too-late", reason=str(gone))
            return
        if row.placement != item.placement or row.end is not None:
            return
        if row.status == "open":
            return self.report_requested(order, item, len(row.contexts))
        if row.status == "rewarded":
            reason = row.reward_reason or RewardOutcome.OK
            found = RewardResult(row.reward, reason, "", dict(row.extras))
            return self._report_rewarded(order, item, row, _make_stored_reward(row), found)
        await self.host.hit_failpoint("rollout-score")
        try:
            answer = await turns.answer_turn(item, row)
        except SessionLost as lost:
            return self.report_failed(order, item, lost.reason, str(lost))
        if isinstance(answer, NextTurn):
            await self._continue_turn(turns, order, item, row, answer)
        else:
            await self._score_done(order, item, row, answer)

    async def _continue_turn(
        self,
        turns: Turns,
        order: cmd.Envelope,
        item: cmd.PlacedTrajectory,
        row: m.StoredTrajectory,
        answer: NextTurn,
    ) -> None:
        turn = len(row.contexts) + 1
        stored = await turns.store_context(item, turn, answer)
        await self.host.hit_failpoint("rollout-rewarded")
        if stored.answer == "ok":
            self.report_requested(order, item, turn)
        elif stored.answer == "refused":
            self.report_failed(order, item, FailureReason.STORE_REFUSED, stored.reason)

    def report_requested(self, order: cmd.Envelope, item: cmd.PlacedTrajectory, turn: int) -> None:
        """Report that a session requests a turn, whose context the store has."""
        event = ev.TurnRequested(
            trajectory_id=item.trajectory_id, placement=item.placement, turn=turn
        )
        self.host.emit(event, event_seq=order.cause, trajectory=item.trajectory_id, turn=turn)

    async def _score_done(
        self,
        order: cmd.Envelope,
        item: cmd.PlacedTrajectory,
        row: m.StoredTrajectory,
        answer: TrajectoryDone,
    ) -> None:
        """Store the environment's score, or else that of the reward functions."""
        result = answer.result
        if result is None:
            completion = (answer.text, _decode_token_ids(row))
            call = RewardCall(prompt_row(row), [completion], row.version_step or 0)
            try:
                (result,) = await self.pool.compute_rewards(call)
            except RewardWorkerLost as error:
                return self.report_failed(order, item, FailureReason.REWARD_WORKER_LOST, str(error))
        await self._put_rewards(order, (item,), [row], [answer.text], [result], answer)

    async def _put_rewards(
        self,
        order: cmd.Envelope,
        placed: Sequence[cmd.PlacedTrajectory],
        rows: list[m.StoredTrajectory],
        texts: list[str],
        results: list[RewardResult],
        answer: TrajectoryDone | None = None,
    ) -> None:
        """Store the rewards and report them; `answer`: the environment's, for one trajectory."""
        items = tuple(
            m.RewardItem(
                trajectory_id=item.trajectory_id,
                placement=item.placement,
                reward=result.reward,
                reason=result.reason[:256],
                detail=result.detail[:2000],
                text=text,
                extras=result.extras,
                finish_reason=answer.reason if answer is not None else "",
                effects=effect_items(answer.effects) if answer is not None else (),
            )
            for item, text, result in zip(placed, texts, results, strict=True)
        )
        reply = await self.store.send_request(m.PutRewards(items=items), m.PutRewardsReply)
        await self.host.hit_failpoint("rollout-rewarded")
        for item, row, result, stored in zip(placed, rows, results, reply.results, strict=True):
            if stored.answer in ("ok", "already"):
                self._report_rewarded(order, item, row, stored, result)
            elif stored.answer == "refused":
                self.report_failed(order, item, FailureReason.STORE_REFUSED, stored.reason)

    def _report_rewarded(
        self,
        order: cmd.Envelope,
        item: cmd.PlacedTrajectory,
        row: m.StoredTrajectory,
        stored: m.StoredReward,
        result: RewardResult,
    ) -> None:
        """Report the stored reward, which may be an earlier one than `result`."""
        reason = stored.reward_reason or RewardOutcome.OK
        if stored.reward is None:
            return self.report_failed(
                order, item, FailureReason.UNSCORED, "no reward function could score it"
            )
        truncated = is_cut_off(stored.finish_reason)
        event = ev.TrajectoryRewarded(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            reward_bits=bits_of(stored.reward),
            correct=is_correct(stored.reward, truncated=truncated),
            reason=RewardOutcome(reason),
            num_tokens=len(row.tokens) // 4,
            detail=""
            if reason == RewardOutcome.OK
            else self._log_first_failures(order, item, reason, result.detail),
            truncated=truncated,
            ended_by=_ended_by(stored),
            extras=select_numbers(result.extras) if row.purpose == Purpose.EVAL else {},
        )
        self.host.emit(
            event, event_seq=order.cause, trajectory=item.trajectory_id, reward=stored.reward
        )

    def _log_first_failures(
        self, order: cmd.Envelope, item: cmd.PlacedTrajectory, reason: str, detail: str
    ) -> str:
        """Log one of the first failures of its reason, and return the detail for its event."""
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

    def report_failed(
        self, order: cmd.Envelope, item: cmd.PlacedTrajectory, reason: FailureReason, detail: str
    ) -> None:
        """Report a failure, unless this process ends: its workers and sessions end with it.

        The response is then scored elsewhere, or after the pause.
        """
        if self.host.ending:
            self.host.log.info("left-unscored", trajectory=item.trajectory_id, reason=detail)
            return
        event = ev.TrajectoryFailed(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            reason=reason,
            detail=detail[:500],
        )
        self.host.emit(event, event_seq=order.cause, trajectory=item.trajectory_id, reason=reason)


def _decode_token_ids(row: m.StoredTrajectory) -> list[int]:
    tokens: list[int] = np.frombuffer(row.tokens, dtype="<i4").tolist()
    return tokens


def _make_stored_reward(row: m.StoredTrajectory) -> m.StoredReward:
    """Return a row's reward in the form of the store's answer."""
    return m.StoredReward(
        trajectory_id=row.trajectory_id,
        answer="already",
        reward=row.reward,
        reward_reason=row.reward_reason,
        finish_reason=row.finish_reason,
    )


def _ended_by(stored: m.StoredReward) -> EndedBy:
    """Return the reason if the environment ended the trajectory."""
    reason = stored.finish_reason or ""
    return EndedBy(reason) if reason in set(EndedBy) else EndedBy.NONE
