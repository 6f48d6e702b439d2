"""What a client may ask for, in which form messages are compared, and what follows a turn."""

import json

import pytest

from laminar.config import ConfigError, DataConfig
from laminar.tasks.environments.chat_messages import RequestRefused, compare_form, read_request
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.tool_calls import CallParser, ToolCall
from tools.kit.tool_models import END, TEMPLATE, schema, tokenizer

USER = {"role": "user", "content": "a"}
TOOLS = [schema("add", a="integer")]
#: writes thoughts of the turns after the last message of a user only, as Qwen3 does
DROPS_THOUGHTS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.thoughts }}</think>{% endif %}"
    "{{ m.content }}",
)
HIDES_TEXT = TEMPLATE.replace(
    "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
)


def read(**given):
    return read_request(json.dumps({"messages": [USER], **given}).encode())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"functions": []}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot"}]}, "messages[0]"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [USER, {**USER, "content": [{"type": "image_url"}]}]}, "messages[1]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls",
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        (
            {"tools": [schema("f") | {"function": {"parameters": {"properties": {"a": 0}}}}]},
            "tools",
        ),
        ({"tools": "add"}, "tools"),
    ],
)
def test_what_changes_the_distribution_or_has_no_answer_is_refused(given, param):
    with pytest.raises(RequestRefused) as refused:
        read(**given)
    error = json.loads(refused.value.body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(RequestRefused, match="the body is not"):
        read_request(body)


def test_what_the_run_decides_is_accepted():
    found = read(
        n=1, temperature=0, top_p=0.5, seed=3, max_tokens=1, max_completion_tokens=2, stop=[],
        tool_choice="none", response_format={"type": "text"}, stream=True, tools=TOOLS, user="u",
    )  # fmt: skip
    assert (found.messages, found.tools, found.may_call, found.stream) == (
        [USER],
        TOOLS,
        False,
        True,
    )
    assert (
        read(messages=[{"role": "user", "content": "h\ud83d"}]).messages[0]["content"] == "h\ufffd"
    )


def test_messages_equal_those_that_clients_send_back():
    def form(**message):
        return compare_form(read(messages=[{"role": "assistant", **message}]).messages[0])

    def call(name, arguments, **more):
        return {"id": "1", "function": {"name": name, "arguments": arguments}, **more}

    told = form(content=None, tool_calls=[call("f", '{"a": 1, "b": [2]}')])
    assert told == form(content="", tool_calls=[call("f", '{"b":[2],"a":1}', id="2", index=0)])
    assert told == form(tool_calls=[call("f", {"a": 1, "b": [2]})], reasoning_content="hm")
    assert told != form(tool_calls=[call("f", '{"a": 1, "b": [3]}')])
    assert told != form(tool_calls=[call("g", '{"a": 1, "b": [2]}')])
    assert told != form(content="x", tool_calls=[call("f", '{"a": 1, "b": [2]}')])
    assert form(content=[{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]) == form(
        content="xy\n"
    )


@pytest.mark.parametrize("template", [TEMPLATE, DROPS_THOUGHTS, HIDES_TEXT])
def test_what_follows_a_turn_is_what_the_template_appends(template):
    model = tokenizer(template)
    renderer = Renderer(model, DataConfig(), TOOLS, frozenset([model.eos_token_id]))
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    result = {"role": "tool", "tool_call_id": "c", "content": f"0d9c1f {END} <s>"}
    for made, new, text in (
        ([], [USER], f"\n<s>user\na{END}\n<s>assistant\n"),
        (calls, [result], f"\n<s>tool\n0d9c1f {END} <s>{END}\n<s>assistant\n"),
        (
            calls,
            [result, USER],
            f"\n<s>tool\n0d9c1f {END} <s>{END}\n<s>user\na{END}\n<s>assistant\n",
        ),
    ):
        assert model.decode(renderer.render_messages(made, new)) == text


def test_a_turn_without_an_end_cannot_be_continued():
    model = tokenizer(TEMPLATE.replace("</s>", ""))
    renderer = Renderer(model, DataConfig(), [], frozenset([model.eos_token_id]))
    with pytest.raises(ConfigError, match="does not end a turn"):
        renderer.render_messages([], [USER])


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("plain", "plain", "", []),
        ("<think>why</think>\n\nso", "so", "why", []),
        ("<think>unfinished", "", "unfinished", []),
        ('a<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>b', "ab", "",
         [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "", "",
         [ToolCall("add", {"a": "x"})]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", "",
         [ToolCall("other", {})]),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", "", []),
    ],
)  # fmt: skip
def test_a_turn_is_a_message(text, content, reasoning, calls):
    model = tokenizer()
    found = CallParser(model, TOOLS).parse_message(model.encode(text + END), [], text)
    assert found == (content, reasoning, calls)
    assert CallParser(model, []).parse_message(model.encode(text), [], text).calls == []


def test_a_tool_may_have_any_schema():
    parameters = {"properties": {"a": {"type": "array", "items": []}}, "required": None}
    tools = read(tools=[{"function": {"name": "add", "parameters": parameters}}]).tools
    text = '<tool_call>{"name": "add", "arguments": {"a": [1], "b": null}}</tool_call>'
    found = CallParser(model := tokenizer(), tools).parse_message(model.encode(text), [], text)
    assert found.calls == [ToolCall("add", {"a": [1], "b": None})]
