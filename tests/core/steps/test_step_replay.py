"""The trainer is lost and comes back: what it is given again, and under which numbers."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.core.steps.step_replay import DEATHS_MAX
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names import ids
from laminar.names.ids import GroupId
from tests.core.scheduling.test_evaluation import answer_all
from tools.kit.bench import Bench, only, start_bench

NAME = "trainer-0"


def run(steps: int = 0, *, in_training: bool = False, **changes: Any) -> Bench:
    """One replica; so many steps are trained and published, then perhaps a batch is begun."""
    values = {"max_staleness": 1, "groups_per_step": 1, "save_freq": 1, "total_steps": 0}
    bench = start_bench(capacity=4, **values | changes)
    for _ in range(steps):
        bench.complete(bench.open_groups()[0])
        bench.train()
        bench.write_ends()
        bench.load_all()
    if in_training:
        bench.complete(bench.open_groups()[0])
    return bench


def orders(bench: Bench) -> list[cmd.TrainStep]:
    return only(cmd.TrainStep, bench.commands)


def checkpoint(bench: Bench, step: int, changes: dict[str, Any] | None = None) -> ev.Checkpoint:
    """As the trainer that made the first `step` steps would have written it."""
    trained = {order.step_index: order for order in orders(bench)[::-1]}
    batches = [trained[i].trajectories for i in range(step)]
    values: dict[str, Any] = {
        "version": trained[step - 1].version,
        "step": step,
        "path": f"checkpoints/step_{step}",
        "digest": ids.extend_chain_digest("", *batches),
    }
    return ev.Checkpoint(**values | (changes or {}))


def save(bench: Bench, step: int, *kept: int) -> None:
    found = checkpoint(bench, step)
    kept = kept or (found.version,)
    saved = ev.CheckpointSaved(version=found.version, step=step, path=found.path, kept=kept)
    bench.say(NAME, saved)


def come_back(bench: Bench, *checkpoints: ev.Checkpoint, boot: str = "b") -> list[Command]:
    bench.join(NAME, boot)
    ready = ev.TrainerReady(num_parameters=1, weights_bytes=4, checkpoints=checkpoints)
    return bench.say(NAME, ready)


def loaded(bench: Bench) -> list[Command]:
    (order,) = only(cmd.LoadCheckpoint, bench.commands)[-1:]
    return bench.say(NAME, ev.CheckpointLoaded(version=order.version, step=order.step))


def repeated(bench: Bench, digest: str = "") -> list[Command]:
    """The step that it does again is done."""
    (order,) = only(cmd.RepeatStep, bench.commands)[-1:]
    event = ev.StepRepeated(
        step_index=order.step_index,
        version=order.version,
        digest=digest or f"d{order.step_index + 1}",
        published=order.digest,
    )
    return bench.say(NAME, event)


def test_a_step_that_is_completed_before_it_is_ordered_again_is_not_believed() -> None:
    bench = run(3, in_training=True)
    completed = bench.trained()
    save(bench, 1)
    bench.kill(NAME)
    come_back(bench, checkpoint(bench, 1))
    assert bench.say(NAME, completed) == []
    assert bench.state.run.ignored["StepCompleted: not-ordered"] == 1
    assert bench.state.steps.completed == 3 and bench.state.steps.batch is not None


def test_everything_is_done_again_from_a_checkpoint_and_the_batch_is_ordered_anew() -> None:
    bench = run(3, in_training=True)
    versions = bench.state.versions
    first = orders(bench)
    save(bench, 1)
    assert not only(cmd.EndTrajectories, bench.kill(NAME))
    (load,) = only(cmd.LoadCheckpoint, come_back(bench, checkpoint(bench, 1)))
    assert (load.version, load.step, load.path) == (1, 1, "checkpoints/step_1")
    (repeat,) = only(cmd.RepeatStep, loaded(bench))
    assert (repeat.step_index, repeat.version, repeat.digest) == (1, 2, "d2")
    assert repeat.trajectories == first[1].trajectories
    (repeat,) = only(cmd.RepeatStep, repeated(bench))
    assert (repeat.step_index, repeat.trajectories) == (2, first[2].trajectories)
    (again,) = only(cmd.TrainStep, repeated(bench))
    assert (again.step_index, again.version) == (3, 5) and first[3].version == 4
    assert again.trajectories == first[3].trajectories
    bench.train()
    assert (bench.state.steps.completed, versions.newest, versions.newest_step) == (4, 5, 4)
    trained = bench.state.work.ledger.trajectories.trained
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.trained == trained + 2 == 8


def test_without_a_checkpoint_it_begins_with_the_first_step() -> None:
    bench = run(2, in_training=True)
    bench.kill(NAME)
    (repeat,) = only(cmd.RepeatStep, come_back(bench))
    assert repeat.step_index == 0
    repeated(bench)
    assert [o.version for o in only(cmd.TrainStep, repeated(bench))] == [4]


@pytest.mark.parametrize(
    "ahead", [{"step": 3}, {"version": 4}, {"digest": ids.extend_chain_digest("", ("0.9.9",))}]
)
def test_what_the_log_does_not_confirm_is_not_loaded(ahead: dict[str, Any]) -> None:
    """Its step is not completed, or was under another number, or of other trajectories."""
    bench = run(2, in_training=True)
    save(bench, 1)
    bench.kill(NAME)
    wrong = checkpoint(bench, 2, ahead)
    (load,) = only(cmd.LoadCheckpoint, come_back(bench, checkpoint(bench, 1), wrong))
    assert (load.step, load.kept) == (1, (1,))
    assert bench.state.versions.checkpoint_paths == {1: "checkpoints/step_1"}


def test_a_checkpoint_that_was_not_reported_counts_if_the_log_has_its_step() -> None:
    bench = run(2)
    bench.kill(NAME)
    found = checkpoint(bench, 2)
    (load,) = only(cmd.LoadCheckpoint, come_back(bench, found))
    assert load.step == 2 and bench.state.versions.checkpoint_paths == {2: found.path}
    assert not only(cmd.RepeatStep, loaded(bench))


def test_what_the_oldest_checkpoint_has_is_forgotten() -> None:
    bench = run(3)
    save(bench, 2)
    save(bench, 3, 2, 3)
    assert [t.step_index for t in bench.state.steps.trained] == [1, 2]
    save_again = bench.state.steps.trained
    bench.kill(NAME)
    come_back(bench, checkpoint(bench, 2), checkpoint(bench, 3))
    assert bench.state.steps.trained == save_again and bench.state.steps.repeated == 3


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_whose_checkpoints_are_gone_cannot_go_on(steps: int) -> None:
    """While it generates, and when only the export is left."""
    bench = run(steps, total_steps=3)
    save(bench, 2)
    bench.write_ends()
    bench.kill(NAME)
    commands = come_back(bench)
    assert only(cmd.AbortTrajectories if steps == 2 else cmd.StopActor, commands)
    assert "no checkpoint that the log confirms" in bench.state.run.failure


def test_other_weights_go_out_under_a_number_of_their_own() -> None:
    """On a GPU rounding may differ; the next batch is trained on what there is now."""
    bench = run(2)
    bench.kill(NAME)
    come_back(bench)
    repeated(bench)
    (publish,) = only(cmd.PublishWeights, repeated(bench, "other bytes"))
    assert (publish.version, publish.step) == (3, 2)
    event = ev.WeightsPublished(version=3, step=2, digest="other bytes", num_bytes=4, held=(2, 3))
    bench.say("relay-0", event)
    bench.step_of[3] = 2
    bench.load_all()
    versions = bench.state.versions
    assert (versions.newest, versions.newest_step) == (3, 2)
    assert versions.newest_digest == "other bytes"
    bench.complete(bench.open_groups()[0])
    assert (orders(bench)[-1].step_index, orders(bench)[-1].version) == (2, 4)


def test_a_skipped_version_has_nothing_to_compare_with() -> None:
    bench = run(1, in_training=True)
    bench.skip_publish()
    bench.train(publish=False)
    bench.kill(NAME)
    come_back(bench)
    (repeat,) = only(cmd.RepeatStep, repeated(bench))
    assert repeat.digest == ""
    (publish,) = only(cmd.PublishWeights, repeated(bench, "whatever"))
    assert (publish.version, publish.step) == (2, 2)


def test_what_the_dead_one_had_handed_over_counts() -> None:
    """Its relay reports the version of the interrupted batch while it is away."""
    bench = run(1, in_training=True)
    bench.kill(NAME)
    bench.publish(2, 2)
    assert bench.state.versions.newest == 2 and bench.pull_of("rollout-0") is not None
    bench.load_all()
    come_back(bench)
    (again,) = only(cmd.TrainStep, repeated(bench))
    assert again.version == 3
    bench.train()
    assert (bench.state.versions.newest, bench.state.versions.newest_step) == (3, 2)


def test_what_never_reached_the_relay_is_owed() -> None:
    """It was trained and reported, and its hand-over died with the trainer."""
    bench = run(1, in_training=True)
    bench.train(publish=False)
    bench.kill(NAME)
    assert bench.state.versions.newest == 1
    come_back(bench)
    repeated(bench)
    (publish,) = only(cmd.PublishWeights, repeated(bench))
    assert (publish.version, publish.step) == (2, 2)


def test_an_interrupted_export_is_made_again_under_another_number() -> None:
    bench = run(2, total_steps=2)
    assert [o.version for o in only(cmd.ExportModel, bench.commands)] == [3]
    bench.kill(NAME)
    bench.publish(3, 2)  # it was handed over, and not reported
    come_back(bench, checkpoint(bench, 2))
    (export,) = only(cmd.ExportModel, loaded(bench))
    assert (export.version, export.step) == (4, 2)
    bench.say(NAME, ev.ModelExported(version=4, path="export"))
    bench.publish(4, 2)
    assert only(cmd.StopActor, bench.write_ends() or bench.commands)
    assert not bench.state.run.failure


def test_a_trainer_that_was_away_when_the_user_stopped_the_run_exports_what_there_is() -> None:
    """It has made no step, so it has nothing to load."""
    bench = run(0)
    bench.kill(NAME)
    bench.own(ev.DrainRequested(reason="SIGINT"))
    assert not only(cmd.ExportModel, bench.commands)
    (export,) = only(cmd.ExportModel, come_back(bench))
    assert (export.version, export.step) == (1, 0)


def test_a_batch_that_ends_its_trainer_three_times_ends_the_run() -> None:
    bench = run(in_training=True)
    (group,) = bench.state.steps.batch.groups if bench.state.steps.batch else ()
    for boot in range(DEATHS_MAX):
        assert not bench.state.run.failure
        bench.kill(NAME)
        if boot < DEATHS_MAX - 1:
            come_back(bench, boot=f"b{boot}")
    assert bench.state.run.failed.kind == "batch-fatal" and bench.state.run.exit_code == 1
    assert f"the batch of step 1 (groups {group}) has ended {NAME} 3" in bench.state.run.failure


def test_a_trainer_that_does_not_come_back_ends_the_run() -> None:
    for gone in (False, True):
        bench = run(1)
        bench.kill(NAME, restarting=not gone)
        if not gone:
            bench.wait(bench.settings.start_timeout_ms)
        assert NAME in bench.state.run.failure and bench.state.run.exit_code == 1


@pytest.mark.parametrize("when", ["train", "load", "repeat"])
def test_one_that_hangs_is_restarted(when: str) -> None:
    bench = run(1, in_training=True)
    if when != "train":
        bench.kill(NAME)
        come_back(bench, *([checkpoint(bench, 1)] if when == "load" else []))
    assert when in bench.state.orders.commands
    commands = bench.own(ev.TimerFired(timer=f"command:{when}"))
    assert NAME in [c.actor for c in only(cmd.RestartActor, commands)]


def test_its_own_failure_is_a_loss_and_a_mistake_of_the_user_is_the_end() -> None:
    bench = run(1)
    bench.say(NAME, ev.ActorFailed(reason="out of memory", user_error=False))
    assert not bench.state.run.failure and f"rejoin:{NAME}" in bench.state.orders.timers
    come_back(bench)
    bench.say(NAME, ev.ActorFailed(reason="no such model", user_error=True))
    assert bench.state.run.exit_code == 2


def test_with_another_loss_of_the_user_the_run_ends() -> None:
    """With the same one it goes on."""
    bench = run(1)
    bench.state.steps.function_digests = {"loss": "d1"}
    for digest in ("d1", "d2"):
        bench.kill(NAME)
        bench.join(NAME, digest)
        loss = ev.TrainFunction(setting="loss", digest=digest)
        bench.say(NAME, ev.TrainerReady(num_parameters=1, weights_bytes=4, functions=(loss,)))
        assert bool(bench.state.run.failure) == (digest == "d2")
    said = "trainer-0: loss: its file now has digest d2, but the run began with d1"
    assert said in bench.state.run.failure and bench.state.run.exit_code == 2


def test_lost_again_while_it_does_a_step_again() -> None:
    bench = run(2, in_training=True)
    save(bench, 1)
    for boot in ("b", "c"):
        bench.kill(NAME)
        come_back(bench, checkpoint(bench, 1), boot=boot)
        (repeat,) = only(cmd.RepeatStep, loaded(bench))
        assert repeat.step_index == 1
    assert [o.version for o in only(cmd.TrainStep, repeated(bench))] == [4]
    assert bench.state.steps.batch is not None and bench.state.steps.batch.deaths == 1


def test_another_trainer_is_refused() -> None:
    bench = run(1)
    bench.kill(NAME)
    elsewhere = ev.ActorJoined(name=NAME, role="trainer", boot_id="x", node="node-7", pid=1)
    (refused,) = only(cmd.RefuseActor, bench.hear(NAME, 0, elsewhere))
    assert refused.reason == "the trainer of this run is trainer-0 on node-0"


def test_the_head_comes_back_while_it_is_away() -> None:
    """What both have lost is handed over again, when the trainer has it again."""
    bench = run(1)
    bench.kill(NAME)
    bench.kill("relay-0")
    bench.join("relay-0", "b")
    bench.ready("relay-0")
    assert bench.state.versions.owed == 1 and not only(cmd.PublishWeights, bench.commands[-5:])
    come_back(bench)
    assert [p.version for p in only(cmd.PublishWeights, repeated(bench))] == [1]


def test_a_strategy_is_asked_when_it_is_back() -> None:
    bench = run(batch_strategy="mine.py:choose")
    first, second, *_ = bench.open_groups()
    bench.complete(first)
    bench.own(ev.BatchProposed(step_index=0, groups=(GroupId(first),)))
    bench.train()
    bench.kill(NAME)
    assert not only(cmd.ProposeBatch, bench.complete(second))
    come_back(bench)
    assert [p.step_index for p in only(cmd.ProposeBatch, repeated(bench))] == [1]


def test_a_run_that_ends_has_nothing_done_again() -> None:
    """And then the trainer is lost once more: nobody waits for it."""
    bench = run(2)
    bench.kill(NAME)
    come_back(bench)
    bench.kill("rollout-0", restarting=False)
    assert bench.state.run.phase == "ending" and not only(cmd.RepeatStep, repeated(bench))
    bench.say(NAME, ev.TrainerReady(num_parameters=1, weights_bytes=4))
    assert bench.state.run.ignored["TrainerReady: repeat"] == 1
    bench.kill(NAME)
    assert bench.state.run.failure.startswith("no replica is left")


def test_drained_while_it_is_away_the_batch_is_completed() -> None:
    bench = run(1, in_training=True)
    bench.kill(NAME)
    bench.own(ev.DrainRequested(reason="SIGINT"))
    come_back(bench)
    assert only(cmd.TrainStep, repeated(bench))
    assert [e.version for e in only(cmd.ExportModel, bench.train())] == [4]


def evaluate(bench: Bench) -> None:
    answer_all(bench)
    bench.write_ends()


def hand_over(bench: Bench, kind: type[cmd.PublishWeights | cmd.ExportModel], digest: str) -> None:
    """The trainer hands over what it was ordered to last, of these bytes; its relay keeps nothing
    older."""
    order = only(kind, bench.commands)[-1]
    bench.step_of[order.version] = order.step
    published = ev.WeightsPublished(
        version=order.version, step=order.step, digest=digest, num_bytes=4, held=(order.version,)
    )
    bench.say("relay-0", published)
    if isinstance(order, cmd.ExportModel):
        bench.say(NAME, ev.ModelExported(version=order.version, path="export"))


def exported_run() -> Bench:
    """The only step is trained, its export is published and about to be loaded."""
    bench = run(1, total_steps=1, num_eval=2)
    bench.say(NAME, ev.ModelExported(version=2, path="export"))
    bench.publish(2, 1)
    assert bench.state.run.phase == "final-evaluation"
    return bench


def finals(bench: Bench) -> list[tuple[int, bool]]:
    return [(result.version, result.final) for result in bench.state.evaluations.results]


def test_what_is_redone_after_the_export_is_published_to_nobody() -> None:
    """Other bytes than the exported ones: the relay still has those, and they are evaluated."""
    bench = exported_run()
    bench.kill(NAME)
    come_back(bench)
    assert not only(cmd.PublishWeights, repeated(bench, "other bytes"))
    bench.load_all()
    evaluate(bench)
    assert finals(bench) == [(2, True)]
    assert bench.state.run.phase == "stopping" and not bench.state.run.failure


def test_an_export_that_is_lost_and_cannot_be_made_again_is_followed_by_another() -> None:
    """The relay of the trainer's machine is lost too, and the trainer has other bytes."""
    bench = exported_run()
    bench.kill(NAME)
    come_back(bench)
    repeated(bench, "other bytes")
    bench.kill("relay-0")
    bench.join("relay-0", "b")
    (publish,) = only(cmd.PublishWeights, bench.ready("relay-0"))
    assert bench.state.run.phase == "exporting" and (publish.version, publish.step) == (3, 1)
    hand_over(bench, cmd.PublishWeights, "other bytes")
    hand_over(bench, cmd.ExportModel, "other bytes")
    assert bench.state.run.phase == "final-evaluation" and bench.state.versions.export == 4
    if bench.pull_of("rollout-0") is not None:
        bench.load_all()
    evaluate(bench)
    assert finals(bench)[-1] == (4, True)
    assert bench.state.run.phase == "stopping" and not bench.state.run.failure


def test_an_export_that_never_reached_its_relay_is_made_again_of_other_bytes() -> None:
    """It was reported, and its hand-over died with the trainer."""
    bench = run(1, total_steps=1, num_eval=2)
    bench.say(NAME, ev.ModelExported(version=2, path="export"))
    bench.kill(NAME)
    come_back(bench)
    (publish,) = only(cmd.PublishWeights, repeated(bench, "other bytes"))
    assert (publish.version, bench.state.versions.export) == (3, -1)
    hand_over(bench, cmd.PublishWeights, "other bytes")
    hand_over(bench, cmd.ExportModel, "other bytes")
    bench.load_all()
    evaluate(bench)
    assert finals(bench)[-1] == (4, True) and bench.state.run.phase == "stopping"


def test_the_evaluation_of_an_export_that_is_made_again_is_not_the_last_one() -> None:
    """The trainer is lost between handing the export over and reporting it."""
    bench = run(1, total_steps=1, num_eval=2)
    bench.publish(2, 1)
    bench.load_all()
    assert bench.state.evaluations.running is not None and bench.state.evaluations.running.final
    bench.kill(NAME)
    come_back(bench)
    repeated(bench)
    evaluate(bench)
    assert finals(bench) == [(2, False)]
    assert [order.version for order in only(cmd.ExportModel, bench.commands)] == [2, 3]
    hand_over(bench, cmd.ExportModel, "d1")
    bench.load_all()
    evaluate(bench)
    assert finals(bench) == [(2, False), (3, True)] and bench.state.run.phase == "stopping"
