"""All processes of a run have ended, and it goes on with new ones: what is lost and what is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from laminar.core.members import resumption
from laminar.core.state.statuses import Phase, TrajectoryStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from tests.core.steps import test_step_replay
from tools.kit.bench import Bench, only, start_bench

NODE, TRAINER = "node-0", "trainer-0"


def resumed(bench: Bench, *, asked: bool = False, **changes: int) -> list[Command]:
    """Another coordinator has found no process."""
    bench.own(bench.started(incarnation=2))
    news = resumption.make_resume_event(bench.state, bench.settings, (), asked=asked)
    assert isinstance(news, ev.RunResumed)
    return bench.own(msgspec.structs.replace(news, **changes))


def come_back(bench: Bench, *checkpoints: ev.Checkpoint, boot: str = "b") -> list[Command]:
    """New processes join, as they did when the run began."""
    names = [*bench.nodes, "store-0", *bench.relays, *bench.names]
    for name in names:
        bench.join(name, boot)
    for name in names[len(bench.nodes) :]:
        bench.ready(name)
    return test_step_replay.come_back(bench, *checkpoints, boot=boot)


def test_everything_is_lost_and_nothing_is_blamed() -> None:
    """No batch is given up, however often the power fails."""
    bench = test_step_replay.run(2, in_training=True)
    running = [t.id for t in bench.state.work.trajectories.values() if t.status == "dispatched"]
    assert running
    for number in range(4):
        commands = resumed(bench)
        assert commands == [] and not bench.state.run.failure
        assert not any(actor.alive for actor in bench.state.members.actors.values())
        assert [t.id for t in bench.state.work.trajectories.values() if t.deaths] == []
        assert all(bench.trajectory(t).status == TrajectoryStatus.LOST for t in running)
        assert bench.state.steps.batch is not None and bench.state.steps.batch.deaths == 0
        bench.own(bench.started(incarnation=2))
        for name in (NODE, "store-0", "relay-0", *bench.names):
            bench.join(name, str(number))
        for name in ("store-0", "relay-0", *bench.names):
            bench.ready(name)


def test_the_trainer_goes_on_from_a_checkpoint_and_lost_work_resumes() -> None:
    """The relay gets the last version again, and what had it goes on from its tokens."""
    bench = test_step_replay.run(2)
    test_step_replay.save(bench, 2)
    (first, *_) = [t for t in bench.state.work.trajectories.values() if t.version == 2]
    resumed(bench)
    (load,) = only(cmd.LoadCheckpoint, come_back(bench, test_step_replay.checkpoint(bench, 2)))
    assert load.step == 2
    (publish,) = only(cmd.PublishWeights, test_step_replay.loaded(bench))
    assert (publish.version, publish.step) == (2, 2)
    bench.publish(2, 2)
    (placed,) = [
        c for c in only(cmd.GenerateTrajectory, bench.load_all()) if c.trajectory_id == first.id
    ]
    assert placed.placement == first.placement == 2 and first.attempt == 1


def test_work_whose_version_nobody_has_starts_over() -> None:
    """It is counted as such, and waits no longer than for the first weights."""
    bench = test_step_replay.run(1, max_staleness=3)
    old = [t for t in bench.state.work.trajectories.values() if t.version == 0]
    resumed(bench)
    assert only(cmd.RepeatStep, come_back(bench))
    assert only(cmd.PublishWeights, test_step_replay.repeated(bench))
    bench.publish(1, 1, held=(1,))
    bench.load_all()
    assert old and {(t.version, t.attempt, t.status) for t in old} == {(1, 2, "dispatched")}


def test_held_out_answers_are_given_again() -> None:
    """As often as it takes; none is missing for it."""
    bench = start_bench(num_eval=1, val_before_train=True, save_freq=1)
    for number in range(4):
        (answer,) = (t for t in bench.state.work.trajectories.values() if t.id.startswith("e"))
        assert only(cmd.EndTrajectories, resumed(bench))
        come_back(bench, boot=str(number))
        bench.write_ends()
        bench.publish(0, 0)
        bench.load_all()
        assert answer.id not in bench.state.work.trajectories
    assert bench.state.evaluations.running is not None and bench.state.evaluations.running.done == 0


def test_a_run_that_had_not_begun_has_its_time_again() -> None:
    bench = Bench(save_freq=1)
    bench.join(NODE)
    bench.wait(50_000)
    resumed(bench)
    bench.wait(50_000)
    assert bench.state.run.phase == Phase.STARTING
    bench.wait(20_000)
    assert "not started" in bench.state.run.failure


def test_the_last_ends_are_written_by_the_next_store() -> None:
    bench = test_step_replay.run()
    bench.kill(TRAINER, restarting=False)
    assert bench.state.run.phase == Phase.ENDING
    resumed(bench)
    assert only(cmd.AcceptActor, bench.join(NODE, "b"))
    assert only(cmd.RefuseActor, bench.join(TRAINER, "b"))
    bench.join("store-0", "b")
    bench.ready("store-0")
    bench.write_ends()
    bench.stop()
    assert bench.state.run.phase == Phase.ENDED


def test_who_does_not_come_back_is_waited_for_and_then_named() -> None:
    bench = test_step_replay.run(1)
    assert only(cmd.RestartActor, bench.silent("rollout-0"))
    resumed(bench)
    bench.join(NODE, "b")
    bench.wait(bench.settings.start_timeout_ms)
    assert "never joined" in bench.state.run.failure


def test_settings_that_may_be_changed_are() -> None:
    bench = test_step_replay.run(1, total_steps=2)
    resumed(bench, total_steps=5, test_freq=2, save_freq=7)
    settings = bench.state.settings
    assert (settings.total_steps, settings.test_freq, settings.save_freq) == (5, 2, 7)
    bench.join(NODE, "b")
    resumed(bench, save_freq=0)
    assert bench.state.settings.save_freq == 7
    assert bench.state.run.ignored["RunResumed: impossible"] == 1


def test_a_run_without_checkpoints_is_left_as_it_is() -> None:
    bench = test_step_replay.run(save_freq=0)
    assert resumption.make_resume_event(bench.state, bench.settings, (), asked=False) is None
    bench.own(ev.RunResumed(asked=True, total_steps=1, test_freq=1, save_freq=1))
    assert bench.state.run.ignored["RunResumed: not-resumable"] == 1
    assert bench.state.members.is_actor_alive(TRAINER)


def test_a_run_of_which_a_process_lives_is_not_resumed() -> None:
    bench = Bench(save_freq=1)
    assert resumption.make_resume_event(bench.state, bench.settings, (), asked=False) is None
    bench.join(NODE)
    assert (
        resumption.make_resume_event(bench.state, bench.settings, {(NODE, 1)}, asked=False) is None
    )
    assert (
        resumption.make_resume_event(bench.state, bench.settings, {(NODE, 2)}, asked=False)
        is not None
    )


@pytest.mark.parametrize("exported", [False, True])
def test_a_run_whose_steps_are_done_goes_on_with_more(exported: bool) -> None:
    """The number of the export stays that of the last step."""
    bench = test_step_replay.run(2, total_steps=2, num_eval=1)
    test_step_replay.save(bench, 2)
    (export,) = only(cmd.ExportModel, bench.commands)
    if exported:
        bench.say(TRAINER, ev.ModelExported(version=export.version, path="export"))
        bench.publish(export.version, 2)
        bench.load_all()
        assert bench.state.run.phase == Phase.FINAL_EVALUATION
    resumed(bench, total_steps=3)
    assert bench.state.run.phase == Phase.RUNNING
    come_back(bench, test_step_replay.checkpoint(bench, 2))
    (publish,) = only(cmd.PublishWeights, test_step_replay.loaded(bench))[-1:]
    assert (publish.version, publish.step) == (export.version, 2)
    bench.publish(publish.version, 2)
    bench.load_all()
    bench.complete(bench.open_groups()[0])
    done = bench.trained()
    bench.train()
    bench.write_ends()
    assert (done.version, done.step_index, bench.state.steps.completed) == (
        export.version + 1,
        2,
        3,
    )
    (last,) = only(cmd.ExportModel, bench.commands)[-1:]
    assert last.version == export.version + 2


def stopped(bench: Bench) -> None:
    """Ctrl-C twice: every process leaves."""
    bench.own(ev.DrainRequested(reason="SIGINT"))
    stopped_at_once(bench)


def stopped_at_once(bench: Bench) -> None:
    bench.own(ev.DrainRequested(reason="SIGINT", at_once=True))
    leave(bench)
    assert bench.state.run.phase == Phase.ENDED and bench.state.run.exit_code == 130


def leave(bench: Bench) -> None:
    """All that live, one of them without a word."""
    assert bench.state.run.phase == Phase.STOPPING
    for name in [a.name for a in bench.state.members.actors.values() if a.alive]:
        bench.silent(name) if name == "relay-0" else bench.say(name, ev.ActorLeft())


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0", "store-0"])
def test_a_mistake_of_the_user_found_after_the_start_ends_a_run_that_resumes(name: str) -> None:
    bench = test_step_replay.run(2, in_training=True)
    run = bench.state.run
    test_step_replay.save(bench, 2)
    before = set(bench.state.work.trajectories)
    bench.say(name, ev.ActorFailed(reason="loss: f of l.py raised", user_error=True))
    assert (run.phase, run.exit_code) == (Phase.STOPPING, 2)
    leave(bench)
    assert run.failure == f"{name}: loss: f of l.py raised"
    assert not resumption.is_run_over(bench.state) and set(bench.state.work.trajectories) == before
    resumed(bench, asked=True)
    assert (run.phase, run.failure, run.exit_code) == ("running", "", 0)


def test_a_mistake_of_the_user_found_at_the_start_is_final() -> None:
    bench = Bench(save_freq=1)
    bench.join(NODE)
    bench.join("store-0")
    bench.say("store-0", ev.ActorFailed(reason="no such file", user_error=True))
    for name in (NODE, "store-0"):
        bench.say(name, ev.ActorLeft())
    assert bench.state.run.exit_code == 2 and bench.state.run.phase == Phase.ENDED
    assert resumption.is_run_over(bench.state)


def test_a_run_that_was_stopped_at_once_goes_on_where_it_was() -> None:
    """Nothing was dropped for it."""
    bench = test_step_replay.run(2, in_training=True)
    test_step_replay.save(bench, 2)
    before = set(bench.state.work.trajectories)
    stopped(bench)
    assert not resumption.is_run_over(bench.state) and set(bench.state.work.trajectories) == before
    bench.own(ev.RunResumed(asked=False, total_steps=0, test_freq=0, save_freq=1))
    assert bench.state.run.ignored["RunResumed: not-resumable"] == 1
    resumed(bench, asked=True)
    assert (bench.state.run.phase, bench.state.run.failure, bench.state.run.exit_code) == (
        "running",
        "",
        0,
    )
    come_back(bench, test_step_replay.checkpoint(bench, 2))
    assert [o.step_index for o in only(cmd.TrainStep, test_step_replay.loaded(bench))] == [2]
    assert set(bench.state.work.trajectories) == before


def test_a_run_that_was_stopped_while_it_exported_exports_again() -> None:
    bench = test_step_replay.run(2, total_steps=2)
    test_step_replay.save(bench, 2)
    stopped(bench)
    resumed(bench, asked=True)
    come_back(bench, test_step_replay.checkpoint(bench, 2))
    (publish,) = only(cmd.PublishWeights, test_step_replay.loaded(bench))
    bench.publish(publish.version, 2)
    first, second = only(cmd.ExportModel, bench.commands)
    assert (first.step, second.step) == (2, 2) and second.version > first.version


def test_a_run_that_ended_because_the_user_asked_goes_on() -> None:
    """What was open has been dropped; the next prompts are those after it."""
    bench = test_step_replay.run(2)
    test_step_replay.save(bench, 2)
    bench.own(ev.DrainRequested(reason="SIGTERM"))
    (export,) = only(cmd.ExportModel, bench.commands)
    bench.say(TRAINER, ev.ModelExported(version=export.version, path="export"))
    bench.publish(export.version, 2)
    bench.stop()
    cursor = bench.state.data.cursor
    assert bench.state.run.phase == Phase.ENDED and bench.state.run.exit_code == 0
    resumed(bench, asked=True)
    come_back(bench, test_step_replay.checkpoint(bench, 2))
    test_step_replay.loaded(bench)
    bench.publish(export.version, 2)
    bench.load_all()
    assert bench.open_groups()[0] == f"0.{cursor}" and bench.state.data.cursor > cursor
    bench.complete(bench.open_groups()[0])
    assert bench.trained().step_index == 2 and bench.trained().version == export.version + 1


def ending(**changes: Any) -> Bench:
    """The user has asked after two steps; the model is exported, and the last ends are written."""
    bench = test_step_replay.run(2, **changes)
    test_step_replay.save(bench, 2)
    bench.own(ev.DrainRequested(reason="SIGINT"))
    (export,) = only(cmd.ExportModel, bench.commands)
    bench.say(TRAINER, ev.ModelExported(version=export.version, path="export"))
    bench.publish(export.version, 2)
    assert bench.state.run.phase == Phase.ENDING and only(cmd.EndTrajectories, bench.commands)
    return bench


def test_a_drained_run_that_was_stopped_while_its_last_ends_were_written_goes_on() -> None:
    """They are written then."""
    bench = ending()
    left = set(bench.state.work.trajectories)
    stopped_at_once(bench)
    assert (
        not resumption.is_run_over(bench.state)
        and left == set(bench.state.work.trajectories) != set()
    )
    resumed(bench, asked=True)
    assert (bench.state.run.phase, bench.state.run.failure, bench.state.run.exit_code) == (
        "running",
        "",
        0,
    )
    come_back(bench, test_step_replay.checkpoint(bench, 2))
    test_step_replay.loaded(bench)
    bench.write_ends()
    assert not left & set(bench.state.work.trajectories)
    bench.publish(bench.state.versions.next - 1, 2)
    bench.load_all()
    bench.complete(bench.open_groups()[0])
    assert bench.trained().step_index == 2


def test_a_run_that_has_failed_or_done_its_steps_is_over() -> None:
    bench = test_step_replay.run(1, total_steps=1)
    assert not resumption.is_run_over(bench.state)
    (export,) = only(cmd.ExportModel, bench.commands)
    bench.say(TRAINER, ev.ModelExported(version=export.version, path="export"))
    bench.publish(export.version, 1)
    bench.stop()
    assert bench.state.run.phase == Phase.ENDED and resumption.is_run_over(bench.state)
    resumed(bench, asked=True)
    assert bench.state.run.phase == Phase.ENDED


def test_a_run_that_was_to_end_when_the_power_failed_ends_or_goes_on() -> None:
    """It goes on if the user asks for that."""
    for asked in (False, True):
        bench = test_step_replay.run(1, in_training=True)
        bench.own(ev.DrainRequested(reason="SIGTERM"))
        resumed(bench, asked=asked)
        assert bench.state.run.draining != asked and bench.state.run.phase == Phase.RUNNING
