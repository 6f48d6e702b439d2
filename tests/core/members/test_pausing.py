"""The run pauses: what is completed and saved before, what stays open, how it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.coordinator.takeover import ResumeRequest
from laminar.core.members import resumption
from laminar.core.members.pausing import SAVE_TIMEOUT_MS, STOP_TIMEOUT_MS
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names import exit_codes
from tests.core.members.test_resumption import come_back, resumed
from tests.core.steps import test_step_replay
from tools.kit.bench import Bench, only, start_bench

PAUSE = ev.DrainRequested(reason="SIGUSR1", pause=True)
DRAIN = ev.DrainRequested(reason="SIGINT")
TRAINER = "trainer-0"


def saved(bench: Bench) -> list[Command]:
    """The trainer does as it was ordered last."""
    (order,) = only(cmd.SaveCheckpoint, bench.commands)[-1:]
    found = test_step_replay.checkpoint(bench, order.step)
    assert order.version == found.version
    return bench.say(
        TRAINER,
        ev.CheckpointSaved(
            version=order.version, step=order.step, path=found.path, kept=(order.version,)
        ),
    )


def left(bench: Bench) -> None:
    """Everybody does, and the run is paused."""
    for name in [a.name for a in bench.state.members.actors.values() if a.alive]:
        bench.say(name, ev.ActorLeft())
    state, run = bench.state, bench.state.run
    assert (run.phase, run.exit_code, run.failure) == ("ended", exit_codes.PAUSED, "")
    assert run.paused and not resumption.is_run_over(state)


def test_the_step_in_training_is_completed_and_saved_and_nothing_is_done_again() -> None:
    bench = test_step_replay.run(2, in_training=True, save_freq=10)
    assert bench.own(PAUSE) == []
    commands = bench.train(publish=False)
    assert [(o.version, o.step) for o in only(cmd.SaveCheckpoint, commands)] == [(3, 3)]
    assert not only(cmd.StopActor, commands)
    assert only(cmd.StopActor, saved(bench))
    left(bench)
    is_open = set(bench.state.work.trajectories)
    bench.own(ev.RunResumed(asked=False, total_steps=0, test_freq=0, save_freq=1))
    assert bench.state.run.ignored["RunResumed: not-resumable"] == 1
    resumed(bench, asked=True)
    assert (bench.state.run.phase, bench.state.run.exit_code) == (Phase.RUNNING, 0)
    (load,) = only(cmd.LoadCheckpoint, come_back(bench, test_step_replay.checkpoint(bench, 3)))
    assert load.step == 3
    (publish,) = only(cmd.PublishWeights, test_step_replay.loaded(bench))
    assert publish.version == 3 and not only(cmd.RepeatStep, bench.commands)
    assert is_open == set(bench.state.work.trajectories) != set()


def test_a_step_that_is_saved_already_is_not_saved_again() -> None:
    bench = test_step_replay.run(2)
    test_step_replay.save(bench, 2)
    commands = bench.own(PAUSE)
    assert only(cmd.StopActor, commands) and not only(cmd.SaveCheckpoint, commands)
    left(bench)


def test_no_new_work_is_given_out_and_no_batch_is_begun() -> None:
    bench = test_step_replay.run(1, in_training=True, groups_per_version=4)
    bench.own(PAUSE)
    known = len(bench.commands)
    for group in bench.open_groups():
        bench.complete(group)
    assert not only(cmd.GenerateTrajectory, bench.commands[known:])
    commands = bench.train()
    assert only(cmd.SaveCheckpoint, commands) and not only(cmd.TrainStep, commands)


def test_a_run_that_has_not_begun_starts_again() -> None:
    bench = Bench(save_freq=1)
    bench.join("node-0")
    bench.own(PAUSE)
    left(bench)
    resumed(bench, asked=True)
    assert bench.state.run.phase == Phase.STARTING
    come_back(bench)
    assert only(cmd.PublishWeights, bench.commands)
    bench.publish(0, 0)
    assert bench.state.run.phase == Phase.RUNNING


def test_who_asks_for_an_end_meanwhile_gets_it() -> None:
    bench = test_step_replay.run(1, in_training=True, save_freq=10)
    bench.own(PAUSE)
    bench.own(DRAIN)
    commands = bench.train()
    assert only(cmd.ExportModel, commands) and not only(cmd.SaveCheckpoint, commands)
    bench.own(PAUSE)
    assert bench.state.run.ignored["DrainRequested: run-ending"] == 1


def test_an_end_at_once_is_one() -> None:
    bench = test_step_replay.run(1, in_training=True)
    bench.own(PAUSE)
    assert only(cmd.StopActor, bench.own(ev.DrainRequested(reason="SIGQUIT", at_once=True)))
    assert bench.state.run.exit_code == exit_codes.STOPPED_EARLY and not bench.state.run.paused


def test_a_run_without_checkpoints_ends() -> None:
    bench = test_step_replay.run(1, save_freq=0)
    assert only(cmd.ExportModel, bench.own(PAUSE))


@pytest.mark.parametrize("when", ["training", "saving", "before"])
def test_a_trainer_that_is_away_is_not_waited_for(when: str) -> None:
    """Its steps are done again, as they would have been anyway."""
    bench = test_step_replay.run(2, in_training=when == "training", save_freq=10)
    if when == "before":
        bench.kill(TRAINER)
    bench.own(PAUSE)
    if when != "before":
        bench.kill(TRAINER)
    assert only(cmd.StopActor, bench.commands)
    left(bench)
    resumed(bench, asked=True)
    assert only(cmd.RepeatStep, come_back(bench))


def test_a_checkpoint_that_is_never_written_ends_the_trainer_and_the_pause() -> None:
    bench = test_step_replay.run(2, save_freq=10)
    bench.own(PAUSE)
    bench.wait(SAVE_TIMEOUT_MS)
    assert only(cmd.RestartActor, bench.commands)
    assert bench.state.run.paused and not bench.state.run.failure


def test_machines_that_leave_meanwhile_are_no_failure() -> None:
    bench = test_step_replay.run(1, in_training=True)
    bench.own(PAUSE)
    bench.kill("rollout-0", restarting=False)
    assert bench.state.run.phase == Phase.STOPPING and bench.state.run.paused
    left(bench)


def test_while_it_exports_the_last_step_is_saved_unless_the_export_is_ordered() -> None:
    bench = test_step_replay.run(2, total_steps=2, save_freq=10)
    assert only(cmd.ExportModel, bench.commands)
    commands = bench.own(PAUSE)
    assert only(cmd.StopActor, commands) and not only(cmd.SaveCheckpoint, commands)
    left(bench)
    resumed(bench, asked=True)
    assert bench.state.run.phase == Phase.EXPORTING


def test_a_coordinator_that_finds_all_gone_while_they_are_ordered_to_end_pauses(
    tmp_path: Path,
) -> None:
    """Nobody starts those again that have left by order; who asks for that later gets it."""
    bench = test_step_replay.run(2)
    test_step_replay.save(bench, 2)
    assert not ResumeRequest.RESUME_STOPPED.applies_to(tmp_path, bench.state)
    bench.own(PAUSE)
    assert bench.state.run.phase == Phase.STOPPING and ResumeRequest.RESUME_STOPPED.applies_to(
        tmp_path, bench.state
    )
    resumed(bench)
    bench.wait(STOP_TIMEOUT_MS)
    assert (bench.state.run.phase, bench.state.run.exit_code) == (Phase.ENDED, exit_codes.PAUSED)
    resumed(bench, asked=True)
    assert bench.state.run.phase == Phase.RUNNING


def test_a_power_cut_during_a_pause_is_the_pause() -> None:
    bench = test_step_replay.run(2, in_training=True)
    bench.own(PAUSE)
    resumed(bench)
    assert bench.state.run.phase == Phase.RUNNING
    assert not bench.state.run.draining and not bench.state.run.pausing


def test_weights_that_came_of_doing_a_step_again_are_not_saved_as_those_of_the_first_time() -> None:
    """The log has the step under the version that was published first."""
    bench = test_step_replay.run(1, save_freq=10)
    bench.kill(TRAINER)
    come_back_alone = test_step_replay.come_back(bench)
    assert only(cmd.RepeatStep, come_back_alone)
    test_step_replay.repeated(bench, "other")
    commands = bench.own(PAUSE)
    assert only(cmd.StopActor, commands) and not only(cmd.SaveCheckpoint, commands)


def waiting(response_timeout_ms: int) -> Bench:
    """The step is saved, and an answer has older weights."""
    bench = test_step_replay.run(2, in_training=True, save_freq=10)
    old = [t for t in bench.state.work.trajectories.values() if t.status == "dispatched"]
    assert old and {t.version for t in old} == {2}
    bench.own(
        ev.DrainRequested(reason="SIGUSR1", pause=True, response_timeout_ms=response_timeout_ms)
    )
    bench.train(publish=False)
    saved(bench)
    return bench


def test_answers_that_could_only_start_over_are_finished_before() -> None:
    bench = waiting(60_000)
    assert bench.state.run.phase == Phase.RUNNING and bench.state.run.pausing
    for group in bench.open_groups():
        bench.complete(group)
    assert bench.state.run.phase == Phase.STOPPING and "pause" not in bench.state.orders.timers


@pytest.mark.parametrize("response_timeout_ms", [0, 5_000])
def test_they_have_the_time_that_the_request_gives_them(response_timeout_ms: int) -> None:
    bench = waiting(response_timeout_ms)
    if response_timeout_ms:
        assert bench.state.run.phase == Phase.RUNNING
        bench.wait(response_timeout_ms)
    assert bench.state.run.phase == Phase.STOPPING
    left(bench)


def test_answers_of_the_weights_that_the_run_began_with_are_not_waited_for() -> None:
    """No step has made others, and the trainer has these again."""
    bench = start_bench(save_freq=10)
    bench.own(ev.DrainRequested(reason="SIGUSR1", pause=True, response_timeout_ms=60_000))
    assert bench.open_groups() and bench.state.run.phase == Phase.STOPPING
    left(bench)
