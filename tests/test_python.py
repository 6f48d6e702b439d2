"""Laminar from Python: what `import laminar` loads, what a run gives, how training ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.config import dump_config, load_config
from tools.kit.run_directory import make_run, world_log

MODEL = Path(__file__).parents[1] / "configs/models/spell-0.6m"
HEAVY = ("torch", "transformers", "zmq", "vllm", "reasoning_gym")
EMULATED: dict[str, Any] = {
    "rollout": {"engine": "emulated", "replicas": 1, "group_size": 2},
    "data.train_batch_size": 2,
    "trainer": {"total_training_steps": 2, "logger": []},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", world_log())
    settings = {"model": {"name": MODEL.as_posix()}, "data.dataset": "gcd", "seed": 7}
    (tmp_path / "run" / "config.toml").write_text(dump_config(load_config([settings])))
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"step": 1, "event": 9, "time_ns": 12, "reward/mean": 0.5, "by_origin/reward/0": 0.5}\n'
        '{"step": 1, "event": 11, "time_ns": 15, "val/version": 1, "val-core/x": 1}\n{"torn'
    )
    return tmp_path / "run"


def fresh(code: str) -> Any:
    """What an interpreter of its own prints last, as JSON."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def test_import_loads_nothing_and_reading_a_run_no_framework(run_dir: Path) -> None:
    loaded = "import json, sys; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    assert not {*HEAVY, "numpy", "pyarrow", "msgspec"} & {*fresh(f"import laminar; {loaded}")}
    read = f"r = laminar.open_run({str(run_dir)!r}); r.summary, r.metrics, r.config, r.samples()"
    found = {*fresh(f"import laminar; {read}; {loaded}")}
    assert not {*HEAVY} & found and "pyarrow" in found
    commands = fresh(f"from laminar.cli.commands import build_parser as b; b(); {loaded}")
    assert not {*HEAVY, "numpy", "rich", "asyncio"} & {*commands}, "for `laminar --help`"
    gym = fresh(f"from laminar.tasks.data.gym import create_dataset; {loaded}")
    assert "matplotlib" not in gym and "reasoning_gym" in gym


def test_a_run_gives_its_tables(run_dir: Path) -> None:
    run = laminar.open_run(run_dir)
    assert run.directory == run_dir and run.config["seed"] == 7
    assert run.metrics.to_pylist() == [
        {"step": 1, "event": 9, "time_ns": 12, "reward/mean": 0.5}
        | {"val/version": None, "val-core/x": None},
        {"step": 1, "event": 11, "time_ns": 15, "reward/mean": None}
        | {"val/version": 1.0, "val-core/x": 1.0},
    ]
    place = [{"step": 1, "event": 9, "time_ns": 12}, {"step": 1, "event": 11, "time_ns": 15}]
    shares = [{"by_origin/reward/0": 0.5}, {"by_origin/reward/0": None}]
    by_origin = [where | share for where, share in zip(place, shares, strict=True)]
    assert run.metrics_by_origin.to_pylist() == by_origin
    assert run.summary["steps"] == 3 and not (run_dir / "summary.json").exists()
    trained = run.samples(step=1)
    assert set(trained["step"].to_pylist()) == {1} and set(trained["status"].to_pylist()) == {
        "trained"
    }
    (worst,) = run.samples(worst=1)["reward"].to_pylist()
    assert worst == min(s for s in run.samples()["reward"].to_pylist() if s is not None)
    assert run.samples(n=2).num_rows == 2
    nothing = run.samples(search="is in no answer")
    assert nothing.num_rows == 0 and nothing.column_names == trained.column_names


def test_a_mistake_is_the_sentence_of_the_command(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(laminar.ConfigError, match="name a run directory"):
        laminar.open_run(tmp_path / "none")
    with pytest.raises(laminar.ConfigError, match="give at most one of step"):
        laminar.open_run(run_dir).samples(step=1, evaluation=0)
    with pytest.raises(laminar.ConfigError, match=r"^unknown key optim\.learning_rate; "):
        laminar.train({"optim": {"learning_rate": 1e-6}})
    with pytest.raises(laminar.ConfigError, match=r"optim\.lr = 'high' is not allowed"):
        laminar.train([run_dir / "config.toml", {"optim.lr": "high"}])
    with pytest.raises(laminar.ConfigError, match="exists; give another"):
        place = {"run": {"name": "run", "output_dir": tmp_path}}
        laminar.train([run_dir / "config.toml", place])
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        laminar.trian  # noqa: B018


@pytest.mark.process
def test_training_returns_the_run_or_raises_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a thread, as some notebooks do it; the signals of the program stay as they are."""
    handler = signal.getsignal(signal.SIGINT)
    found: list[laminar.Run] = []
    place = {"run": {"output_dir": tmp_path, "name": "ended"}}

    def train() -> None:
        found.append(laminar.train([EMULATED, place], quiet=True))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    assert found[0].summary["steps"] == 2 and found[0].directory == tmp_path / "ended"
    assert capfd.readouterr().out == ""


def test_a_run_that_fails_raises_its_reason(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laminar.coordinator.restarts import GiveUp
    from laminar.core.state.failures import FailureKind
    from laminar.launch import handle

    ends = {
        FailureKind.NO_SCORES: laminar.RunFailed,
        FailureKind.CRASHED: laminar.RunFailed,
        FailureKind.USER_MISTAKE: laminar.ConfigError,
    }
    config = [run_dir / "config.toml", {"run.output_dir": run_dir.parent, "run.name": "run"}]
    for failure, kind in ends.items():
        over = GiveUp.after_failure(failure, "reward", "no room")
        monkeypatch.setattr(handle, "run_training", lambda *_, over=over, **__: over)
        monkeypatch.setattr(handle, "place_of", lambda *_: None)
        with pytest.raises(kind, match="no room") as raised:
            laminar.train(config)
        assert kind is laminar.ConfigError or raised.value.run.directory == run_dir
    over = GiveUp.after_failure(FailureKind.STOPPED, "SIGINT")
    monkeypatch.setattr(handle, "run_training", lambda *_, **__: over)
    with pytest.raises(KeyboardInterrupt):
        laminar.train(config)
