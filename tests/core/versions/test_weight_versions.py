"""Weight versions: a skipped publish is paid, rejected weights, what nobody publishes."""

from __future__ import annotations

import msgspec

from laminar.core.loading import PULL_TIMEOUT_MS
from laminar.core.state import keys
from laminar.core.versions.broadcast import SLOT_TIMEOUT_MS
from laminar.core.versions.publishing import PUBLISH_TIMEOUT_MS
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, only, start_bench


def on_policy(**changes: object) -> Bench:
    return start_bench(changes, max_staleness=0, groups_per_step=1, capacity=2)


def test_skipped_publish_is_paid_before_the_trainer_waits() -> None:
    """On-policy. No slot was free for version 1, so the trainer went on. But the next batch can
    only be generated with version 1: before the trainer waits for it, it publishes it."""
    bench = on_policy()
    bench.complete("0.0")
    assert not only(cmd.PublishWeights, bench.skip_publish())
    owed = only(cmd.PublishWeights, bench.train(publish=False))
    assert [(c.version, c.step) for c in owed] == [(1, 1)]
    assert only(cmd.PullWeights, bench.publish(1, 1))
    assert bench.state.versions.owed == -1
    assert only(cmd.GenerateTrajectory, bench.load("rollout-0"))


def test_owed_publish_has_its_time_while_bytes_come() -> None:
    """What comes holds a slot of the relay, and has its own time from the last word of it."""
    bench = on_policy(nodes=2)
    bench.complete("0.0")
    bench.skip_publish()
    assert only(cmd.PublishWeights, bench.train(publish=False))
    bench.wait(200_000)
    word = ev.TransferProblem(
        kind="slow", relay="relay-0", version=0, detail="half", num_bytes=9, duration_ms=9,
        left_bytes=9,
    )  # fmt: skip
    bench.say("relay-1", word)
    due = bench.state.orders.timers[keys.deadline_timer(keys.PUBLISH)]
    assert due == (bench.now_ms + SLOT_TIMEOUT_MS) * 1_000_000
    bench.say("relay-1", msgspec.structs.replace(word, kind="stalled", num_bytes=0))
    assert bench.state.orders.timers[keys.deadline_timer(keys.PUBLISH)] == due


def test_skipped_publish_is_not_paid_while_there_is_a_batch() -> None:
    """With staleness 2 the next batch is ready: the trainer trains it, its weights replace the
    ones that were skipped, and nothing is owed any more."""
    bench = start_bench(max_staleness=2, groups_per_step=1, capacity=8)
    bench.complete("0.0", "0.1")
    bench.skip_publish()
    commands = bench.train(publish=False)
    assert only(cmd.TrainStep, commands) and not only(cmd.PublishWeights, commands)
    bench.train()
    assert (bench.state.versions.newest, bench.state.versions.owed) == (2, -1)


def test_skipped_publish_is_not_paid_while_a_later_one_is_on_its_way() -> None:
    """Version 1 was skipped. The trainer has handed over version 2 and reports its step before the
    relay has worked out the digest: that publish will make up for it, and the relay would refuse
    version 1 after version 2."""
    bench = start_bench(max_staleness=2, groups_per_step=1, capacity=8)
    bench.complete("0.0", "0.1")
    bench.skip_publish()
    bench.train(publish=False)
    assert not only(cmd.PublishWeights, bench.train(publish=False))
    assert bench.state.versions.owed == 1
    assert not only(cmd.PublishWeights, bench.publish(2, 2))
    assert bench.state.versions.owed == -1


def test_last_skipped_publish_is_paid_before_the_export() -> None:
    """The last step's weights were skipped; the export comes after every version of the run."""
    bench = on_policy(total_steps=1)
    bench.complete("0.0")
    bench.skip_publish()
    commands = bench.train(publish=False)
    assert only(cmd.PublishWeights, commands) and not only(cmd.ExportModel, commands)
    assert only(cmd.ExportModel, bench.publish(1, 1))


def test_older_version_that_arrives_late_does_not_pay_for_a_newer() -> None:
    """Version 1 is still on its way when version 2 is skipped: version 2 stays owed."""
    bench = start_bench(max_staleness=2, groups_per_step=1, capacity=8)
    bench.complete("0.0", "0.1")
    bench.train(publish=False)
    bench.skip_publish()
    bench.train(publish=False)
    again = bench.publish(1, 1)
    assert bench.state.versions.owed == 2
    assert bench.state.orders.commands["publish"].command == cmd.PublishWeights(
        to="trainer-0", version=2, step=2
    )
    assert not only(cmd.PublishWeights, again), "it is asked for once"


def test_group_that_is_finished_during_an_owed_publish_is_trained_after_it() -> None:
    """The trainer had nothing to train and copies its weights out; then it goes on."""
    for strategy, kind in (("deadline", cmd.TrainStep), ("strategies.py:mine", cmd.ProposeBatch)):
        bench = start_bench(max_staleness=2, groups_per_step=1, capacity=8, batch_strategy=strategy)
        for question in only(cmd.ProposeBatch, bench.complete("0.0")):
            bench.own(ev.BatchProposed(step_index=0, groups=(question.candidates[0].group,)))
        bench.skip_publish()
        bench.train(publish=False)
        bench.complete("0.1")
        assert bench.state.steps.batch is None
        assert only(kind, bench.publish(1, 1))


def test_weights_that_the_relay_never_publishes_end_the_run() -> None:
    """A step completed, its weights neither arrive at the relay nor are skipped."""
    bench = on_policy()
    bench.complete("0.0")
    bench.train(publish=False)
    bench.write_ends()
    bench.wait(PUBLISH_TIMEOUT_MS)
    assert bench.state.run.failure == "the relay did not publish the weights of step 1"
    assert bench.state.run.exit_code == 1


def test_older_version_that_arrives_late_leaves_the_clock_running() -> None:
    """Version 2 never reaches the relay. That version 1 arrives meanwhile is no reason to wait
    for it without end."""
    bench = on_policy(max_staleness=1)
    bench.complete("0.0")
    bench.train(publish=False)
    bench.complete("0.1")
    bench.train(publish=False)
    bench.publish(1, 1)
    bench.write_ends()
    bench.wait(PUBLISH_TIMEOUT_MS)
    assert bench.state.run.failure == "the relay did not publish the weights of step 2"


def test_rejected_weights_are_loaded_once_more_then_the_replica_is_restarted() -> None:
    """The probe differs: perhaps a flipped bit, so it loads again. Twice in a row is its own
    fault: the process is restarted, and comes back with a clean record."""
    bench = on_policy()
    bench.complete("0.0")
    bench.train()
    rejected = ev.WeightsRejected(version=1, reason="probe differs by 3.0")
    again = bench.say("rollout-0", rejected)
    assert [c.version for c in only(cmd.PullWeights, again)] == [1]
    assert not only(cmd.RestartActor, again)
    assert bench.replica().version == -1
    restart = only(cmd.RestartActor, bench.say("rollout-0", rejected))
    assert [(c.to, c.actor) for c in restart] == [("node-0", "rollout-0")]
    assert "probe differs by 3.0" in restart[0].reason
    assert bench.pull_of("rollout-0") is None
    bench.kill()
    assert only(cmd.PullWeights, bench.come_back())


def test_pull_that_takes_too_long_restarts_the_replica() -> None:
    """A load that neither succeeds nor fails."""
    bench = on_policy()
    bench.complete("0.0")
    bench.train()
    bench.write_ends()
    restart = only(cmd.RestartActor, bench.wait(PULL_TIMEOUT_MS))
    assert [c.actor for c in restart] == ["rollout-0"]
    assert restart[0].reason == "PullWeights was not done in time"


def test_load_has_twice_the_time_of_the_longest_one() -> None:
    bench = on_policy()
    bench.complete("0.0")
    bench.train()
    bench.say("rollout-0", msgspec.structs.replace(bench.loaded(1), seconds=200.0))
    bench.complete("0.1")
    bench.train()
    bench.write_ends()
    assert not only(cmd.RestartActor, bench.wait(399_999))
    restart = only(cmd.RestartActor, bench.wait(1))
    assert restart[0].reason == "PullWeights was not done in time"


def test_ordinary_pull_takes_what_is_newest_at_the_load() -> None:
    """Version 2 appeared while the replica was told to pull version 1: it loads version 2."""
    bench = start_bench(max_staleness=2, groups_per_step=1, groups_per_version=1, capacity=2)
    for group in ("0.0", "0.1"):
        bench.complete(group)
        bench.train(publish=False)
    bench.complete("0.2")
    bench.publish(1, 1)
    bench.publish(2, 2)
    pull = bench.pull_of("rollout-0")
    assert pull is not None and (pull.version, pull.exact) == (1, False)
    bench.load("rollout-0")
    assert bench.replica().version == 2
