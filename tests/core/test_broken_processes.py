"""A process that reports what cannot be true: it is not believed, and the run says what it did."""

from __future__ import annotations

import random

import pytest

from laminar.core.state import keys
from laminar.core.state.indexes import indexes_of
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.names.ids import TrajectoryId
from tests.core.event_probes import fitting, spoiled
from tools.kit.bench import Bench, only, start_bench
from tools.kit.random_worlds import random_world
from tools.kit.world import World
from tools.kit.world_parts import Process, step_completed


def trained(**changes: object) -> Bench:
    """Two groups are in training, two more are generated."""
    bench = start_bench(max_staleness=1, **changes)
    bench.complete(*bench.open_groups()[:2])
    return bench


def rewarded(**changes: object) -> ev.TrajectoryRewarded:
    fields = {"reward_bits": 0, "correct": False, "reason": "ok", "num_tokens": 5}
    return ev.TrajectoryRewarded(
        trajectory_id=TrajectoryId("0.2.0"),
        placement=1,
        **(fields | changes),  # type: ignore[arg-type]
    )


def step(number: int, version: int) -> ev.StepCompleted:
    return step_completed(number, version)


def published(version: int, by: int, held: tuple[int, ...] = (0,)) -> ev.WeightsPublished:
    return ev.WeightsPublished(version=version, step=by, digest="d", num_bytes=4, held=held)


def loaded(version: int, by: int) -> ev.WeightsLoaded:
    return ev.WeightsLoaded(
        version=version, step=by, digest="d", probe_diff=0.0, seconds=0.1, reloaded=True
    )


@pytest.mark.parametrize(
    ("sender", "event"),
    [
        ("relay-0", published(7, 7)),
        ("relay-0", published(1, 9)),
        ("relay-0", published(-1, -1)),
        ("relay-0", published(1, 1, held=(1, 2**64 - 1))),
        ("trainer-0", step(0, 2)),
        ("trainer-0", step(5, 6)),
        ("trainer-0", ev.PublishSkipped(version=2**63, step=2**63, reason="")),
        ("trainer-0", ev.PublishSkipped(version=1, step=0, reason="")),
        ("rollout-0", loaded(9, 9)),
        ("rollout-0", loaded(-1, -1)),
        ("rollout-0", ev.VersionMissing(version=0, held=(12,))),
        ("rollout-0", ev.ReplicaReady(max_num_seqs=0, kv_capacity_tokens=1)),
        ("rollout-0", ev.ReplicaReady(max_num_seqs=1, kv_capacity_tokens=1)),
        ("store-0", ev.DataLoaded(num_train=2**60, num_eval=0, overlap=0, digest="d")),
        ("store-0", ev.DataLoaded(num_train=0, num_eval=0, overlap=0, digest="d")),
        (
            "rollout-0",
            ev.TrajectoryFinished(
                trajectory_id=TrajectoryId("0.2.0"),
                placement=1,
                num_tokens=-5,
                finish_reason="stop",
            ),
        ),
        ("rollout-0", rewarded(reward_bits=0x7FF0 << 48)),
        ("rollout-0", rewarded(num_tokens=-1)),
        ("rollout-0", rewarded(extras={"acc": float("nan")})),
    ],
)
def test_what_cannot_be_true_is_counted_and_changes_nothing(sender: str, event: Event) -> None:
    """Versions and steps that were never handed out, no room for a group, infinite scores, ..."""
    bench = trained(eval_answers=1)
    state, versions = bench.state, bench.state.versions
    before = versions.newest, indexes_of(state).held, versions.owed, state.steps.batch
    assert bench.say(sender, event) == []
    assert (versions.newest, indexes_of(state).held, versions.owed, state.steps.batch) == before
    assert bench.state.run.ignored == {f"{type(event).__name__}: impossible": 1}


def test_ends_with_negative_counts_leave_the_command_to_its_deadline() -> None:
    """The ledger does not move; a store that answers like that is started again."""
    bench = trained()
    (end,) = only(cmd.EndTrajectories, bench.train())
    key = next(k for k in bench.state.orders.commands if k.startswith("end:"))
    rows = tuple(
        ev.EndedTrajectory(trajectory_id=e.trajectory_id, num_tokens=-1, tokens_lost=0)
        for e in end.endings
    )
    command_id = bench.state.orders.commands[key].command_id
    assert bench.say("store-0", ev.TrajectoriesEnded(command_id=command_id, ended=rows)) == []
    assert bench.state.work.ledger.trajectories.trained == 0 and key in bench.state.orders.commands
    (order,) = only(cmd.RestartActor, bench.wait(120_000))
    assert (order.actor, order.reason) == ("store-0", "EndTrajectories was not done in time")


def test_head_that_received_what_was_not_published_is_no_end_of_the_wait() -> None:
    """The relay of the trainer's machine names the last version before its step is completed."""
    bench = start_bench(total_steps=1, groups_per_step=1)
    bench.complete("0.0")
    bench.receive("relay-0", 1)
    bench.train(publish=False)
    assert bench.state.run.phase == Phase.EXPORTING and keys.WEIGHTS in bench.state.orders.timers
    (export,) = only(cmd.ExportModel, bench.publish(1, 1))
    assert export.step == 1 and keys.WEIGHTS not in bench.state.orders.timers


def test_export_is_believed_under_its_own_number_only() -> None:
    bench = start_bench(total_steps=1, groups_per_step=1)
    bench.complete("0.0")
    bench.train()
    assert bench.state.versions.export == 2
    bench.say("trainer-0", ev.ModelExported(version=1, path="elsewhere"))
    assert "export" in bench.state.orders.commands and bench.state.versions.export_path == ""


@pytest.mark.parametrize("restarting", [True, False])
def test_exit_of_a_process_that_nobody_knows(restarting: bool) -> None:
    """One that its node starts again may still join; one that it gave up ends the run."""
    bench = trained()
    exited = ev.ProcessExited(actor="rollout-7", boot_id="b", code=1, restarting=restarting)
    bench.say("node-0", exited)
    assert bool(bench.state.run.failure) == (not restarting)
    bench.say("node-0", exited)
    assert bench.state.run.ignored == {"ProcessExited: never-joined": 2 if restarting else 1}


def test_complaint_of_a_run_that_ends_anyway_is_counted() -> None:
    bench = trained()
    bench.say("trainer-0", ev.ActorFailed(reason="out of memory", user_error=False))
    assert bench.say("store-0", ev.ActorFailed(reason="disk full", user_error=False)) == []
    assert bench.state.run.failure == "trainer-0: out of memory"
    assert bench.state.run.ignored == {"ActorFailed: run-ending": 1}


class BrokenWorld(World):
    """Now and then a live process says something that nobody can mean, and its run goes on."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self.chance = random.Random(self.settings.seed)
        self.lies = 0

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        commands = super().deliver(peer, incarnation, peer_seq, event)
        if self.machine.started and self.chance.random() < 0.05:
            self._lie()
        return commands

    def _do_GenerateTrajectory(
        self, process: Process, command: cmd.GenerateTrajectory, command_id: int
    ) -> None:
        process.version = command.version  # it may have lied about it
        while len(process.work) >= self.capacity:  # or about what it has finished
            del process.work[next(iter(process.work))]
        super()._do_GenerateTrajectory(process, command, command_id)

    def _do_PullWeights(self, process: Process, command: cmd.PullWeights, command_id: int) -> None:
        process.work.clear()  # it may have lied about what it has released
        super()._do_PullWeights(process, command, command_id)

    def _lie(self) -> None:
        liars = [a for a in self.state.members.actors.values() if a.alive and a.role != "node"]
        if not liars:
            return
        liar = self.chance.choice(liars)
        fits = fitting(self.state, liar.name)
        may = [kind for kind in fits if liar.role in ev.REPORTED_BY[kind] and kind not in FINAL]
        told = [event for kind in may for event in fits[kind]]
        self.lies += 1
        lie = spoiled(self.chance.choice(told), self.chance)
        super().deliver(liar.name, liar.incarnation, 0, lie)


#: An actor may end itself at any time; that is no lie.
FINAL = (ev.ActorJoined, ev.ActorLeft, ev.ActorFailed)


def test_runs_with_lying_processes_end() -> None:
    """Lies may cost answers or the run; they never raise, break an invariant or hang it."""
    lies = 0
    for seed in range(25):
        world = random_world(seed, BrokenWorld)
        assert isinstance(world, BrokenWorld)
        world.ordered = False  # what a liar was ordered to do need not fit what it does
        world.run()
        assert world.state.run.phase == Phase.ENDED
        lies += world.lies
    assert lies > 300
