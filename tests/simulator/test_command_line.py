"""`python -m tools.simulator`: what it prints and what it answers to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.simulator.main import main

SMALL = """
rollout.replicas = 2
trainer.total_training_steps = 2
data.val_size = 0
algorithm.batch_strategy = "deadline"
world.nodes = 1
[world.faults]
calm_share = 1.0
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "sim.toml"
    file.write_text(SMALL)
    return file


def sim(*words: object) -> int:
    return main([*map(str, words)])


def test_one_seed_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("-c", config, "--seed", 1) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("seed 1: complete; ") and "faults: none" in out


def test_broken_promise_has_a_story_and_a_way_to_see_it_again(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.actors.protocol.CommandFilter.accept_id", lambda *_: True)
    text = SMALL.replace(
        "calm_share = 1.0", "menu = ['coordinator-killed']\nshare = 1.0\nevery_s = 0.5"
    )
    config.write_text(text)
    assert sim("-c", config, "--seeds", "1..4") == 1
    out = capsys.readouterr().out
    assert "broke acted_once: " in out and "story of " in out
    seed = out.partition("seed ")[2].split()[0]
    assert f"reproduce: python -m tools.simulator -c {config} --seed {seed} --events" in out
    assert sim("-c", config, "--seed", seed) == 1
