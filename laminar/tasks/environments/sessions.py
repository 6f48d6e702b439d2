"""Sessions of a replica: what environments and agents have in common.

Reads   the user's file, in a process for each trajectory (session_pool.py)
Gives   Sessions, the base of pool.py and agents.py: a session per attempt, at most
        env.max_sessions, the same answer to a repeated request, the time that calls may take
Raises  SessionLost if the effects of a call are unknown; EnvironmentFailed if the user's code
        itself is the cause

A session whose process is gone is restarted if calls are retryable (env.call_semantics) or none was
made, and is lost otherwise.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from laminar.config import Config
from laminar.config.tree import EnvConfig, RewardConfig
from laminar.events.reasons import EndedBy
from laminar.run.child_channel import ChildLost
from laminar.tasks.environments.session_pool import AllSessionsDied, SessionPool, SessionProcess
from laminar.tasks.environments.turns import (
    Effect,
    EnvironmentFailed,
    NextTurn,
    Session,
    SessionLost,
    TrajectoryDone,
    TurnCall,
)
from laminar.tasks.rewards.results import RewardResult

CUT_OFF = "length"  #: finish reason of a turn that ended at its limit
ANSWERED_MAX = 1024  #: maximum finished trajectories whose answers are kept for repeated requests

Intend = Callable[[tuple[Effect, ...]], Awaitable[None]]


class CallKilled(Exception):
    """The kill of a session whose request ran too long."""


class TimeBudget:
    """The time left to the calls of a turn."""

    def __init__(self, env: EnvConfig, spent_s: float) -> None:
        """Begin the budget of a turn after earlier turns' calls have taken `spent_s`."""
        self._limits = {
            EndedBy.TRAJECTORY_TIMEOUT: env.trajectory_timeout_s - spent_s,
            EndedBy.TURN_TIMEOUT: env.turn_timeout_s,
        }
        self._tool_timeout_s = env.tool_timeout_s

    def of_a_turn(self) -> tuple[float, EndedBy]:
        """Return the time limit of the turn, and the reason to report if it is reached."""
        reason = min(self._limits, key=lambda known: self._limits[known])
        return self._limits[reason], reason

    def of_a_call(self) -> tuple[float, EndedBy]:
        """Return the time limit of the next call, and the reason to report if it is reached."""
        limit_s, reason = self.of_a_turn()
        if limit_s < self._tool_timeout_s:
            return limit_s, reason
        return self._tool_timeout_s, EndedBy.TOOL_TIMEOUT

    def spend_seconds(self, seconds: float) -> None:
        for reason in self._limits:
            self._limits[reason] -= seconds


class LiveSession(Protocol):
    """A session's process."""

    @property
    def ended(self) -> asyncio.Future[ChildLost]: ...

    def kill(self) -> None: ...


Live = TypeVar("Live", bound=LiveSession)
T = TypeVar("T")


class Conversation(Generic[Live]):
    """A trajectory with its session and the answers to its turns."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.busy = asyncio.Lock()  #: lock of a single request; repeated ones find the answer
        self.process: Live | None = None
        self.prompt_ids: tuple[int, ...] | None = None  #: prompt with what the session adds
        self.answers: dict[int, NextTurn | TrajectoryDone] = {}  #: by turn
        self.killed_after_s = 0.0  #: run time of a call that was killed, or 0
        self.has_room = False  #: holds one of env.max_sessions
        self.forgotten = False


class Sessions(ABC, Generic[Live]):
    """The sessions of a replica."""

    what: str  #: kind of user code, in reasons of failures
    reset_failed: str  #: beginning of the reason if no session could be started

    def __init__(self, config: Config, pool: SessionPool) -> None:
        self.sessions_lost = 0  #: number of sessions that ended by themselves
        self.sessions_killed = 0  #: number of sessions killed because a call ran too long
        self._env, self._reward, self._pool = config.env, config.reward, pool
        self._room = asyncio.Semaphore(config.max_sessions)
        self._conversations: dict[str, Conversation[Live]] = {}

    @abstractmethod
    async def _start_session(
        self, conversation: Conversation[Live], process: SessionProcess
    ) -> tuple[Live, tuple[int, ...] | None] | str:
        """Start the user's code; return the session and the prompt's ids, or why it failed."""

    @abstractmethod
    async def _answer_turn(
        self, conversation: Conversation[Live], call: TurnCall, intend: Intend
    ) -> NextTurn | TrajectoryDone: ...

    async def start(self) -> None:
        """Import the user's file; raise ConfigError, SessionLost."""
        try:
            await self._pool.start()
        except ChildLost as died:
            raise SessionLost(f"{self.what} could not start: {died}") from None

    async def close(self) -> None:
        await self._pool.close()

    async def reset(self, session: Session) -> tuple[int, ...] | None:
        """Open a trajectory's session; return the prompt's ids if reset adds text, else None.

        Raises SessionLost.
        """
        conversation = self._get_conversation(session)
        async with conversation.busy:
            if conversation.process is None and not conversation.answers:
                await self._acquire_slot(conversation)
                try:
                    await self._begin_session(conversation)
                except SessionLost:
                    self._close_session(conversation)
                    raise
            return conversation.prompt_ids

    async def answer_turn(self, call: TurnCall, intend: Intend) -> NextTurn | TrajectoryDone:
        """Answer a turn, and repeated requests with the same answer; raise SessionLost.

        `intend` makes calls durable before they are made; awaited if each runs at most once.
        """
        conversation = self._get_conversation(call.session)
        async with conversation.busy:
            if call.turn not in conversation.answers:
                try:
                    answer = await self._answer_turn(conversation, call, intend)
                except BaseException:
                    self._close_session(conversation)
                    raise
                conversation.answers[call.turn] = answer
                if isinstance(answer, TrajectoryDone):
                    self._close_session(conversation)
            return conversation.answers[call.turn]

    def end_session(self, trajectory_id: str) -> None:
        """End the session of a trajectory that is not needed any more."""
        if (conversation := self._conversations.pop(trajectory_id, None)) is not None:
            conversation.forgotten = True
            self._close_session(conversation)

    # --- sessions -------------------------------------------------------------------------------

    def _get_conversation(self, session: Session) -> Conversation[Live]:
        """Return the conversation of this attempt, and end one of an earlier attempt."""
        found = self._conversations.get(session.trajectory_id)
        if found is not None and found.session.attempt == session.attempt:
            return found
        self.end_session(session.trajectory_id)
        found = self._conversations[session.trajectory_id] = Conversation(session)
        over = [i for i, c in self._conversations.items() if c.process is None and c.answers]
        for trajectory_id in over[: max(0, len(over) - ANSWERED_MAX)]:
            del self._conversations[trajectory_id]
        return found

    async def _acquire_slot(self, conversation: Conversation[Live]) -> None:
        """Wait for one of env.max_sessions.

        A restarted session does not wait: the coordinator has counted its trajectory already.
        """
        limit_s = self._env.tool_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._room.acquire()
        except TimeoutError:
            raise SessionLost(
                f"none of env.max_sessions sessions was free within {limit_s:g} s"
            ) from None
        conversation.has_room = True

    async def _begin_session(self, conversation: Conversation[Live]) -> None:
        """Open and reset a session; raise SessionLost."""
        reason = ""
        for _ in range(1 + self._reward.max_retries):
            try:
                process = await self._pool.open()
            except ChildLost as died:
                reason = str(died)
                continue
            try:
                started = await self._start_session(conversation, process)
            except BaseException:
                process.kill()
                raise
            if not isinstance(started, str) and not conversation.forgotten:
                conversation.process, conversation.prompt_ids = started
                return
            process.kill()
            if conversation.forgotten:
                raise SessionLost("its trajectory is no longer needed")
            self.sessions_lost += 1
            reason = str(started)
        raise EnvironmentFailed(f"{self.reset_failed}; last reason: {reason}")

    def _close_session(self, conversation: Conversation[Live]) -> None:
        process, conversation.process = conversation.process, None
        if process is not None:
            process.kill()
        if conversation.has_room:
            conversation.has_room = False
            self._room.release()

    async def _ensure_process(self, conversation: Conversation[Live], call: TurnCall) -> Live:
        """Return the session of a turn, restarted if permitted; raise SessionLost."""
        if conversation.process is not None and conversation.process.ended.done():
            self._close_session(conversation)  # it ended before this turn
        if conversation.process is None:
            if self._env.call_semantics == "at-most-once" and (call.turn or call.stored):
                raise SessionLost("its session was lost, and with it the effects of its calls")
            await self._begin_session(conversation)
        assert conversation.process is not None
        return conversation.process

    async def _record_intent(
        self,
        conversation: Conversation[Live],
        call: TurnCall,
        intend: Intend,
        effects: tuple[Effect, ...],
    ) -> None:
        """Make at-most-once calls durable before they are made; raise SessionLost."""
        if self._env.call_semantics != "at-most-once":
            return
        if any(effect.status == "intended" for effect in call.stored):
            raise SessionLost("the outcome of its last call is unknown")
        await self._ensure_process(conversation, call)
        await intend(effects)

    async def _use_session(
        self,
        conversation: Conversation[Live],
        call: TurnCall,
        use: Callable[[Live], Awaitable[T]],
        limit_s: float,
    ) -> tuple[T, float]:
        """Return the result of `use` and its seconds; retry in a new session if permitted.

        Raises CallKilled after `limit_s`, SessionLost.
        """
        attempts = 1 if self._env.call_semantics == "at-most-once" else 1 + self._reward.max_retries
        for _ in range(attempts):
            process = await self._ensure_process(conversation, call)
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(limit_s):
                    reply = await use(process)
                return reply, asyncio.get_running_loop().time() - began
            except TimeoutError:
                self.sessions_killed += 1
                conversation.killed_after_s = limit_s
                self._close_session(conversation)
                raise CallKilled from None
            except ChildLost as error:
                self.sessions_lost += 1
                self._close_session(conversation)
                died = error
        lost = SessionLost if isinstance(died, AllSessionsDied) else EnvironmentFailed
        raise lost(f"its process ended during a call: {died}")


def make_timeout_result(reward: RewardConfig, limit_s: float) -> RewardResult:
    return RewardResult(reward.error_score, "timeout", describe_timeout(limit_s))


def describe_timeout(limit_s: float) -> str:
    return f"no answer within {limit_s:.3g} s"
