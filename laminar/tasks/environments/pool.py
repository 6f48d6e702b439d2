"""Sessions of a host, which answer the turns of its trajectories: those of environments.

Reads   the turn's ids; the user's class, in a process for each trajectory (session_pool.py)
Gives   Sessions, the base of agents.py too; Environments: NextTurn, with the ids of the tools'
        answers, or TrajectoryDone, with the reward
Raises  SessionLost if the effects of a call are unknown; EnvironmentFailed if the environment
        itself is the cause

Errors that the policy can cause become text for it: a call that cannot be parsed, a tool that
raises. A call that runs too long is killed, which ends its session and trajectory; the trajectory
is scored. Errors that the policy cannot cause never become a score: a session whose process is gone
is restarted if calls are retryable (env.call_semantics) or none was made, and is lost otherwise.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from laminar.config import Config, ConfigError
from laminar.config.tasks import EnvConfig, RewardConfig
from laminar.events.reasons import EndedBy
from laminar.run.child_channel import ChildLost
from laminar.tasks.environments.renderer import CallResult, Renderer
from laminar.tasks.environments.session_pool import AllSessionsDied, SessionPool, SessionProcess
from laminar.tasks.environments.session_process import (
    Reply,
    Request,
    RewardReply,
    RewardRequest,
    TextReply,
    ToolRequest,
)
from laminar.tasks.environments.tool_calls import TEXT_CHARS_MAX, CallParser, ToolCall
from laminar.tasks.environments.turns import (
    Effect,
    EnvironmentFailed,
    NextTurn,
    Session,
    SessionLost,
    TrajectoryDone,
    TurnCall,
)
from laminar.tasks.rewards.results import RewardCall, RewardResult, apply_error_score

CUT_OFF = "length"  #: finish reason of a turn that ended at its limit
ANSWERED_MAX = 1024  #: maximum finished trajectories whose answers are kept for repeated requests

Intend = Callable[[tuple[Effect, ...]], Awaitable[None]]
T = TypeVar("T")


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


class Conversation:
    """A trajectory with its session and the answers to its turns."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.busy = asyncio.Lock()  #: lock of a single request; repeated ones find the answer
        self.process: SessionProcess | None = None
        self.agent: Any = None  #: AgentSession of agents.py
        self.first: NextTurn | None = None  #: the first turn, with the prompt as the session has it
        self.answers: dict[int, NextTurn | TrajectoryDone] = {}  #: by turn
        self.killed_after_s = 0.0  #: run time of a call that was killed, or 0
        self.has_room = False  #: holds one of agents.max_sessions
        self.forgotten = False


class Sessions(ABC):
    """The sessions of a host."""

    what: str  #: kind of user code, in reasons of failures
    reset_failed: str  #: beginning of the reason if no session could be started

    def __init__(self, config: Config, pool: SessionPool) -> None:
        self._env, self._reward, self._pool = config.env, config.reward, pool
        self._room = asyncio.Semaphore(config.max_sessions)
        self._conversations: dict[str, Conversation] = {}

    @abstractmethod
    async def _start_session(
        self, conversation: Conversation, process: SessionProcess
    ) -> NextTurn | str | None:
        """Start the user's code; return the first turn if it changes it, or why it failed."""

    @abstractmethod
    async def _answer_turn(
        self, conversation: Conversation, call: TurnCall, intend: Intend
    ) -> NextTurn | TrajectoryDone: ...

    async def start(self) -> None:
        """Import the user's file; raise ConfigError, SessionLost."""
        try:
            await self._pool.start()
        except ChildLost as died:
            raise SessionLost(f"{self.what} could not start: {died}") from None

    async def close(self) -> None:
        await self._pool.close()

    async def reset(self, session: Session) -> NextTurn | None:
        """Open a trajectory's session; return the first turn if reset changes the prompt.

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
            return conversation.first

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

    def _get_conversation(self, session: Session) -> Conversation:
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

    async def _acquire_slot(self, conversation: Conversation) -> None:
        """Wait for one of agents.max_sessions.

        A restarted session does not wait: the coordinator has counted its trajectory already.
        """
        limit_s = self._env.tool_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._room.acquire()
        except TimeoutError:
            raise SessionLost(
                f"none of agents.max_sessions sessions was free within {limit_s:g} s"
            ) from None
        conversation.has_room = True

    async def _begin_session(self, conversation: Conversation) -> None:
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
                conversation.process, conversation.first = process, started
                return
            process.kill()
            if conversation.forgotten:
                raise SessionLost("its trajectory is no longer needed")
            reason = str(started)
        raise EnvironmentFailed(f"{self.reset_failed}; last reason: {reason}")

    def _close_session(self, conversation: Conversation) -> None:
        process, conversation.process = conversation.process, None
        if process is not None:
            process.kill()
        if conversation.has_room:
            conversation.has_room = False
            self._room.release()

    async def _ensure_process(self, conversation: Conversation, call: TurnCall) -> SessionProcess:
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
        conversation: Conversation,
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
        conversation: Conversation,
        call: TurnCall,
        use: Callable[[SessionProcess], Awaitable[T]],
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
                conversation.killed_after_s = limit_s
                self._close_session(conversation)
                raise CallKilled from None
            except ChildLost as error:
                self._close_session(conversation)
                died = error
        lost = SessionLost if isinstance(died, AllSessionsDied) else EnvironmentFailed
        raise lost(f"its process ended during a call: {died}")


class _TimeLimitReached(Exception):
    """The end of a turn because a call timed out or had no time left."""

    def __init__(self, reason: EndedBy) -> None:
        self.reason = reason


class Environments(Sessions):
    """The environments of a host."""

    what, reset_failed = "the environment", "reset failed"

    def __init__(
        self,
        config: Config,
        pool: SessionPool,
        renderer: Renderer,
        parser: CallParser,
        decode: Callable[[list[int]], str],
    ) -> None:
        """Connect the parts; `decode` returns the text of a turn without its end token."""
        super().__init__(config, pool)
        self._renderer, self._parser, self._decode = renderer, parser, decode

    async def _start_session(
        self, conversation: Conversation, process: SessionProcess
    ) -> NextTurn | str | None:
        """Reset the environment."""
        row, seed = conversation.session.row, conversation.session.seed
        said = await process.reset(row, seed, self._env.tool_timeout_s)
        if said.failed:
            return said.text or ""
        if not said.text:
            return None
        try:
            return NextTurn(tuple(self._renderer.render_prompt(row, said.text)))
        except ConfigError as error:
            raise EnvironmentFailed(f"the text of reset cannot be rendered: {error}") from None

    async def _answer_turn(
        self, conversation: Conversation, call: TurnCall, intend: Intend
    ) -> NextTurn | TrajectoryDone:
        ids = list(call.parts[-1][1])
        before = [*call.prompt_ids, *(i for _, part in call.parts[:-1] for i in part)]
        calls = [] if call.finish_reason == CUT_OFF else self._parser.parse_calls(ids, before)
        calls = self._renderer.refuse_unwritable(calls)
        text = self._decode(ids)
        if not calls or call.turn + 1 >= self._env.max_turns:
            reason = EndedBy.MAX_TURNS if calls else EndedBy.NONE
            return await self._finish_trajectory(conversation, call, text, reason, [])
        planned = (_make_effect(i, c, "intended") for i, c in enumerate(calls) if _can_run(c))
        await self._record_intent(conversation, call, intend, tuple(planned))
        effects: list[Effect] = []
        try:
            answers = await self._run_calls(conversation, call, calls, effects)
        except _TimeLimitReached as over:
            return await self._finish_trajectory(conversation, call, text, over.reason, effects)
        try:
            context = tuple(self._renderer.render_results(answers))
        except ConfigError as error:
            raise SessionLost(f"the results of its calls cannot be rendered: {error}") from None
        if len(context) > call.room:
            return await self._finish_trajectory(
                conversation, call, text, EndedBy.CONTEXT_FULL, effects
            )
        return NextTurn(context, tuple(effects))

    async def _run_calls(
        self,
        conversation: Conversation,
        call: TurnCall,
        calls: list[ToolCall],
        effects: list[Effect],
    ) -> list[CallResult]:
        """Run the calls of a turn and return their answers; append each outcome to `effects`."""
        answers, left = list[CallResult](), TimeBudget(self._env, call.seconds)
        for i, one in enumerate(calls):
            if not _can_run(one):
                answers.append((one, f"error: {one.refusal_reason}"))
                continue
            limit_s, over = left.of_a_call()
            if limit_s <= 0:
                raise _TimeLimitReached(over)
            use = ToolRequest(one.tool, json.dumps(one.arguments))
            try:
                said, seconds = await self._send_request(conversation, call, use, limit_s)
            except CallKilled:
                effects.append(
                    _make_effect(i, one, "timed-out", describe_timeout(limit_s), limit_s)
                )
                raise _TimeLimitReached(over) from None
            assert isinstance(said, TextReply)
            left.spend_seconds(seconds)
            text = _shorten_text(f"error: {said.text}" if said.failed else said.text or "")
            effects.append(_make_effect(i, one, "failed" if said.failed else "done", text, seconds))
            answers.append((one, text))
        return answers

    async def _finish_trajectory(
        self,
        conversation: Conversation,
        call: TurnCall,
        text: str,
        reason: EndedBy,
        effects: list[Effect],
    ) -> TrajectoryDone:
        """Finish a trajectory, with the reward of its environment if it has one."""
        result = None
        if self._pool.has_reward:
            result = await self._get_reward(conversation, call, text)
        return TrajectoryDone(result, text, reason, tuple(effects))

    async def _get_reward(
        self, conversation: Conversation, call: TurnCall, text: str
    ) -> RewardResult:
        """Return the session's reward, or a timeout if the session was killed."""
        limit_s = self._env.tool_timeout_s
        if conversation.killed_after_s:
            return make_timeout_result(self._reward, conversation.killed_after_s)
        try:
            ids = [i for _, part in call.parts for i in part]
            request = RewardRequest(RewardCall(call.session.row, [(text, ids)]))
            rated, _ = await self._send_request(conversation, call, request, limit_s)
        except CallKilled:
            return make_timeout_result(self._reward, limit_s)
        assert isinstance(rated, RewardReply)
        return apply_error_score(rated.result, self._reward.error_score)

    async def _send_request(
        self, conversation: Conversation, call: TurnCall, request: Request, limit_s: float
    ) -> tuple[Reply, float]:
        """Return the reply to a request and its seconds; raise CallKilled, SessionLost."""
        return await self._use_session(
            conversation, call, lambda process: process.send_request(request), limit_s
        )


def make_timeout_result(reward: RewardConfig, limit_s: float) -> RewardResult:
    return RewardResult(reward.error_score, "timeout", describe_timeout(limit_s))


def describe_timeout(limit_s: float) -> str:
    return f"no answer within {limit_s:.3g} s"


def _can_run(call: ToolCall) -> bool:
    return not call.refusal_reason


def _make_effect(
    index: int, call: ToolCall, status: str, result: str = "", seconds: float = 0.0
) -> Effect:
    return Effect(index, call.tool, json.dumps(call.arguments), status, result, seconds)


def _shorten_text(text: str) -> str:
    if len(text) <= TEXT_CHARS_MAX:
        return text
    end = f" ... ({len(text)} characters in all)"
    return text[: TEXT_CHARS_MAX - len(end)] + end
