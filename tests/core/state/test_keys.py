"""Keys of commands and names of timers: the texts that logs have, and back."""

from __future__ import annotations

import pytest

from laminar.core.state import keys
from laminar.core.state.keys import CommandKey, Timer, TimerKind, TimerName


@pytest.mark.parametrize(
    ("name", "text", "timer"),
    [
        (keys.START, "start", (TimerKind.START, "")),
        (keys.WEIGHTS, "weights", (TimerKind.WEIGHTS, "")),
        (keys.PAUSE, "pause", (TimerKind.PAUSE, "")),
        (keys.BATCH_WAIT, "batch-wait", (TimerKind.BATCH_WAIT, "")),
        (keys.resume("0.17.3"), "resume:0.17.3", (TimerKind.RESUME, "0.17.3")),
        (keys.progress("rollout-3.0"), "progress:rollout-3.0", (TimerKind.PROGRESS, "rollout-3.0")),
        (keys.rejoin("relay-2"), "rejoin:relay-2", (TimerKind.REJOIN, "relay-2")),
        (keys.receive("relay-2"), "receive:relay-2", (TimerKind.RECEIVE, "relay-2")),
        (keys.deadline(keys.TRAIN), "command:train", (TimerKind.COMMAND, keys.TRAIN)),
        (keys.deadline(keys.end(7)), "command:end:7", (TimerKind.COMMAND, keys.end(7))),
    ],
)
def test_timers(name: TimerName, text: str, timer: tuple[TimerKind, str]) -> None:
    assert name == text
    assert keys.parse_timer(name) == Timer(*timer)


def test_every_kind_of_timer_has_a_name_and_nothing_else_is_one() -> None:
    assert {keys.parse_timer(f"{kind}:x").kind for kind in TimerKind} == set(TimerKind)
    with pytest.raises(ValueError, match="no such kind"):
        keys.parse_timer("no such kind:x")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (keys.generate("0.17.3"), "generate:0.17.3"),
        (keys.score("0.17"), "score:0.17"),
        (keys.end(7), "end:7"),
        (keys.pull("rollout-0"), "pull:rollout-0"),
        (keys.forward("relay-0"), "forward:relay-0"),
        (keys.restart("relay-0"), "restart:relay-0"),
        (keys.stop("node-0"), "stop:node-0"),
        (keys.PUBLISH, "publish"),
        (keys.EXPORT, "export"),
        (keys.TRAIN, "train"),
        (keys.PROPOSE, "propose"),
    ],
)
def test_commands(key: CommandKey, text: str) -> None:
    assert key == text
