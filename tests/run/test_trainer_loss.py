"""The trainer is killed five times, in a step, while it does one again, while it loads, before the
export, and coordinator and reward worker once: the run goes on to its end, each step that is done
again comes to the weights that it had come to, and the last ones are those of `laminar retrain`. No
more tokens are kept meanwhile than that needs."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from laminar.analysis.facts.trained_steps import read_trained_steps
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.run import fail_points
from laminar.run.directory import STORE_FILE, TRAINER_BOOK_FILE
from laminar.storage.books import open_tables
from tests.run.conftest import Finished, check_books, history, laminar, train

pytestmark = [pytest.mark.process, pytest.mark.long]
STEPS = 6
KILLS = (
    "trainer-book:3",
    "trainer-repeat:1",
    "trainer-step:4",
    "trainer-load:1",
    "trainer-export:1",
    "coordinator-durable:200",
    "reward-call:20",
)
SMALL = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=3",
    "store.payload_gb=1e-6",
    "recovery.max_restarts=9",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "data.val_size=16",
    "data.dataset_size=2000",
)


@pytest.mark.timeout(400)
def test_the_trainer_is_killed_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When step 3 is in its book and nobody has heard of it; when it has done step 1 again; in step
    6, with a checkpoint of step 3 on the disk; while that is loaded; and before the export."""
    monkeypatch.setenv(fail_points.VARIABLE, ",".join(KILLS))
    run = train(tmp_path, *SMALL)
    assert run.code == 0, run.output
    log = list(history(run.directory))
    ends = [item for item in log if isinstance(item, ev.ProcessExited) and item.restarting]
    assert [(e.actor, e.code) for e in ends] == [("trainer-0", -signal.SIGKILL)] * 5
    assert {path.name for path in run.directory.glob("failed-*")} == {
        f"failed-{point.replace(':', '-')}" for point in KILLS
    }
    loaded = [item.step for item in log if isinstance(item, cmd.LoadCheckpoint)]
    assert loaded[:2] == [3, 3] and loaded[2] in (3, 6) and len(loaded) == 3
    repeated = [item for item in log if isinstance(item, ev.StepRepeated)]
    assert [item.step_index for item in repeated][:4] == [0, 1, 3, 4]
    assert all(item.digest == item.published != "" for item in repeated)
    completed = [item.step_index for item in log if isinstance(item, ev.StepCompleted)]
    assert completed == list(range(STEPS))
    _lines_of_the_book(run, log)
    check_books(run)
    _removed_payloads(run)


def _lines_of_the_book(run: Finished, log: list[object]) -> None:
    """Step 3 has two, of two processes, of which the second counts."""
    text = (run.directory / TRAINER_BOOK_FILE).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    first, second = (line for line in lines if line["step"] == 2)
    assert first["incarnation"] < second["incarnation"] and first["ids"] == second["ids"]
    (done,) = (i for i in log if isinstance(i, ev.StepCompleted) and i.step_index == 2)
    assert done.version == second["version"] != first["version"]
    said = laminar("audit", str(run.directory)).stdout
    assert "step 3 is in trainer_book.jsonl under version" in said


def _removed_payloads(run: Finished) -> None:
    """Those of the steps before the oldest checkpoint; what they say can still be read."""
    answers = read_trained_steps(run.directory).steps
    with open_tables(run.directory / STORE_FILE) as tables:
        removed = tables.removed_payloads()
    kept = {name for step in answers[3:] for name in step.trajectories}
    assert removed & set(answers[0].trajectories) and not removed & kept
    note = f"note: the tokens of {len(removed)} trajectories were removed"
    assert note in laminar("audit", str(run.directory)).stdout
    first = laminar("samples", str(run.directory), "--step", "1", "--jsonl").stdout.splitlines()
    assert {json.loads(line)["id"] for line in first} == set(answers[0].trajectories)
    assert all(json.loads(line)["response"] and json.loads(line)["spans"] for line in first)
    again = laminar("retrain", str(run.directory))
    assert again.returncode == 0, again.stdout + again.stderr
    *steps, verdict = again.stdout.splitlines()
    assert steps[0].startswith("step 3, a checkpoint: ") and len(steps) == 4
    assert verdict.startswith("identical: 3 steps repeated, ")
    published = [e for e in history(run.directory) if isinstance(e, ev.WeightsPublished)]
    assert published[-1].step == STEPS and published[-1].digest in steps[-1]  # of the export
    shutil.rmtree(run.directory / "checkpoints")
    refused = laminar("retrain", str(run.directory))
    assert refused.returncode == exit_codes.USER_ERROR
    assert " were removed from the store" in refused.stderr and not refused.stdout
