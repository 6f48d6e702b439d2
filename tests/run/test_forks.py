"""A run that begins with a checkpoint of another one: the same weights, the rest of its prompts,
and nothing of it is needed any more."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.cli.commands import run_command
from laminar.cli.fork import build_origin
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.run import fail_points
from laminar.run.directory import ORIGIN_DIR, RESUME_FILE
from laminar.training.trainer_state import ResumeState, decode
from tests.run.conftest import ROOT, Finished, check_books, history, laminar

pytestmark = pytest.mark.process
STEP, STEPS = 4, 6
Said = Callable[..., str]


def fork(of: Path, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    into = f"run.output_dir={directory}", "run.name=fork"
    return laminar("fork", str(of), "--at-step", str(STEP), *into, *words)


def copied(run: Path, directory: Path) -> Path:
    """What a fork needs of it."""
    for name in ("config.toml", "events", "checkpoints"):
        found = shutil.copytree if (run / name).is_dir() else shutil.copy
        directory.mkdir(exist_ok=True)
        found(run / name, directory / name)
    return directory


def resume_of(checkpoint: Path) -> ResumeState:
    return decode((checkpoint / RESUME_FILE).read_bytes())


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_fork_goes_on_where_its_trainer_is_killed_twice_and_the_other_run_is_gone(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has a checkpoint of its own: once with nothing to do again, once with a step."""
    other = copied(finished.directory, tmp_path / "other")
    monkeypatch.setenv(fail_points.VARIABLE, "trainer-book:1,trainer-step:2")
    done = fork(other, tmp_path, "optim.lr=5e-4", "trainer.save_freq=3")
    shutil.rmtree(other)
    made = Finished(tmp_path / "fork", done.returncode, done.stdout + done.stderr)
    assert made.code == 0, made.output
    assert f"starts     from step {STEP} of {other}" in made.output
    assert "changed    optim.lr = 0.0005, was 0.0001" in made.output
    log = list(history(made.directory))
    ends = [item for item in log if isinstance(item, ev.ProcessExited) and item.restarting]
    assert [(e.actor, e.code) for e in ends] == [("trainer-0", -signal.SIGKILL)] * 2
    loads = [item for item in log if isinstance(item, cmd.LoadCheckpoint)]
    assert [(item.step, item.path) for item in loads] == [(STEP, ORIGIN_DIR)] * 3
    trained = [item.step_index for item in log if isinstance(item, ev.StepCompleted)]
    assert trained == list(range(STEP, STEPS))
    (repeated,) = (item for item in log if isinstance(item, ev.StepRepeated))
    assert repeated.digest == repeated.published != ""
    assert _first_digest(log, STEP) == _digest_of(finished, STEP)
    _each_prompt_ends_once(finished, log)
    check_books(made)
    again = laminar("retrain", str(made.directory))
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"step {STEP}, the start of the fork: {_digest_of(finished, STEP)}" in again.stdout
    assert "identical: 2 steps repeated" in again.stdout
    found = made.summary["forked_from"]
    assert (found["run"], found["step"], found["same_data"]) == (str(other), STEP, True)
    _can_be_forked(made)


def _first_digest(log: list[object], step: int) -> str:
    first = next(item for item in log if isinstance(item, ev.WeightsPublished))
    assert (first.version, first.step) == (step, step)
    return first.digest


def _digest_of(run: Finished, step: int) -> str:
    log = history(run.directory)
    return next(i.digest for i in log if isinstance(i, ev.WeightsPublished) and i.step == step)


def _each_prompt_ends_once(finished: Finished, log: list[object]) -> None:
    """What the other run had handed out by then, and had not ended, goes first, and then the rest
    of its pass."""
    ended, open_then, completed = set(), {}, 0
    for item in history(finished.directory):
        if isinstance(item, cmd.GenerateTrajectory) and item.purpose == "train":
            if completed < STEP:
                open_then[item.group] = item.row_index
        elif isinstance(item, ev.StepCompleted):
            completed = item.step_index + 1
        elif isinstance(item, cmd.EndTrajectories) and completed <= STEP:
            ended |= {e.group for e in item.endings if e.purpose == "train" and e.step < STEP}
    left = {group: row for group, row in open_then.items() if group not in ended}
    rows: dict[str, int] = {}
    for item in log:
        if isinstance(item, cmd.GenerateTrajectory) and item.purpose == "train":
            rows.setdefault(item.group, item.row_index)
    assert left and rows and not ended & rows.keys()
    first = list(rows.items())[: len(left)]
    assert dict(first) == left
    positions = [int(group.partition(".")[2]) for group in list(rows)[len(left) :]]
    begin = len(ended) + len(left)
    assert positions == list(range(begin, begin + len(positions)))


def _can_be_forked(made: Finished) -> None:
    """At what it began with, and not where it has none."""
    origin = build_origin(made.directory, *_named(resume := resume_of(made.directory / ORIGIN_DIR)))
    first = next(i for i in history(made.directory) if isinstance(i, ev.CoordinatorStarted)).origin
    assert first is not None and origin.unfinished == first.unfinished != ()
    assert (origin.cursor, origin.seed) == (first.cursor, first.seed)
    assert origin.digest == resume.digest == first.digest
    last = resume_of(made.directory / "checkpoints" / "step_6")
    later = build_origin(made.directory, *_named(last))
    assert (later.unfinished, later.cursor) == ((), 4 * STEPS)  # all have been trained
    assert later.version == STEPS + 2  # two orders were interrupted


def _named(resume: ResumeState) -> tuple[int, int, str]:
    return resume.step, resume.version, resume.digest


@pytest.fixture
def refused(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Said:
    """The sentence of a refused `laminar fork`, with which nothing is made."""
    monkeypatch.chdir(ROOT)

    def said(*words: str, of: Path = finished.directory, step: int = STEP) -> str:
        before = sorted(of.parent.iterdir())
        code = run_command(["fork", str(of), "--at-step", str(step), *words])
        found = capsys.readouterr()
        assert code == 2, found.out + found.err
        assert sorted(of.parent.iterdir()) == before
        (line,) = found.err.strip().splitlines()
        return line

    return said


@pytest.mark.parametrize(
    ("words", "step", "expected"),
    [
        ([], 5, ["no checkpoint of step 5", "those of step 4, 6"]),
        ([], 0, ["no checkpoint of step 0", "those of step 4, 6"]),
        ([], 6, ["trainer.total_training_steps = 6", "step 6", "larger"]),
        (["model.name=/another"], 4, ["model.name = '/another'", "laminar train"]),
        (["rollout.engine=emulated"], 4, ["rollout.engine = 'emulated'", "another model"]),
        (["run.name=run"], 4, ["run.name = 'run'", "give another"]),
        (["optim.rl=1"], 4, ["optim.rl", "optim.lr"]),
    ],
    ids=["no-checkpoint", "step-0", "no-steps", "model", "engine", "name", "key"],
)
def test_mistakes(refused: Said, words: list[str], step: int, expected: list[str]) -> None:
    message = refused(*words, step=step)
    assert all(word in message for word in expected), message


def test_what_is_no_run_is_not_forked(refused: Said, tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} does not exist" in refused(of=tmp_path / "none")
    assert f"{tmp_path} is not a run directory" in refused(of=tmp_path)


def test_a_directory_that_exists_is_left_as_it_is(refused: Said, finished: Finished) -> None:
    there = finished.directory.parent / f"run-step-{STEP}"
    there.mkdir()
    try:
        assert str(there) in refused()
        assert list(there.iterdir()) == []
    finally:
        there.rmdir()


def test_a_damaged_checkpoint_is_named(refused: Said, finished: Finished, tmp_path: Path) -> None:
    other = copied(finished.directory, tmp_path / "other")
    checkpoint = other / "checkpoints" / f"step_{STEP}"
    file = checkpoint / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = refused(of=other)
    assert str(checkpoint) in message and "its optimizer.safetensors is damaged" in message


def test_a_checkpoint_that_the_log_does_not_have_is_not_taken(
    refused: Said, finished: Finished, tmp_path: Path
) -> None:
    other = copied(finished.directory, tmp_path / "other")
    checkpoint = other / "checkpoints" / f"step_{STEP}"
    facts = json.loads((checkpoint / RESUME_FILE).read_text())
    facts["batches"] = facts["batches"][:-1]
    (checkpoint / RESUME_FILE).write_text(json.dumps(facts))
    shutil.copy(checkpoint / RESUME_FILE, tmp_path)
    assert "its trainer.json is damaged" in refused(of=other)
    _write_digest(checkpoint)
    assert f"the log of {other} has no step {STEP} with these trajectories" in refused(of=other)


def _write_digest(checkpoint: Path) -> None:
    from laminar.training.checkpoints.file_digests import write_digests

    write_digests(checkpoint)
