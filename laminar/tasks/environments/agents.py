"""Agents of a host: programs whose requests to a chat API are the turns of its trajectories.

Reads   the turn's ids; requests (endpoint.py) of the user's agent, in a process for each
        trajectory (agent_process.py)
Gives   NextTurn, with the ids of the new messages, or TrajectoryDone, with the agent's score
Raises  SessionLost if the agent has seen a turn and is gone; EnvironmentFailed if the agent itself
        is the cause

The time between two requests is to an agent what a call is to an environment. If agents are
retryable (env.call_semantics), a new session gets the turns that the lost one had, and must ask for
them in the same words. What an agent does before its first reply may be repeated, as `reset` is.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np

from laminar.config import Config
from laminar.events.reasons import EndedBy
from laminar.run.child_channel import ChildLost
from laminar.run.child_process import Output
from laminar.storage.branches import find_parent
from laminar.storage.messages import TurnOptions
from laminar.storage.rules import MAX_TOKENS
from laminar.tasks.environments import chat_messages as chat
from laminar.tasks.environments.chat_messages import ChatRequest, RequestRefused
from laminar.tasks.environments.conversation import Chat, ChatFormat, ChatTurn, TooManyBranches
from laminar.tasks.environments.endpoint import ChatEndpoint, Gate, TurnReply
from laminar.tasks.environments.pool import (
    CUT_OFF,
    CallKilled,
    Conversation,
    Intend,
    Sessions,
    TimeBudget,
    describe_timeout,
    make_timeout_result,
)
from laminar.tasks.environments.session_pool import SessionPool, SessionProcess
from laminar.tasks.environments.session_process import AgentReply, AgentRequest
from laminar.tasks.environments.turns import Effect, NextTurn, SessionLost, TrajectoryDone, TurnCall
from laminar.tasks.rewards.results import RewardResult, apply_error_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSALS_MAX = 100  #: refused requests of a session; then it gets no turn any more
AGENT = "agent"  #: name of the work between two requests among the calls of a run


class AgentSession:
    """An agent in its process, its requests, and its conversation."""

    def __init__(
        self, process: SessionProcess, gate: Gate, form: ChatFormat, request: AgentRequest
    ) -> None:
        """Start the agent."""
        self._process, self._gate, self.chat = process, gate, Chat(form, request.row)
        self._end = asyncio.ensure_future(process.send_request(request))
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())  # retrieved
        self.turn = 0  #: the turn for which the agent waits
        self.options = TurnOptions()  #: of that turn
        self.closed: EndedBy | None = None  #: reason to end the trajectory with the last turn
        self.refusals: list[str] = []

    async def request_next(
        self, reply: str | None, room: int, closed: EndedBy | None = None
    ) -> ChatTurn | AgentReply:
        """Return the turn of the agent's next valid request, or its end; raise ChildLost.

        `reply`: that to its last request. `closed`: the reason to refuse all requests; without
        it, those above `room` are.
        """
        if reply is not None:
            self._gate.send_reply(TurnReply(reply))
        while isinstance(asked := await self._wait_for_agent(), ChatRequest):
            try:
                if closed is not None:
                    raise RequestRefused(_WHY_CLOSED[closed], code=chat.TOO_LONG)
                turn = self.chat.render_request(asked)
                if turn.num_read > room:
                    closed = EndedBy.CONTEXT_FULL if self.turn else None
                    full = f"the new messages have {turn.num_read} tokens, and {room} are allowed"
                    raise RequestRefused(full, code=chat.TOO_LONG)
            except RequestRefused as refused:
                self.closed = closed
                if isinstance(refused, TooManyBranches):
                    self.closed = EndedBy.CONTEXT_FULL
                self.refusals.append(str(refused))
                ends = closed is not None or len(self.refusals) >= REFUSALS_MAX
                self._gate.send_reply(TurnReply(refused.body, refused=True, closed=ends))
            else:
                self.chat.accept_request(asked, turn)
                self.closed, self.options = None, asked.options
                return turn
        return asked

    async def _wait_for_agent(self) -> ChatRequest | AgentReply:
        """Return the agent's next request, or its end; raise ChildLost."""
        self._process.asked = True  # it is the agent that works, not the model
        asked = asyncio.ensure_future(self._gate.next_request())
        try:
            await asyncio.wait([self._end, asked], return_when=asyncio.FIRST_COMPLETED)
            if not self._end.done():
                self._process.asked = False
                return asked.result()
        finally:
            asked.cancel()
        self._gate.close()
        reply = self._end.result()
        assert isinstance(reply, AgentReply)
        return reply


_WHY_CLOSED = {
    EndedBy.NONE: "the last turn was cut off at the limit of sampled tokens "
    "(data.max_response_length)",
    EndedBy.MAX_TURNS: "the conversation has had all its turns (env.max_turns)",
    EndedBy.CONTEXT_FULL: "no tokens are left for another turn (env.max_context_tokens, "
    "data.max_response_length)",
}


class Agents(Sessions):
    """The agents of a host."""

    what, reset_failed = "the agent", "the agent made no request"

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        decode: Callable[[list[int]], str],
        on_output: Output = len,
    ) -> None:
        """Create them, not started; `decode` returns the text of a turn without its end token."""
        pool = SessionPool(config.env, agents=config.agents, on_output=on_output)
        super().__init__(config, pool)
        model = Path(config.model.name).name
        self._form = ChatFormat(tokenizer, config.data, end_ids, decode, model, config.agents)
        self._on_output, self.replaced = on_output, dict[str, Any]()
        refuse, temperature = config.agents.sampling == "refuse", config.rollout.temperature
        sampling = chat.Sampling(refuse, temperature)
        self._endpoint = ChatEndpoint(model, sampling, self._report_replaced)
        self._directories: TemporaryDirectory[str] | None = None  #: of commands
        if config.agents.command:
            self._directories = TemporaryDirectory(prefix="laminar-agents-")
        self._prompt_room = config.data.max_prompt_length + config.env.max_context_tokens

    async def close(self) -> None:
        await super().close()
        await self._endpoint.close()
        if self._directories is not None:
            await asyncio.to_thread(self._directories.cleanup)

    def _report_replaced(self, given: Mapping[str, Any]) -> None:
        """Print the first of each sampling parameter that has no effect."""
        new = {key: value for key, value in given.items() if key not in self.replaced}
        self.replaced |= new
        if new:
            self._on_output(f"{describe_replaced(new)}\n".encode())

    def check_template(self, trajectory_id: str) -> None:
        """Test the chat template with the tools of an open session; raise ConfigError."""
        self._conversations[trajectory_id].agent.chat.check_template()

    async def _start_session(
        self, conversation: Conversation, process: SessionProcess
    ) -> NextTurn | str:
        """Run the agent until its first request."""
        session, limit_s = conversation.session, self._env.turn_timeout_s
        url, gate = self._endpoint.open_gate(session.trajectory_id)
        directory = mkdtemp(dir=self._directories.name) if self._directories else ""
        process.ended.add_done_callback(lambda _: self._clean_up(url, directory))
        request = AgentRequest(
            session.row, session.seed, self._form.model, url, gate.key, directory
        )
        live = conversation.agent = AgentSession(process, gate, self._form, request)
        try:
            async with asyncio.timeout(limit_s):
                asked = await live.request_next(None, self._prompt_room)
        except TimeoutError:
            return f"{describe_timeout(limit_s)} (env.turn_timeout_s)"
        except ChildLost as died:
            return f"its process ended ({died})"
        if not isinstance(asked, AgentReply):
            return NextTurn(asked.ids, options=live.options)
        refused = f"; its request was refused: {live.refusals[-1]}" if live.refusals else ""
        return (asked.result.detail or f"it returned {asked.result.reward}") + refused

    def _clean_up(self, url: str, directory: str) -> None:
        self._endpoint.close_gate(url)
        if directory:
            removal = partial(shutil.rmtree, directory, ignore_errors=True)
            asyncio.get_running_loop().run_in_executor(None, removal)

    async def _answer_turn(
        self, conversation: Conversation, call: TurnCall, intend: Intend
    ) -> NextTurn | TrajectoryDone:
        text = self._form.decode(list(call.parts[-1][1]))
        limit_s, over = TimeBudget(self._env, call.seconds).of_a_turn()
        if limit_s <= 0:
            result = make_timeout_result(self._reward, self._env.trajectory_timeout_s)
            return TrajectoryDone(result, text, over)
        await self._record_intent(conversation, call, intend, (_make_effect("intended"),))

        try:
            asked, seconds = await self._use_session(
                conversation, call, lambda _: self._continue_agent(conversation, call), limit_s
            )
        except CallKilled:
            effect = _make_effect("timed-out", describe_timeout(limit_s), limit_s)
            result = make_timeout_result(self._reward, limit_s)
            return TrajectoryDone(result, text, over, (effect,))
        live, told = conversation.agent, ""
        if refusals := live.refusals:
            told = f"{len(refusals)} requests refused; the last one: {refusals[-1]}"
        live.refusals = []
        effect = _make_effect("done", told, seconds)
        if not isinstance(asked, AgentReply):
            return NextTurn(asked.ids, (effect,), asked.parent, live.options)
        reason = live.closed or EndedBy.NONE
        return TrajectoryDone(self._read_score(asked.result, live), text, reason, (effect,))

    async def _continue_agent(
        self, conversation: Conversation, call: TurnCall
    ) -> ChatTurn | AgentReply:
        """Give the agent the turns that its session has not had, with the last one that of `call`.

        Raises SessionLost if a new session asks for earlier turns in other words.
        """
        if conversation.first is None or conversation.first.context != call.prompt_ids:
            raise SessionLost(_DIFFERS)
        live: AgentSession = conversation.agent
        turns = [at for at, (is_sampled, _) in enumerate(call.parts) if is_sampled]
        for at in turns[live.turn :]:
            is_last, ids = at == turns[-1], call.parts[at][1]
            name = f"chatcmpl-{call.session.trajectory_id}-{live.turn}"
            first = sum(len(part) for is_sampled, part in call.parts[:at] if is_sampled)
            scores = np.frombuffer(call.logprobs, "<f4")[first : first + len(ids)].tolist()
            cut = live.chat.is_cut(ids)
            reply = live.chat.make_reply(ids, name, cut=cut, logprobs=scores)
            live.turn += 1
            if is_last:
                return await live.request_next(reply, call.room, self._find_end(call))
            known = call.parts[at + 1][1], find_parent(call.parents, live.turn)
            again = await live.request_next(reply, MAX_TOKENS)
            if isinstance(again, AgentReply) or again[:2] != known:
                raise SessionLost(_DIFFERS)
        raise SessionLost("its session has had this turn already")

    def _find_end(self, call: TurnCall) -> EndedBy | None:
        """Return the reason why no turn can follow."""
        sampled = sum(len(part) for is_sampled, part in call.parts if is_sampled)
        if call.finish_reason == CUT_OFF and sampled >= self._form.data.max_response_length:
            return EndedBy.NONE
        if call.turn + 1 >= self._env.max_turns:
            return EndedBy.MAX_TURNS
        return None if call.room else EndedBy.CONTEXT_FULL

    def _read_score(self, result: RewardResult, live: AgentSession) -> RewardResult | None:
        """Return the agent's score; None if the reward functions score the last turn.

        They also do if the agent raised because its conversation was full.
        """
        failed = result.reason == "error" and live.closed is not None
        if failed or result.reason == "unscored":
            return None
        return apply_error_score(result, self._reward.error_score)


def describe_replaced(given: Mapping[str, Any]) -> str:
    named = ", ".join(f"{key} = {json.dumps(value)[:100]}" for key, value in given.items())
    return (
        f"the sampling of the run replaces {named} of the agent's requests; "
        'agents.sampling = "refuse" rejects them'
    )


_DIFFERS = "its agent was run again and made another request than before"


def _make_effect(status: str, result: str = "", seconds: float = 0.0) -> Effect:
    return Effect(0, AGENT, json.dumps({}), status, result, seconds)
