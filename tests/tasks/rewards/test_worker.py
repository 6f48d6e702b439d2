"""The worker process alone: its channel, and that it never outlives its use."""

import signal
import subprocess
import sys

import msgspec
import psutil
import pytest

from laminar.run.process_guard import guard_command
from laminar.tasks.data.prompts import PromptRow
from laminar.tasks.pipe_frames import LENGTH, encode_frame
from laminar.tasks.rewards.results import FunctionSpec, RewardCall, RewardResult, RewardSpec
from laminar.tasks.rewards.worker import CallScored, WorkerReady, WorkerRefused, WorkerStart

pytestmark = pytest.mark.process


def start(tmp_path, body):
    path = tmp_path / "reward.py"
    path.write_text(f"import os, re, subprocess, time\ndef f(completion): {body}")
    spec = RewardSpec(
        "trajectory", [FunctionSpec("custom", style="single", path=str(path), name="f")]
    )
    return WorkerStart(spec)


CALL = RewardCall(PromptRow(0, "q", "a", {}, "test"), [("x", [1])])


def talk(worker, message):
    worker.stdin.write(encode_frame(message))
    worker.stdin.flush()


def hear(worker):
    body = worker.stdout.read(LENGTH.unpack(worker.stdout.read(LENGTH.size))[0])
    return msgspec.msgpack.decode(body, type=WorkerReady | WorkerRefused | CallScored)


@pytest.fixture
def worker():
    command = guard_command(0, "laminar.tasks.rewards.worker")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        yield process
        process.kill()


def test_a_busy_worker_dies_when_stdin_closes(worker, tmp_path):
    talk(worker, start(tmp_path, "time.sleep(1000)"))
    assert hear(worker) == WorkerReady()
    talk(worker, CALL)
    worker.stdin.close()
    assert worker.wait(timeout=20) == -signal.SIGKILL


def test_an_idle_worker_ends_by_itself_when_stdin_closes(worker, tmp_path):
    talk(worker, start(tmp_path, "return 1.0"))
    assert hear(worker) == WorkerReady()
    talk(worker, CALL)
    assert hear(worker) == CallScored([RewardResult(1.0)])
    worker.stdin.close()
    assert worker.wait(timeout=20) == 0


def test_a_worker_that_holds_the_interpreter_dies_when_stdin_closes(worker, tmp_path):
    """A long match keeps any thread of the worker from running."""
    talk(worker, start(tmp_path, "return float(bool(re.match('(a+)+$', 'a' * 64 + 'b')))"))
    assert hear(worker) == WorkerReady()
    talk(worker, CALL)
    worker.stdin.close()
    assert worker.wait(timeout=20) == -signal.SIGKILL


@pytest.mark.parametrize("killed", [False, True], ids=["parent", "worker"])
def test_a_daemon_of_a_function_does_not_outlive_its_worker(worker, tmp_path, killed):
    leave = "subprocess.check_output(['setsid', 'sh', '-c', 'sleep 1000 >/dev/null & echo $!'])"
    talk(worker, start(tmp_path, f"return float({leave})"))
    assert hear(worker) == WorkerReady()
    talk(worker, CALL)
    daemon = psutil.Process(int(hear(worker).results[0].reward))
    if killed:
        psutil.Process(worker.pid).children()[0].kill()
    worker.stdin.close()
    assert worker.wait(timeout=20) == (-signal.SIGKILL if killed else 0)
    assert not daemon.is_running()


def test_a_refusal_says_why(worker, tmp_path):
    talk(worker, start(tmp_path, "return 1.0\nraise ValueError('boom')"))
    reply = hear(worker)
    assert isinstance(reply, WorkerRefused)
    assert "reward.py does not import: ValueError: boom (reward.py:3)" in reply.reason


def test_a_worker_loads_no_heavy_library():
    code = "import sys, laminar.tasks.rewards.worker as w; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {"torch", "transformers", "numpy", "reasoning_gym", "math_verify", "pyarrow", "sympy"}
    assert not heavy & loaded
