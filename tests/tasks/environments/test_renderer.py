"""Histories that are continued token by token, and the calls in what a model wrote."""

import json

import pytest
from tokenizers import Regex, pre_tokenizers

from laminar.config import ConfigError, DataConfig
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.tool_calls import CALLS_MAX, TEXT_CHARS_MAX, CallParser, ToolCall
from tools.kit.tool_models import END, TEMPLATE, schema, tokenizer

TOOLS = [schema("add", a="integer", b="integer"), schema("say", text="string", loud="boolean")]


def made(template=TEMPLATE, tools=TOOLS):
    model = tokenizer(template)
    ends = frozenset([model.convert_tokens_to_ids(END)])
    return model, Renderer(model, DataConfig(), tools, ends), CallParser(model, tools)


@pytest.fixture(scope="module")
def parts():
    return made()


def refusal(template):
    _, renderer, parser = made(template)
    with pytest.raises(ConfigError) as error:
        renderer.check_template(parser)
    return str(error.value)


def test_a_template_that_only_appends_is_taken(parts):
    _, renderer, parser = parts
    renderer.check_template(parser)


def test_answers_follow_what_was_sampled_however_it_was_cut(parts):
    """The sampled ids spell the turn in another way than the tokenizer would; they stay."""
    model, renderer, parser = parts
    text = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 7}}</tool_call>' + END
    sampled = [model.encode(c)[0] for c in text[11:-16]]
    tags = [model.convert_tokens_to_ids(t) for t in ("<tool_call>", "</tool_call>", END)]
    sampled = [tags[0], *sampled, tags[1], tags[2]]
    assert sampled != model.encode(text)
    calls = parser.parse_calls(sampled, [])
    assert calls == [ToolCall("add", {"a": 12, "b": 7})]
    whole = model.decode(sampled + renderer.render_results([(calls[0], "19")]))
    assert whole == f"{text}\n<s>tool\n19{END}\n<s>assistant\n"


def test_what_reset_said_is_part_of_the_prompt(parts):
    model, renderer, _ = parts
    row = PromptRow(0, "Find it.", None, {}, "test")
    text = model.decode(renderer.render_prompt(row, " It is here."))
    assert text.endswith(f"<s>user\nFind it. It is here.{END}\n<s>assistant\n")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last }}"), "only appends"),
        (TEMPLATE.replace("<s>assistant\n", "<s>assistant\n<think>"), "only appends"),
        (TEMPLATE.replace("</s>\n{%", "\n{%"), "one of the model's end tokens"),
        (TEMPLATE.replace("<tool_call>", "<call>"), "tool calls can be parsed"),
        (TEMPLATE.replace("{{ m.role }}", "{{ raise_exception('no') if m.role == 'tool' }}"), "no"),
        ("", "chat template"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(template, said):
    assert said in refusal(template)


QWEN3 = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_a_template_that_closes_the_thoughts_of_a_new_turn_is_taken(arguments):
    """Qwen3 leaves out empty thoughts of earlier turns; in a run they stay."""
    model = tokenizer(QWEN3)
    model.add_tokens(["<think>", "</think>"])
    model.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    data = DataConfig(apply_chat_template_kwargs=arguments)
    ends = frozenset([model.convert_tokens_to_ids(END)])

    def check(template):
        model.chat_template = template
        renderer = Renderer(model, data, TOOLS, ends)
        renderer.check_template(CallParser(model, TOOLS))
        return model.decode(renderer.render_results([(ToolCall("add", {"a": 1, "b": 2}), "3")]))

    closed = "<think>\n\n</think>\n\n" if arguments else ""
    assert check(QWEN3) == f"\n<s>tool\n3{END}\n<s>assistant\n{closed}"
    with pytest.raises(ConfigError, match="only appends"):
        check(QWEN3.replace("{{ m.content }}", "{{ m.content if loop.last }}"))


def test_a_model_with_a_template_of_its_own_for_responses_is_read_by_it(parts, monkeypatch):
    model, _, _ = parts
    monkeypatch.setattr(model, "response_template", {}, raising=False)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    monkeypatch.setattr(model, "parse_response", lambda *_, **__: {"tool_calls": calls})
    assert CallParser(model, TOOLS).parse_calls([1], [2]) == [ToolCall("add", {"a": 1, "b": 2})]

    def fails(*_, **__):
        raise ValueError("no such tag")

    monkeypatch.setattr(model, "parse_response", fails)
    (call,) = CallParser(model, TOOLS).parse_calls([1], [2])
    assert call.refusal_reason == "the response cannot be read: no such tag"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("{nonsense}", "the call is not valid JSON"),
        ("[1]", "not an object with a name"),
        ('{"name": 1}', "not an object with a name"),
        ('{"name": "add", "arguments": [1]}', "not a JSON object"),
        ('{"name": "add", "arguments": "{"}', "not a JSON object"),
        ('{"name": "add", "arguments": "[]"}', "not a JSON object"),
        ('{"name": "rm", "arguments": {}}', "there is no tool 'rm'; the tools are add, say"),
        ("[" * 50_000, "the call is not valid JSON"),
        (f'{{"name": "say", "arguments": {{"text": "{"x" * TEXT_CHARS_MAX}"}}}}', "more than"),
    ],
)
def test_a_call_that_cannot_be_run_is_told_why(parts, text, refused):
    model, _, parser = parts
    (call,) = parser.parse_calls(model.encode(f"<tool_call>{text}</tool_call>"), [])
    assert refused in call.refusal_reason


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (r'{"x": "\ud83d"}', {"x": "\ufffd"}),
        (r'{"\ud83d": ["\ude00 x", {"b": "\ud83d\ude00"}]}', {"\ufffd": ["\ufffd x", {"b": "😀"}]}),
    ],
)
def test_half_a_surrogate_pair_in_a_call_is_replaced(parts, text, arguments):
    model, renderer, parser = parts
    (call,) = parser.parse_calls(_tagged(model, "add", text), [])
    assert call == ToolCall("add", arguments) and renderer.render_results([(call, "ok")])
    (call,) = parser.parse_calls(_tagged(model, r"\ud83d", text), [])
    assert call.tool == "\ufffd" and renderer.render_results([(call, "ok")])


@pytest.mark.parametrize("levels", [33, 300, 990, 5000])
def test_a_call_nested_too_deep_is_refused_without_its_arguments(parts, levels):
    model, renderer, parser = parts
    deep = '{"x": %s1%s}' % ("[" * levels, "]" * levels)  # noqa: UP031
    (call,) = parser.parse_calls(_tagged(model, "add", deep), [])
    assert "levels of arguments" in call.refusal_reason or "not valid JSON" in call.refusal_reason
    assert call.arguments == {} and renderer.render_results([(call, "no")])
    (call,) = parser.parse_calls(
        _tagged(model, "add", '{"x": ' + "[" * 31 + "1" + "]" * 31 + "}"), []
    )
    assert not call.refusal_reason


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
FENCED = '<tool_call>{"name": "add", "arguments": {"x": "\\n```\\nx\\n```"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"<think>perhaps {CALL}</think>3", 0),
        (f"perhaps {CALL}</think>3", 0),  # the prompt has opened the thought
        (f"<think>a {CALL}</think>b<think>{CALL}</think>{CALL}", 1),
        (f"<think>perhaps {CALL}", 0),
        (f"I end it by </tool_call> and begin with <tool_call>: {CALL} {CALL}", 2),
        (f"{CALL} is one, made by <tool_call>.", 1),
        (f"As in\n```xml\n{CALL}\n```\nor\n~~~~\n{CALL}\n```\n~~~~\n{CALL}", 1),
        (f"```\nx = 1\n```\n{FENCED}\n```\ny\n```", 1),
    ],
)
def test_what_is_thought_mentioned_or_shown_is_no_call(parts, text, count):
    model, _, parser = parts
    calls = parser.parse_calls(model.encode(text + END), [])
    assert [(c.tool, c.refusal_reason) for c in calls] == [("add", None)] * count


def test_a_thought_that_the_prompt_opened_and_nothing_ended_has_no_call(parts):
    model, _, parser = parts
    for before, count in (("<s>assistant\n<think>\n", 0), ("<s>assistant\n", 1)):
        assert len(parser.parse_calls(model.encode(CALL), model.encode(before))) == count


KINDS = {
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "s": {"type": "string"},
    "l": {"type": "array", "items": {"type": "integer"}},
    "u": {"type": ["integer", "number"], "nullable": True},
    "any": {},
}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"i": "1", "n": " -2.5", "b": "True"}, {"i": 1, "n": -2.5, "b": True}),
        ({"i": 3.0, "n": 4, "s": 5, "l": "[1]"}, {"i": 3, "n": 4, "s": "5", "l": [1]}),
        ({"l": ["1", 2], "u": "7", "any": "8"}, {"l": [1, 2], "u": 7, "any": "8"}),
        ({"u": None, "s": None, "x": "1"}, {"u": None, "s": None, "x": "1"}),
        ({"i": "one"}, "the argument 'i' must be of the type integer, not 'one'"),
        ({"i": 1.5}, "integer"),
        ({"i": True}, "integer"),
        ({"i": None}, "integer"),
        ({"n": "[" * 500 + "]" * 500}, "number"),
        ({"b": 1}, "boolean"),
        ({"s": {"a": 1}}, "string"),
        ({"l": [1, "x"]}, "the argument 'l' must be of the type integer, not 'x'"),
        ({"u": "x"}, "of the type integer or number or null"),
    ],
)
def test_arguments_have_the_types_of_the_tool(parts, given, taken):
    model, *_ = parts
    tool = schema("do")
    tool["function"]["parameters"] |= {"properties": KINDS, "required": ["i"]}
    (call,) = CallParser(model, [tool]).parse_calls(_tagged(model, "do", json.dumps(given)), [])
    if isinstance(taken, str):
        assert taken in call.refusal_reason
    else:
        assert not call.refusal_reason and repr(call.arguments) == repr(taken)


def test_a_tool_with_a_union_of_types_passes_the_check():
    _, renderer, parser = made(tools=[schema("do", u=["integer", "number"], b="boolean")])
    renderer.check_template(parser)


def _tagged(model, name, arguments):
    return model.encode(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')


def test_a_call_without_end_and_too_many_calls_are_told_so(parts):
    model, _, parser = parts
    (call,) = parser.parse_calls(model.encode('<tool_call>{"name": "add"'), [])
    assert "no end" in call.refusal_reason
    one = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    calls = parser.parse_calls(model.encode(one * (CALLS_MAX + 1)), [])
    assert [bool(c.refusal_reason) for c in calls] == [False] * CALLS_MAX + [True]
    assert parser.parse_calls(model.encode("no call"), []) == []
