"""Six ways to lose an actor, one recovery: what follows depends on the work, not on the news."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from tools.kit.bench import Bench, only, start_bench

REPLICA = "rollout-0"


def silent(bench: Bench, name: str) -> list[Command]:
    """Its lease ran out."""
    return bench.silent(name)


def complains(bench: Bench, name: str) -> list[Command]:
    """It says that it cannot go on."""
    return bench.say(name, ev.ActorFailed(reason="out of memory", user_error=False))


def leaves(bench: Bench, name: str) -> list[Command]:
    """Somebody terminated it by hand, and it says goodbye."""
    return bench.say(name, ev.ActorLeft())


def unlinked(bench: Bench, name: str) -> list[Command]:
    """Its link to the store passes small packets only."""
    return bench.say(name, ev.ActorFailed(reason="stalled", user_error=False, link=True))


def replaced(bench: Bench, name: str) -> list[Command]:
    """A new process of the same name joins first."""
    return bench.join(name, boot=f"{bench.seq}")


def dies(bench: Bench, name: str) -> list[Command]:
    """Its node tells of its death."""
    return bench.kill(name)


def never_restarted(bench: Bench, name: str) -> list[Command]:
    """It does nothing, and its node does not restart it."""
    bench.now_ms += bench.settings.stall_ms
    assert only(cmd.RestartActor, bench.own(ev.TimerFired(timer=f"progress:{name}")))
    return bench.own(ev.TimerFired(timer=f"command:restart:{name}"))


Way = Callable[[Bench, str], list[Command]]
WAYS_OF_ALL: tuple[Way, ...] = (silent, complains, leaves, replaced, dies)
WAYS: tuple[Way, ...] = (*WAYS_OF_ALL, never_restarted)  #: of a replica with work
every_way = pytest.mark.parametrize("way", WAYS)
every_death = pytest.mark.parametrize("way", [way for way in WAYS if way is not leaves])


def again(bench: Bench, way: Way) -> None:
    """The replica is lost and comes back with the same work."""
    way(bench, REPLICA)
    bench.join(REPLICA, boot=f"{bench.seq}")
    bench.ready(REPLICA)
    bench.load_all()


@every_way
def test_work_and_rewards_go_to_the_other_replica(way: Way) -> None:
    """One answer is being scored, three are being generated."""
    bench = start_bench(replicas=2, capacity=4, max_staleness=0)
    bench.finish("0.0.0")
    commands = way(bench, REPLICA)
    assert {c.trajectory_id for c in only(cmd.GenerateTrajectory, commands)} == {
        "0.0.1", "0.1.0", "0.1.1"
    }  # fmt: skip
    assert [c.to for c in only(cmd.ScoreTrajectories, commands)] == ["rollout-1"]


@every_way
def test_empty_replica_is_reserved_for_lost_work(way: Way) -> None:
    """The other replica is empty but has another version: it pulls the one that is needed."""
    bench = start_bench(groups_per_step=1, max_staleness=1, capacity=2, replicas=2)
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    bench.complete("0.2")
    pulls = only(cmd.PullWeights, way(bench, REPLICA))
    assert [(p.to, p.version, p.purpose) for p in pulls] == [("rollout-1", 0, "resume")]


@every_death
@pytest.mark.parametrize("strategy", ["deadline", "strategies.py:mine"])
def test_third_death_completes_a_batch(way: Way, strategy: str) -> None:
    """Two of three siblings are rewarded, the third killed its replica three times: without it the
    group is complete, and the trainer was waiting for it."""
    bench = start_bench(
        groups_per_step=1, group_size=3, max_staleness=0, capacity=3, batch_strategy=strategy
    )
    for sibling in ("0.0.0", "0.0.1"):
        bench.finish(sibling)
        bench.reward(sibling)
    again(bench, way)
    again(bench, way)
    commands = way(bench, REPLICA)
    assert only(cmd.EndTrajectories, commands)[0].endings[0].reason == "quarantined"
    expected = cmd.TrainStep if strategy == "deadline" else cmd.ProposeBatch
    assert len(only(expected, commands)) == 1


@every_death
def test_third_death_of_the_last_prompt_ends_the_data(way: Way) -> None:
    """Nothing else is left: the model is exported."""
    bench = start_bench(total_steps=0, num_train=1, groups_per_step=1, max_staleness=0, capacity=2)
    again(bench, way)
    again(bench, way)
    commands = way(bench, REPLICA)
    assert only(cmd.ExportModel, commands)


@every_death
def test_third_death_of_the_last_evaluation_answer_ends_the_evaluation(way: Way) -> None:
    """It is missing, and the version is unpinned."""
    bench = start_bench(total_steps=0, num_train=0, num_eval=1, val_before_train=True, capacity=2)
    again(bench, way)
    again(bench, way)
    commands = way(bench, REPLICA)
    assert [c.version for c in only(cmd.PinVersion, commands)] == [-1]
    figures = bench.state.evaluations.results[0].figures
    assert figures is not None and figures.missing == 1


@pytest.mark.parametrize("way", WAYS_OF_ALL)
def test_loss_of_the_trainer_without_checkpoints_stops_everybody(way: Way) -> None:
    """Nothing is open yet, so everybody who is left is told to stop at once; also a new process of
    the lost name is not taken in any more."""
    bench, name = Bench(), "trainer-0"
    for other in ("node-0", "store-0", "relay-0", "trainer-0"):
        bench.join(other)
    commands = way(bench, name)
    stopped = {c.to for c in only(cmd.StopActor, commands)} - {name}
    assert stopped == {"node-0", "store-0", "relay-0", "trainer-0"} - {name}
    assert bench.state.run.failure.startswith(f"{name}") and bench.state.run.exit_code == 1
    assert not only(cmd.AcceptActor, commands)


def test_silent_and_replaced_processes_are_told_to_stop_what_ran_there() -> None:
    """A replica that is only cut off may hear it; one that is dead will not."""
    bench = start_bench(groups_per_step=1, group_size=2, max_staleness=0, capacity=2)
    again(bench, silent)
    again(bench, silent)
    assert {c.to for c in only(cmd.AbortTrajectories, silent(bench, REPLICA))} == {REPLICA}


@pytest.mark.parametrize("way", [leaves, unlinked])
def test_who_leaves_has_not_died_of_its_work(way: Callable[[Bench, str], list[Command]]) -> None:
    """However often: a machine that is taken away has nothing to do with what ran there."""
    bench = start_bench(replicas=1, capacity=4, max_staleness=0)
    for _ in range(4):
        again(bench, way)
    assert {t.deaths for t in bench.state.work.trajectories.values()} == {0}
    assert not bench.state.work.ledger.groups.dropped
