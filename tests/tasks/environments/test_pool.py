"""Real sessions of a user's class: what follows a turn, calls that are killed, lost processes."""

import asyncio
import contextlib
import os
import signal
import textwrap

import pytest
import uvloop
from msgspec.structs import replace

from laminar.config import ConfigError, DataConfig, resolve_config
from laminar.config.tasks import EnvConfig
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.environments import turns
from laminar.tasks.environments.pool import Environments
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.session_pool import SessionPool
from laminar.tasks.environments.tool_calls import CallParser
from laminar.tasks.environments.user_class import load_class, load_declaration
from laminar.tasks.rewards.reward_functions import reward_spec
from tools.kit.tool_models import END, TEMPLATE, schema, tokenizer

pytestmark = pytest.mark.process
LIMIT_S = 20.0

#: `note` counts what has been done, in a file that outlives sessions.
SOURCE = """
    import os, random, subprocess, sys, time

    class Notes:
        def reset(self, word="", **row):
            self.words = []
            if word == "fail" or (word == "fail-once" and self.note("reset") == "1"):
                raise RuntimeError("no server")
            return f" {{word}} {{random.randrange(10**9)}}" if word else None

        def note(self, word: str) -> str:
            self.words.append(word)
            with open({log!r}, "a") as log:
                log.write(word + "\\n")
            return str(len(open({log!r}).read().split()))

        async def both(self, a: str, b: str) -> str:
            return f"{{self.note(a)}} {{self.note(b)}}"

        def do(self, what: str) -> object:
            if what == "fill":
                return sys.getsizeof(bytearray(1 << 30))
            if what == "nap":
                time.sleep(0.2)
            if what == "raise":
                raise ValueError("boom")
            if what == "leave":
                sys.exit(3)
            if what in ("hang", "daemon"):
                leave = "sleep 1000 >/dev/null & echo $!"  # in a session without a parent
                daemon = subprocess.check_output(["setsid", "sh", "-c", leave], text=True).strip()
            if what == "daemon":
                return self.note(daemon)
            if what == "hang":
                child = subprocess.Popen(["sleep", "1000"])
                self.note(f"{{os.getpid()}},{{child.pid}},{{daemon}}")
                while True:
                    time.sleep(1)
            if what == "die":
                self.note("died")
                os._exit(5)
            if what == "print":
                print("printed by a tool")
            if what == "half":
                return "h\\ud83d"
            if what == "raise-half":
                raise ValueError("h\\ud83d")
            if what == "text":
                return type("Text", (str,), {{}})("of a kind")
            return len(what)
"""
REWARD = """
        def get_reward(self) -> float:
            if "raise" in self.words:
                raise KeyError("no score")
            if "raise-half" in self.words:
                raise ValueError("no \\ud83d")
            return float(len(self.words))
"""
TOOLS = [
    schema("note", word="string"),
    schema("both", a="string", b="string"),
    schema("do", what="string"),
]


def call(tool, **arguments):
    parts = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{tool}", "arguments": {{{parts}}}}}</tool_call>'


KEYS = {"max_sessions": "agents.max_sessions"}


class Bench:
    """Environments of one class, and the turns of a model that says what a test wants."""

    model = tokenizer()

    def __init__(self, path, *, reward=False, functions=None, **settings):
        self.log = path / "log"
        self.log.touch()
        source = textwrap.dedent(SOURCE.format(log=str(self.log)) + (REWARD if reward else ""))
        (path / "notes.py").write_text(source)
        config = resolve_config(
            {
                "model.name": "m",
                "data.dataset": "spell_backward",
                "rollout.max_num_seqs": 2,
                "rollout.group_size": 2,
                "reward.error_score": -1.0,
                "reward.max_retries": 1,
                "env.path": str(path / "notes.py"),
                "env.tool_timeout_s": LIMIT_S,
                "env.max_turns": 3,
                **{KEYS.get(key, f"env.{key}"): value for key, value in settings.items()},
            }
        )
        self.printed, self.intended, self.noted_before = [], [], []
        self.environments = Environments(
            config,
            SessionPool(
                replace(config.env, memory_mb=512), on_output=self.printed.append, reward=functions
            ),
            self.renderer(TEMPLATE),
            CallParser(self.model, TOOLS),
            lambda ids: self.model.decode(ids, skip_special_tokens=True),
        )

    def renderer(self, template):
        model = tokenizer(template)
        return Renderer(model, DataConfig(), TOOLS, frozenset([model.eos_token_id]))

    async def __aenter__(self):
        await self.environments.start()
        return self

    async def __aexit__(self, *_):
        await self.environments.close()

    def session(self, name="t", attempt=1, **columns):
        row = PromptRow(0, "Do it.", None, columns, "test")
        return turns.Session(name, attempt, 7, row, "train")

    async def answer_turn(
        self, text, number=0, session=None, reason="stop", room=500, stored=(), seconds=0.0
    ):
        ids = tuple(self.model.encode(text + END))
        call = turns.TurnCall(
            session or self.session(), number, (1, 2), ((True, ids),), reason, room, stored, seconds
        )
        return await self.environments.answer_turn(call, self._intend)

    async def _intend(self, effects):
        self.intended.append([(e.call, e.tool, e.status) for e in effects])
        self.noted_before += [self.noted()]

    def told(self, answer):
        assert isinstance(answer, turns.NextTurn), answer
        return self.model.decode(answer.context)

    def noted(self):
        return self.log.read_text().split()


def in_bench(path, body, **settings):
    """Run `body(bench)`, on the event loop of a replica."""

    failed = []  # of callbacks; a replica ends with the first one

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        async with asyncio.timeout(120), Bench(path, **settings) as bench:
            await body(bench)
            await asyncio.sleep(0.2)

    uvloop.run(run())
    assert not failed


def test_a_class_of_trl_answers_turns_and_gives_its_reward(tmp_path):
    async def body(bench):
        assert await bench.environments.reset(bench.session()) is None
        first = await bench.answer_turn("so " + call("note", word="x") + call("both", a="y", b="z"))
        assert bench.told(first) == f"\n<s>tool\n1{END}\n<s>tool\n2 3{END}\n<s>assistant\n"
        assert bench.intended == [[(0, "note", "intended"), (1, "both", "intended")]]
        assert bench.noted_before == [[]]  # no call was made yet
        assert [(e.call, e.status, e.result) for e in first.effects] == [
            (0, "done", "1"),
            (1, "done", "2 3"),
        ]
        again = await bench.answer_turn("so " + call("note", word="x") + call("both", a="y", b="z"))
        assert again == first and bench.noted() == ["x", "y", "z"]  # an order that came twice
        done = await bench.answer_turn("the end", 1)
        assert isinstance(done, turns.TrajectoryDone) and (done.text, done.reason) == (
            "the end",
            "",
        )
        assert done.result.reward == 3.0
        assert await bench.answer_turn("the end", 1) == done

    in_bench(tmp_path, body, reward=True)


def test_what_the_policy_can_cause_is_text_for_it(tmp_path):
    async def body(bench):
        said = {
            call("do", what="raise"): "error: ValueError: boom (notes.py:",
            call("do", what="leave"): "error: SystemExit: 3",
            call("do", what="fill"): "error: MemoryError",
            call("do"): "error: TypeError",
            call("fly"): "error: there is no tool 'fly'",
            "<tool_call>{": "error: the call has no end",
            call("do", what="print"): "5",
            call("do", what="half"): "h\ufffd",
            call("do", what="raise-half"): "error: ValueError: h\ufffd",
            call("do", what="text"): "of a kind",
            call("do", what="\\ud83d"): "1",
        }
        for i, (text, answer) in enumerate(said.items()):
            assert answer in bench.told(
                await bench.answer_turn(text, session=bench.session(f"t{i}"))
            )
        while b"printed by a tool" not in b"".join(bench.printed):
            await asyncio.sleep(0.01)

    in_bench(tmp_path, body)


def test_a_call_that_the_template_cannot_write_is_refused_before_it_is_made(tmp_path):
    strict = TEMPLATE.replace("{{ call.function", "{{ none + 1 if 'list' in call.function | string "
                              "else '' }}{{ call.function")  # fmt: skip

    async def body(bench):
        bench.environments._renderer = bench.renderer(strict)
        text = '<tool_call>{"name": "note", "arguments": {"x": ["list"]}}</tool_call>'
        answer = await bench.answer_turn(call("note", word="a") + text)
        assert "error: the chat template cannot write its arguments" in bench.told(answer)
        assert bench.noted() == ["a"] and bench.intended == [[(0, "note", "intended")]]
        bench.environments._renderer = bench.renderer("{{ none + 1 }}")
        with pytest.raises(turns.SessionLost, match="the results of its calls cannot be rendered"):
            await bench.answer_turn(call("note", word="b"), session=bench.session("other"))
        with pytest.raises(turns.EnvironmentFailed, match="the text of reset cannot be rendered"):
            await bench.environments.reset(bench.session("third", word="w"))

    in_bench(tmp_path, body)


def test_half_a_surrogate_pair_does_not_cost_the_session_its_reward(tmp_path):
    async def body(bench):
        await bench.answer_turn(call("note", word="raise-half"))
        done = await bench.answer_turn("the end", 1)
        assert "no \ufffd" in done.result.detail

    in_bench(tmp_path, body, reward=True)


def test_a_call_that_hangs_is_killed_with_all_it_started_and_costs_one_session(tmp_path):
    async def body(bench):
        other = bench.session("other")
        await bench.environments.reset(other)
        done = await bench.answer_turn(call("note", word="a") + call("do", what="hang"))
        assert (done.reason, done.result.reward, done.result.reason) == (
            "tool-timeout",
            -1.0,
            "timeout",
        )
        assert [e.status for e in done.effects] == ["done", "timed-out"]
        for pid in map(int, bench.noted()[1].split(",")):
            while alive(pid):
                await asyncio.sleep(0.01)
        assert "2" not in bench.told(await bench.answer_turn(call("do", what="abc"), session=other))

    in_bench(tmp_path, body, reward=True, tool_timeout_s=1.0)


@pytest.mark.parametrize(
    ("spent", "settings", "reason"),
    [
        (0.0, {"turn_timeout_s": 2.0}, "turn-timeout"),
        (28.0, {"turn_timeout_s": 25.0, "trajectory_timeout_s": 30.0}, "trajectory-timeout"),
    ],
)
def test_calls_together_end_a_turn_and_a_trajectory(tmp_path, spent, settings, reason):
    async def body(bench):
        done = await bench.answer_turn(
            call("do", what="nap") + call("do", what="hang"), seconds=spent
        )
        first, killed = done.effects
        assert (done.reason, done.result.reward) == (reason, -1.0)
        assert (first.status, killed.status) == ("done", "timed-out")
        assert first.seconds > 0 and first.seconds + killed.seconds == pytest.approx(2.0)
        late = await bench.answer_turn(call("note", word="b"), 0, bench.session("s"), seconds=31.0)
        assert (late.reason, late.effects, late.result.reward) == ("trajectory-timeout", (), 0.0)
        assert "b" not in bench.noted()

    limits = {"tool_timeout_s": 1.9, "trajectory_timeout_s": 30.0, **settings}
    in_bench(tmp_path, body, reward=True, **limits)


def alive(pid):
    """A process that runs; one that nobody has reaped does not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def test_limits_of_a_trajectory_end_it(tmp_path):
    async def body(bench):
        cut = await bench.answer_turn(
            call("note", word="x"), session=bench.session("c"), reason="length"
        )
        assert isinstance(cut, turns.TrajectoryDone) and cut.reason == ""
        last = await bench.answer_turn(call("note", word="x"), 2, bench.session("m"))
        assert last.reason == "max-turns"
        assert bench.noted() == [] and bench.intended == []  # neither was run
        full = await bench.answer_turn(call("note", word="x"), session=bench.session("f"), room=3)
        assert full.reason == "context-full" and [e.status for e in full.effects] == ["done"]
        room = len(
            (await bench.answer_turn(call("do", what="x"), session=bench.session("a"))).context
        )
        for spare, kind in ((0, turns.NextTurn), (-1, turns.TrajectoryDone)):
            one = bench.session(str(spare))
            found = await bench.answer_turn(call("do", what="x"), 0, one, room=room + spare)
            assert isinstance(found, kind)

    in_bench(tmp_path, body, call_semantics="at-most-once")


def test_with_once_no_call_is_repeated_and_a_lost_session_is_no_score(tmp_path):
    async def body(bench):
        with pytest.raises(turns.EnvironmentFailed, match="exit code 5"):
            await bench.answer_turn(call("do", what="die"))
        assert bench.noted() == ["died"]
        with pytest.raises(turns.SessionLost, match="its session was lost") as gone:
            await bench.answer_turn(call("note", word="x"), 1)
        assert not isinstance(gone.value, turns.EnvironmentFailed)
        first = await bench.answer_turn(call("note", word="x"), session=bench.session("s"))
        intended = tuple(e._replace(status="intended") for e in first.effects)
        bench.environments.end_session("s")
        with pytest.raises(turns.SessionLost, match="is unknown"):
            await bench.answer_turn(call("note", word="x"), 0, bench.session("s"), stored=intended)
        assert bench.noted() == ["died", "x"]

    in_bench(tmp_path, body)


def test_with_pure_a_lost_session_is_made_again(tmp_path):
    async def body(bench):
        await bench.environments.reset(bench.session())
        bench.environments.end_session("t")
        assert "1" in bench.told(await bench.answer_turn(call("note", word="x"), 1))
        with pytest.raises(turns.SessionLost, match="exit code 5"):
            await bench.answer_turn(call("do", what="die"), session=bench.session("d"))
        assert bench.noted() == ["x", "died", "died"] and bench.intended == []

    in_bench(tmp_path, body, call_semantics="retryable")


def test_functions_over_environments_are_called_in_the_session(tmp_path):
    """Each gets lists of one; a session of its own has another object."""
    path = tmp_path / "reward.py"
    path.write_text(
        "def words(environments, completions, prompts, count, **columns):\n"
        "    (e,), (text,) = environments, completions\n"
        "    return [{'score': len(e.words) / count[0], 'text': text}]\n"
        "def fails(environments): return [environments[0].absent]\n"
    )
    flat = {"model.name": "m", "data.train_files": ["t.jsonl"], "env.path": str(path)}

    def spec(*names):
        listed = [{"path": str(path), "name": name} for name in names]
        return reward_spec(resolve_config({**flat, "reward.functions": [*listed]}))

    async def body(bench):
        for name, used in (("a", 2), ("b", 0)):
            session = bench.session(name, count=2)
            for turn in range(used):
                await bench.answer_turn(call("note", word="x"), turn, session)
            done = await bench.answer_turn("All done.", used, session)
            assert (done.result.reward, done.result.reason) == (used / 2, "ok")
            assert done.result.extras == {"text": "All done."}

    in_bench(tmp_path, body, functions=spec("words"))

    async def failing(bench):
        done = await bench.answer_turn("All done.", 0, bench.session("a", count=2))
        assert (done.result.reward, done.result.reason) == (-1.0, "error")
        assert "absent" in done.result.detail and "reward.py:4" in done.result.detail

    in_bench(tmp_path, failing, functions=spec("words", "fails"))


def test_siblings_begin_alike_and_a_reset_that_fails_is_tried_again(tmp_path):
    async def body(bench):
        environments = bench.environments
        a = await environments.reset(bench.session("a", word="Look."))
        b = await environments.reset(bench.session("b", word="Look."))
        assert a == b and "Do it. Look. " in bench.model.decode(a.context)
        assert await environments.reset(bench.session("a", word="Look.")) == a
        assert await environments.reset(bench.session("c", word="fail-once"))
        with pytest.raises(turns.EnvironmentFailed, match="no server"):
            await environments.reset(bench.session("d", word="fail"))

    in_bench(tmp_path, body)


def test_sessions_are_bounded_and_come_free_when_one_is_forgotten(tmp_path):
    async def body(bench):
        environments = bench.environments
        await asyncio.gather(*(environments.reset(bench.session(n)) for n in "ab"))
        third = asyncio.create_task(environments.reset(bench.session("c")))
        done, _ = await asyncio.wait({third}, timeout=0.2)
        assert not done
        environments.end_session("a")
        await third
        environments.end_session("c")
        await environments.reset(bench.session("b", attempt=2))  # ends the one of attempt 1
        await environments.reset(bench.session("c"))

    in_bench(tmp_path, body, max_sessions=2)


def test_sessions_that_begin_at_once_end_one_by_one(tmp_path):
    async def body(bench):
        names = "abcdefgh"
        await asyncio.gather(*(bench.environments.reset(bench.session(n)) for n in names))
        processes = [bench.environments._conversations[n].process for n in names]
        for process in processes:
            while not process.pid:
                await asyncio.sleep(0.01)
        assert len({process.pid for process in processes}) == len(names)
        for i, name in enumerate(names):
            bench.environments.end_session(name)
            while alive(processes[i].pid):
                await asyncio.sleep(0.01)
            assert all(alive(process.pid) for process in processes[i + 1 :])

    in_bench(tmp_path, body, max_sessions=8)


@pytest.mark.parametrize("end", ["forgotten", "died", "killed", "closed"])
def test_a_daemon_ends_with_its_session_and_no_other(tmp_path, end):
    """Whether the session, its own process or that with the file ends."""

    async def body(bench):
        sessions = [bench.session(name) for name in "ab"]
        for session in sessions:
            await bench.environments.reset(session)
            await bench.answer_turn(call("do", what="daemon"), 0, session)
        daemon, other = map(int, bench.noted())
        assert alive(daemon) and alive(other)
        if end == "forgotten":
            bench.environments.end_session("a")
        elif end == "died":
            with pytest.raises(turns.SessionLost):
                await bench.answer_turn(call("do", what="die"), 1, sessions[0])
        elif end == "killed":
            session = bench.environments._conversations["a"].process
            while not session.pid:
                await asyncio.sleep(0.01)
            os.kill(parent_of(session.pid), signal.SIGKILL)
        else:
            await bench.environments.close()
        left = [daemon] if end in ("forgotten", "died") else [daemon, other]
        while any(map(alive, left)):
            await asyncio.sleep(0.01)
        if len(left) == 1:
            assert bench.told(await bench.answer_turn(call("note", word="z"), 1, sessions[1]))
            assert alive(other)

    in_bench(tmp_path, body)


def test_what_the_import_of_the_file_has_started_lives_as_long_as_the_pool(tmp_path):
    source = tmp_path / "served.py"
    start = "subprocess.check_output(['setsid', 'sh', '-c', 'sleep 1000 >/dev/null & echo $!'])"
    source.write_text(
        f"import subprocess\nPID = int({start})\n"
        "class A:\n def reset(self, **row): return str(PID)\n"
        " def go(self, x: int):\n  'Go.\\n\\n  Args:\\n    x: x\\n  '\n  return 1\n"
    )

    async def body():
        pool = SessionPool(EnvConfig(path=str(source), memory_mb=0))
        try:
            for _ in range(2):
                session = await pool.open()
                said = await session.reset(PromptRow(0, "q", None, {}, "test"), 1, 60.0)
                server = int(said.text)
                assert alive(server)
                session.kill()
                await session.ended
            assert alive(server)
        finally:
            await pool.close()
        while alive(server):
            await asyncio.sleep(0.01)

    asyncio.run(body())


def test_when_that_process_is_killed_one_call_is_blamed_and_none_is_made_again(tmp_path):
    """Of those that were being made; what had no call goes on, and nothing else has failed."""

    async def body(bench):
        for name in ("new", "used", "a", "b"):
            await bench.environments.reset(bench.session(name))
        await bench.answer_turn(call("note", word="x"), session=bench.session("used"))
        hang = call("do", what="hang")
        calls = [
            asyncio.create_task(bench.answer_turn(hang, 0, bench.session(n))) for n in ("a", "b")
        ]
        while len(bench.noted()) < 3:
            await asyncio.sleep(0.01)
        bench.environments._pool._warm.kill()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [turns.EnvironmentFailed, turns.SessionLost]
        with pytest.raises(turns.SessionLost, match="its session was lost") as gone:
            await bench.answer_turn(call("note", word="y"), 1, bench.session("used"))
        assert not isinstance(gone.value, turns.EnvironmentFailed)
        assert "4" in bench.told(
            await bench.answer_turn(call("note", word="z"), 0, bench.session("new"))
        )
        assert bench.noted()[0] == "x" and bench.noted()[-1] == "z" and len(bench.noted()) == 4

    in_bench(tmp_path, body)


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("class A:\n def reset(self): pass", "", "has no tool"),
        ("class A:\n def go(self): pass", "", "has no method reset"),
        ("class A: pass\nclass B: pass", "", "public classes A, B; name the environment"),
        ("class A: pass", "C", "is not a class in"),
        ("class A:\n def __init__(self, x): pass\n def reset(self): 0\n def f(self): 0", "", "def"),
        ("import nothing_of_this_name", "", "does not import: ModuleNotFoundError"),
    ],
)
def test_a_class_that_cannot_be_an_environment_is_refused(tmp_path, source, name, said):
    (tmp_path / "user.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        load_class(str(tmp_path / "user.py"), name)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(self, a):\n  '''F.\n\n  Args:\n   a: A.\n  '''", "missing a type hint"),
        ("def f(self): pass\nimport os\nos._exit(3)", "ends the process that imports it"),
    ],
)
def test_tools_without_types_are_refused_before_a_run(tmp_path, source, said):
    path = tmp_path / "user.py"
    path.write_text(f"class A:\n def reset(self): pass\n {source}")
    with pytest.raises(ConfigError, match=said):
        load_declaration(EnvConfig(path=str(path)))
