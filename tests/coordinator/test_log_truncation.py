"""A log that has lost its end is told from one whose run was cut off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.coordinator.log_truncation import check_log
from laminar.core.machine import StateMachine
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import ids
from laminar.training.trainer_state import LearnerFacts, ResumeState, encode
from tools.kit.logs import Log
from tools.kit.run_directory import world_log, write_book, write_store

FACTS = LearnerFacts(torch="2", threads=1, micro_batch_tokens=1, reference="", moved={})


@pytest.fixture(scope="module")
def log() -> Log:
    return world_log()


def state_after(log: Log, events: int) -> State:
    machine = StateMachine()
    for stamped, _ in log[:events]:
        machine.handle_event(stamped)
    return machine.state


def books(directory: Path, log: Log) -> Path:
    """What store and trainer have written when all of this was ordered and carried out."""
    directory.mkdir()
    if any(isinstance(s.event, ev.DataLoaded) for s, _ in log):
        write_store(directory, log)
    write_book(directory, log)
    return directory


def reported(log: Log, events: int) -> Log:
    """So many events with their decisions, and the next one, of which nobody has heard yet."""
    following = [(stamped, []) for stamped, _ in log[events : events + 1]]
    return [*log[:events], *following]


def ordering(log: Log, *kinds: type[cmd.Command]) -> list[int]:
    """Numbers of the events that such an order was decided by."""
    return [at for at, (_, cs) in enumerate(log, 1) if any(isinstance(c, kinds) for c in cs)]


def test_what_was_done_and_not_reported_is_no_loss(tmp_path: Path, log: Log) -> None:
    """Wherever the coordinator was cut off: all that it had ordered is done, and the next report
    was on its way."""
    for events in range(1, len(log) + 1, 17):
        run = books(tmp_path / str(events), reported(log, events))
        check_log(run, state_after(log, events))
        shutil.rmtree(run)


def test_a_log_without_the_last_order_is_behind(tmp_path: Path, log: Log) -> None:
    """One order that was carried out is enough, whichever it is."""
    orders = ordering(log, cmd.GenerateTrajectory, cmd.EndTrajectories)
    for events in orders[:: len(orders) // 12]:
        run = books(tmp_path / str(events), log[:events])
        with pytest.raises(ConfigError, match=r"has lost its end: .* store\.sqlite has "):
            check_log(run, state_after(log, events - 1))
        shutil.rmtree(run)


def test_half_of_a_log_is_behind_and_all_that_is_ahead_is_named(tmp_path: Path, log: Log) -> None:
    run = books(tmp_path / "run", log)
    saved(run, step=3, version=3)
    with pytest.raises(ConfigError) as error:
        check_log(run, state_after(log, len(log) // 3))
    said = str(error.value)
    for what in (
        "that the log never began",
        "trainer_book.jsonl has step ",
        "step_3 was made by step 3, of version 3, which the log never ordered",
        f"restore the newest copy of {run / 'events'}",
        f"model.name={run / 'checkpoints' / 'step_3'} to continue",
    ):
        assert what in said, said


def saved(run: Path, *, step: int, version: int) -> None:
    directory = run / "checkpoints" / f"step_{step}"
    directory.mkdir(parents=True)
    resume = ResumeState(version=version, step=step, before="", batches=(), learner=FACTS)
    (directory / "trainer.json").write_bytes(encode(resume))


@pytest.mark.parametrize("of_the_batch", [False, True])
def test_a_checkpoint_may_be_ahead_by_the_step_that_was_ordered(
    tmp_path: Path, log: Log, of_the_batch: bool
) -> None:
    (first, *_) = ordering(log, cmd.TrainStep)
    run = books(tmp_path / "run", log[: first - 1])
    saved(run, step=1, version=1)
    if of_the_batch:
        return check_log(run, state_after(log, first))
    with pytest.raises(ConfigError, match="was made by step 1, of version 1"):
        check_log(run, state_after(log, first - 1))


def test_an_answer_that_was_asked_for_again_is_known_by_its_attempt(
    tmp_path: Path, log: Log
) -> None:
    """A held-out answer that is asked for again has a name of its own."""
    (first, *_) = ordering(log, cmd.GenerateTrajectory)
    state = state_after(log, first)
    assert state.evaluations.running is not None
    run = tmp_path / "run"
    run.mkdir()
    again = ids.GroupId(f"{ids.eval_group(0, 0)}-2")
    renamed = [
        (stamped, [_renamed(command, again) for command in commands])
        for stamped, commands in log[:first]
    ]
    write_store(run, renamed)
    with pytest.raises(ConfigError, match=r"never began \(e0\.0-2\.0\)"):
        check_log(run, state)


def _renamed(command: cmd.Command, group: ids.GroupId) -> cmd.Command:
    if not isinstance(command, cmd.GenerateTrajectory) or command.group != "e0.0":
        return command
    return cmd.GenerateTrajectory(
        **{
            name: getattr(command, name)
            for name in command.__struct_fields__
            if name not in ("group", "trajectory_id")
        },
        group=group,
        trajectory_id=ids.make_trajectory_id(group, command.sibling),
    )
