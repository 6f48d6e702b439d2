"""Rendering of an environment's text as token ids that continue those of its trajectory.

Reads   the tokenizer, DataConfig, the tools' schemas
Gives   Renderer: the ids of a prompt with the text of `reset`; those of tools' answers
Raises  ConfigError for a chat template that cannot be continued

A history is never tokenised again: sampled ids may differ after decoding and encoding, and a
template may render an old message differently from a new one. The next ids are the ids so far and
those that the template appends to a turn, taken from a made-up conversation that ends in the same
messages. `check_template` tests on random conversations, before a run, that the result equals the
template's output for the whole conversation. Where a new turn begins with empty thoughts (Qwen3
with enable_thinking = false), the template may omit these in earlier turns; in a run they stay.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from laminar.config import ConfigError, DataConfig
from laminar.tasks.data.chat import build_messages, encode_prompt
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.arguments import list_types
from laminar.tasks.environments.tool_calls import (
    CALL_ID,
    THINK,
    THOUGHT,
    CallParser,
    ToolCall,
    format_call,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from laminar.tasks.environments.user_class import Schemas

CONVERSATIONS = 200  #: random conversations on which a template is tested; takes about a second
TURNS_MAX, CALLS_TRIED, WORDS_MAX = 3, 2, 6
_WORDS = (
    "sum",
    "485",
    "-7",
    "a b",
    "x\ny",
    '{"k": 1}',
    "é",
    "<b>",
    "end.",
    "\tT",
    "二",
    "  ",
    "0.5",
)
_MADE_UP = ToolCall("made_up", {"a": 1})
CallResult = tuple[ToolCall, str]
Message = dict[str, Any]
_MARK = "0d9c1f"  #: text of a made-up turn


class Renderer:
    """The chat template of a run, continued turn by turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        tools: Schemas,
        end_ids: frozenset[int],
    ) -> None:
        """Create a renderer; `end_ids` are those that end a turn when sampled."""
        self._tokenizer, self._data, self._tools = tokenizer, data, tools
        self._end_ids = end_ids

    def render_prompt(self, row: PromptRow, said: str) -> list[int]:
        """Return the ids of a prompt with the text of `reset` appended; raise ConfigError."""
        messages = [dict(message) for message in build_messages(row, self._data)]
        messages[-1]["content"] = f"{messages[-1]['content']}{said}"
        return encode_prompt(
            self._tokenizer, replace(row, prompt=messages), self._data, self._tools
        )

    def render_results(self, answers: Sequence[CallResult]) -> list[int]:
        """Return the ids that follow a turn with calls: their answers and the next turn's start."""
        before = [
            {"role": "user", "content": "?"},
            _make_turn_message("?", [call for call, _ in answers]),
        ]
        whole = self._encode_messages([*before, *_make_result_messages(answers)], begin=True)
        return whole[len(self._encode_ended(before, whole)) :]

    def render_messages(
        self, calls: Sequence[Message], messages: Sequence[Message], *, ended: bool = True
    ) -> list[int]:
        """Return the ids that follow a turn with `calls`: new messages and the next turn's start.

        The text after the end of a made-up turn, so that templates may rewrite what is before it;
        after an end token if the turn lacks one (`ended`). Raises ConfigError.
        """
        mark = _MARK
        while any(mark in str(message) for message in messages):
            mark += "0"
        turn: Message = {"role": "assistant", "content": mark}
        if calls:  # next to which some templates leave out the content
            turn["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {"a": mark}}}
                for call in calls
            ]
        whole = [{"role": "user", "content": "?"}, turn, *messages]
        text = self.render_text(whole)
        ends = {i: str(self._tokenizer.convert_ids_to_tokens(i)) for i in self._end_ids}
        at = text.rfind(mark)
        found = [
            (place, len(end), i)
            for i, end in ends.items()
            if at >= 0 and (place := text.find(end, at)) >= 0
        ]
        if not found:
            raise ConfigError(_NO_END)
        place, length, end_id = min(found)
        ids, before = self._encode_text(text), self._encode_text(text[: place + length])
        if ids[: len(before)] != before:
            raise ConfigError(_NOT_APPENDED)
        return [*([] if ended else [end_id]), *ids[len(before) :]]

    def render_text(self, messages: list[Message]) -> str:
        """Return the text of messages with the start of the next turn; raise ConfigError."""
        return str(self._apply_template(messages, begin=True, tokenize=False))

    def _encode_text(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def refuse_unwritable(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Return the calls; refuse those that the template cannot write, and drop their arguments.

        Flat arguments are not tried: `check_template` has tried such.
        """
        refused = "the chat template cannot write its arguments"
        return [
            call if _is_flat(call) or self._can_write(call) else ToolCall(call.tool, {}, refused)
            for call in calls
        ]

    def _can_write(self, call: ToolCall) -> bool:
        try:
            return bool(self.render_results([(call, "")]))
        except ConfigError:
            return False

    def check_template(self, parser: CallParser) -> None:
        """Test the template on random conversations; raise ConfigError."""
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "environments and agents need a model with a chat template, and its tokenizer has "
                "none; give another model.name"
            )
        draws, empty = random.Random(0), self._find_empty_thoughts()
        for _ in range(CONVERSATIONS):
            self._check_conversation(draws, parser, empty)

    def _find_empty_thoughts(self) -> list[int]:
        """Return the ids of the closed thoughts that a new turn begins with; [] if it has none."""
        ids = self._encode_messages([{"role": "user", "content": "?"}], begin=True)
        text = str(self._tokenizer.decode(ids))
        thoughts = text[text.rfind(THINK) :] if text.rstrip().endswith(THOUGHT) else ""
        found: list[int] = self._tokenizer.encode(thoughts, add_special_tokens=False)
        return found if ids[len(ids) - len(found) :] == found else []

    def _check_conversation(
        self, draws: random.Random, parser: CallParser, empty: list[int]
    ) -> None:
        thoughts = "" if empty else "?"
        messages: list[dict[str, Any]] = [{"role": "user", "content": _draw_text(draws)}]
        so_far = _drop_part(self._encode_messages(messages, begin=True), empty)
        for _ in range(draws.randint(1, TURNS_MAX)):
            calls = [self._draw_call(draws) for _ in range(draws.randint(1, CALLS_TRIED))]
            answers = [(call, _draw_text(draws)) for call in calls]
            messages.append(_make_turn_message(_draw_text(draws), calls, thoughts))
            told = [*messages, *_make_result_messages(answers)]
            wanted = _drop_part(self._encode_messages(told, begin=True), empty)
            ended = self._encode_ended(messages, wanted, empty)
            added = _drop_part(self.render_results(answers), empty)
            if ended[: len(so_far)] != so_far or ended + added != wanted:
                raise ConfigError(_NOT_APPENDED)
            self._check_calls(parser, calls, so_far, ended)
            messages, so_far = told, wanted

    def _check_calls(
        self, parser: CallParser, calls: list[ToolCall], before: list[int], ended: list[int]
    ) -> None:
        if (found := parser.parse_calls(ended[len(before) :], before)) != calls:
            shown = (found and found[0].refusal_reason) or "it is not parsed as a call"
            form = json.dumps({"name": calls[0].tool, "arguments": calls[0].arguments})
            raise ConfigError(
                f"tools need a model whose tool calls can be parsed, but the call {form} as "
                f"written by the chat template of model.name cannot ({shown}): give a model "
                "whose tokenizer has a response_template, or that writes JSON in <tool_call> "
                "tags"
            )

    def _draw_call(self, draws: random.Random) -> ToolCall:
        """Draw a call of a random tool with random arguments."""
        function = draws.choice(self._tools)["function"]
        properties = function["parameters"].get("properties", {})
        values = {name: _draw_value(draws, list_types(kind)) for name, kind in properties.items()}
        return ToolCall(function["name"], values)

    def _encode_ended(
        self, messages: list[dict[str, Any]], whole: list[int], dropped: Sequence[int] = ()
    ) -> list[int]:
        """Return the ids of messages up to the last turn's end, with which `whole` must begin."""
        ids = _drop_part(self._encode_messages(messages, begin=False), dropped)
        at = next((i for i in reversed(range(len(ids))) if ids[i] in self._end_ids), None)
        if at is None:
            raise ConfigError(_NO_END)
        if whole[: at + 1] != ids[: at + 1]:
            raise ConfigError(_NOT_APPENDED)
        return ids[: at + 1]

    def _encode_messages(self, messages: list[dict[str, Any]], *, begin: bool) -> list[int]:
        """Return the ids of messages; with `begin`, also the start of the next turn."""
        return [int(i) for i in self._apply_template(messages, begin=begin, tokenize=True)]

    def _apply_template(self, messages: list[Message], *, begin: bool, tokenize: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=list(self._tools) or None,
                tokenize=tokenize,
                add_generation_prompt=begin,
                return_dict=False,
                **self._data.apply_chat_template_kwargs,
            )
        except Exception as error:  # templates raise various types
            raise ConfigError(
                f"the chat template of model.name refuses a conversation with tools: {error}; give "
                "another model, or a template that writes tool_calls and the role tool"
            ) from None


_NO_END = (
    "the chat template of model.name does not end a turn with one of the model's end tokens, so a "
    "sampled turn cannot be continued; give another model, or a template that does"
)
_NOT_APPENDED = (
    "the chat template of model.name rewrites earlier turns when a conversation continues, so "
    "its ids differ from those that the model sampled and read; give a model or a template that "
    "only appends"
)


def _drop_part(ids: list[int], part: Sequence[int]) -> list[int]:
    """Return the ids without each occurrence of `part`."""
    found, i = list[int](), 0
    while i < len(ids):
        if part and ids[i : i + len(part)] == part:
            i += len(part)
        else:
            found.append(ids[i])
            i += 1
    return found


def _make_turn_message(text: str, calls: Sequence[ToolCall], thoughts: str = "?") -> dict[str, Any]:
    """Make a turn of the policy, with reasoning, because templates leave out empty reasoning."""
    made = [
        format_call(CALL_ID.format(i), call.tool or _MADE_UP.tool, call.arguments)
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, "reasoning_content": thoughts, "tool_calls": made}


def _make_result_messages(answers: Sequence[CallResult]) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "name": call.tool or _MADE_UP.tool,
            "tool_call_id": CALL_ID.format(i),
            "content": text,
        }
        for i, (call, text) in enumerate(answers)
    ]


def _is_flat(call: ToolCall) -> bool:
    return all(isinstance(value, str | int | float) for value in call.arguments.values())


def _draw_text(draws: random.Random) -> str:
    return " ".join(draws.choices(_WORDS, k=draws.randint(1, WORDS_MAX)))


def _draw_value(draws: random.Random, kinds: Sequence[str]) -> Any:
    numbers = {"integer": draws.randrange(1000), "number": draws.randrange(1000) / 8}
    others = {"boolean": draws.random() < 0.5, "array": [], "object": {}}
    return (numbers | others).get(next(iter(kinds), ""), _draw_text(draws))
