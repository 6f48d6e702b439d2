"""An emulated run: no model, and everything else as it is."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.events import commands as cmd
from laminar.events import events as ev
from tests.run.conftest import Finished, history, laminar
from tools.bench.kills.lost_answers import lost_answers, read_log

pytestmark = pytest.mark.process

SMALL = [
    "rollout.engine=emulated",
    "rollout.replicas=5",
    "emulation.replicas_per_process=3",
    "rollout.group_size=4",
    "rollout.max_num_seqs=16",
    "rollout.progress_interval_ms=100",
    "data.dataset_size=300",
    "data.val_size=8",
    "data.max_prompt_length=32",
    "data.max_response_length=200",
    "data.train_batch_size=4",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "emulation.median_response=20",
    "emulation.train_s=0.1",
    "emulation.weights_mb=2",
    "repack.policy=best-fit",
    "repack.interval_ms=100",
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("emulated")
    done = laminar("train", *SMALL, f"run.output_dir={directory}", "run.name=run")
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(directory / "run", done.returncode, done.stdout)


def test_it_trains_and_its_books_agree(emulated: Finished) -> None:
    for command in (["audit"], ["log", "replay"]):
        assert run_command([*command, str(emulated.directory)]) == 0
    assert emulated.summary["steps"] == 4
    assert emulated.summary["trajectories_trained"] == 64
    loaded = [e for e in history(emulated.directory) if isinstance(e, ev.WeightsLoaded)]
    assert {e.version for e in loaded} > {0}
    assert max(e.probe_diff for e in loaded) == 0.0
    published = [e for e in history(emulated.directory) if isinstance(e, ev.WeightsPublished)]
    assert {e.num_bytes for e in published} == {2 << 20}


def test_stragglers_move_and_their_replicas_are_free_at_once(emulated: Finished) -> None:
    repack = emulated.summary["repack"]
    assert repack["moves"] > 0
    assert repack["replicas_freed"] == repack["replicas_emptied"] > 0
    assert repack["expired"] == 0


def test_replicas_share_processes(emulated: Finished) -> None:
    status = json.loads((emulated.directory / "status.json").read_text())
    pids = [status["processes"][f"rollout-{i}"] for i in range(5)]
    assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4]
    logs = emulated.directory / "logs" / "latest"
    lines = [json.loads(line) for line in (logs / "rollout-4.jsonl").read_text().splitlines()]
    assert {line["process"] for line in lines} == {"rollout-4"}


def test_a_checkpoint_says_what_it_is(emulated: Finished) -> None:
    for name in ("export", "checkpoints/step_2"):
        content = emulated.directory / name / "emulated_weights.bin"
        assert content.stat().st_size == 2 << 20


@pytest.mark.parametrize(
    "command",
    ["audit", "report", "samples", "log replay", "log dump --stats", "log why RUN rollout-0"],
)
def test_every_output_says_that_it_is_emulated(
    emulated: Finished, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "this run is emulated" in emulated.output
    line = command if "RUN" in command else f"{command} RUN"
    assert run_command(line.replace("RUN", str(emulated.directory)).split()) == 0
    said = capsys.readouterr()
    assert "this run is emulated" in said.out + said.err


def test_figures_say_so_too(emulated: Finished) -> None:
    steps = [line for line in emulated.metrics() if "reward/mean" in line]
    assert len(steps) == 4
    assert {line["emulated"] for line in steps} == {1.0}
    status = json.loads(Path(emulated.directory, "status.json").read_text())
    assert "emulated" in status["warnings"][0]


FLYING = [
    *(setting for setting in SMALL if not setting.startswith("repack.")),
    "rollout.weight_update=in-flight",
    "emulation.replicas_per_process=1",
    "data.max_response_length=1000",
    "emulation.median_response=60",
    "trainer.total_training_steps=6",
]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("rollout-leased", marks=pytest.mark.long),
        pytest.param("rollout-loaded", marks=pytest.mark.long),
        pytest.param("rollout-appended", marks=pytest.mark.long),
    ],
)
def test_weights_in_flight_and_a_replica_that_is_killed_around_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """What it ran goes on with its tokens on another one, whatever version that has by then."""
    monkeypatch.setenv("LAMINAR_FAIL", f"{point}:3")  # of one process: after its first weights
    done = laminar("train", *FLYING, f"run.output_dir={tmp_path}", "run.name=run")
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run"
    for check in (["audit"], ["log", "replay"]):
        assert run_command([*check, str(run_dir)]) == 0
    told = list(history(run_dir))
    killed = [e for e in told if isinstance(e, ev.ProcessExited) and e.code == -9]
    assert [e.actor.partition("-")[0] for e in killed] == ["rollout"]
    log = read_log(run_dir)
    joined = [e for e in told if isinstance(e, ev.ActorJoined)]
    pid = next(e.pid for e in joined if e.boot_id == killed[0].boot_id)
    lost = lost_answers(run_dir, log, killed[0].actor, pid)
    assert lost["lost"] == lost["went_on"] and not lost["started_over"]
    orders = [c for c in told if isinstance(c, cmd.GenerateTrajectory) and c.purpose == "train"]
    assert {c.attempt for c in orders} == {1}
    pulls = {str(c.purpose) for c in told if isinstance(c, cmd.PullWeights)}
    assert "in-flight" in pulls and "resume" not in pulls
    with sqlite3.connect(run_dir / "store.sqlite") as db:
        flown = "SELECT COUNT(*) FROM trajectories WHERE last_version > weight_version"
        assert db.execute(flown).fetchone()[0] > 0
