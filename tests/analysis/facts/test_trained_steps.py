"""What a log says was trained: batches in their order, and the weights that were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.analysis.facts.trained_steps import read_trained_steps
from laminar.cli.commands import run_command
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from tools.kit.logs import write_log
from tools.kit.run_directory import world_log


def test_every_completed_step_once_with_what_was_published(tmp_path: Path) -> None:
    """Also of a log in which the trainer repeats what it has said."""
    log = world_log()
    write_log(tmp_path, log)
    ordered = {c.step_index: c for _, said in log for c in said if isinstance(c, cmd.TrainStep)}
    events = [stamped.event for stamped, _ in log]
    published = {e.version: e.digest for e in events if isinstance(e, ev.WeightsPublished)}
    found = read_trained_steps(tmp_path)
    assert found.first_digest == published[0] != ""
    assert [step.step_index for step in found.steps] == [0, 1, 2]
    for step in found.steps:
        assert step.trajectories == ordered[step.step_index].trajectories
        assert step.version == ordered[step.step_index].version
        assert step.digest == published.get(step.version, "")


def test_a_step_that_was_ordered_and_not_completed_is_not_trained(tmp_path: Path) -> None:
    log = world_log()
    events = [stamped.event for stamped, _ in log]
    is_third = [isinstance(e, ev.StepCompleted) and e.step_index == 2 for e in events]
    write_log(tmp_path, log[: is_third.index(True)])
    assert [step.step_index for step in read_trained_steps(tmp_path).steps] == [0, 1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('[data]\ndataset = "spell_backward"\n[model]\nname = "m"\n', "has not completed a step"),
        ('[rollout]\nengine = "emulated"\n', "is emulated"),
    ],
)
def test_a_run_that_cannot_be_trained_again_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, words: str
) -> None:
    (tmp_path / "config.toml").write_text(config)
    write_log(tmp_path, world_log()[:3])
    assert run_command(["retrain", str(tmp_path)]) == exit_codes.USER_ERROR
    said = capsys.readouterr()
    assert said.out == "" and words in said.err and len(said.err.splitlines()) == 1
