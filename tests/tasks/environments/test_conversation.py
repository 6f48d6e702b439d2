"""Conversations of an agent: requests that extend a turn, or begin a branch."""

import itertools
import json

import pytest

from laminar.config import DataConfig
from laminar.config.tasks import AgentsConfig
from laminar.storage.branches import ROOT
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.chat_messages import read_request
from laminar.tasks.environments.conversation import Chat, ChatFormat, TooManyBranches
from tools.kit.tool_models import END, TEMPLATE, schema, tokenizer

TOOLS = [schema("add", a="integer", b="integer")]
#: thoughts are written again only while no message of the user follows
THINKING = TEMPLATE.replace(
    "{{ m.content }}",
    "{% set last = namespace(at=-1) %}{% for n in messages %}{% if n.role == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% if m.reasoning_content and loop.index0 > last.at %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)


def user(text):
    return {"role": "user", "content": text}


class Model:
    """A session whose turns are said by a test."""

    def __init__(self, template=TEMPLATE, **settings):
        self.tokenizer, self.names = tokenizer(template), itertools.count()
        end_ids = frozenset([self.tokenizer.eos_token_id])
        form = ChatFormat(
            self.tokenizer, DataConfig(), end_ids, self.decode, "m", AgentsConfig(**settings)
        )
        self.chat = Chat(form, PromptRow(0, "", None, {}, "test"))

    def decode(self, ids):
        return self.tokenizer.decode(ids).removesuffix(END)

    def ask(self, messages, said, *, end=END, cut=False, **more):
        """Return the text that the model reads first, its parent, and the message that it gives."""
        asked = read_request(json.dumps({"messages": messages, **more}).encode())
        turn = self.chat.render_request(asked)
        self.chat.accept_request(asked, turn)
        ids = self.tokenizer.encode(said + end)
        completion = json.loads(self.chat.make_reply(ids, str(next(self.names)), cut=cut))
        self.tokens = completion["usage"]["prompt_tokens"]
        message = completion["choices"][0]["message"]
        self.last = turn
        return self.tokenizer.decode(turn.ids), turn.parent, message

    def read(self, text):
        return len(self.tokenizer.encode(text))


def rendered(*texts):
    """The user's messages as the template writes them."""
    return "".join(f"<s>user\n{text}{END}\n" for text in texts) + "<s>assistant\n"


def test_a_parent_resumes_after_its_sub_agent():
    model = Model()
    text, parent, first = model.ask([user("a")], "one")
    assert (text, parent) == (rendered("a"), ROOT)
    text, parent, sub = model.ask([user("task")], "two")
    assert (text, parent) == (rendered("task"), ROOT)
    text, parent, _ = model.ask([user("task"), sub, user("more")], "three")
    assert (text, parent) == (f"\n{rendered('more')}", 1)
    text, parent, _ = model.ask([user("a"), first, user("b")], "four")
    assert (text, parent) == (f"\n{rendered('b')}", 0)
    assert model.last.num_read == len(model.last.ids)  # its row is the only one that reads turn 0
    before = f"{rendered('a')}one{END}\n{rendered('b')}"
    assert model.tokens == model.read(before)


def test_a_repeated_request_is_another_sample():
    model = Model()
    _, _, first = model.ask([user("a")], "one")
    text, parent, _ = model.ask([user("a")], "one")
    assert (text, parent) == (rendered("a"), ROOT)
    again = [user("a"), first, user("b")]
    assert model.ask(again, "x")[:2] == (f"\n{rendered('b')}", 1)  # the latest of equal turns
    path = [*model.tokenizer.encode(f"{rendered('a')}one{END}")]
    assert model.ask(again, "y")[:2] == (f"\n{rendered('b')}", 1)
    assert model.last.num_read == len(model.last.ids) + len(path)  # a second row reads the path


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [m[0], {**m[1], "content": "edited"}, m[2]],
        lambda m: [user("other"), *m[1:]],
        lambda m: [{"role": "system", "content": "Be."}, *m],
        lambda m: [*m, {"role": "assistant", "content": "added"}, user("c")],
        lambda m: m[:2],
    ],
)
def test_anything_else_is_a_new_root_that_is_read_whole(change):
    model = Model()
    _, _, said = model.ask([user("a")], "one")
    messages = change([user("a"), said, user("b")])
    text, parent, _ = model.ask(messages, "two")
    forms = [{"role": m["role"], "content": m["content"]} for m in messages]
    wanted = model.tokenizer.apply_chat_template(forms, tokenize=False, add_generation_prompt=True)
    assert (text, parent) == (wanted, ROOT)


def test_other_tools_are_another_root():
    model = Model()
    _, _, said = model.ask([user("a")], "one", tools=TOOLS)
    assert model.ask([user("a"), said, user("b")], "x")[1] == ROOT
    assert model.ask([user("a"), said, user("b")], "x", tools=TOOLS)[1] == 0


def test_what_clients_change_does_not_begin_a_branch():
    model = Model()
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    asked = [{"role": "developer", "content": [{"type": "text", "text": "Be"}]}, user("a")]
    _, _, said = model.ask(asked, f"<think>hm</think>{call}", tools=TOOLS)
    assert said["content"] is None and said["reasoning_content"] == "hm"
    function = {"name": "add", "arguments": ' {"a":1,  "b":2}'}
    sent = {"role": "assistant", "content": "", "tool_calls": [{"id": "x1", "function": function}]}
    result = {"role": "tool", "tool_call_id": "x1", "content": "3"}
    changed = [{"role": "system", "content": "Be"}, user("a"), sent, result]
    text, parent, _ = model.ask(changed, "end", tools=TOOLS)
    assert (text, parent) == (f"\n<s>tool\n3{END}\n<s>assistant\n", 0)


def test_a_turn_without_an_end_token_gets_it_as_context():
    model = Model()
    _, _, said = model.ask([user("a")], "cut off", end="", cut=True)
    assert said["content"] == "cut off"
    assert model.ask([user("a"), said, user("b")], "x")[:2] == (f"{END}\n{rendered('b')}", 0)


@pytest.mark.parametrize("thinking", ["keep", "template"])
def test_old_thoughts_are_kept_or_served_as_the_template_does(thinking):
    model = Model(THINKING, thinking=thinking)
    call = '<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    _, _, said = model.ask([user("a")], call, tools=TOOLS)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
    history = [user("a"), said, result]
    # the template still writes the thought after the result of a tool
    assert model.ask(history, "end", tools=TOOLS)[:2] == (f"\n<s>tool\n3{END}\n<s>assistant\n", 0)
    history += [{"role": "assistant", "content": "end"}, user("b")]
    text, parent, _ = model.ask(history, "x", tools=TOOLS)
    if thinking == "keep":
        assert (text, parent) == (f"\n{rendered('b')}", 1)
    else:
        assert parent == ROOT and "hm" not in text and "<s>tool\n3" in text


def test_thoughts_that_a_new_root_lost_do_not_matter_to_what_extends_it():
    model = Model(THINKING, thinking="template")
    _, _, said = model.ask([user("a")], "<think>hm</think>one")
    history = [user("a"), said, user("b")]
    assert model.ask(history, "two")[1] == ROOT
    history += [{"role": "assistant", "content": "two"}, user("c")]
    assert model.ask(history, "x")[:2] == (f"\n{rendered('c')}", 1)


def test_branches_are_bounded_but_not_what_extends_them():
    model = Model(max_branches=2)
    first = [user("a")]
    first += [model.ask(first, "one")[2], user("b")]
    second = [user("c")]
    second += [model.ask(second, "two")[2], user("d")]
    for messages in (first, second):
        messages += [model.ask(messages, "x")[2], user("y")]
    for again in ([user("e")], first[:3]):
        with pytest.raises(TooManyBranches, match="2 branches") as refused:
            model.ask(again, "z")
        assert json.loads(refused.value.body)["error"]["code"] == "context_length_exceeded"
    assert model.ask(first, "z")[1] == 2
