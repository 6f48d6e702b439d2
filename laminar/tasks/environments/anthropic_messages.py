"""Anthropic's messages as JSON: requests as those of chat completions, and replies made from these.

Reads   the body of a request to POST messages
Gives   FORM, for the endpoint: read_messages, format_message, iter_events, format_error
Raises  RequestRefused

The conversation and its turns know one form only (chat_messages.py). Thoughts that a client sends
back are dropped, as they are there: the model has read its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from laminar.tasks.environments import chat_messages as chat
from laminar.tasks.environments.chat_messages import (
    ChatRequest,
    Message,
    RequestRefused,
    Sampling,
    read_object,
)
from laminar.tasks.environments.tool_calls import format_call

#: keys that mean the same in both forms
_SAME = ("temperature", "top_p", "top_k", "max_tokens", "stream")
_THOUGHTS = ("thinking", "redacted_thinking")
_ENDS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def read_messages(body: bytes, sampling: Sampling) -> ChatRequest:
    """Check a request; raise RequestRefused."""
    given = read_object(body)
    config = given.get("output_config")
    if given.get("output_format") or (isinstance(config, dict) and config.get("format")):
        raise RequestRefused("output formats are not supported: leave them out")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    made = list[Message]()
    if given.get("system"):
        made.append({"role": "system", "content": given["system"]})
    for i, message in enumerate(messages):
        made += _convert_message(message, f"messages[{i}]")
    choice, tools = given.get("tool_choice"), given.get("tools")
    asked = {
        **{key: given[key] for key in _SAME if key in given},
        "messages": made,
        "tools": [*map(_convert_tool, tools)] if isinstance(tools, list) else tools,
        "tool_choice": choice.get("type") if isinstance(choice, dict) else choice,
        "stop": given.get("stop_sequences"),
    }
    return chat.check_request(asked, sampling)


def _convert_tool(tool: Any) -> Message:
    """Return a tool in the form of chat completions; it is checked there."""
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise RequestRefused(
            f"the tool {json.dumps(tool)[:200]} is not one that the client runs", param="tools"
        )
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _convert_message(message: Any, at: str) -> Iterator[Message]:
    """Yield a message; results of tools are messages of their own in the other form."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        yield message
        return
    rest, calls = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            told = block.get("content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told}
        elif kind == "tool_use":
            calls.append(
                format_call(block.get("id", ""), block.get("name", ""), block.get("input"))
            )
        elif kind not in _THOUGHTS:
            rest.append(block)
    if rest or calls or message.get("role") == "assistant":
        yield {"role": message.get("role"), "content": rest, "tool_calls": calls}


def format_message(body: str) -> str:
    """Return the message of a completion."""
    return json.dumps(_make_message(json.loads(body)))


def _make_message(completion: Message) -> Message:
    (choice,), usage = completion["choices"], completion["usage"]
    told, stop = choice["message"], choice.get("stop_reason")
    blocks = list[Message]()
    if told.get("reasoning_content"):
        thought = told["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if told["content"]:
        blocks.append({"type": "text", "text": told["content"]})
    for call in told.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        used = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**used, "input": arguments})
    ended = _ENDS[choice["finish_reason"]]
    return {
        "id": completion["id"],
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": blocks,
        "stop_reason": "stop_sequence" if stop and ended == "end_turn" else ended,
        "stop_sequence": stop,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def iter_events(body: str, asked: ChatRequest) -> Iterator[str]:
    """Yield the events of a stream for a completion: the whole of each block at once."""
    message = _make_message(json.loads(body))
    ends = {key: message.pop(key) for key in ("stop_reason", "stop_sequence")}
    blocks = message["content"]
    opened = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield _format_event("message_start", message=opened)
    for index, block in enumerate(blocks):
        empty, *deltas = _split_block(block)
        yield _format_event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _format_event("content_block_delta", index=index, delta=delta)
        yield _format_event("content_block_stop", index=index)
    yield _format_event("message_delta", delta=ends, usage=message["usage"])
    yield _format_event("message_stop")


def _split_block(block: Message) -> list[Message]:
    """Return a block without its content, then the delta with that."""
    if block["type"] == "text":
        return [{**block, "text": ""}, {"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return [{**block, "thinking": ""}, thought]
    arguments = json.dumps(block["input"])
    return [{**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}]


def _format_event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def format_error(body: str) -> str:
    """Return Anthropic's error object for OpenAI's."""
    error = json.loads(body)["error"]
    text = error["message"]
    if error["code"] == chat.TOO_LONG:
        text = f"prompt is too long: {text}"  # by which clients know it
    return json.dumps({"type": "error", "error": {"type": error["type"], "message": text}})


FORM = (read_messages, format_message, iter_events, format_error)
