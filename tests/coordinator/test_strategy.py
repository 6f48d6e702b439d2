"""A user's batch strategy: a real file in a real process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.coordinator.strategy import StrategyWorker, load_strategy
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names.ids import GroupId

WAIT_S = 20


def question(step: int = 3) -> cmd.ProposeBatch:
    candidates = tuple(
        cmd.BatchCandidate(
            group=GroupId(f"0.{i}"),
            row_index=i,
            deadline=5,
            step=3,
            order=i,
            num_tokens=100 - i,
            rewards=(0.0, 1.0),
        )
        for i in range(4)
    )
    return cmd.ProposeBatch(to="strategy", step_index=step, count=2, candidates=candidates)


async def ask(path: Path, *questions: cmd.ProposeBatch) -> list[ev.BatchProposed]:
    answers: asyncio.Queue[ev.BatchProposed] = asyncio.Queue()
    worker = StrategyWorker(f"{path}:choose", answers.put_nowait)
    try:
        found = []
        for one in questions:
            worker.propose_batch(one)
            found.append(await asyncio.wait_for(answers.get(), WAIT_S))
        return found
    finally:
        await worker.close()


def write(directory: Path, body: str) -> Path:
    path = directory / "strategy.py"
    path.write_text(f"def choose(candidates, count):\n    {body}\n")
    return path


async def test_it_sees_the_metadata_and_its_prints_do_no_harm(tmp_path: Path) -> None:
    body = (
        "print('hello'); "
        "return [c['group'] for c in sorted(candidates, key=lambda c: c['num_tokens'])][:count]"
    )
    first, second = await ask(write(tmp_path, body), question(3), question(4))
    assert (first.step_index, first.groups) == (3, ("0.3", "0.2"))
    assert (second.step_index, second.groups) == (4, ("0.3", "0.2"))


async def test_a_failure_is_an_empty_answer_with_its_reason(tmp_path: Path) -> None:
    (answer,) = await ask(write(tmp_path, "raise KeyError('deadlin')"), question())
    assert answer.groups == ()
    assert "deadlin" in answer.detail


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (None, "f", ["deadline", "priority"]),
        ("import nothing_of_that_name\n", "f", ["nothing_of_that_name"]),
        ("x = 1\n", "f", ["f"]),
        ("f = 1\n", "f", ["not a function"]),
    ],
)
def test_what_is_no_strategy_is_refused(
    tmp_path: Path, text: str | None, name: str, words: list[str]
) -> None:
    path = tmp_path / "s.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_strategy(f"{path}:{name}")
    assert all(word in str(caught.value) for word in [*words, "batch_strategy"])


async def test_an_answer_that_was_not_on_offer_is_refused_before_it_reaches_the_log(
    tmp_path: Path,
) -> None:
    """Its size is the user's: a million long names must not become a record of the log."""
    (answer,) = await ask(write(tmp_path, "return ['x' * 100] * 10_000"), question())
    assert answer.groups == ()
    assert "10000 of them not offered" in answer.detail
    (failed,) = await ask(write(tmp_path, "raise ValueError('y' * 1_000_000)"), question())
    assert (failed.groups, len(failed.detail)) == ((), 500)
    (flooded,) = await ask(write(tmp_path, "return ['z' * (17 << 20)]"), question())
    assert flooded.groups == () and "process ended" in flooded.detail
