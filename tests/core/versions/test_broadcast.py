"""The chain of relays: its order, its repairs, and what each machine's replicas can pull."""

from __future__ import annotations

import msgspec
import pytest

from laminar.core.context import RESTART_TIMEOUT_MS
from laminar.core.scheduling.admission import find_not_admitted_reason
from laminar.core.versions import broadcast
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from tools.kit.bench import Bench, only, start_bench

SLOW = {"duration_ms": 4_000, "num_bytes": 1_000_000}


def together(**changes: object) -> Bench:
    """Each machine has generated one group, the three are the batch, and nobody has work."""
    bench = started(capacity=2, groups_per_step=3, max_staleness=0, **changes)
    bench.complete(*bench.open_groups())
    return bench


def started(nodes: int = 3, **changes: object) -> Bench:
    """Three machines with one replica each; every relay holds version 0."""
    return start_bench(changes, nodes=nodes, max_staleness=4, capacity=4)


def forwarded(commands: list[Command]) -> list[tuple[str, str]]:
    return [(c.to, c.successor) for c in only(cmd.ForwardWeights, commands)]


def restarted(commands: list[Command]) -> list[tuple[str, str]]:
    return [(c.to, c.actor) for c in only(cmd.RestartActor, commands)]


def stalls(
    bench: Bench, name: str, relay: str, stalls: int = broadcast.STALLS_MAX
) -> list[Command]:
    """A relay reports that its connections to this one are established and carry no weights."""
    problem = {"kind": "stalled", "relay": relay, "version": -1, "detail": "timed out"}
    return bench.say(name, ev.TransferProblem(**problem, stalls=stalls))


def step(bench: Bench, *, publish: bool = True) -> list[Command]:
    """One batch is generated and trained."""
    bench.complete(*bench.open_groups()[:2])
    return bench.train(publish=publish)


# --- order --------------------------------------------------------------------------------------


def test_chain_begins_at_the_trainers_machine_whoever_was_ready_first() -> None:
    bench = Bench(nodes=3)
    for name in ("node-0", "node-1", "node-2", "store-0", "relay-0", "relay-1", "relay-2"):
        bench.join(name)
    assert forwarded(bench.ready("relay-1")) == []
    assert forwarded(bench.ready("relay-0")) == [("relay-1", "relay-0")]
    assert forwarded(bench.join("trainer-0")) == [("relay-0", "relay-1"), ("relay-1", "")]
    (order,) = only(cmd.ForwardWeights, bench.ready("relay-2"))
    assert (order.to, order.successor, order.address) == ("relay-1", "relay-2", "relay-2:1")
    assert order.incarnation == bench.state.members.actors["relay-2"].incarnation
    assert bench.state.members.relay_chain == ["relay-0", "relay-1", "relay-2"]


def test_run_starts_without_the_other_machines() -> None:
    bench = Bench(nodes=2)
    for name in ("node-0", "store-0", "relay-0", "trainer-0"):
        bench.join(name)
    bench.ready("store-0")
    assert not only(cmd.PublishWeights, bench.ready("relay-0"))
    assert only(cmd.PublishWeights, bench.ready("trainer-0"))


@pytest.mark.parametrize(("name", "node"), [("relay-7", "node-1"), ("relay-0", "elsewhere")])
def test_relay_that_is_not_its_machines_is_refused(name: str, node: str) -> None:
    bench = Bench()
    joined = ev.ActorJoined(name=name, role="relay", boot_id="b", node=node, pid=1)
    (refused,) = only(cmd.RefuseActor, bench.hear(name, 0, joined))
    assert refused.reason == f"{name!r} is not the name of the relay of {node!r}"


# --- pulls --------------------------------------------------------------------------------------


def test_replica_pulls_what_the_relay_of_its_machine_holds() -> None:
    bench = together()
    commands = bench.train()
    assert {c.to for c in only(cmd.PullWeights, commands)} == {"rollout-0"}
    pulls = only(cmd.PullWeights, bench.receive("relay-1", 1))
    assert [(p.to, p.version) for p in pulls] == [("rollout-1.0", 1)]


def test_version_that_arrives_before_the_word_of_its_publication_can_be_pulled() -> None:
    bench = together()
    bench.train(publish=False)
    pulls = only(cmd.PullWeights, bench.receive("relay-1", 1))
    assert [p.to for p in pulls] == ["rollout-1.0"]
    assert bench.state.versions.newest == 0
    assert not restarted(bench.publish(1, 1))


def test_evicted_version_is_not_asked_for_again_and_newer_ones_stay() -> None:
    bench = started()
    bench.receive("relay-1", 0, held=(0,))
    step(bench)
    relay = bench.state.members.relays["relay-1"]
    bench.receive("relay-1", 1, held=(0, 1))
    bench.kill("rollout-1.0")
    bench.come_back("rollout-1.0")
    gone = ev.VersionMissing(version=0, held=())
    bench.say("rollout-1.0", gone)
    assert relay.held == [1] and relay.newest == 1


def test_evaluation_waits_for_a_machine_that_has_its_version_and_pins_it_everywhere() -> None:
    bench = together(num_eval=2, test_freq=1)
    bench.kill("rollout-0", restarting=False)
    bench.train()
    assert bench.state.evaluations.due == 1 and bench.pull_of("rollout-1.0") is None
    bench.receive("relay-1", 1)
    pinned = only(cmd.PinVersion, bench.load("rollout-1.0"))
    assert [(p.to, p.version) for p in pinned] == [(f"relay-{i}", 1) for i in range(3)]
    bench.kill("relay-2")
    bench.join("relay-2", "b")
    late = only(cmd.PinVersion, bench.ready("relay-2"))
    assert [(p.to, p.version) for p in late] == [("relay-2", 1)]


def test_evaluation_of_the_newest_version_stays_when_that_was_evicted_on_its_arrival() -> None:
    """A machine whose relay has just come back is the only one left, and it kept nothing: what its
    replica asks for is that version, or what comes after it."""
    bench = together(num_eval=2, test_freq=1)
    bench.kill("relay-1")
    bench.come_back("relay-1")
    bench.kill("rollout-2.0", restarting=False)
    bench.train()
    bench.load("rollout-0")
    bench.kill("rollout-0", restarting=False)
    (pull,) = only(cmd.PullWeights, bench.receive("relay-1", 1, held=()))
    assert (pull.to, pull.version, pull.exact) == ("rollout-1.0", 1, False)
    evaluation = bench.state.evaluations.running
    assert evaluation is not None and evaluation.version == 1


# --- repairs --------------------------------------------------------------------------------------


def test_lost_relay_is_spliced_out_with_one_command() -> None:
    bench = started(nodes=4)
    assert forwarded(bench.kill("relay-1")) == [("relay-0", "relay-2")]
    assert bench.state.members.relay_chain == ["relay-0", "relay-2", "relay-3"]


def test_relay_that_comes_back_is_fed_as_the_last_one() -> None:
    bench = started()
    bench.kill("relay-1")
    bench.join("relay-1", "b")
    assert "rejoin:relay-1" in bench.state.orders.timers
    assert forwarded(bench.ready("relay-1")) == [("relay-2", "relay-1")]
    assert "rejoin:relay-1" not in bench.state.orders.timers
    assert "receive:relay-1" in bench.state.orders.timers
    bench.receive("relay-1", 0)
    assert "receive:relay-1" not in bench.state.orders.timers


def test_replica_that_drained_for_a_newer_version_admits_again_when_its_relay_is_lost() -> None:
    """At once, and not when something else happens to touch it."""
    bench = start_bench(
        replicas=2, capacity=4, groups_per_step=2, max_staleness=4, groups_per_version=1
    )
    bench.complete("0.0", "0.1")
    bench.train()
    assert not only(cmd.GenerateTrajectory, bench.complete("0.4"))
    assert find_not_admitted_reason(bench.state, bench.replica("rollout-0")) == "draining"
    given = only(cmd.GenerateTrajectory, bench.kill("relay-0"))
    assert {c.to for c in given} == {"rollout-0"}


def test_connection_that_does_not_come_about_restarts_the_successor_then_the_relay_itself() -> None:
    bench = started()
    bench.kill("relay-1")
    assert restarted(bench.wait(broadcast.LINK_TIMEOUT_MS)) == [("node-2", "relay-2")]
    bench.kill("relay-2")
    assert restarted(bench.wait(broadcast.LINK_TIMEOUT_MS)) == [("node-0", "relay-0")]


def test_hop_that_stalls_restarts_its_successor_and_the_chain_continues_without_it() -> None:
    bench = started()
    assert not restarted(stalls(bench, "relay-0", "relay-1", broadcast.STALLS_MAX - 1))
    (order,) = only(cmd.RestartActor, stalls(bench, "relay-0", "relay-1"))
    assert (order.to, order.actor) == ("node-1", "relay-1")
    assert f"{broadcast.STALLS_MAX} connections from relay-0 to relay-1" in order.reason
    assert "MTU" in order.reason
    assert not restarted(stalls(bench, "relay-0", "relay-1", broadcast.STALLS_MAX + 1))
    assert forwarded(bench.kill("relay-1")) == [("relay-0", "relay-2")]
    bench.come_back("relay-1")
    bench.link_all()
    assert bench.state.members.relay_chain == ["relay-0", "relay-2", "relay-1"]
    assert not restarted(stalls(bench, "relay-0", "relay-1"))  # it is fed by another one now


def test_relay_that_feeds_no_successor_is_restarted_itself() -> None:
    bench = started()
    assert restarted(stalls(bench, "relay-1", "relay-2")) == [("node-2", "relay-2")]
    bench.come_back("relay-2")
    bench.link_all()
    assert restarted(stalls(bench, "relay-1", "relay-2")) == [("node-1", "relay-1")]


def test_head_is_not_to_blame_for_the_only_other_machine() -> None:
    bench = started(nodes=2)
    for boot in "bcd":
        assert restarted(stalls(bench, "relay-0", "relay-1")) == [("node-1", "relay-1")]
        bench.come_back("relay-1", boot)
        bench.link_all()


def test_version_that_does_not_come_restarts_the_first_that_lacks_it() -> None:
    bench = started(batch_timeout_ms=10**9)
    step(bench)
    bench.write_ends()
    bench.load_all()
    assert restarted(bench.wait(broadcast.RECEIVE_TIMEOUT_MS)) == [("node-1", "relay-1")]
    bench.kill("relay-1")
    bench.link_all()
    assert ("node-2", "relay-2") in restarted(bench.wait(broadcast.RECEIVE_TIMEOUT_MS))


def test_version_that_comes_slowly_has_the_time_that_its_bytes_take() -> None:
    """As long as bytes come; 300 s after the last word of that its relay is told to begin again."""
    bench = started(batch_timeout_ms=10**9)
    step(bench)
    bench.write_ends()
    bench.load_all()
    slow = ev.TransferProblem(
        kind="slow", relay="relay-0", version=1, detail="", num_bytes=20, duration_ms=60_000,
        left_bytes=80,
    )  # fmt: skip
    for _ in range(2):
        bench.say("relay-1", slow)
        bench.say("relay-2", slow)
        assert not restarted(bench.wait(broadcast.RECEIVE_TIMEOUT_MS - 1))
    assert restarted(bench.wait(1)) == [("node-1", "relay-1")]


def test_other_bytes_under_the_published_number_restart_the_relay() -> None:
    bench = started()
    step(bench)
    assert restarted(bench.receive("relay-1", 1, digest="x")) == [("node-1", "relay-1")]


def test_relay_that_is_never_restarted_is_spliced_out() -> None:
    """Its node does not do as it is told; whoever comes behind it gets the weights all the same."""
    bench = started(batch_timeout_ms=10**9)
    step(bench)
    assert restarted(bench.receive("relay-1", 1, digest="x"))
    assert forwarded(bench.wait(RESTART_TIMEOUT_MS)) == [("relay-0", "relay-2")]
    assert bench.state.members.relay_chain == ["relay-0", "relay-2"]
    assert "rejoin:relay-1" in bench.state.orders.timers


def test_other_bytes_are_found_when_the_publication_comes_later() -> None:
    bench = started()
    step(bench, publish=False)
    assert not restarted(bench.receive("relay-1", 1, digest="x"))
    assert restarted(bench.publish(1, 1)) == [("node-1", "relay-1")]


# --- the head -------------------------------------------------------------------------------------


def test_head_that_comes_back_is_fed_by_the_trainer_and_is_head_again() -> None:
    bench = started(groups_per_version=1, capacity=2, batch_timeout_ms=10**9)
    step(bench)
    bench.receive("relay-1", 1)
    assert forwarded(bench.kill("relay-0")) == []
    bench.join("relay-0", "b")
    commands = bench.ready("relay-0")
    assert forwarded(commands) == [("relay-0", "relay-1")]
    assert bench.state.versions.owed == 1
    commands += bench.write_ends()
    if bench.state.steps.batch is not None:
        commands += bench.train(publish=False)
    assert only(cmd.PublishWeights, bench.commands)[-1].version == bench.state.versions.owed


def test_publish_that_went_to_a_dead_head_is_owed() -> None:
    """The trainer handed its weights over, the relay died before it had the digest."""
    bench = started(batch_timeout_ms=10**9)
    bench.complete(*bench.open_groups()[:2])
    bench.kill("relay-0")
    bench.come_back("relay-0")
    bench.link_all()
    assert bench.state.versions.owed == 0
    (order,) = only(cmd.PublishWeights, bench.train(publish=False))
    assert (order.version, order.step) == (1, 1)
    bench.publish(1, 1)
    assert (bench.state.versions.owed, bench.state.versions.newest) == (-1, 1)


def test_first_publish_is_asked_for_again_when_its_relay_died() -> None:
    bench = Bench()
    for name in ("node-0", "store-0", "relay-0", "trainer-0"):
        bench.join(name)
    for name in ("store-0", "relay-0"):
        bench.ready(name)
    assert only(cmd.PublishWeights, bench.ready("trainer-0"))
    bench.kill("relay-0")
    bench.join("relay-0", "b")
    (order,) = only(cmd.PublishWeights, bench.ready("relay-0"))
    assert (order.version, order.step) == (0, 0)


def test_publish_of_the_same_version_again_pays_the_debt_and_changes_nothing_else() -> None:
    bench = started(batch_timeout_ms=10**9, max_staleness=0, num_train=2, total_steps=0)
    bench.complete(*bench.open_groups())
    bench.kill("relay-0")
    bench.come_back("relay-0")
    newest = bench.state.versions.newest, bench.state.versions.newest_digest
    bench.publish(0, 0, held=(0,))
    assert (bench.state.versions.newest, bench.state.versions.newest_digest) == newest
    assert bench.state.versions.owed == -1


@pytest.mark.parametrize("steps", [0, 1])
def test_other_bytes_of_the_trainer_go_out_under_another_number(steps: int) -> None:
    """The head restarts once, and what the trainer has counts: no digest is refused for ever."""
    bench = started(batch_timeout_ms=10**9)
    if steps:
        step(bench)
    bench.kill("relay-0")
    bench.come_back("relay-0")
    other = ev.WeightsPublished(version=steps, step=steps, digest="x", num_bytes=4, held=(steps,))
    assert restarted(bench.say("relay-0", other)) == [("node-0", "relay-0")]
    assert bench.say("relay-0", other) == []
    assert bench.state.run.ignored == {"WeightsPublished: repeat": 1}
    bench.kill("relay-0")
    bench.join("relay-0", "c")
    (order,) = only(cmd.PublishWeights, bench.ready("relay-0"))
    assert (order.version, order.step) == (steps + 1, steps)
    again = msgspec.structs.replace(other, version=steps + 1, held=(steps + 1,))
    assert not restarted(bench.say("relay-0", again))
    versions = bench.state.versions
    assert (versions.newest, versions.newest_step) == (steps + 1, steps)
    assert versions.newest_digest == "x"
    assert versions.owed == -1
    assert all(trained.digest == "x" for trained in bench.state.steps.trained)


def test_run_that_ends_after_a_restart_says_why_it_was_ordered() -> None:
    bench = started()
    run = bench.state.run
    bench.kill("relay-0")
    bench.come_back("relay-0")
    bench.say("relay-0", ev.WeightsPublished(version=0, step=0, digest="x", num_bytes=4, held=(0,)))
    bench.kill("relay-0", restarting=False)
    assert (run.failed.kind, run.failed.subject) == ("relay-lost", "relay-0")


def test_head_lost_during_the_last_evaluation_gets_the_export_again() -> None:
    bench = start_bench(total_steps=1, groups_per_step=1, capacity=2, num_eval=1)
    bench.complete("0.0")
    bench.train()
    bench.write_ends()
    bench.say("trainer-0", ev.ModelExported(version=bench.state.versions.export, path="export"))
    bench.step_of[2] = 1
    published = ev.WeightsPublished(version=2, step=1, digest="d1", num_bytes=4, held=(1, 2))
    bench.say("relay-0", published)
    assert bench.state.run.phase == "final-evaluation"
    bench.kill("relay-0")
    bench.join("relay-0", "b")
    (order,) = only(cmd.PublishWeights, bench.ready("relay-0"))
    assert order.version == 2


# --- machines -------------------------------------------------------------------------------------


def test_other_machines_relay_may_stay_away() -> None:
    bench = started()
    bench.kill("relay-1", restarting=False)
    bench.wait(bench.settings.start_timeout_ms)
    assert not bench.state.run.failure and "rejoin:relay-1" not in bench.state.orders.timers


def test_run_ends_when_no_replica_has_a_relay() -> None:
    bench = started(nodes=2)
    bench.kill("rollout-0", restarting=False)
    assert not bench.state.run.failure
    bench.kill("relay-1", restarting=False)
    assert (bench.state.run.failed.kind, bench.state.run.failed.subject) == (
        "replicas-lost",
        "relay-1",
    )


def test_machine_without_a_relay_is_waited_for() -> None:
    """Its replica is ready, its relay never joins."""
    bench = started(nodes=1)
    bench.join("node-1")
    bench.join("rollout-1.0")
    bench.ready("rollout-1.0")
    bench.kill("rollout-0", restarting=False)
    assert not bench.state.run.failure
    bench.wait(bench.settings.start_timeout_ms)
    assert bench.state.run.failure.startswith("no replica is left: relay-1")


# --- slow ones ------------------------------------------------------------------------------------


def training(nodes: int) -> Bench:
    """The trainer has the first of many batches, of one group each; no clock hurries anybody."""
    bench = started(nodes=nodes, total_steps=0, groups_per_step=1, batch_timeout_ms=10**9)
    bench.complete(*bench.open_groups()[:1])
    return bench


def test_relay_that_holds_up_every_transfer_goes_to_the_end() -> None:
    bench = training(nodes=4)
    for version in range(1, broadcast.LAGS_MAX + 1):
        assert bench.state.members.relay_chain[1:] == ["relay-1", "relay-2", "relay-3"]
        bench.train(publish=False)
        bench.publish(version, version)
        commands: list[Command] = []
        for name in ("relay-1", "relay-2", "relay-3"):
            slow = name == "relay-2"
            bench.now_ms += 2_000 if slow else 10
            commands += bench.receive(name, version, **(SLOW if slow else {}))
        bench.complete(*bench.open_groups()[:1])
    assert bench.state.members.relay_chain == ["relay-0", "relay-1", "relay-3", "relay-2"]
    assert forwarded(commands) == [
        ("relay-1", "relay-3"), ("relay-3", "relay-2"), ("relay-2", ""),
    ]  # fmt: skip


def test_relay_that_is_slower_than_versions_are_made_goes_to_the_end() -> None:
    """The one before it always has a newer version, and some relay always lacks the newest."""
    bench = training(nodes=4)
    for version in range(1, broadcast.LAGS_MAX + 2):
        assert bench.state.members.relay_chain[1:] == ["relay-1", "relay-2", "relay-3"]
        bench.train(publish=False)
        bench.publish(version, version)
        bench.receive("relay-1", version)
        bench.now_ms += 2_000
        commands = bench.receive("relay-2", version - 1, **SLOW) if version > 1 else []
        bench.complete(*bench.open_groups()[:1])
    assert bench.state.members.relay_chain == ["relay-0", "relay-1", "relay-3", "relay-2"]
    assert forwarded(commands) == [
        ("relay-1", "relay-3"), ("relay-3", "relay-2"), ("relay-2", ""),
    ]  # fmt: skip


def test_relay_with_another_predecessor_is_judged_afresh() -> None:
    bench = training(nodes=4)
    bench.train()
    bench.receive("relay-1", 1)
    bench.receive("relay-2", 1)
    bench.now_ms += 2_000
    bench.receive("relay-3", 1, **SLOW)
    assert bench.state.members.relays["relay-3"].slow_transfers == 1
    bench.kill("relay-2")
    assert bench.state.members.relay_chain == ["relay-0", "relay-1", "relay-3"]
    assert bench.state.members.relays["relay-3"].slow_transfers == 0


def test_first_hop_is_compared_with_the_quickest_of_the_run() -> None:
    bench = training(nodes=3)
    for version in range(1, broadcast.LAGS_MAX + 1):
        bench.train(publish=False)
        bench.publish(version, version)
        bench.receive("relay-1", version, **SLOW)
        bench.receive("relay-2", version, **SLOW)
        bench.complete(*bench.open_groups()[:1])
    assert bench.state.members.relay_chain == ["relay-0", "relay-2", "relay-1"]


def test_delta_of_the_first_hop_says_nothing_about_its_speed() -> None:
    bench = started(nodes=3, groups_per_step=1, batch_timeout_ms=10**9)
    bench.complete(*bench.open_groups()[:1])
    bench.train()
    bench.receive("relay-1", 1, kind="delta", **SLOW)
    assert bench.state.members.relays["relay-1"].slow_transfers == 0


def test_one_quick_transfer_clears_a_relays_name() -> None:
    bench = training(nodes=3)
    bench.train()
    bench.receive("relay-1", 1, **SLOW)
    assert bench.state.members.relays["relay-1"].slow_transfers == 1
    bench.receive("relay-2", 1)
    bench.complete(*bench.open_groups()[:1])
    bench.train()
    bench.receive("relay-1", 2)
    assert bench.state.members.relays["relay-1"].slow_transfers == 0
