"""A trajectory with turns: the engine's input, and the answers of its session.

Reads   answers of the store to an opening or to a fetch
Writes  prompts and contexts, tool calls (through the store)
Gives   TurnSessions, the port; Turn, the input from which the engine continues; Turns

The engine does not know turns: all text before the present turn is its prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from laminar.actors.host import Host
from laminar.actors.service_clients import StoreClient
from laminar.config import Config
from laminar.events import commands as cmd
from laminar.names import ids
from laminar.storage import messages as m
from laminar.storage.branches import find_path
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.turns import (
    Effect,
    NextTurn,
    Session,
    SessionLost,
    TrajectoryDone,
    TurnCall,
    count_context_room,
)

Ids = tuple[int, ...]


class TurnSessions(Protocol):
    """The sessions of one host."""

    async def start(self) -> None:
        """Get ready to open sessions; ConfigError."""

    async def reset(self, session: Session) -> NextTurn | None:
        """Open a session and return its first turn, whose context is the whole prompt.

        None: the environment adds nothing to the prompt. SessionLost.
        """
        ...

    async def answer_turn(
        self, call: TurnCall, intend: Callable[[tuple[Effect, ...]], Awaitable[None]]
    ) -> NextTurn | TrajectoryDone:
        """Answer a turn; a repeated call gets the same answer. SessionLost.

        `intend` records at-most-once calls before they are made.
        """
        ...

    def end_session(self, trajectory_id: str) -> None:
        """End the session of a trajectory, if there is one."""

    async def close(self) -> None: ...


class Turn(NamedTuple):
    """The state from which a trajectory continues."""

    number: int  #: index, from 0
    prompt_ids: Ids  #: all tokens before the turn
    done_ids: Ids  #: tokens of the turn sampled so far
    begins: int  #: sampled tokens of earlier turns


def make_turn(opened: m.OpenResult) -> Turn:
    """Return the turn to sample."""
    sampled, number = _decode_ids(opened.tokens), len(opened.contexts)
    turns = list(accumulate(opened.segment_lengths[:number], initial=0))
    contexts, before = (opened.prompt_ids, *opened.contexts), list[int]()
    for turn in find_path(opened.parents, number):
        before += _decode_ids(contexts[turn])
        if turn < number:
            before += sampled[turns[turn] : turns[turn + 1]]
    return Turn(number, tuple(before), tuple(sampled[turns[-1] :]), turns[-1])


def turn_seed(seed: int, turn: int) -> int:
    """Return a turn's seed, so that no turn draws the random numbers of another."""
    return ids.hash64(seed, "turn", turn) if turn else seed


class Turns:
    """The sessions of one host, connected to the store."""

    def __init__(self, host: Host, store: StoreClient, sessions: TurnSessions) -> None:
        self.host, self.store, self.sessions = host, store, sessions
        self.config: Config = host.config

    async def open_session(self, command: cmd.StartSession, opened: m.OpenResult) -> bool:
        """Open a session and store its prompt; return False if another placement has it.

        SessionLost.
        """
        if opened.num_tokens or opened.contexts or opened.own_prompt:
            return True  # it was started before
        reply = await self.store.fetch([command.trajectory_id], with_prompt=True)
        session = self._make_session(reply[0])
        first = await self.sessions.reset(session)
        if first is None:
            return True
        room = self.config.env.max_context_tokens + self.config.data.max_prompt_length
        if len(first.context) > room:
            raise SessionLost(
                f"reset() returned a prompt of {len(first.context)} tokens, more than the limit of "
                f"{room} (data.max_prompt_length + env.max_context_tokens)"
            )
        item = m.ContextItem(
            trajectory_id=command.trajectory_id,
            placement=command.placement,
            turn=0,
            tokens=_encode_ids(first.context),
            options=first.options,
        )
        stored = await self.store.send_request(m.Continue(items=(item,)), m.ContinueReply)
        (kept,) = stored.results
        if kept.answer == "refused":
            raise SessionLost(kept.reason)
        return kept.answer == "ok"

    async def answer_turn(
        self, item: cmd.PlacedTrajectory, row: m.StoredTrajectory
    ) -> NextTurn | TrajectoryDone:
        """Return the environment's answer to the turn that has ended; SessionLost."""
        effects = tuple(
            Effect(e.call, e.tool, e.arguments, e.status, e.result, e.seconds) for e in row.effects
        )
        contexts = [len(ids) // 4 for ids in (row.prompt_ids, *row.contexts)]
        call = TurnCall(
            session=self._make_session(row),
            turn=len(row.contexts),
            prompt_ids=_decode_ids(row.prompt_ids),
            parts=split_turns(row),
            parents=row.parents,
            logprobs=row.logprobs,
            finish_reason=row.finish_reason or "",
            room=count_context_room(self.config, contexts, row.segment_lengths, row.parents),
            stored=effects,
            seconds=row.call_seconds,
        )

        async def intend(calls: tuple[Effect, ...]) -> None:
            request = m.Intend(
                trajectory_id=item.trajectory_id,
                placement=item.placement,
                turn=call.turn,
                owner=f"{self.host.name}@{self.host.incarnation}",
                effects=effect_items(calls),
            )
            reply = await self.store.send_request(request, m.IntendReply)
            (noted,) = reply.results
            if noted.answer != "ok":
                raise SessionLost(noted.reason or noted.answer)
            await self.host.hit_failpoint("rollout-noted")

        answer = await self.sessions.answer_turn(call, intend)
        await self.host.hit_failpoint("rollout-called")
        return answer

    async def store_context(
        self, item: cmd.PlacedTrajectory, turn: int, answer: NextTurn
    ) -> m.Result:
        """Store the context and the outcomes of calls, which reopens the trajectory."""
        context = m.ContextItem(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            turn=turn,
            tokens=_encode_ids(answer.context),
            parent=answer.parent,
            options=answer.options,
            effects=effect_items(answer.effects),
        )
        reply = await self.store.send_request(m.Continue(items=(context,)), m.ContinueReply)
        return reply.results[0]

    def _make_session(self, row: m.StoredTrajectory) -> Session:
        seed = ids.hash64(self.config.seed, "environment", row.group_id)
        return Session(row.trajectory_id, row.attempt, seed, prompt_row(row), row.purpose)


def split_turns(row: m.StoredTrajectory) -> tuple[tuple[bool, Ids], ...]:
    """Return turns and contexts in order: whether the model sampled them, and token ids."""
    sampled, parts = _decode_ids(row.tokens), list[tuple[bool, Ids]]()
    ends = list(accumulate(row.segment_lengths, initial=0))
    for (start, end), context in zip(pairwise(ends), [*row.contexts, b""], strict=True):
        parts.append((True, sampled[start:end]))
        if context:
            parts.append((False, _decode_ids(context)))
    return tuple(parts)


def prompt_row(row: m.StoredTrajectory) -> PromptRow:
    """Return the prompt in the form for reward functions and environments."""
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


def effect_items(effects: Sequence[Effect]) -> tuple[m.EffectItem, ...]:
    return tuple(
        m.EffectItem(
            call=e.call,
            tool=e.tool,
            arguments=e.arguments,
            status=e.status,  # type: ignore[arg-type]
            result=e.result,
            seconds=e.seconds,
        )
        for e in effects
    )


def _decode_ids(data: bytes) -> Ids:
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def _encode_ids(token_ids: Ids) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()
