"""laminar clean: what it says, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.cli import clean
from laminar.cli.commands import run_command
from laminar.weights.arena.arena import Arena, arena_path, sweep_arenas


def test_dead_memory_goes_and_living_memory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clean, "sweep_arenas", lambda: sweep_arenas(tmp_path))
    dead = Arena.create(arena_path("run", "1a", "node-0", "b1", tmp_path), 3, 64)
    living = Arena.create(arena_path("run", "1a", "node-0", "b2", tmp_path), 3, 64)
    dead.populate_all()
    dead.close()
    said = _clean(capsys)
    assert said == [f"removed {dead.path} (16384 bytes)", "freed 16384 bytes of shared memory"]
    assert list(tmp_path.iterdir()) == [living.path]
    assert _clean(capsys) == ["no shared memory of killed runs found"]


def _clean(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run_command(["clean"]) == 0
    return capsys.readouterr().out.splitlines()
