"""A rank of the trainer is killed or stands still, in a step, in a publish and in a checkpoint, the
first one, another one and both: the loss is noticed in time, the run goes on to its end, its books
agree, the weights are those of `laminar retrain`, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from laminar.coordinator.system import RealDisk
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.events.codec import decode_event
from laminar.run.fail_points import STOP_VARIABLE
from tests.run.conftest import ROOT, Finished, arenas, check_books, command, laminar

pytestmark = [pytest.mark.process, pytest.mark.long]
LEASE_S = 8
KILLED_S, STOPPED_S = 2.0, LEASE_S + 5.0
"""How late the log may say that the trainer has ended."""
SETTINGS = (
    "trainer.ranks=2",
    "trainer.total_training_steps=32",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=2000",
    f"coordinator.node_lease_ms={LEASE_S * 1000}",
    "recovery.max_restarts=20",
    "recovery.restart_window_s=1",
)
NOTHING, KILL, STOP = signal.SIGCONT, signal.SIGKILL, signal.SIGSTOP
LOSSES = {
    "kill rank 1": (NOTHING, KILL),
    "kill rank 0": (KILL, NOTHING),
    "kill both": (KILL, KILL),
    "stop rank 1": (NOTHING, STOP),
    "stop rank 0": (STOP, NOTHING),
    "stop both": (STOP, STOP),
}
"""What rank 0 gets, and rank 1, which stands at the point."""
WAIT_S = 240.0


@contextmanager
def begun(directory: Path, stop: str) -> Iterator[subprocess.Popen[str]]:
    words = [*SETTINGS, f"run.output_dir={directory}", "run.name=run"]
    run = subprocess.Popen(
        command("train", "-c", "configs/recipes/words/run.toml", *words),
        cwd=ROOT,
        env={**os.environ, STOP_VARIABLE: stop},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield run
    finally:
        run.terminate()
        run.wait()


def rank_1(run: Path, started: subprocess.Popen[str]) -> psutil.Process:
    """The process that stands at the point."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and started.poll() is None:
        for process in _of(run):
            if process.status() == psutil.STATUS_STOPPED:
                return process
        time.sleep(0.05)
    raise AssertionError("rank 1 has not come to the point")


def _of(run: Path) -> list[psutil.Process]:
    """The ranks of a run that rank 0 has started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "laminar.actors.system.rank_process" in words and str(run) in words:
            found.append(process)
    return found


def ends(run: Path) -> list[int]:
    """When the trainer has ended and is started again, by the log, in time.time_ns()."""
    records = (record for _, record in read_log(RealDisk(run / "events")))
    found, zero = [], 0
    for record in records:
        if isinstance(record, EventRecord):
            match decode_event(record.event):
                case ev.CoordinatorStarted(clock_ns=now):
                    zero = now - record.time_ns
                case ev.ProcessExited(actor="trainer-0", restarting=True):
                    found.append(zero + record.time_ns)
                case ev.ProcessExited(restarting=True) as other:
                    raise AssertionError(f"{other.actor} has ended, too")
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("point", "times"), [("rank-step", 5), ("rank-fill", 6), ("rank-write", 3)]
)
def test_the_run_goes_on_whichever_rank_is_lost(tmp_path: Path, point: str, times: int) -> None:
    """Each process trains on before it stands there: a batch that ends three is given up."""
    run, mark = tmp_path / "run", tmp_path / "run" / f"failed-{point}-{times}"
    began = []
    with begun(tmp_path, f"{point}:{times}") as started:
        for what, (to_first, to_other) in LOSSES.items():
            other = rank_1(run, started)
            first = other.parent()
            assert first is not None
            mark.unlink()  # the next process stops there, too
            began.append(time.time_ns())
            first.send_signal(to_first)
            other.send_signal(to_other)
            _, alive = psutil.wait_procs([first, other], timeout=WAIT_S)
            assert not alive, what
        mark.touch()  # no further one
        output, _ = started.communicate(timeout=WAIT_S)
    assert started.returncode == 0, output
    finished = Finished(run, 0, output)
    for (what, signals), since, noticed in zip(LOSSES.items(), began, ends(run), strict=True):
        after_s = (noticed - since) / 1e9
        print(f"{point}, {what}: noticed after {after_s:.1f} s")
        assert after_s < (STOPPED_S if STOP in signals else KILLED_S), what
    check_books(finished)
    again = laminar("retrain", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
    assert _of(run) == [] and arenas(run) == []
