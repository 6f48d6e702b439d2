"""Parsing of tool calls in the turns of the policy.

Reads   the ids of a turn; the tokenizer's `parse_response`, if it has a response template
Gives   ToolCalls, in order; if a call cannot be run, with the reason as text for the policy

Without a response template, calls are read in Qwen's form: JSON with name and arguments in
<tool_call> tags. Thoughts, code blocks and tags that the text only mentions are no calls.
renderer.py tests before a run that the model's form is read correctly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from laminar.run.user_file import get_first_line, replace_surrogates
from laminar.tasks.environments.arguments import convert_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from laminar.tasks.environments.user_class import Schemas

CALLS_MAX = 16  #: maximum calls run per turn; each may take env.tool_timeout_s
TEXT_CHARS_MAX = 16_384
"""Maximum size of a call's arguments, and of its answer, which the store keeps."""
DEPTH_MAX = 32  #: maximum nesting of a call's arguments; encoders recurse, each to another depth
CALL_ID = "call{:05}"
"""Id of a call in a message: nine letters and digits, as some templates require."""
THINK, THOUGHT = "<think>", "</think>"
_TAGGED = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)(</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)
_PROMPT_END = 16
"""Ids at the end of a prompt that may have opened a thought; a tag can be several tokens."""


class ToolCall(NamedTuple):
    """A call of a tool, with the reason if it is not run."""

    tool: str
    arguments: dict[str, Any]
    refusal_reason: str | None = None


def format_call(call_id: str, tool: str, arguments: Any) -> dict[str, Any]:
    """Return a call as messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}


class TurnMessage(NamedTuple):
    """A turn as a chat API returns it."""

    content: str  #: text without thoughts and calls; with those that cannot be parsed
    reasoning: str
    calls: list[ToolCall]


class CallParser:
    """A parser of the calls in a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Schemas) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        functions = [tool["function"] for tool in tools]
        self._parameters = {each["name"]: each.get("parameters", {}) for each in functions}
        self._has_own = getattr(tokenizer, "response_template", None) is not None

    def parse_calls(self, ids: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        """Parse the calls in the turn `ids`, which followed the ids `before`."""
        parse = self._by_tokenizer if self._has_own else self._parse_tagged
        found = parse(ids, before)
        return [self._check_call(call, i) for i, call in enumerate(found)]

    def parse_message(self, ids: Sequence[int], before: Sequence[int], text: str) -> TurnMessage:
        """Parse the turn `ids` with the text `text`, its end token left out.

        Calls that the tools do not allow stay calls, with the arguments that the model wrote.
        """
        if not self._has_own:
            return self._parse_tagged_message(ids, before, text)
        message = self._parse_response(ids, before)
        found = [] if isinstance(message, str) else _list_calls(message)
        if isinstance(message, str) or any(call.refusal_reason for call in found):
            return TurnMessage(text, "", [])
        reasoning = message.get("reasoning_content") or message.get("thinking") or ""
        return TurnMessage(message.get("content") or "", reasoning, self._convert_calls(found))

    def _parse_tagged_message(
        self, ids: Sequence[int], before: Sequence[int], text: str
    ) -> TurnMessage:
        content = _remove_thoughts(text, opened=self._opens_thought(before))
        reasoning = text[: len(text) - len(content)]
        content = content.lstrip() if reasoning else content
        found = list[ToolCall]()
        for match in _TAGGED.finditer(_FENCED.sub("", content)) if self._tools else ():
            call = _tagged_call(*match.groups())
            if not call.refusal_reason:
                found.append(call)
                content = content.replace(match.group(0), "", 1)
        reasoning = reasoning.removesuffix(THOUGHT).strip().removeprefix(THINK).strip()
        return TurnMessage(content, reasoning, self._convert_calls(found))

    def _convert_calls(self, found: list[ToolCall]) -> list[ToolCall]:
        checked = (self._check_call(call, i) for i, call in enumerate(found))
        pairs = zip(found, checked, strict=True)
        return [call if known.refusal_reason else known for call, known in pairs]

    def _by_tokenizer(self, ids: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        message = self._parse_response(ids, before)
        return [ToolCall("", {}, message)] if isinstance(message, str) else _list_calls(message)

    def _parse_response(self, ids: Sequence[int], before: Sequence[int]) -> dict[str, Any] | str:
        """Return the message that the tokenizer reads in a turn, or why it cannot."""
        try:
            message: dict[str, Any] = self._tokenizer.parse_response(
                list(ids), prefix=list(before), tools=list(self._tools)
            )
        except Exception as error:  # invalid text raises types that depend on the template
            return f"the response cannot be read: {get_first_line(error)}"
        return message

    def _parse_tagged(self, ids: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        opened = self._opens_thought(before)
        text = _FENCED.sub("", _remove_thoughts(self._decode(ids), opened=opened))
        found = [match.groups() for match in _TAGGED.finditer(text)]
        return [
            _tagged_call(body, end) for body, end in found if end or body.lstrip().startswith("{")
        ]

    def _opens_thought(self, before: Sequence[int]) -> bool:
        return self._decode(before[-_PROMPT_END:]).rstrip().endswith(THINK)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _check_call(self, call: ToolCall, index: int) -> ToolCall:
        if call.refusal_reason:
            return call
        if call.tool not in self._parameters:
            names = ", ".join(self._parameters)
            unknown = f"there is no tool {call.tool!r}; the tools are {names}"
            return call._replace(refusal_reason=unknown)
        try:
            arguments = convert_arguments(call.arguments, self._parameters[call.tool])
        except ValueError as error:
            return call._replace(refusal_reason=get_first_line(error))
        call = _limit_arguments(call.tool, arguments)
        reason = call.refusal_reason
        if reason is None and len(json.dumps(call.arguments)) > TEXT_CHARS_MAX:
            reason = f"more than {TEXT_CHARS_MAX} characters of arguments"
        elif reason is None and index >= CALLS_MAX:
            reason = f"more than {CALLS_MAX} calls in one turn"
        return call._replace(refusal_reason=reason)


def _remove_thoughts(text: str, *, opened: bool) -> str:
    """Return what follows the last thought; nothing if it is unfinished, or the prompt's is."""
    _, ended, said = text.rpartition(THOUGHT)
    unfinished = said.lstrip().startswith(THINK) or (opened and not ended)
    return "" if unfinished else said


def _tagged_call(body: str, end: str) -> ToolCall:
    if not end:
        return ToolCall("", {}, "the call has no end </tool_call>")
    try:
        return _make_call(json.loads(body))
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not valid JSON: {get_first_line(error)}")


def _list_calls(message: dict[str, Any]) -> list[ToolCall]:
    return [_make_call(call.get("function", call)) for call in message.get("tool_calls") or []]


def _make_call(value: Any) -> ToolCall:
    """Make a call from a decoded value of any type."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, "the call is not an object with a name and arguments")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    name = replace_surrogates(value["name"])
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments of the call are not a JSON object")
    return _limit_arguments(name, arguments)


def _limit_arguments(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Make a call with arguments that every encoder can carry."""
    if _is_deeper(arguments, DEPTH_MAX):
        return ToolCall(name, {}, f"more than {DEPTH_MAX} levels of arguments")
    text = json.dumps(arguments, ensure_ascii=False, default=str)
    return ToolCall(name, json.loads(replace_surrogates(text)))


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in more than so many levels."""
    values = [value]
    for _ in range(levels):
        outer = [v.values() if isinstance(v, dict) else v for v in values if _is_nested(v)]
        values = [value for nested in outer for value in nested]
    return any(map(_is_nested, values))


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)
