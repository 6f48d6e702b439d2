"""Real sessions of agents: requests in the wire format become turns; the ends of conversations."""

import asyncio
import json
import os
import signal
import sys
import textwrap

import numpy as np
import pytest
import uvloop

from laminar.config import ConfigError, resolve_config
from laminar.events.reasons import EndedBy
from laminar.storage.messages import TurnOptions
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments import turns
from laminar.tasks.environments.agents import AGENT, REFUSALS_MAX, Agents
from tools.kit.tool_models import END, TEMPLATE, schema, tokenizer

pytestmark = pytest.mark.process
LIMIT_S = 30.0
TOOLS = [schema("add", a="integer", b="integer")]
SOURCE = """
    import asyncio, json, os, random, time, urllib.request
    from urllib.error import HTTPError

    TOOLS = {tools!r}

    def note(word):
        with open({log!r}, "a") as log:
            log.write(f"{{word}}\\n")

    def notes():
        return open({log!r}).read().split()

    def chosen(endpoint, messages, **more):
        body = json.dumps(dict(model="any", messages=messages, **more)).encode()
        headers = {{"Authorization": "Bearer " + endpoint.api_key, "X-Given": "1"}}
        request = urllib.request.Request(endpoint.base_url + "/chat/completions", body, headers)
        return json.load(urllib.request.urlopen(request))["choices"][0]

    def ask(endpoint, messages, **more):
        return chosen(endpoint, messages, **more)["message"]

    def code(endpoint, messages, **more):
        try:
            return ask(endpoint, messages, **more)["content"]
        except HTTPError as error:
            return json.load(error)["error"]

    def user(text):
        return dict(role="user", content=text)

    def loop(task, endpoint):
        messages = [user(task["prompt"])]
        note("began")
        while True:
            said = ask(endpoint, messages, tools=TOOLS)
            messages.append(said)
            note("told")
            if not said.get("tool_calls"):
                return dict(score=len(messages), said=said["content"])
            for call in said["tool_calls"]:
                given = json.loads(call["function"]["arguments"])
                messages.append(dict(role="tool", tool_call_id=call["id"],
                                     content=str(given["a"] + given["b"])))
"""


class Bench:
    """Agents with one function, and the turns of a model that says what a test wants."""

    def __init__(self, path, body, *, run="", template=TEMPLATE, **settings):
        self.log = path / "log"
        self.log.touch()
        source = textwrap.dedent(SOURCE.format(log=str(self.log), tools=TOOLS))
        (path / "own.py").write_text(source + "\n" + textwrap.dedent(body))
        named = run or f"{path}/own.py:{'solve' if 'def solve' in body else 'loop'}"
        config = resolve_config(
            {
                "model.name": "models/mine",
                "data.dataset": "spell_backward",
                "data.max_prompt_length": 200,
                "rollout.max_num_seqs": 2,
                "rollout.group_size": 2,
                "reward.error_score": -1.0,
                "reward.max_retries": 1,
                **({"agents.command": run} if isinstance(run, list) else {"agents.run": named}),
                "env.tool_timeout_s": LIMIT_S,
                "env.max_turns": 4,
                **{key if "." in key else f"env.{key}": value for key, value in settings.items()},
            }
        )
        self.model, self.printed, self.intended = tokenizer(template), [], []
        self.agents = Agents(
            config,
            self.model,
            frozenset([self.model.eos_token_id]),
            lambda ids: self.model.decode(ids).removesuffix(END),
            self.printed.append,
        )

    def session(self, name="t", attempt=1, **columns):
        row = PromptRow(0, "Do it.", "42", columns, "test")
        return turns.Session(name, attempt, 7, row, "train")

    async def begin(self, **columns):
        self.now, self.parts, self.parents = self.session(**columns), [], [-1]
        self.first = await self.agents.reset(self.now)
        self.prompt_ids = self.first.context
        return self.model.decode(self.prompt_ids)

    async def say(self, text, *, reason="stop", room=500, stored=()):
        """Answer the next turn; a text that follows is returned."""
        end = END if reason == "stop" and not text.endswith("STOP") else ""
        self.parts.append((True, tuple(self.model.encode(text + end))))
        return await self.repeat(reason=reason, room=room, stored=stored)

    async def repeat(self, *, reason="stop", room=500, stored=()):
        number = sum(sampled for sampled, _ in self.parts) - 1
        sampled = sum(len(ids) for is_sampled, ids in self.parts if is_sampled)
        call = turns.TurnCall(
            self.now, number, self.prompt_ids, tuple(self.parts), reason, room, stored,
            parents=tuple(self.parents), logprobs=np.arange(0, -sampled, -1, "<f4").tobytes(),
        )  # fmt: skip
        answer = await self.agents.answer_turn(call, self._intend)
        if isinstance(answer, turns.NextTurn):
            self.call, self.answer = call, answer
            self.parts.append((False, answer.context))
            self.parents.append(answer.parent)
            return self.model.decode(answer.context)
        return answer

    async def _intend(self, effects):
        self.intended += [(e.call, e.tool, e.status) for e in effects]


def in_bench(path, agent, body, **settings):
    """Run `body(bench)`, on the event loop of a replica."""

    async def run():
        bench = Bench(path, agent, **settings)
        async with asyncio.timeout(120):
            await bench.agents.start()
            try:
                await body(bench)
            finally:
                await bench.agents.close()

    uvloop.run(run())


def add(a, b):
    return f'so <tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_a_tool_loop_is_continued_by_new_messages_only(tmp_path):
    async def body(bench):
        shown = "".join(json.dumps(tool) + "\n" for tool in TOOLS)
        assert await bench.begin() == f"{shown}<s>user\nDo it.{END}\n<s>assistant\n"
        assert await bench.say(add(1, 2)) == f"\n<s>tool\n3{END}\n<s>assistant\n"
        again = await bench.agents.answer_turn(bench.call, None)  # an order that came twice
        assert again.context == bench.parts[-1][1]
        (effect,) = again.effects
        assert (effect.tool, effect.status) == (AGENT, "done") and effect.seconds > 0
        assert await bench.say(add(3, 4) + add(5, 6)) == (
            f"\n<s>tool\n7{END}\n<s>tool\n11{END}\n<s>assistant\n"
        )
        done = await bench.say("end")
        assert (done.result.reward, done.result.extras) == (7, {"said": "end"})
        assert (done.text, done.reason) == ("end", EndedBy.NONE)
        assert bench.intended == [(0, AGENT, "intended")] * 3
        assert bench.log.read_text().split() == ["began", *["told"] * 3]

    in_bench(tmp_path, "", body)


def test_ids_are_those_of_the_template_for_the_whole_conversation(tmp_path):
    agent = """
    async def solve(task, endpoint):
        messages = [dict(role="developer", content="Be."), user([dict(type="text", text="y")])]
        for text in ("é", "  two\\n"):
            said = await asyncio.to_thread(ask, endpoint, messages)
            parts = [dict(type="text", text=said["content"])]
            messages += [dict(role="assistant", content=parts), user(text)]
        ask(endpoint, messages)
    """
    said = ["one", "a  b", "z"]

    async def body(bench):
        await bench.begin()
        for text in said[:-1]:
            await bench.say(text)
        done = await bench.say(said[-1])
        assert done.result is None and done.text == "z"  # reward functions score it
        messages = [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "y"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "é"},
            {"role": "assistant", "content": "a  b"},
            {"role": "user", "content": "  two\n"},
        ]
        whole = bench.model.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        fed = [*bench.prompt_ids, *(i for _, part in bench.parts[:-1] for i in part)]
        assert fed == whole

    in_bench(tmp_path, agent, body)


def test_a_compacted_history_and_a_sub_agent_are_branches(tmp_path):
    """Also in a second session, which asks for the same turns after the first one was lost."""
    agent = """
    def solve(task, endpoint):
        main = [user("a")]
        main += [ask(endpoint, main), user("b")]
        summary = ask(endpoint, [user("sum up: b")], tools=TOOLS)
        main += [ask(endpoint, main), user("c")]
        last = ask(endpoint, [user(summary["content"])])["content"]
        note(code(endpoint, [user("too many")])["code"])
        return len(last)
    """

    async def body(bench):
        await bench.begin()
        shown = "".join(json.dumps(tool) + "\n" for tool in TOOLS)
        assert await bench.say("one") == f"{shown}<s>user\nsum up: b{END}\n<s>assistant\n"
        await kill(bench)
        assert await bench.say("two") == f"\n<s>user\nb{END}\n<s>assistant\n"
        assert await bench.say("three") == f"<s>user\ntwo{END}\n<s>assistant\n"
        await kill(bench)
        done = await bench.say("four!")
        assert (done.result.reward, done.reason) == (5, EndedBy.CONTEXT_FULL)
        assert "1 requests refused; the last one: the session has 3 branches" in (
            done.effects[0].result
        )
        assert bench.log.read_text() == "context_length_exceeded\n"
        assert bench.parents == [-1, -1, 0, -1]

    settings = {"agents.max_branches": 3, "max_turns": 5, "call_semantics": "retryable"}
    in_bench(tmp_path, agent, body, **settings)


def test_a_branch_too_many_ends_what_cannot_do_without(tmp_path):
    agent = """
    def solve(task, endpoint):
        ask(endpoint, [user("a")])
        ask(endpoint, [user("b")])
    """

    async def body(bench):
        await bench.begin()
        done = await bench.say("x")
        assert (done.reason, done.result) == (EndedBy.CONTEXT_FULL, None)

    in_bench(tmp_path, agent, body, **{"agents.max_branches": 1})


@pytest.mark.parametrize(
    ("settings", "turn", "reason"),
    [
        ({}, {"room": 3}, EndedBy.CONTEXT_FULL),
        ({"data.max_response_length": 1}, {"room": 0, "reason": "length"}, EndedBy.NONE),
        ({"max_turns": 1}, {}, EndedBy.MAX_TURNS),
    ],
)
def test_a_full_conversation_ends_whether_the_agent_copes_or_not(tmp_path, settings, turn, reason):
    agent = """
    def solve(task, endpoint):
        said = ask(endpoint, [user("a")])
        longer = [user("a"), said, user("b" * 50)]
        found = [code(endpoint, longer)["code"] for _ in range(3)]
        if not task["copes"]:
            ask(endpoint, longer)
        return {"score": 2, "found": " ".join(found)}
    """

    async def body(bench):
        for copes in (True, False):
            bench.agents.end_session("t")
            await bench.begin(copes=copes)
            done = await bench.say(add(1, 2), **turn)
            assert (done.reason, done.text) == (reason, add(1, 2))
            if copes:
                assert done.result.reward == 2
                assert done.result.extras == {"found": " ".join(["context_length_exceeded"] * 3)}
            else:
                assert done.result is None

    in_bench(tmp_path, agent, body, **settings)


def test_limits_of_a_turn_go_with_it_to_the_engine(tmp_path):
    agent = """
    def solve(task, endpoint):
        messages, found = [user("a")], []
        for more in (dict(max_tokens=9, max_completion_tokens=5), dict(stop="STOP"), {}):
            choice = chosen(endpoint, messages, **more)
            found += [choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]]
            messages += [choice["message"], user("b")]
        return dict(score=1, found=json.dumps(found))
    """

    async def body(bench):
        await bench.begin()
        assert bench.first.options == TurnOptions(max_tokens=5)
        context = f"{END}\n<s>user\nb{END}\n<s>assistant\n"  # the turn has no end token
        assert await bench.say("cut o", reason="length") == context
        assert bench.answer.options == TurnOptions(stop=("STOP",))
        assert await bench.say("so STOP") == context
        assert bench.answer.options == TurnOptions()
        done = await bench.say("end")
        assert json.loads(done.result.extras["found"]) == [
            *("cut o", "length", None),
            *("so ", "stop", "STOP"),
            *("end", "stop", None),
        ]

    in_bench(tmp_path, agent, body)


def test_log_probs_are_those_of_the_sampled_tokens(tmp_path):
    agent = """
    def solve(task, endpoint):
        first = ask(endpoint, [user("a")])
        second = chosen(endpoint, [user("a"), first, user("b")], logprobs=True)["logprobs"]
        note(json.dumps(second["content"]))
    """

    async def body(bench):
        await bench.begin()
        await bench.say("one")
        await bench.say("two é")
        found = json.loads(bench.log.read_text())
        ids, before = bench.parts[-1][1], len(bench.parts[0][1])
        assert [each["logprob"] for each in found] == [-float(before + i) for i in range(len(ids))]
        texts = [bench.model.decode([i]) for i in ids]
        assert [each["token"] for each in found] == texts
        for text, each in zip(texts, found, strict=True):
            assert each["bytes"] == (None if "\ufffd" in text else list(text.encode()))

    in_bench(tmp_path, agent, body)


@pytest.mark.parametrize("sampling", ["replace", "refuse"])
def test_the_run_decides_how_the_model_is_sampled(tmp_path, sampling):
    agent = """
    def solve(task, endpoint):
        said = code(endpoint, [user("a")], temperature=1.0, top_p=1)  # as the run
        found = [code(endpoint, [user("b")], temperature=0, seed=1) for _ in range(2)]
        note(json.dumps(found))
    """

    async def body(bench):
        await bench.begin()
        await bench.say("x")
        printed = b"".join(bench.printed).decode()
        if sampling == "refuse":
            found = json.loads(bench.log.read_text())
            assert [error["param"] for error in found] == ["temperature"] * 2
            assert 'agents.sampling = "replace"' in found[0]["message"] and not printed
            return
        await bench.say("y")
        await bench.say("z")
        printed = b"".join(bench.printed).decode()
        assert printed.count("replaces temperature = 0, seed = 1 of the agent's requests") == 1

    in_bench(tmp_path, agent, body, **{"agents.sampling": sampling})


def test_an_agent_that_ignores_errors_is_bounded(tmp_path):
    agent = """
    def solve(task, endpoint):
        ask(endpoint, [user("a")])
        for i in range(1000):
            note(code(endpoint, [user(str(i))])["message"][-3:])
        return 3
    """

    async def body(bench):
        await bench.begin()
        assert (await bench.say("x")).result.reward == 3
        (answer,) = bench.agents._conversations["t"].answers.values()
        assert answer.effects[0].result.startswith(f"{REFUSALS_MAX} requests refused")
        assert len(bench.log.read_text().splitlines()) == 1000

    in_bench(tmp_path, agent, body, **{"agents.max_branches": 1})


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ("raise KeyError('lost')", "KeyError: 'lost' (own.py:"),
        ("return 1.0", "it returned 1.0"),
        ("os._exit(4)", "exit code 4"),
        ("ask(endpoint, [dict(role='user', content=[dict(type='image_url')])])", "HTTP Error 400"),
        ("time.sleep(1000)", "no answer within 0.5 s"),
    ],
)
def test_an_agent_without_a_request_is_no_trajectory(tmp_path, ends, told):
    async def body(bench):
        with pytest.raises(turns.EnvironmentFailed, match="the agent made no request") as failed:
            await bench.begin()
        assert told in str(failed.value)
        assert bench.log.read_text() == "began\n" * 2  # reward.max_retries

    limit = {"turn_timeout_s": 0.5, "tool_timeout_s": 0.4} if "sleep" in ends else {}
    agent = f"def solve(task, endpoint):\n    note('began')\n    {ends}\n"
    in_bench(tmp_path, agent, body, **limit)


@pytest.mark.parametrize(
    ("ends", "result"),
    [
        ("raise KeyError('lost')", ("error", -1.0)),
        ("return 'one'", ("not-a-number", -1.0)),
        ("return dict(score=0.5, steps=2)", ("ok", 0.5)),
        ("time.sleep(1000)", ("timeout", -1.0)),
    ],
)
def test_the_end_of_an_agent_is_a_score_with_its_reason(tmp_path, ends, result):
    async def body(bench):
        await bench.begin()
        pid = bench.agents._conversations["t"].process.pid
        done = await bench.say("x")
        assert (done.result.reason, done.result.reward) == result
        timed_out = done.result.reason == "timeout"
        assert done.reason == (EndedBy.TURN_TIMEOUT if timed_out else EndedBy.NONE)
        assert done.effects[0].status == ("timed-out" if timed_out else "done")
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.01)

    limit = {"turn_timeout_s": 1.0, "tool_timeout_s": 0.4} if "sleep" in ends else {}
    agent = f"def solve(task, endpoint):\n    ask(endpoint, [user('a')])\n    {ends}\n"
    in_bench(tmp_path, agent, body, **limit)


async def kill(bench):
    process = bench.agents._conversations["t"].process
    os.kill(process.pid, signal.SIGKILL)
    await process.ended


def test_an_agent_that_has_read_a_turn_is_never_run_again(tmp_path):
    async def body(bench):
        await bench.begin()
        await kill(bench)  # before its first reply
        assert await bench.say(add(1, 2)) == f"\n<s>tool\n3{END}\n<s>assistant\n"
        await kill(bench)
        with pytest.raises(turns.SessionLost, match="its session was lost"):
            await bench.say("end")
        assert bench.log.read_text().split() == ["began", "began", "told"]
        intended = turns.Effect(0, AGENT, "{}", "intended")
        bench.agents.end_session("t")
        await bench.begin()
        with pytest.raises(turns.SessionLost, match="outcome of its last call is unknown"):
            await bench.say("end", stored=(intended,))

    in_bench(tmp_path, "", body)


def test_a_retryable_agent_is_given_its_turns_again(tmp_path):
    async def body(bench):
        await bench.begin()
        for first in (1, 3):
            told = await bench.say(add(first, 2))
            assert told == f"\n<s>tool\n{first + 2}{END}\n<s>assistant\n"
            await kill(bench)
        assert (await bench.say("end")).result.reward == 6
        assert bench.log.read_text().split().count("began") == 3 and not bench.intended

    in_bench(tmp_path, "", body, call_semantics="retryable")


def test_a_retryable_agent_that_differs_is_lost(tmp_path):
    agent = """
    def solve(task, endpoint):
        said = ask(endpoint, [user("a")])
        note("x")
        ask(endpoint, [user("a"), said, user(str(len(notes())))])
    """

    async def body(bench):
        await bench.begin()
        await bench.say("x")
        await kill(bench)
        with pytest.raises(turns.SessionLost, match="made another request than before"):
            await bench.say("y")

    in_bench(tmp_path, agent, body, call_semantics="retryable")


def test_a_session_has_its_own_key_and_variables(tmp_path):
    agent = """
    def solve(task, endpoint):
        print(endpoint, os.environ["NO_PROXY"])
        assert os.environ["OPENAI_BASE_URL"] == endpoint.base_url
        assert os.environ["OPENAI_API_KEY"] == endpoint.api_key
        note(endpoint.api_key)
        found = [task["answer"], task["word"], endpoint.model]
        try:
            ask(endpoint._replace(api_key="other"), [])
        except HTTPError as error:
            found.append(str(error.code))
        said = ask(endpoint, [user("a")], temperature=0.1, max_tokens=5, n=1)
        return dict(score=1, found=" ".join(found))
    """

    async def body(bench):
        await bench.begin(word="w")
        assert (await bench.say("x")).result.extras == {"found": "42 w mine 401"}
        key, printed = bench.log.read_text().strip(), b"".join(bench.printed).decode()
        assert len(key) > 20 and "127.0.0.1" in printed and key not in printed

    in_bench(tmp_path, agent, body)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_like_this", "own.py does not import: ModuleNotFoundError"),
        ("raise SystemExit(3)", "own.py does not import: SystemExit: 3"),
        ("solve = 3", "3 is not a callable object"),
        ("", "None is not a callable object"),
        ("def solve(task): pass", "cannot be called with a row and an endpoint"),
    ],
)
async def test_a_file_that_cannot_be_an_agent_is_refused(tmp_path, source, words):
    bench = Bench(tmp_path, f"{source}\n# def solve")
    try:
        with pytest.raises(ConfigError, match=words):
            await bench.agents.start()
    finally:
        await bench.agents.close()


PROGRAM = """
    from types import SimpleNamespace

    task = json.load(open(os.environ["LAMINAR_TASK_FILE"]))
    key, url = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
    assert os.environ["ANTHROPIC_API_KEY"] == key
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == url and "127.0.0.1" in os.environ["NO_PROXY"]
    note(os.getcwd())
    assert os.environ["TMPDIR"] == os.getcwd()
    said = ask(SimpleNamespace(base_url=url, api_key=key), [user(task["prompt"] + task["answer"])])
    print("said", said["content"])
    ENDS
"""


@pytest.mark.parametrize(
    ("ends", "result"),
    [
        ("print(json.dumps(dict(score=0.5, said=said['content'])))", ("ok", 0.5)),
        ("print(1)\nprint()", ("ok", 1.0)),
        ("print('nothing')", None),
        ("print('[1]')", None),
        ("sys.exit(3)", ("error", -1.0)),
        ("os.kill(os.getpid(), 9)", ("error", -1.0)),
    ],
)
def test_a_command_is_an_agent(tmp_path, ends, result):
    source = textwrap.dedent(PROGRAM).replace("ENDS", f"import sys\n{ends}")

    async def body(bench):
        own = bench.log.parent / "own.py"
        own.write_text(own.read_text() + source)
        assert await bench.begin() == f"<s>user\nDo it.42{END}\n<s>assistant\n"
        directory = bench.log.read_text().strip()
        done = await bench.say("fine")
        assert (done.result and (done.result.reason, done.result.reward)) == result
        if result == ("error", -1.0):
            assert "ended with" in done.result.detail
        assert "said fine" in b"".join(bench.printed).decode()
        while os.path.exists(directory):
            await asyncio.sleep(0.01)

    in_bench(tmp_path, "", body, run=[sys.executable, str(tmp_path / "own.py")])


async def test_a_command_that_is_not_there_is_refused(tmp_path):
    bench = Bench(tmp_path, "", run=["no-such-program", "x"])
    try:
        with pytest.raises(ConfigError, match="there is no program 'no-such-program' on the PATH"):
            await bench.agents.start()
    finally:
        await bench.agents.close()
