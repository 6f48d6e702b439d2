"""The conversation of an agent: requests to a chat API as the ids of turns and contexts.

Reads   ChatRequest (chat_messages.py), the ids of turns, the tokenizer and its chat template
Gives   Chat, ChatFormat
Raises  RequestRefused for messages that cannot continue the conversation

Ids of a turn are never made from its text again: a request that continues the conversation adds the
ids of its new messages. A separate module, because agents.py knows processes and limits, not
messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from laminar.config.tree import DataConfig
from laminar.tasks.data.chat import encode_prompt
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments import chat_messages as chat
from laminar.tasks.environments.chat_messages import ChatRequest, RequestRefused
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.tool_calls import CallParser, TurnMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatFormat(NamedTuple):
    """The tokenizer and the chat template, for conversations with any tools."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    end_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    model: str


class Chat:
    """A conversation, whose ids are never made from its text again."""

    def __init__(self, form: ChatFormat, row: PromptRow) -> None:
        self._form, self._row = form, row
        self._asked: ChatRequest | None = None  #: the request that waits for a turn
        self._history: list[tuple[str, ...]] = []  #: messages read and sampled
        self._calls: list[chat.Message] = []  #: calls of the last turn
        self._num_calls = 0

    def render_request(self, asked: ChatRequest) -> list[int]:
        """Return the ids that the model reads before its next turn; raise RequestRefused."""
        try:
            if self._asked is None:
                row = replace(self._row, prompt=asked.messages)
                return encode_prompt(self._form.tokenizer, row, self._form.data, asked.tools)
            new = self._find_new(self._asked, asked)
            return self._make_renderer(asked).render_messages(self._calls, new)
        except RequestRefused:
            raise
        except Exception as error:  # templates raise various types
            raise RequestRefused(f"the messages cannot be rendered: {error}") from None

    def accept_request(self, asked: ChatRequest) -> None:
        self._asked = asked
        self._history = [chat.compare_form(message) for message in asked.messages]

    def make_reply(self, ids: Sequence[int], before: Sequence[int], name: str, *, cut: bool) -> str:
        """Return the completion for a turn, with which the conversation continues."""
        assert self._asked is not None
        text = self._form.decode(list(ids))
        turn = TurnMessage(text, "", [])
        if not cut:
            parser = CallParser(
                self._form.tokenizer, self._asked.tools if self._asked.may_call else []
            )
            turn = parser.parse_message(ids, before, text)
        message = chat.make_turn_message(turn, self._num_calls)
        self._num_calls += len(turn.calls)
        self._calls = message.get("tool_calls", [])
        self._history.append(chat.compare_form(message))
        head = {"id": name, "created": int(time.time()), "model": self._form.model}
        tokens = len(before), len(ids)
        return chat.make_completion(head, message, turn.reasoning, cut=cut, tokens=tokens)

    def check_template(self) -> None:
        """Test the template with the tools of the request; raise ConfigError."""
        assert self._asked is not None
        if self._asked.tools:
            parser = CallParser(self._form.tokenizer, self._asked.tools)
            self._make_renderer(self._asked).check_template(parser)

    def _make_renderer(self, asked: ChatRequest) -> Renderer:
        return Renderer(self._form.tokenizer, self._form.data, asked.tools, self._form.end_ids)

    def _find_new(self, before: ChatRequest, asked: ChatRequest) -> list[chat.Message]:
        """Return the messages after the last turn; raise RequestRefused for another beginning."""
        if asked.tools != before.tools:
            raise RequestRefused(_BRANCH.format("its tools are not those of the first request"))
        forms, known = [chat.compare_form(m) for m in asked.messages], self._history
        same = (i for i, form in enumerate(known) if forms[i : i + 1] != [form])
        if (at := next(same, None)) is not None:
            raise RequestRefused(_BRANCH.format(f"messages[{at}] is not that of the conversation"))
        new = asked.messages[len(known) :]
        if not new or new[-1]["role"] == "assistant":
            raise RequestRefused(_BRANCH.format("no new message of another role follows"))
        names = {call["id"]: call["function"]["name"] for call in self._calls}
        return [
            {"name": names[m["tool_call_id"]], **m} if m.get("tool_call_id") in names else m
            for m in new
        ]


_BRANCH = (
    "the request does not continue the last turn of its session: {}; sub-agents, edited histories "
    "and repeated samples are not supported yet"
)
