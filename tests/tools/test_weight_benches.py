"""The benches of the weight plane do what they say, small; no figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools.bench import relay_kills, weights
from tools.bench.weights_baselines import Group, buffers, gloo, star

pytestmark = pytest.mark.process

SIZE = 3 << 20


def source(machines: int) -> list:
    memory = buffers(machines, SIZE)
    np.frombuffer(memory[0], np.uint8)[:] = np.random.default_rng(0).integers(0, 256, SIZE)
    return memory


def test_a_star_and_gloo_bring_the_bytes_to_all(tmp_path: Path) -> None:
    memory = source(3)
    made = [
        star(memory),
        gloo(memory, tmp_path / "whole", chunked=False),
        gloo(memory, tmp_path / "chunked", chunked=True),
    ]
    for group in made * 2:
        found = group.round()  # it compares the bytes
        assert found.seconds > 0 and found.cpu_seconds > 0
    for group in made:
        group.close()


def test_bytes_that_did_not_arrive_are_found() -> None:
    group = Group(lambda index, view: lambda: None, source(2))
    with pytest.raises(RuntimeError, match="machine 1 did not get the bytes"):
        group.round()
    group.close()


def test_a_receiver_checks_every_byte_that_comes() -> None:
    memory = source(2)
    checked = np.frombuffer(buffers(1, 4096)[0], np.uint64)  # the check runs in its process

    def count(piece: memoryview) -> None:
        checked[0] += piece.nbytes

    group = star(memory, check=count)
    group.round()
    group.close()
    assert checked[0] == SIZE


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [
        ("pull_ratio", 0.85, True),
        ("pull_ratio", 0.84, False),
        ("chain_cpu_per_gb_vs_hop", 1.3, False),
    ],
)
def test_a_figure_with_a_limit_says_whether_it_is_met(
    name: str, value: float, met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weights.show(weights.figure(name, value, "ratio"))
    assert json.loads(capsys.readouterr().out)["met"] is met


def test_everybody_else_gets_the_version_when_relays_are_killed() -> None:
    found = relay_kills.run(relay_kills.TINY, kills=3, seed=1)
    assert len(found.splice_s) == 3
    assert found.wrong_digests == found.incomplete == 0
