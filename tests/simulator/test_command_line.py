"""`python -m tools.simulator`: what it prints and what it answers to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.simulator.main import main

SMALL = """
[work]
replicas = 2
nodes = 1
total_steps = 2
num_eval = 0
batch_strategy = "deadline"
[faults]
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


def test_events_and_marks_are_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("-c", config, "--seed", 1, "--events", "--marks") == 0
    out = capsys.readouterr().out
    assert "coordinator-started" in out.splitlines()[0]
    assert any(line.endswith("  event:TrajectoryFinished") for line in out.splitlines())
    assert "expected marks were hit" in out


def test_many_seeds_are_summed_up(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("-c", config, "--seeds", "1..3") == 0
    assert capsys.readouterr().out.startswith("3 runs, 0 broken, 0 ended early by a loss; ")


def test_broken_promise_has_a_story_and_a_way_to_see_it_again(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.actors.protocol.CommandFilter.take", lambda *_: True)
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--seeds", "5..1"), "--seeds '5..1': give two numbers, such as 1..1000"),
        (("--seeds", "many"), "--seeds 'many'"),
        (("--seed", 1, "-j", 0), "--jobs 0"),
        (("--seeds", "1..2", "--events"), "--events shows one run"),
        (("--seed", "x"), "--seed"),
        (("--see", 1), "--see"),
        (("--seed", 1, "--seeds", "1..2"), "--seeds"),
    ],
)
def test_mistakes_are_one_sentence(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], told: str
) -> None:
    assert sim("-c", config, *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("simulator: ") and told in err and err.count("\n") == 1
