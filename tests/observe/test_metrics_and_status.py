"""metrics.jsonl and status.json, from a run of the random world."""

from __future__ import annotations

import json
from pathlib import Path

from laminar.core.machine import Machine
from laminar.observe.metrics import MetricsWriter
from laminar.observe.status import StatusWriter
from tests.core.world import World
from tests.core.world_parts import settings


def small_world() -> World:
    return World(settings(test_freq=2), num_eval=4, seed=3).run()


def feed(observer: MetricsWriter | StatusWriter, world: World, until: int | None = None) -> None:
    machine = Machine()
    for stamped, _ in world.log[:until]:
        observer(stamped, machine.handle(stamped), machine.state)


def lines(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_coordinator_that_comes_back_writes_each_figure_once(tmp_path: Path) -> None:
    """It replays its log through a new writer; what is in the file stays, the rest follows."""
    world = small_world()
    once, twice = tmp_path / "once", tmp_path / "twice"
    for directory in (once, twice):
        directory.mkdir()
    feed(MetricsWriter(once, tensorboard=False), world)
    feed(MetricsWriter(twice, tensorboard=False), world, until=len(world.log) // 2)
    assert 0 < len(lines(twice)) < len(lines(once))
    with open(twice / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ev')  # the crash cut a line short
    feed(MetricsWriter(twice, tensorboard=False), world)
    whole = [line for line in (twice / "metrics.jsonl").read_text().splitlines() if "}" in line]
    events = [json.loads(line[line.rindex('{"step"') :])["event"] for line in whole]
    assert events == [line["event"] for line in lines(once)]


def test_steps_and_evaluations_have_their_lines(tmp_path: Path) -> None:
    feed(MetricsWriter(tmp_path, tensorboard=False), small_world())
    steps = [line["step"] for line in lines(tmp_path) if "staleness/mean" in line]
    shares = [line["step"] for line in lines(tmp_path) if "val/version" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (shares[0], shares[-1]) == (0, 6)


def test_status_tells_the_last_state(tmp_path: Path) -> None:
    feed(StatusWriter(tmp_path, clock=iter(range(10**9)).__next__), small_world())
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["phase"] == "ended"
    assert status["step"] == 6
    assert status["processes"].keys() == {
        "node-0",
        "store-0",
        "relay-0",
        "trainer-0",
        "rollout-0",
        "rollout-1",
    }
