"""Versions that no relay holds any more, and the checkpoints that they are loaded from."""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from tools.kit.bench import Bench, only, start_bench

PATH = "checkpoints/step_0"


def save(bench: Bench, version: int, path: str = PATH, kept: tuple[int, ...] = ()) -> list[Command]:
    """The trainer has written a checkpoint; those of `kept` are there now."""
    saved = ev.CheckpointSaved(version=version, step=version, path=path, kept=kept or (version,))
    return bench.say("trainer-0", saved)


def with_an_evicted_version(capacity: int = 2) -> Bench:
    """rollout-0 generates group 0.0 with version 0, which the relay has evicted since; rollout-1
    has group 0.2 of version 1, and no room but for that with the usual capacity."""
    bench = start_bench(groups_per_step=1, max_staleness=1, capacity=capacity, replicas=2)
    bench.complete("0.1")
    bench.train(publish=False)
    bench.publish(1, 1, held=(1,))
    bench.load("rollout-1")
    return bench


def pulled(commands: list[Command]) -> list[tuple[int, bool, str, str]]:
    pulls = only(cmd.PullWeights, commands)
    return [(p.version, p.exact, p.purpose, p.checkpoint) for p in pulls]


def test_lost_work_goes_on_with_weights_from_a_checkpoint() -> None:
    bench = with_an_evicted_version()
    save(bench, 0)
    bench.kill("rollout-0")
    assert pulled(bench.complete("0.2")) == [(0, True, "resume", PATH)]
    resumed = only(cmd.GenerateTrajectory, bench.load("rollout-1"))
    assert {(c.group, c.attempt, c.version) for c in resumed} == {("0.0", 1, 0)}


def test_what_the_relay_holds_is_not_read_from_disk() -> None:
    bench = with_an_evicted_version()
    save(bench, 0)
    bench.publish(1, 1, held=(0, 1))
    bench.kill("rollout-0")
    assert pulled(bench.complete("0.2")) == [(0, True, "resume", "")]


def test_checkpoint_that_is_written_after_the_loss_is_used_as_well() -> None:
    """The survivor has room for nothing, and then for the lost answers' own version."""
    bench = with_an_evicted_version()
    bench.kill("rollout-0")
    assert not pulled(save(bench, 0))
    assert pulled(bench.complete("0.2")) == [(0, True, "resume", PATH)]


def test_checkpoint_is_loaded_without_a_relay() -> None:
    """The relay is gone, and the survivor idles with an older version than the lost answers'."""
    bench = with_an_evicted_version()
    bench.kill("relay-0")
    bench.kill("rollout-1")
    assert not pulled(bench.complete("0.0"))
    assert pulled(save(bench, 1)) == [(1, True, "resume", PATH)]
    resumed = only(cmd.GenerateTrajectory, bench.load("rollout-0"))
    assert {(c.group, c.attempt, c.version) for c in resumed} == {("0.2", 1, 1)}


def test_refused_checkpoint_is_read_by_nobody_else() -> None:
    """The lost answers start over on what there is."""
    bench = with_an_evicted_version()
    save(bench, 0)
    bench.kill("rollout-0")
    bench.complete("0.2")
    again = bench.say("rollout-1", ev.CheckpointRefused(version=0, reason="wrong digest"))
    assert bench.state.versions.checkpoint_paths == {}
    assert {(c.group, c.attempt) for c in only(cmd.GenerateTrajectory, again)} == {("0.0", 2)}


def test_version_that_was_evicted_on_the_way_is_loaded_from_its_checkpoint() -> None:
    """An evaluation stays with its version: it need not move on to the newest."""
    bench = start_bench(
        groups_per_step=1, max_staleness=1, capacity=4, num_eval=2, val_before_train=True
    )
    bench.complete("0.0")
    bench.train()
    save(bench, 0)
    bench.fail("0.1.0")
    bench.fail("0.1.1")
    bench.kill()
    assert pulled(bench.come_back()) == [(0, True, "evaluation", "")]
    gone = ev.VersionMissing(version=0, held=(1,))
    assert pulled(bench.say("rollout-0", gone)) == [(0, True, "evaluation", PATH)]


def test_checkpoint_of_an_evaluation_that_is_refused_gives_its_answers_up() -> None:
    """One answer waits for its reward, the other can be given by nobody any more."""
    bench = start_bench(
        groups_per_step=1, max_staleness=1, capacity=4, num_eval=2, val_before_train=True
    )
    bench.complete("0.0")
    bench.train(publish=False)
    save(bench, 0)
    bench.finish("e0.0.0")
    bench.publish(1, 1, held=(1,))
    bench.kill()
    assert [path for *_, path in pulled(bench.come_back())] == [PATH]
    refused = bench.say("rollout-0", ev.CheckpointRefused(version=0, reason="wrong digest"))
    assert [c.endings[0].reason for c in only(cmd.EndTrajectories, refused)] == ["version-missing"]


def test_lost_work_whose_checkpoint_is_removed_starts_over() -> None:
    """A replica has room, but another version: it waited for that of the checkpoint."""
    bench = with_an_evicted_version(capacity=4)
    save(bench, 0)
    assert not only(cmd.GenerateTrajectory, bench.kill("rollout-0"))
    again = only(cmd.GenerateTrajectory, save(bench, 1, "checkpoints/step_1", kept=(1,)))
    assert {(c.group, c.attempt, c.version) for c in again} == {("0.0", 2, 1)}
