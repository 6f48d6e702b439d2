"""The run as a whole: drain at every phase, a start that does not come about, fatal losses."""

from __future__ import annotations

import pytest

from laminar.core.members.lifecycle import EXPORT_TIMEOUT_MS
from laminar.core.members.pausing import STOP_TIMEOUT_MS
from laminar.core.state import keys
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, only, start_bench

DRAIN = ev.DrainRequested(reason="SIGINT")
AT_ONCE = ev.DrainRequested(reason="SIGQUIT", at_once=True)


def small(**changes: object) -> Bench:
    """Two steps of one group, on-policy, two held-out prompts."""
    values: dict[str, object] = {
        "groups_per_step": 1,
        "max_staleness": 0,
        "capacity": 4,
        "total_steps": 2,
        "num_eval": 2,
    }
    return Bench(**(values | changes))


def to_the_export(bench: Bench) -> list[cmd.Command]:
    bench.start()
    commands: list[cmd.Command] = []
    for _ in range(2):
        bench.complete(*bench.open_groups())
        commands = bench.train()
        bench.load_all()
    return commands


def exported(bench: Bench) -> list[cmd.Command]:
    bench.say("trainer-0", ev.ModelExported(version=3, path="export"))
    return bench.publish(3, 2)


def test_an_older_version_of_the_same_step_does_not_stand_for_the_export() -> None:
    """The relay is new and the export is owed to it; what was handed over before arrives first."""
    bench = small()
    to_the_export(bench)
    bench.kill("relay-0")
    bench.join("relay-0", "b")
    bench.ready("relay-0")
    owed = bench.say("trainer-0", ev.ModelExported(version=3, path="export"))
    assert [order.version for order in only(cmd.PublishWeights, owed)] == [3]
    bench.publish(2, 2)
    assert keys.PUBLISH in bench.state.orders.commands and bench.state.versions.owed == 3
    bench.publish(3, 2)
    assert (
        keys.PUBLISH not in bench.state.orders.commands
        and bench.state.run.phase == "final-evaluation"
    )


def books_closed(bench: Bench) -> bool:
    ledger = bench.state.work.ledger
    return ledger.groups.live == ledger.trajectories.live == ledger.tokens.live == 0


@pytest.mark.parametrize("lost", ["exits", "fails", "machine"])
def test_the_last_ends_are_written_without_a_trainer(lost: str) -> None:
    """The model is exported and evaluated: also without checkpoints nobody needs it any more."""
    bench = small()
    to_the_export(bench)
    exported(bench)
    for command in only(cmd.GenerateTrajectory, bench.load_all()):
        bench.finish(command.trajectory_id)
        bench.reward(command.trajectory_id)
    assert (bench.state.run.phase, bench.settings.save_freq) == ("ending", 0)
    if lost == "exits":
        bench.kill("trainer-0")
    elif lost == "fails":
        bench.say("trainer-0", ev.ActorFailed(reason="out of memory", user_error=False))
    else:
        bench.join("node-0", "b")
        bench.join("store-0", "b", "node-0/b")
        bench.ready("store-0")
    assert not bench.state.run.failure
    bench.stop()
    assert bench.state.run.exit_code == 0
    assert books_closed(bench) and bench.state.run.phase == "ended"


def test_whole_run_ends_with_exit_code_zero() -> None:
    """Two steps, export, the last evaluation on the exported weights, everybody goes home."""
    bench = small()
    run = bench.state.run
    assert only(cmd.ExportModel, to_the_export(bench)) == [
        cmd.ExportModel(to="trainer-0", version=3, step=2)
    ]
    exported(bench)
    assert run.phase == "final-evaluation"
    commands = bench.load_all()
    for command in only(cmd.GenerateTrajectory, commands):
        assert command.purpose == "eval"
        bench.finish(command.trajectory_id)
        bench.reward(command.trajectory_id)
    bench.stop()
    assert (run.phase, run.exit_code, run.failure) == ("ended", 0, "")
    assert books_closed(bench) and bench.state.versions.export_path == "export"
    assert not bench.state.orders.timers and not bench.state.orders.commands


def test_drain_while_starting_ends_at_once() -> None:
    """Ctrl-C before anything began: there is no model to export; 130 is a shell's code for it."""
    bench = small()
    bench.join("trainer-0")
    stop = bench.own(DRAIN)
    assert [c.to for c in only(cmd.StopActor, stop)] == ["trainer-0"]
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 130)
    assert "SIGINT" in bench.state.run.failure


def test_drain_while_the_trainer_waits() -> None:
    """Ctrl-C while answers are generated: they are given up, the model is exported, no new work is
    begun, no evaluation is made, and the exit code is 0."""
    bench = small(test_freq=1, val_before_train=True)
    bench.start()
    commands = bench.own(DRAIN)
    assert only(cmd.ExportModel, commands) and only(cmd.AbortTrajectories, commands)
    bench.write_ends()
    commands += bench.say("trainer-0", ev.ModelExported(version=1, path="export"))
    commands += bench.publish(1, 0)
    commands += bench.load_all()
    assert not only(cmd.GenerateTrajectory, commands)
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 0)
    assert books_closed(bench)


def test_drain_while_a_batch_is_trained_completes_it() -> None:
    """The step that is under way is not thrown away."""
    bench = small()
    bench.start()
    bench.complete("0.0")
    assert not bench.own(DRAIN)
    commands = bench.train()
    assert only(cmd.ExportModel, commands) and not only(cmd.GenerateTrajectory, commands)
    bench.write_ends()
    assert bench.state.work.ledger.groups.trained == 1 and books_closed(bench)


@pytest.mark.parametrize("draining", [False, True])
def test_stop_at_once_neither_completes_the_step_nor_exports(draining: bool) -> None:
    """Ctrl-C for the second time, or without a first: everybody stops when the books are closed."""
    bench = small()
    bench.start()
    bench.complete("0.0")
    if draining:
        bench.own(DRAIN)
    commands = bench.own(AT_ONCE)
    assert not only(cmd.ExportModel, commands) and only(cmd.EndTrajectories, commands)
    assert bench.own(DRAIN) == [] and bench.own(AT_ONCE) == []
    bench.write_ends()
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 130)
    assert bench.state.run.failure == "stopped at once: SIGQUIT"
    assert bench.state.work.ledger.groups.trained == 0 and books_closed(bench)


def test_drain_while_exporting_gives_up_a_running_evaluation() -> None:
    """A regular evaluation was still running; when the export is out, its answers are dropped."""
    bench = small(total_steps=1, val_before_train=True)
    bench.start()
    bench.complete("0.0")
    bench.train()
    bench.own(DRAIN)
    bench.say("trainer-0", ev.ModelExported(version=2, path="export"))
    commands = bench.publish(2, 1)
    assert only(cmd.AbortTrajectories, commands)
    assert {e.reason for c in only(cmd.EndTrajectories, commands) for e in c.endings} == {
        "run-ended"
    }
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 0)


def test_drain_during_the_last_evaluation_ends_it() -> None:
    """Ctrl-C once more: the answers under way are given up and the books close."""
    bench = small()
    to_the_export(bench)
    exported(bench)
    assert only(cmd.GenerateTrajectory, bench.load_all())
    assert only(cmd.AbortTrajectories, bench.own(DRAIN))
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 0)
    assert books_closed(bench) and bench.state.work.ledger.groups.dropped == {"run-ended": 2}


@pytest.mark.parametrize("phase", ["ending", "stopping", "ended"])
def test_drain_while_ending_changes_nothing(phase: str) -> None:
    """Ctrl-C again and again."""
    bench = small(num_eval=0)
    to_the_export(bench)
    exported(bench)
    if phase != "ending":
        bench.write_ends()
    if phase == "ended":
        bench.stop()
    assert bench.state.run.phase == phase
    assert bench.own(DRAIN) == [] and bench.own(DRAIN) == []
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 0)


@pytest.mark.parametrize(
    ("lacking", "published", "said"),
    [
        ("relay-0", False, "relay"),
        ("", False, "the first weights to be published"),
        ("rollout-0", True, "rollout"),
    ],
)
def test_start_that_does_not_come_about_names_what_is_missing(
    lacking: str, published: bool, said: str
) -> None:
    """And nobody who is there; also when the weights are out and nobody would ask for them."""
    bench = small(start_timeout_ms=60_000)
    for name in ("node-0", "store-0", "relay-0", "trainer-0", "rollout-0"):
        if name != lacking:
            bench.join(name)
            if name != "node-0":
                bench.ready(name)
    if published:
        bench.publish(0, 0)
    bench.wait(60_000)
    assert bench.state.run.failure == f"not started within 60000 ms: missing {said}"
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 1)


@pytest.mark.parametrize("name", ["trainer-0", "relay-0"])
def test_loss_of_a_single_role_ends_the_run_with_closed_books(name: str) -> None:
    """Its process dies in the middle of the run, with a batch in training and answers under way."""
    bench = small(total_steps=6, max_staleness=2, capacity=8)
    bench.start()
    bench.complete("0.0")
    bench.kill(name, restarting=False)
    assert (
        bench.state.run.failed.kind == {"trainer-0": "process-lost", "relay-0": "relay-lost"}[name]
    )
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 1)
    assert books_closed(bench)
    assert set(bench.state.work.ledger.trajectories.dropped) == {"run-ended"}


def test_last_replica_that_never_comes_back_ends_the_run() -> None:
    """Its node restarts it, but it hangs before it joins."""
    bench = small(start_timeout_ms=60_000)
    bench.start()
    bench.kill()
    bench.write_ends()
    assert not bench.state.run.failure
    bench.wait(60_000)
    assert (bench.state.run.failed.kind, bench.state.run.failed.subject) == (
        "replicas-lost",
        "rollout-0",
    )


def test_process_that_never_joins_ends_the_run() -> None:
    """It crashes during its start (a bad import) and its node gives up."""
    bench = small()
    bench.join("node-0")
    exited = ev.ProcessExited(actor="relay-0", boot_id="x", code=1, restarting=False)
    bench.say("node-0", exited)
    assert bench.state.run.failure == "relay-0 never joined: its process ended with exit code 1"


def test_export_that_hangs_ends_the_run() -> None:
    bench = small()
    to_the_export(bench)
    bench.write_ends()
    bench.wait(EXPORT_TIMEOUT_MS)
    assert bench.state.run.failure == "trainer-0 did not finish ExportModel in time"


@pytest.mark.parametrize("failed", [False, True])
def test_export_with_other_weights_ends_the_run(failed: bool) -> None:
    """The file system gave back other bytes than were written: nobody may take that model. It is no
    second failure of a run that has failed."""
    bench = small()
    to_the_export(bench)
    if failed:
        bench.kill("store-0", restarting=False)
    reason, version = bench.state.run.failure, bench.state.versions.export
    other = ev.WeightsPublished(version=version, step=2, digest="x", num_bytes=4, held=())
    bench.say("relay-0", other)
    assert bench.state.run.exit_code == 1
    assert bench.state.run.failure == reason if failed else "digest x" in bench.state.run.failure
    assert bench.state.run.ignored == ({"WeightsPublished: run-ending": 1} if failed else {})


def test_actor_that_does_not_say_goodbye_is_not_waited_for_for_ever() -> None:
    """One process ignores StopActor; its node kills it later, the run ends without it."""
    bench = small(num_eval=0)
    to_the_export(bench)
    exported(bench)
    bench.write_ends()
    for name in ("node-0", "store-0", "relay-0", "trainer-0"):
        bench.say(name, ev.ActorLeft())
    assert bench.state.run.phase == "stopping"
    bench.wait(STOP_TIMEOUT_MS)
    assert (bench.state.run.phase, bench.state.run.exit_code) == ("ended", 0)


def test_process_that_exits_instead_of_saying_goodbye_counts_as_stopped() -> None:
    bench = small(num_eval=0)
    to_the_export(bench)
    exported(bench)
    bench.write_ends()
    for name in ("rollout-0", "trainer-0", "relay-0", "store-0"):
        bench.kill(name, restarting=False)
    bench.say("node-0", ev.ActorLeft())
    assert (bench.state.run.phase, bench.state.run.exit_code, bench.state.run.failure) == (
        "ended",
        0,
        "",
    )


def test_replica_that_said_goodbye_is_watched_no_more() -> None:
    """The others still flush when its progress is due: nobody restarts what has stopped."""
    bench = start_bench(replicas=2, stall_ms=5_000)
    bench.say("trainer-0", ev.ActorFailed(reason="out of memory", user_error=False))
    bench.write_ends()
    bench.say("rollout-0", ev.ActorLeft())
    commands = bench.wait(6_000)
    assert not only(cmd.RestartActor, commands)
    assert "progress:rollout-0" not in bench.state.orders.timers
