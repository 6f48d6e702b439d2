"""Environments of a replica: they answer the turns of its trajectories.

Reads   the turn's ids; the user's class, in a process for each trajectory (session_pool.py)
Gives   NextTurn, with the ids of the tools' answers, or TrajectoryDone, with the reward
Raises  SessionLost if the effects of a call are unknown; EnvironmentFailed if the environment
        itself is the cause

Errors that the policy can cause become text for it: a call that cannot be parsed, a tool that
raises. A call that runs too long is killed, which ends its session and trajectory; the trajectory
is scored. Errors that the policy cannot cause never become a score (sessions.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from laminar.config import Config, ConfigError
from laminar.events.reasons import EndedBy
from laminar.tasks.environments.renderer import CallResult, Renderer
from laminar.tasks.environments.session_pool import SessionPool, SessionProcess
from laminar.tasks.environments.session_process import (
    Reply,
    Request,
    RewardReply,
    RewardRequest,
    TextReply,
    ToolRequest,
)
from laminar.tasks.environments.sessions import (
    CUT_OFF,
    CallKilled,
    Conversation,
    Intend,
    Sessions,
    TimeBudget,
    describe_timeout,
    make_timeout_result,
)
from laminar.tasks.environments.tool_calls import TEXT_CHARS_MAX, CallParser, ToolCall
from laminar.tasks.environments.turns import (
    Effect,
    EnvironmentFailed,
    NextTurn,
    SessionLost,
    TrajectoryDone,
    TurnCall,
)
from laminar.tasks.rewards.results import RewardCall, RewardResult, apply_error_score

_Conversation = Conversation[SessionProcess]


class _TimeLimitReached(Exception):
    """The end of a turn because a call timed out or had no time left."""

    def __init__(self, reason: EndedBy) -> None:
        self.reason = reason


class Environments(Sessions[SessionProcess]):
    """The environments of a replica."""

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
        self, conversation: _Conversation, process: SessionProcess
    ) -> tuple[SessionProcess, tuple[int, ...] | None] | str:
        """Reset the environment."""
        row, seed = conversation.session.row, conversation.session.seed
        said = await process.reset(row, seed, self._env.tool_timeout_s)
        if said.failed:
            return said.text or ""
        if not said.text:
            return process, None
        try:
            return process, tuple(self._renderer.render_prompt(row, said.text))
        except ConfigError as error:
            raise EnvironmentFailed(f"the text of reset cannot be rendered: {error}") from None

    async def _answer_turn(
        self, conversation: _Conversation, call: TurnCall, intend: Intend
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
        conversation: _Conversation,
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
        conversation: _Conversation,
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
        self, conversation: _Conversation, call: TurnCall, text: str
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
        self, conversation: _Conversation, call: TurnCall, request: Request, limit_s: float
    ) -> tuple[Reply, float]:
        """Return the reply to a request and its seconds; raise CallKilled, SessionLost."""
        return await self._use_session(
            conversation, call, lambda process: process.send_request(request), limit_s
        )


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
