"""A trajectory of several turns as its replica sees it: what the engine reads, what an environment
is asked, and what of its answer goes to the store.

Reads   answers of the store to an opening or to a fetch
Writes  prompts and contexts, calls of tools (through the store)
Gives   Environments, the port; Turn, what the engine goes on with; Turns

The engine knows nothing of turns: it is given all that stands before the present one as a prompt.
No module of the replica's could have this: rollout.py and scoring.py are both its callers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from laminar.actors.host import Host
from laminar.actors.service_clients import StoreClient
from laminar.config import Config
from laminar.events import commands as cmd
from laminar.names import ids
from laminar.storage import messages as m
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.turns import (
    Effect,
    NextTurn,
    Session,
    SessionLost,
    TrajectoryDone,
    TurnCall,
)

Ids = tuple[int, ...]


class Environments(Protocol):
    """The sessions of one replica."""

    async def start(self) -> None:
        """Be ready to open sessions; ConfigError."""

    async def reset(self, session: Session) -> Ids | None:
        """Open a session; the token ids of the prompt with what it says first, None: it says
        nothing. SessionLost."""
        ...

    async def answer_turn(
        self, call: TurnCall, intend: Callable[[tuple[Effect, ...]], Awaitable[None]]
    ) -> NextTurn | TrajectoryDone:
        """Answer a turn; asked again, the same answer. `intend` notes calls that are not to be made
        twice, before they are made. SessionLost."""
        ...

    def end_session(self, trajectory_id: str) -> None:
        """End its session, if there is one."""

    async def close(self) -> None: ...


class Turn(NamedTuple):
    """Where a trajectory goes on."""

    number: int  #: from 0
    prompt_ids: Ids  #: all that stands before the turn
    done_ids: Ids  #: sampled of it so far
    begins: int  #: sampled tokens of the turns before it


def make_turn(opened: m.OpenResult) -> Turn:
    """The turn to sample."""
    sampled, number = _decode_ids(opened.tokens), len(opened.contexts)
    turns = list(accumulate(opened.segment_lengths[:number], initial=0))
    before = [*_decode_ids(opened.prompt_ids)]
    for (start, end), context in zip(pairwise(turns), opened.contexts, strict=True):
        before += [*sampled[start:end], *_decode_ids(context)]
    return Turn(number, tuple(before), tuple(sampled[turns[-1] :]), turns[-1])


def turn_seed(seed: int, turn: int) -> int:
    """No turn draws the numbers of another one."""
    return ids.hash64(seed, "turn", turn) if turn else seed


class Turns:
    """The environments of one replica, fed from the store."""

    def __init__(self, host: Host, store: StoreClient, environments: Environments) -> None:
        self.host, self.store, self.environments = host, store, environments
        self.config: Config = host.config

    async def open_session(
        self, command: cmd.GenerateTrajectory, opened: m.OpenResult
    ) -> m.OpenResult | None:
        """Open the session of a trajectory that has no tokens yet; what was opened, with the prompt
        that its environment makes, durable. None: another placement has it. SessionLost."""
        if opened.num_tokens or opened.contexts or opened.own_prompt:
            return opened  # its session is elsewhere, or lost: its turn will tell
        reply = await self.store.fetch([command.trajectory_id], with_prompt=True)
        session = self._make_session(reply[0])
        prompt_ids = await self.environments.reset(session)
        if prompt_ids is None:
            return opened
        room = self.config.env.max_context_tokens + self.config.data.max_prompt_length
        if len(prompt_ids) > room:
            raise SessionLost(
                f"reset() makes a prompt of {len(prompt_ids)} tokens, and there is room for {room} "
                "(data.max_prompt_length + env.max_context_tokens)"
            )
        tokens = _encode_ids(prompt_ids)
        kept = await self._store_prompt(command, tokens)
        if kept.answer == "refused":
            raise SessionLost(kept.reason)
        return msgspec.structs.replace(opened, prompt_ids=tokens) if kept.answer == "ok" else None

    async def _store_prompt(self, command: cmd.GenerateTrajectory, tokens: bytes) -> m.Result:
        item = m.ContextItem(
            trajectory_id=command.trajectory_id,
            placement=command.placement,
            turn=0,
            tokens=tokens,
        )
        reply = await self.store.send_request(m.Continue(items=(item,)), m.ContinueReply)
        return reply.results[0]

    async def answer_turn(
        self, item: cmd.PlacedTrajectory, row: m.Trajectory
    ) -> NextTurn | TrajectoryDone:
        """What its environment says to the turn that has ended; SessionLost."""
        effects = tuple(
            Effect(e.call, e.tool, e.arguments, e.status, e.result, e.seconds) for e in row.effects
        )
        call = TurnCall(
            session=self._make_session(row),
            turn=len(row.contexts),
            prompt_ids=_decode_ids(row.prompt_ids),
            parts=split_turns(row),
            finish_reason=row.finish_reason or "",
            room=self._count_context_room(row),
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

        answer = await self.environments.answer_turn(call, intend)
        await self.host.hit_failpoint("rollout-called")
        return answer

    async def store_context(
        self, item: cmd.PlacedTrajectory, turn: int, answer: NextTurn
    ) -> m.Result:
        """Context and ends of calls into the store: the trajectory is open again."""
        context = m.ContextItem(
            trajectory_id=item.trajectory_id,
            placement=item.placement,
            turn=turn,
            tokens=_encode_ids(answer.context),
            effects=effect_items(answer.effects),
        )
        reply = await self.store.send_request(m.Continue(items=(context,)), m.ContinueReply)
        return reply.results[0]

    def _make_session(self, row: m.Trajectory) -> Session:
        seed = ids.hash64(self.config.seed, "environment", row.group_id)
        return Session(row.trajectory_id, row.attempt, seed, prompt_row(row), row.purpose)

    def _count_context_room(self, row: m.Trajectory) -> int:
        """Context tokens that still fit; a longer prompt takes of it."""
        longer = len(row.prompt_ids) // 4 - self.config.data.max_prompt_length
        used = sum(map(len, row.contexts)) // 4 + max(longer, 0)
        if len(row.tokens) // 4 >= self.config.data.max_response_length:
            return 0  # there is no room for another turn
        return max(self.config.env.max_context_tokens - used, 0)


def split_turns(row: m.Trajectory) -> tuple[tuple[bool, Ids], ...]:
    """Turns and contexts in order: whether the model sampled it, token ids."""
    sampled, parts = _decode_ids(row.tokens), list[tuple[bool, Ids]]()
    ends = list(accumulate(row.segment_lengths, initial=0))
    for (start, end), context in zip(pairwise(ends), [*row.contexts, b""], strict=True):
        parts.append((True, sampled[start:end]))
        if context:
            parts.append((False, _decode_ids(context)))
    return tuple(parts)


def prompt_row(row: m.Trajectory) -> PromptRow:
    """The prompt as reward functions and environments take it."""
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
