"""The environments and agents of docs/agents.md, each in real sessions.

Those of other libraries need these: `make test-agents` has them.
"""

import asyncio
import importlib.util
import json
import os
import socket
import sys
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch
from urllib.request import urlopen

import pytest

from laminar.config import ConfigError
from laminar.config.tasks import EnvConfig
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.session_process import ResetRequest, RewardRequest, ToolRequest
from laminar.tasks.environments.user_class import load_declaration
from laminar.tasks.sandbox.sandbox import Sandbox
from tests.tasks.environments.test_agents import add, in_bench
from tools.kit.tool_models import END

pytestmark = pytest.mark.process
CONFIGS = Path(__file__).parents[2] / "configs"
LIMIT_S = 60.0
SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Sum(Action):
    a: int
    b: int

class Text(Observation):
    text: str

class Adder(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps = 0
        return Text(text=" Add.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        return Text(text=str(action.a + action.b), done=False, reward=float(self.steps))

    @property
    def state(self):
        return State(step_count=self.steps)

app = create_fastapi_app(Adder, Sum, Text, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run([__import__("socket").socket(fileno=0)])
"""


@asynccontextmanager
async def session(name, of, row=None, **variables):
    """A session that was reset, and what reset said."""
    pool = SessionPool(EnvConfig(path=str(CONFIGS / name), name=of, memory_mb=0))
    with patch.dict(os.environ, variables):
        await pool.start()
    try:
        opened = await pool.open()
        said = await opened.send_request(
            ResetRequest(row or PromptRow(0, "Do it.", None, {}, "test"), 7), LIMIT_S
        )
        assert not said.failed, said.text
        yield opened, said.text
    finally:
        await pool.close()


async def use(opened, tool, **arguments):
    said = await opened.send_request(ToolRequest(tool, json.dumps(arguments)), LIMIT_S)
    assert not said.failed, said.text
    return said.text


def needs(module):
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is not installed; make test-agents installs it beside Laminar",
    )


def test_what_they_declare():
    def tools(name, of):
        schemas, has_reward = load_declaration(EnvConfig(path=str(CONFIGS / name), name=of))
        return [tool["function"]["name"] for tool in json.loads(schemas)], has_reward

    assert tools("recipes/calculator/calculator.py", "Calculator") == (["add"], False)
    try:
        Sandbox()
    except ConfigError as missing:
        pytest.skip(str(missing))
    assert tools("python_tool.py", "Python") == (["python"], False)


@pytest.mark.parametrize(("name", "keeps"), [("Python", False), ("Notebook", True)])
async def test_the_python_tool(name, keeps):
    try:
        Sandbox()
    except ConfigError as missing:
        pytest.skip(str(missing))
    async with session("python_tool.py", name) as (opened, _):
        assert await use(opened, "python", code="x = 6\nx * 7") == "42\n"
        told = await use(opened, "python", code="print(x)")
        assert told == "6\n" if keeps else "NameError" in told
        assert "Error" in await use(opened, "python", code="open('/etc/passwd')")


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.long
@needs("openenv")
async def test_the_client_of_an_openenv_server():
    with listening() as (listener, url):
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVER), stdin=listener
        )
        try:
            await asyncio.to_thread(lambda: urlopen(f"{url}/health", timeout=LIMIT_S).close())
            async with session("openenv_client.py", "OpenEnv", OPENENV_URL=url) as (opened, said):
                assert said == " Add."
                assert await use(opened, "add", a=20, b=22) == "42"
                assert await use(opened, "add", a=-1, b=1) == "0"
                assert (await opened.send_request(RewardRequest(), LIMIT_S)).result.reward == 2.0
        finally:
            server.kill()
            await server.wait()


@pytest.mark.long
@needs("skyrl_gym")
async def test_an_environment_of_skyrl_gym():
    row = PromptRow(0, "What is 6 x 7?", "42", {"answer": "42"}, "test")
    async with session("skyrl_gym_task.py", "Gsm8k", row) as (opened, said):
        assert said is None
        assert "#### ANSWER" in await use(opened, "submit", text="It is 41. #### 41")
        assert await use(opened, "submit", text="No, 42. #### 42") == "The task is over."
        assert await use(opened, "submit", text="#### 42") == "The task is over."
        score = (await opened.send_request(RewardRequest(), LIMIT_S)).result.reward
        assert score == pytest.approx(1.0 + 0.2 / 5)


@needs("openai")
def test_the_tool_loop_of_the_openai_sdk(tmp_path):
    async def body(bench):
        await bench.begin()
        assert await bench.say(add(1, 2)) == f"\n<s>tool\n3{END}\n<s>assistant\n"
        assert (await bench.say(add('"x"', 2))).startswith("\n<s>tool\nerror: ")
        done = await bench.say("end")
        assert (done.result, done.text, done.reason) == (None, "end", "")
        bench.agents.end_session("t")
        await bench.begin()
        assert (await bench.say(add(1, 2), room=3)).reason == "context-full"

    in_bench(tmp_path, "", body, run=f"{CONFIGS}/agents/openai_calculator.py:solve")


@needs("agents")
def test_the_openai_agents_sdk(tmp_path):
    async def body(bench):
        assert "Add two whole numbers." in await bench.begin()
        assert await bench.say(add(1, 2)) == f"\n<s>tool\n3{END}\n<s>assistant\n"
        done = await bench.say("3")
        assert (done.result, done.text, done.reason) == (None, "3", "")

    in_bench(tmp_path, "", body, run=f"{CONFIGS}/agents/openai_agents_calculator.py:solve")


@needs("verifiers")
@pytest.mark.parametrize(("said", "score"), [("42!", 1.0), ("41", 0.0)])
def test_verifiers(tmp_path, said, score):
    async def body(bench):
        assert "Add two whole numbers." in await bench.begin()
        assert await bench.say(add(1, 2)) == f"\n<s>tool\n3{END}\n<s>assistant\n"
        assert (await bench.say(said)).result.reward == score

    in_bench(tmp_path, "", body, run=f"{CONFIGS}/agents/verifiers_calculator.py:solve")


@needs("smolagents")
def test_smolagents(tmp_path):
    def call(tool, arguments):
        named = json.dumps({"name": tool, "arguments": arguments})
        return f"<tool_call>{named}</tool_call>"

    async def body(bench):
        assert "Add two whole numbers." in await bench.begin()
        assert "Observation:" in bench.first.options.stop
        assert "Observation:\n42" in await bench.say(call("add", {"a": 20, "b": 22}), room=20_000)
        done = await bench.say(call("final_answer", {"answer": "42"}))
        assert done.result.reward == 1.0, done

    limits = {"data.max_prompt_length": 10_000, "max_context_tokens": 20_000}
    run = f"{CONFIGS}/agents/smolagents_calculator.py:solve"
    in_bench(tmp_path, "", body, run=run, **limits)


@needs("minisweagent")
@pytest.mark.parametrize(("edit", "score"), [("a + b", 1.0), ("a * b", 0.0)])
def test_mini_swe_agent_in_a_sandbox(tmp_path, edit, score):
    try:
        Sandbox()
    except ConfigError as missing:
        pytest.skip(str(missing))

    def run(command):
        called = json.dumps({"name": "bash", "arguments": {"command": command}})
        return f"<tool_call>{called}</tool_call>"

    async def body(bench):
        say = partial(bench.say, room=2_000)
        assert "Do it. Read and edit the files" in await bench.begin()
        assert "return a - b" in await say(run("open('/work/sums.py').read()"))
        assert "No tool calls found" in await say("What now?")
        text = f"def add(a, b):\n    return {edit}\n"
        assert "<returncode>0" in await say(run(f"open('/work/sums.py','w').write({text!r})"))
        done = await say(run("print('SUBMIT')"))
        assert (done.result.reason, done.result.reward) == ("ok", score)

    limits = {"data.max_prompt_length": 1_000, "max_turns": 9}
    run_ = f"{CONFIGS}/agents/mini_swe_agent.py:solve"
    in_bench(tmp_path, "", body, run=run_, **limits)


@needs("anthropic")
def test_a_tool_loop_of_the_anthropic_sdk(tmp_path):
    agent = """
    from anthropic import Anthropic, BadRequestError

    def solve(task, endpoint):
        client, stream = Anthropic(), task["stream"]  # by the variables of the session
        tool = TOOLS[0]["function"]
        tools = [dict(name="add", description="Add.", input_schema=tool["parameters"])]
        messages = [user("a")]
        while True:
            asked = dict(model="any", max_tokens=50, messages=messages, system="Be.", tools=tools)
            try:
                if stream:
                    with client.messages.stream(**asked) as events:
                        reply = events.get_final_message()
                else:
                    reply = client.messages.create(**asked)
            except BadRequestError as error:
                return dict(score=2, text=error.body["error"]["message"])
            used = [block for block in reply.content if block.type == "tool_use"]
            if not used:
                return dict(score=reply.usage.output_tokens, text=reply.content[0].text)
            results = [
                dict(type="tool_result", tool_use_id=each.id, content=str(sum(each.input.values())))
                for each in used
            ]
            messages += [dict(role="assistant", content=reply.content)]
            messages += [dict(role="user", content=results)]
    """

    async def body(bench):
        for stream in (False, True):
            bench.agents.end_session("t")
            assert (await bench.begin(stream=stream)).endswith(
                f"<s>system\nBe.{END}\n<s>user\na{END}\n<s>assistant\n"
            )
            assert bench.first.options.max_tokens == 50
            assert await bench.say(add(1, 2)) == f"\n<s>tool\n3{END}\n<s>assistant\n"
            done = await bench.say("end")
            assert done.result.extras == {"text": "end"}
            assert done.result.reward == len(bench.parts[-1][1])
            bench.agents.end_session("t")
            await bench.begin(stream=stream)
            done = await bench.say(add(1, 2), room=1)
            assert done.result.extras["text"].startswith("prompt is too long: ")

    in_bench(tmp_path, agent, body)


@needs("openai")
def test_a_stream_and_retries_of_the_openai_sdk(tmp_path):
    agent = """
    import openai

    class Client(openai.AsyncOpenAI):
        async def _prepare_request(self, request):
            note("asked")

    async def solve(task, endpoint):
        client = Client(timeout=1.0, max_retries=100)
        messages, stream = [user("a")], task["stream"]
        for _ in range(2):
            reply = await client.chat.completions.create(
                model="any", messages=messages, tools=TOOLS, stream=stream
            )
            if stream:
                deltas = [chunk.choices[0].delta async for chunk in reply]
                text = "".join(delta.content or "" for delta in deltas)
            else:
                text = reply.choices[0].message.content
            messages += [dict(role="assistant", content=text), user("b")]
        return dict(score=1, text=text)
    """

    async def body(bench):
        for stream in (True, False):
            bench.agents.end_session("t")
            await bench.begin(stream=stream)
            before = bench.log.read_text().count("asked")
            while bench.log.read_text().count("asked") < before + 2:  # its client gives up
                await asyncio.sleep(0.05)
            assert await bench.say("one") == f"\n<s>user\nb{END}\n<s>assistant\n"
            assert (await bench.say("two")).result.extras == {"text": "two"}

    in_bench(tmp_path, agent, body)
