"""The conversations of an agent: requests to a chat API as the ids of turns and contexts.

Reads   ChatRequest (chat_messages.py), the ids of turns, the tokenizer and its chat template
Gives   Chat, ChatFormat, ChatTurn
Raises  RequestRefused for messages that cannot be rendered, or one branch too many

Ids of a turn are never made from its text again. A session is a tree of turns: a request whose
messages extend those of any turn continues from the ids as sampled and read, and adds the ids of
its new messages. Anything else is a new root, whose context is the whole request: compacted or
edited histories, sub-agents, other tools. What clients change on the way is ignored in comparing
(compare_form). A separate module, because agents.py knows processes and limits, not messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from laminar.config.tasks import AgentsConfig
from laminar.config.tree import DataConfig
from laminar.storage.branches import ROOT
from laminar.tasks.data.chat import encode_prompt
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments import chat_messages as chat
from laminar.tasks.environments.chat_messages import ChatRequest, RequestRefused
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.stop_strings import cut_text
from laminar.tasks.environments.tool_calls import CallParser, TurnMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]
Forms = tuple[tuple[str, ...], ...]
_MARK = "0d9c1f"  #: reasoning to look for in the output of a template


class TooManyBranches(RequestRefused):
    """A request for one more branch than a trajectory may have."""


class ChatFormat(NamedTuple):
    """The tokenizer and the chat template, for conversations with any tools."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    end_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    model: str
    agents: AgentsConfig = AgentsConfig()


class ChatTurn(NamedTuple):
    """A request as the turn that answers it sees it."""

    ids: Ids  #: what the model reads first, after its parent
    parent: int  #: turn that they follow, or ROOT
    num_read: int  #: tokens that the request adds to the rows of the trajectory


@dataclass
class _Node:
    """A turn: the request before it, and its reply once there is one."""

    turn: ChatTurn
    asked: ChatRequest
    forms: Forms  #: of all messages, the reply included
    sampled: Ids = ()
    reasoning: str = ""
    answered: bool = False


class Chat:
    """The conversations of a session."""

    def __init__(self, form: ChatFormat, row: PromptRow) -> None:
        self._form, self._row = form, row
        self._nodes: list[_Node] = []  #: by turn; the last one may wait for its reply
        self._num_calls = 0

    def render_request(self, asked: ChatRequest) -> ChatTurn:
        """Return the turn that a request asks for; raise RequestRefused."""
        try:
            parent = self._find_parent(asked)
            if parent == ROOT:
                row = replace(self._row, prompt=_name_results(asked.messages))
                ids = encode_prompt(self._form.tokenizer, row, self._form.data, asked.tools)
            else:
                ids = self._render_new(self._nodes[parent], asked)
        except Exception as error:  # templates raise various types
            raise RequestRefused(f"the messages cannot be rendered: {error}") from None
        again = 0
        if parent != ROOT and any(node.turn.parent == parent for node in self._nodes):
            again = len(self._list_ids(parent))
        if parent == ROOT or again:
            self._check_branches()
        return ChatTurn(tuple(ids), parent, len(ids) + again)

    def accept_request(self, asked: ChatRequest, turn: ChatTurn) -> None:
        """Have the next turn answer this request."""
        self._nodes.append(_Node(turn, asked, _compare_forms(asked)))

    def is_cut(self, ids: Sequence[int]) -> bool:
        """Return whether a limit ended these ids of the awaited turn, not the model."""
        stop = self._nodes[-1].asked.options.stop
        return (
            ids[-1] not in self._form.end_ids and not cut_text(self._form.decode([*ids]), stop)[1]
        )

    def make_reply(
        self, ids: Sequence[int], name: str, *, cut: bool, logprobs: Sequence[float] = ()
    ) -> str:
        """Return the completion for the turn that is awaited, which requests may extend.

        `logprobs`: those of the ids, needed if the request wants them.
        """
        node = self._nodes[-1]
        assert not node.answered
        before = self._list_ids(len(self._nodes) - 1)
        text, stop = cut_text(self._form.decode(list(ids)), node.asked.options.stop)
        turn = TurnMessage(text, "", [])
        if not cut:
            parser = CallParser(
                self._form.tokenizer, node.asked.tools if node.asked.may_call else []
            )
            turn = parser.parse_message(ids, before, text)
            content, _ = cut_text(turn.content, node.asked.options.stop)  # if read from the ids
            turn = turn._replace(content=content)
        message = chat.make_turn_message(turn, self._num_calls)
        self._num_calls += len(turn.calls)
        node.sampled, node.reasoning, node.answered = tuple(ids), turn.reasoning, True
        node.forms += (chat.compare_form(message),)
        head = {"id": name, "created": int(time.time()), "model": self._form.model}
        tokens = len(before), len(ids)
        scores = None
        if node.asked.logprobs:
            texts = [str(self._form.tokenizer.decode([i])) for i in ids]
            scores = list(zip(texts, map(float, logprobs), strict=True))
        return chat.make_completion(
            head, message, turn.reasoning, cut=cut, tokens=tokens, stop=stop, logprobs=scores
        )

    def check_template(self) -> None:
        """Test the template with the tools of the last request; raise ConfigError."""
        asked = self._nodes[-1].asked
        if asked.tools:
            parser = CallParser(self._form.tokenizer, asked.tools)
            self._make_renderer(asked).check_template(parser)

    def _make_renderer(self, asked: ChatRequest) -> Renderer:
        return Renderer(self._form.tokenizer, self._form.data, asked.tools, self._form.end_ids)

    def _find_parent(self, asked: ChatRequest) -> int:
        """Return the turn whose conversation the request extends furthest, the latest of equals.

        ROOT if there is none, or if a reply of the model was edited or added after it: then the
        whole request is read. So it is where the template would no longer write old thoughts, if
        these are to be read as served.
        """
        forms = _compare_forms(asked)
        found, length = ROOT, 0
        for turn, node in enumerate(self._nodes):
            known = len(node.forms)
            extends = node.answered and node.asked.tools == asked.tools
            if extends and length <= known < len(forms) and forms[:known] == node.forms:
                found, length = turn, known
        if any(form[0] == "assistant" for form in forms[length:]):
            return ROOT
        if self._form.agents.thinking == "template" and self._drops_thoughts(found, asked):
            return ROOT
        return found

    def _drops_thoughts(self, turn: int, asked: ChatRequest) -> bool:
        """Return whether the template leaves out a thought that the model has sampled."""
        messages = [dict(message) for message in asked.messages]
        marks = []
        while turn != ROOT:
            node = self._nodes[turn]
            if node.reasoning:
                marks.append(f"{_MARK}-{turn}-")
                messages[len(node.forms) - 1]["reasoning_content"] = marks[-1]
            turn = node.turn.parent
        text = self._make_renderer(asked).render_text(messages) if marks else ""
        return any(mark not in text for mark in marks)

    def _render_new(self, node: _Node, asked: ChatRequest) -> list[int]:
        """Return the ids of the messages that the request adds to those of a turn."""
        messages = _name_results(asked.messages)
        reply, new = messages[len(node.forms) - 1], messages[len(node.forms) :]
        ended = node.sampled[-1] in self._form.end_ids
        calls = reply.get("tool_calls", ())
        return self._make_renderer(asked).render_messages(calls, new, ended=ended)

    def _list_ids(self, turn: int) -> list[int]:
        """Return all ids up to the end of a turn, as sampled and read."""
        parts = list[Ids]()
        while turn != ROOT:
            node = self._nodes[turn]
            parts += [node.sampled, node.turn.ids]
            turn = node.turn.parent
        return [i for part in reversed(parts) for i in part]

    def _check_branches(self) -> None:
        """Raise RequestRefused if the trajectory has as many branches as it may."""
        followed = {node.turn.parent for node in self._nodes}
        branches, most = len({*range(len(self._nodes))} - followed), self._form.agents.max_branches
        if branches >= most:
            raise TooManyBranches(
                f"the session has {branches} branches (agents.max_branches), and the request does "
                "not extend the last turn of one",
                code=chat.TOO_LONG,
            )


def _compare_forms(asked: ChatRequest) -> Forms:
    return tuple(map(chat.compare_form, asked.messages))


def _name_results(messages: Sequence[chat.Message]) -> list[chat.Message]:
    """Return messages whose tool results have the name of their tool, which templates may write."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {c["id"]: c["function"]["name"] for c in message.get("tool_calls", ())}
        known = names.get(message.get("tool_call_id", ""))
        named.append({"name": known, **message} if known else message)
    return named
