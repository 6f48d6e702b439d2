"""A machine is lost: its processes come back with a new process of its node, or the run ends."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from tests.core.steps.test_step_replay import run as run_steps
from tools.kit.bench import Bench, only, start_bench

FAILED = "no replica is left: rollout-0: its process ended with exit code -9"
MACHINE = ("store-0", "relay-0", "trainer-0", "rollout-0")


def run(**changes: Any) -> Bench:
    """A step is trained and published; a batch is in training."""
    return run_steps(1, in_training=True, **changes)


def come_back(bench: Bench, boot: str = "b") -> None:
    """All processes of the first machine, started by its new node."""
    for name in MACHINE:
        bench.join(name, boot, f"node-0/{boot}")
        bench.ready(name)


def awaited(bench: Bench) -> list[str]:
    return [name for name in MACHINE if f"rejoin:{name}" in bench.state.orders.timers]


def test_a_new_node_takes_the_machine_of_store_and_trainer_over() -> None:
    """All steps are done again, the interrupted one is ordered again, and the run goes on."""
    bench = run()
    bench.join("node-0", "b")
    assert awaited(bench) == [*MACHINE]
    assert not any(bench.state.members.is_actor_alive(name) for name in MACHINE)
    come_back(bench)
    assert not awaited(bench) and not bench.state.run.failure
    (repeat,) = only(cmd.RepeatStep, bench.commands)
    digest = repeat.digest
    repeated = ev.StepRepeated(
        step_index=0, version=repeat.version, digest=digest, published=digest
    )
    bench.say("trainer-0", repeated)
    assert [order.step_index for order in only(cmd.TrainStep, bench.commands)] == [0, 1, 1]
    assert bench.state.steps.batch is not None and bench.state.steps.batch.deaths == 0


def test_a_node_that_is_lost_first_may_be_replaced_later() -> None:
    """The time of a start begins with the loss, and again with the new node."""
    bench = run()
    bench.silent("node-0")
    assert awaited(bench) == [*MACHINE]
    bench.wait(bench.settings.start_timeout_ms - 1)
    bench.join("node-0", "b")
    bench.wait(bench.settings.start_timeout_ms - 1)
    assert not bench.state.run.failure
    come_back(bench)
    assert not awaited(bench)


@pytest.mark.parametrize("joined", [False, True])
def test_a_machine_that_does_not_come_back_ends_the_run(joined: bool) -> None:
    bench = run()
    bench.silent("node-0")
    if joined:
        bench.join("node-0", "b")
    bench.wait(bench.settings.start_timeout_ms)
    lost = "store-0 is lost with its machine node-0, and no other node has its place"
    never = "store-0 was restarted and never joined"
    assert bench.state.run.failure == f"the store is lost: {never if joined else lost}"
    assert bench.state.run.exit_code == 1


def test_without_checkpoints_the_trainer_does_not_come_back() -> None:
    bench = run(save_freq=0)
    bench.join("node-0", "b")
    assert (bench.state.run.failed.kind, bench.state.run.failed.subject) == (
        "process-lost",
        "trainer-0",
    )


def test_what_a_former_process_of_a_node_has_started_is_refused() -> None:
    """It says hello when its node has been replaced, or was lost."""
    bench = start_bench(nodes=2)
    why = "node-1 was lost or replaced since it has started this process"
    bench.silent("node-1")
    (refused,) = only(cmd.RefuseActor, bench.join("rollout-1.0", "a2", "node-1/a"))
    assert refused.reason == why
    bench.join("node-1", "b")
    (refused,) = only(cmd.RefuseActor, bench.join("rollout-1.0", "a2", "node-1/a"))
    assert refused.reason == why
    assert only(cmd.AcceptActor, bench.join("rollout-1.0", "b", "node-1/b"))


def test_a_node_that_stands_still_has_its_processes_started_by_it() -> None:
    """It is not lost: what it has started before it fell silent may join."""
    bench = start_bench(nodes=2)
    bench.own(ev.NodeSilent(node="node-1", node_incarnation=2, silent_ms=30_000))
    assert only(cmd.AcceptActor, bench.join("rollout-1.0", "b", "node-1/a"))


def ending() -> Bench:
    """The run has failed; the store has ends to write."""
    bench = run()
    bench.kill("rollout-0", restarting=False)
    assert (bench.state.run.phase, bench.state.run.failure) == ("ending", FAILED)
    return bench


def test_the_machine_of_the_store_comes_back_also_while_the_run_ends() -> None:
    """For the store alone: it writes the ends, and the others are refused."""
    bench = ending()
    bench.join("node-0", "b")
    assert awaited(bench) == ["store-0"] and bench.state.run.phase == "ending"
    bench.join("store-0", "b", "node-0/b")
    bench.ready("store-0")
    assert only(cmd.RefuseActor, bench.join("rollout-0", "b", "node-0/b"))
    bench.write_ends()
    assert bench.state.run.phase == "stopping"
    assert bench.state.run.failure == FAILED


def test_a_machine_that_is_lost_while_the_run_ends_leaves_it_its_reason() -> None:
    bench = ending()
    bench.silent("node-0")
    assert awaited(bench) == ["store-0"]
    assert only(cmd.AcceptActor, bench.join("node-0", "b"))
    bench.wait(bench.settings.start_timeout_ms)
    assert (bench.state.run.phase, bench.state.run.failure) == ("stopping", FAILED)


def test_a_node_without_a_store_is_refused_while_the_run_ends() -> None:
    bench = ending()
    assert only(cmd.RefuseActor, bench.join("node-7", "b"))
