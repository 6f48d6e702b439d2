"""Requests and replies in Anthropic's form are those of chat completions."""

import json

import pytest

from laminar.tasks.environments import anthropic_messages, chat_messages
from laminar.tasks.environments.anthropic_messages import format_error, format_message, iter_events
from laminar.tasks.environments.chat_messages import REPLACING, RequestRefused, make_completion
from laminar.tasks.environments.tool_calls import format_call
from tools.kit.tool_models import schema

CALLS = {"tool_calls": [format_call("c", "add", {"a": 1})]}
USER = {"role": "user", "content": "a"}
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}


def read(**given):
    body = json.dumps({"max_tokens": 5, "messages": [USER], **given}).encode()
    return anthropic_messages.read_messages(body, REPLACING)


def test_a_conversation_is_that_of_chat_completions():
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}
    text = {"type": "text", "text": "then", "cache_control": {"type": "ephemeral"}}
    asked = read(
        system=[{"type": "text", "text": "Be."}],
        messages=[
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text, call]},
            {"role": "user", "content": [result, {**result, "content": None}, text]},
            {"role": "assistant", "content": []},
            USER,
        ],
        tools=[TOOL],
        tool_choice={"type": "none"},
        stop_sequences=["x"],
        temperature=0,
        stream=True,
    )
    same = {
        "messages": [
            {"role": "system", "content": "Be."},
            USER,
            {
                "role": "assistant",
                "content": "then",
                "tool_calls": [format_call("c", "add", {"a": 1})],
            },
            {"role": "tool", "tool_call_id": "c", "content": "3"},
            {"role": "tool", "tool_call_id": "c", "content": ""},
            {"role": "user", "content": "then"},
            {"role": "assistant", "content": None},
            USER,
        ],
        "tools": [schema("add")],
        "tool_choice": "none",
        "stop": "x",
        "temperature": 0,
        "max_tokens": 5,
        "stream": True,
    }
    wanted = chat_messages.read_request(json.dumps(same).encode())
    tools = [{"type": "function", "function": {"name": "add", "description": "Add."}}]
    tools[0]["function"]["parameters"] = TOOL["input_schema"]
    assert asked == wanted._replace(tools=tools)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"messages": "a"},
        {"messages": [3]},
        {"messages": [{"role": "user", "content": [3]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]},
        {"tools": [{**TOOL, "type": "web_search"}]},
        {"tools": [{"name": "add"}]},
        {"tools": 3},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "add"}},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": {}, "effort": 3}, "max_tokens": -1},
        {"stop_sequences": 3},
        {"system": 3},
    ],
)
def test_what_has_no_answer_is_refused(given):
    with pytest.raises(RequestRefused) as refused:
        read(**given)
    error = json.loads(format_error(refused.value.body))
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def test_a_full_conversation_has_the_words_by_which_clients_know_it():
    error = json.loads(format_error(chat_messages.make_error("x", code=chat_messages.TOO_LONG)))
    assert error["error"]["message"] == "prompt is too long: x"


@pytest.mark.parametrize(
    ("more", "cut", "stop", "ended"),
    [
        ({}, False, None, "end_turn"),
        ({}, True, None, "max_tokens"),
        ({}, False, "x", "stop_sequence"),
        (CALLS, False, None, "tool_use"),
    ],
)
def test_a_stream_builds_the_message(more, cut, stop, ended):
    told = {"role": "assistant", "content": "é", **more}
    head = {"id": "n", "model": "m"}
    body = make_completion(head, told, "why", cut=cut, tokens=(3, 2), stop=stop)
    message = json.loads(format_message(body))
    assert (message["stop_reason"], message["stop_sequence"]) == (ended, stop)
    assert message["usage"] == {"input_tokens": 3, "output_tokens": 2}
    assert [block["type"] for block in message["content"]] == [
        "thinking",
        "text",
        *["tool_use"] * len(more),
    ]
    events = []
    for event in iter_events(body, read(stream=True)):
        name, data = event.removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    built = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                built["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = built["content"][event["index"]], event["delta"]
                key = delta["type"].removesuffix("_delta")
                if key == "input_json":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    block[key] += delta[key]
            case "message_delta":
                built |= event["delta"]
    assert built == message and events[-1]["type"] == "message_stop"
