"""Real worker processes: verdicts of user code, time limits, losses, order, start and end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import uvloop

from laminar.actors.system.reward_output import OutputLog
from laminar.config import ConfigError, DataConfig, resolve_config
from laminar.tasks.data.prompts import PromptRow, load_prompts
from laminar.tasks.rewards.results import FunctionSpec, RewardCall, RewardSpec
from laminar.tasks.rewards.reward_functions import reward_spec
from laminar.tasks.rewards.worker_pool import RewardPool, RewardWorkerLost

pytestmark = pytest.mark.process
LIMIT_S = 0.5

#: The response says what the function does; `{n}` is a file that counts the calls.
BEHAVIOURS = """
    import asyncio, ctypes, os, signal, subprocess, sys, time

    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        what, _, more = solution_str.partition(" ")
        with open({n!r}, "a") as count:
            count.write(what + "\\n")
        if what == "raise":
            raise ValueError("boom")
        if what == "sleep":
            time.sleep(1000)
        if what == "await":
            await asyncio.sleep(1000)
        if what == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if what in ("child", "leave"):
            child = subprocess.Popen(["sleep", "1000"])
            with open(more, "w") as pid:
                pid.write(str(child.pid))
            time.sleep(1000) if what == "child" else os._exit(6)
        if what == "nan":
            return float("nan")
        if what == "dict":
            return {{"score": 0.5, "acc": 1.0}}
        if what == "none":
            return None
        if what == "print":
            print("printed" * 1000)
            os.write(1, b"raw bytes\\n")
            subprocess.run(["echo", "from a child"])
            return float(sys.stdin.read() == "")
        if what == "exit":
            os._exit(3)
        if what == "crash":
            ctypes.string_at(0)
        if what == "fork":
            if os.fork() == 0:
                os.setsid()
                time.sleep(3)
                os._exit(0)
            os._exit(4)
        if what == "once" and not os.path.exists(more):
            open(more, "w").close()
            os._exit(5)
        if what == "spawn":
            return float(subprocess.Popen(["sleep", "1000"]).pid)
        if what == "pid":
            return float(os.getpid())
        if what == "env":
            return float(os.environ[more])
        return float(solution_str == ground_truth)
"""


@pytest.fixture
def counted(tmp_path):
    return tmp_path / "calls"


@pytest.fixture
def spec(tmp_path, counted):
    return spec_for(tmp_path, BEHAVIOURS.format(n=str(counted)))


def spec_for(tmp_path, source):
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(source))
    flat = {"model.name": "m", "data.train_files": ["t.jsonl"]}
    return reward_spec(resolve_config({**flat, "reward.custom_reward_function.path": str(path)}))


@contextlib.asynccontextmanager
async def pool_of(spec, **settings):
    pool = RewardPool(spec, **{"timeout_s": 30.0, "error_score": -1.0, **settings})
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def call(*texts, truth="right"):
    return RewardCall(PromptRow(0, "q", truth, {}, "test"), [(text, [1]) for text in texts])


def summary(results):
    return [(r.reward, r.reason) for r in results]


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def ends(pid):
    while running(pid):
        await asyncio.sleep(0.02)


async def test_scores_errors_and_extras_in_order(spec):
    async with pool_of(spec, workers=2) as pool:
        results = await pool.compute_rewards(call("right", "wrong", "raise", "nan", "dict", "none"))
    assert summary(results) == [
        (1.0, "ok"),
        (0.0, "ok"),
        (-1.0, "error"),
        (-1.0, "not-a-number"),
        (0.5, "ok"),
        (None, "unscored"),
    ]
    assert results[2].detail.startswith("ValueError: boom (reward.py:")
    assert results[4].extras == {"acc": 1.0}
    assert (pool.workers_lost, pool.workers_killed) == (0, 0)


async def test_what_a_function_prints_goes_to_whoever_wants_it_and_not_to_the_terminal(spec, capfd):
    """Nor does it touch the channel: the calls are answered."""
    printed = bytearray()
    async with pool_of(spec, on_output=printed.extend) as pool:
        assert summary(await pool.compute_rewards(call("print", "right"))) == [
            (1.0, "ok"),
            (1.0, "ok"),
        ]
    assert capfd.readouterr() == ("", "")
    for text in ("printed" * 1000, "raw bytes", "from a child"):
        assert text in printed.decode()


async def test_where_a_call_hangs_is_printed(spec):
    """The worker is killed and says nothing more; its stack, printed before, names the line."""
    printed = bytearray()
    async with pool_of(spec, timeout_s=LIMIT_S, on_output=printed.extend) as pool:
        assert summary(await pool.compute_rewards(call("sleep"))) == [(-1.0, "timeout")]
    assert "reward.py" in printed.decode() and "in compute_score" in printed.decode()


def test_the_file_of_what_is_printed_has_a_limit(tmp_path):
    """A function that prints for days fills no disk; what it printed first is kept."""
    path = tmp_path / "rollout-0.reward.log"
    log = OutputLog(path, bytes_max=20)
    log.write([b"first line\n", b"second line\n"])
    log.write([b"third line\n"])
    kept = path.read_bytes()
    assert kept.startswith(b"first line\nsecond li") and kept.endswith(b"is dropped\n")
    OutputLog(path, bytes_max=20).write([b"of the next process\n"])  # the limit is that of the file
    assert path.read_bytes() == kept


@pytest.mark.parametrize("what", ["sleep", "await", "deaf"])
async def test_a_call_that_runs_too_long_is_a_timeout(spec, counted, what):
    async with pool_of(spec, timeout_s=LIMIT_S) as pool:
        (before,) = await pool.compute_rewards(call("pid"))
        (late,) = await pool.compute_rewards(call(what))
        assert not running(int(before.reward))
        (after,) = await pool.compute_rewards(call("pid"))
    assert (late.reward, late.reason) == (-1.0, "timeout")
    assert "0.5 s" in late.detail
    assert after.reason == "ok" and after.reward != before.reward
    assert (pool.workers_lost, pool.workers_killed) == (0, 1)
    assert counted.read_text().split() == ["pid", what, "pid"]  # a timeout is not tried again


async def test_what_the_function_started_dies_with_it(spec, tmp_path):
    async with pool_of(spec, timeout_s=LIMIT_S, max_retries=0) as pool:
        assert summary(await pool.compute_rewards(call(f"child {tmp_path / 'pid'}"))) == [
            (-1.0, "timeout")
        ]
        await ends(int((tmp_path / "pid").read_text()))
        with pytest.raises(RewardWorkerLost, match="exit code 6"):
            await pool.compute_rewards(call(f"leave {tmp_path / 'pid'}"))
        await ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("what", "cause"), [("exit", "exit code 3"), ("crash", "SIGSEGV"), ("fork", "exit code 4")]
)
async def test_a_worker_that_dies_is_lost_and_never_a_score(spec, counted, what, cause):
    async with pool_of(spec, max_retries=1) as pool:
        with pytest.raises(RewardWorkerLost, match=f"lost 2 times.*{cause}"):
            await pool.compute_rewards(call(what))
        assert counted.read_text().split() == [what, what]
        assert pool.workers_lost == 2
        assert summary(await pool.compute_rewards(call("right"))) == [(1.0, "ok")]


async def test_a_lost_call_is_made_again(spec, tmp_path):
    async with pool_of(spec, max_retries=1) as pool:
        assert summary(await pool.compute_rewards(call(f"once {tmp_path / 'mark'}"))) == [
            (0.0, "ok")
        ]
        assert pool.workers_lost == 1


async def test_a_worker_that_dies_between_calls_costs_no_retry(spec):
    async with pool_of(spec, max_retries=0) as pool:
        worker, child = (int(r.reward) for r in await pool.compute_rewards(call("pid", "spawn")))
        os.kill(worker, signal.SIGKILL)
        await ends(worker)
        await ends(child)
        while not pool._workers[0].channel.ended.done():  # its guard ends after them
            await asyncio.sleep(0.01)
        assert summary(await pool.compute_rewards(call("right"))) == [(1.0, "ok")]
        assert pool.workers_lost == 0


async def test_uvloop_gives_the_same_verdicts(spec):
    async def scenario():
        async with pool_of(spec, timeout_s=LIMIT_S, max_retries=0) as pool:
            assert summary(await pool.compute_rewards(call("right", "sleep"))) == [
                (1.0, "ok"),
                (-1.0, "timeout"),
            ]
            with pytest.raises(RewardWorkerLost, match="exit code 4"):
                await pool.compute_rewards(call("fork"))

    await asyncio.to_thread(uvloop.run, scenario())


async def test_workers_run_at_the_same_time_and_no_more(tmp_path):
    """Each call waits until it sees as many calls at work as there are workers."""
    source = f"""
        import os, time
        def compute_score(solution_str):
            folder = {str(tmp_path)!r}
            open(f"{{folder}}/on-{{solution_str}}", "w").close()
            while len([n for n in os.listdir(folder) if n.startswith("on-")]) < 2:
                time.sleep(0.01)
            seen = len([n for n in os.listdir(folder) if n.startswith("on-")])
            time.sleep(0.1)
            os.rename(f"{{folder}}/on-{{solution_str}}", f"{{folder}}/off-{{solution_str}}")
            return float(seen)
    """
    async with pool_of(spec_for(tmp_path, source), workers=2) as pool:
        assert [r.reward for r in await pool.compute_rewards(call("a", "b"))] == [2.0, 2.0]


async def test_one_worker_takes_calls_in_the_order_of_asking(spec, counted):
    async with pool_of(spec) as pool:
        names = [f"call{i}" for i in range(12)]
        await asyncio.gather(*(pool.compute_rewards(call(name)) for name in names))
    assert counted.read_text().split() == names


async def test_a_cancelled_caller_frees_its_worker(spec):
    async with pool_of(spec) as pool:
        (worker,) = await pool.compute_rewards(call("pid"))
        waiting = asyncio.create_task(pool.compute_rewards(call("sleep")))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await ends(int(worker.reward))
        assert summary(await pool.compute_rewards(call("right"))) == [(1.0, "ok")]


async def test_a_group_is_one_call(tmp_path):
    source = """
        import os, time
        def f(prompts, completions, **columns):
            if "sleep" in completions:
                time.sleep(1000)
            if "raise" in completions:
                raise ValueError("boom")
            return [None if c == "none" else float(len(completions)) for c in completions]
    """
    async with pool_of(spec_for(tmp_path, source), workers=2, timeout_s=LIMIT_S) as pool:
        found = summary(await pool.compute_rewards(call("a", "none", "b")))
        assert found == [(3.0, "ok"), (None, "unscored"), (3.0, "ok")]
        assert summary(await pool.compute_rewards(call("a", "raise"))) == [(-1.0, "error")] * 2
        assert summary(await pool.compute_rewards(call("a", "sleep"))) == [(-1.0, "timeout")] * 2


async def test_the_environment_reaches_the_workers(spec):
    async with pool_of(spec, env={"LAMINAR_TEST_VALUE": "2.5"}) as pool:
        assert (await pool.compute_rewards(call("env LAMINAR_TEST_VALUE")))[0].reward == 2.5


async def test_built_in_scorers_run_in_workers():
    async with pool_of(RewardSpec("trajectory", [FunctionSpec("math")])) as pool:
        found = await pool.compute_rewards(call(r"\boxed{\frac12}", "0.4", truth="0.5"))
        assert summary(found) == [(1.0, "ok"), (0.0, "ok")]
    rows = load_prompts(DataConfig(dataset="spell_backward", dataset_size=1, val_size=0)).train
    answer = (f"<answer>{rows[0].ground_truth}</answer>", [])
    async with pool_of(
        RewardSpec("trajectory", [FunctionSpec("dataset", dataset="spell_backward")])
    ) as pool:
        assert summary(await pool.compute_rewards(RewardCall(rows[0], [answer]))) == [(1.0, "ok")]


# --- start and end


async def test_a_function_that_does_not_load_fails_the_start(spec, tmp_path):
    (tmp_path / "reward.py").write_text("import gone")
    with pytest.raises(ConfigError, match=r"reward.py does not import: .*No module named 'gone'"):
        await RewardPool(spec).start()


@pytest.mark.parametrize(
    ("source", "limit_s", "said"),
    [
        ("import os; os._exit(7)", 60.0, "exit code 7"),
        ("import time; time.sleep(1000)", 0.3, r"did not load within 0\.3 s"),
    ],
)
async def test_a_worker_that_does_not_load_fails_the_start(spec, tmp_path, source, limit_s, said):
    (tmp_path / "reward.py").write_text(source)
    with pytest.raises(RewardWorkerLost, match=said):
        await RewardPool(spec, workers=2, start_timeout_s=limit_s).start()


async def test_a_file_that_breaks_later_is_a_lost_worker(spec, tmp_path):
    async with pool_of(spec, max_retries=1) as pool:
        (tmp_path / "reward.py").write_text("import gone")
        with pytest.raises(RewardWorkerLost, match="No module named 'gone'"):
            await pool.compute_rewards(call("exit"))


async def test_close_ends_busy_workers_and_their_callers(spec):
    pool = RewardPool(spec, workers=1)
    await pool.start()
    (worker,) = await pool.compute_rewards(call("pid"))
    calls = [asyncio.create_task(pool.compute_rewards(call("sleep"))) for _ in range(3)]
    await asyncio.sleep(0.2)
    await pool.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, RewardWorkerLost)
    assert not running(int(worker.reward))
    with pytest.raises(RewardWorkerLost, match="not running"):
        await pool.compute_rewards(call("right"))
    await pool.close()  # twice is once


def test_a_worker_loads_no_heavy_library():
    code = "import sys, laminar.tasks.rewards.worker as w; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {"torch", "transformers", "numpy", "reasoning_gym", "math_verify", "pyarrow", "sympy"}
    assert not heavy & loaded
