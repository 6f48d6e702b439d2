"""Work in a forked process: it sees everything as it was, and can harm nobody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from laminar.coordinator.background import ChildBackground

LARGE = 1_000_000
WAIT_S = 20.0


class Log:
    def __init__(self) -> None:
        self.warnings: list[dict[str, Any]] = []

    def warning(self, message: str, **fields: Any) -> None:
        self.warnings.append(fields)


@pytest.fixture
def log() -> Log:
    return Log()


def children() -> set[int]:
    """Their pids, also of those that nobody has waited for."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def forked(log: Log) -> Iterator[ChildBackground]:
    forked = ChildBackground(log)
    yield forked
    forked.close()


def answer_of(
    forked: ChildBackground, work: Callable[[], bytes], then: Callable[[], None] = int
) -> Any:
    """Of large work; `then` happens after it was given."""
    answers: list[bytes | None] = []
    forked.run("test", LARGE, work, answers.append)
    then()
    assert not answers, "it was done here"
    deadline = time.monotonic() + WAIT_S
    while not answers and time.monotonic() < deadline:
        time.sleep(0.005)
        forked.collect_results()
    return answers[0]


def test_large_work_sees_the_state_of_its_moment(forked: ChildBackground) -> None:
    state = {"seq": 1}
    work = lambda: b"%d %d" % (state["seq"], os.getpid())  # noqa: E731
    seq, pid = answer_of(forked, work, lambda: state.update(seq=2)).split()
    assert int(seq) == 1 and int(pid) != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)  # nothing is left of it


def test_small_work_is_done_at_once(forked: ChildBackground) -> None:
    answers: list[bytes | None] = []
    forked.run("test", 1, lambda: b"%d" % os.getpid(), answers.append)
    assert (
        answers == [b"%d" % os.getpid()]
        and forked.can_run_inline(1)
        and not forked.can_run_inline(LARGE)
    )


def test_small_work_raises_here(forked: ChildBackground) -> None:
    def fails() -> bytes:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        forked.run("test", 1, fails, lambda answer: None)


def test_failure_is_counted_and_told_once(forked: ChildBackground, log: Log) -> None:
    def fails() -> bytes:
        raise OSError("disk full")

    assert answer_of(forked, fails) is None and answer_of(forked, fails) is None
    assert forked.failed == {("test", "OSError: disk full"): 2}
    assert log.warnings == [{"what": "test", "reason": "OSError: disk full"}]


def test_close_ends_what_is_at_work(forked: ChildBackground) -> None:
    before = children()  # of other tests of this process
    forked.run("test", LARGE, lambda: time.sleep(60) or b"", lambda answer: None)
    assert len(children() - before) == 1
    forked.close()
    deadline = time.monotonic() + WAIT_S
    while children() - before:
        assert time.monotonic() < deadline
        forked.collect_results()


def test_signals_do_not_reach_the_handlers_of_the_parent(forked: ChildBackground) -> None:
    """They would write into the pipe of the parent's loop, which would take them for its own."""
    reading, writing = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(writing, b"handled"))
    try:

        def asks_for_it() -> bytes:
            os.kill(os.getpid(), signal.SIGTERM)
            return b"went on"

        assert answer_of(forked, asks_for_it) == b"went on"
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert os.read(reading, 10) == b"handled", "the parent has lost its own"
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reading)
        os.close(writing)


def test_a_fork_that_fails_is_a_failure_of_the_work(
    forked: ChildBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "fork", fork)
    answers: list[bytes | None] = []
    forked.run("test", LARGE, lambda: b"", answers.append)
    assert answers == [None] and forked.failed == {("test", "no memory"): 1}
