"""failures_recover finds failures that nothing caused, and recoveries that never complete.

Each of these bugs leaves every other promise kept, or breaks one much later.
"""

from __future__ import annotations

import pytest

from laminar.core.context import Context
from laminar.core.scheduling import recovery
from laminar.core.state import indexes
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, Phase
from laminar.core.state.transitions import IN_ENGINE
from laminar.core.state.work import Trajectory
from laminar.core.steps import batching
from laminar.events import events as ev
from laminar.events.base import Event, Stamped
from laminar.names.ids import make_trajectory_id, train_group
from tools.kit.sim_worlds import calm, ran
from tools.simulator.checks.recoveries import NAME, Recoveries
from tools.simulator.run import run_seed
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import SECOND

SMALL = {"replicas": 4, "num_train": 40, "total_training_steps": 3, "val_size": 5}


def test_work_starts_over_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a batch is chosen, something that runs begins again elsewhere."""

    def planted(ctx: Context) -> bool:
        chosen = choose_batch(ctx)
        if chosen and (trajectory := _runs(ctx.state)) is not None:
            recovery.lose_trajectory(ctx, trajectory.id)
            indexes.restart_from_prompt(ctx.state, trajectory)
        return chosen

    choose_batch = batching.choose_batch
    monkeypatch.setattr(batching, "choose_batch", planted)
    outcome = run_seed(calm(**SMALL), 3)
    assert outcome.invariant == NAME and "causes no such failure" in outcome.details


@pytest.mark.parametrize("kind", ["process", "work", "load"])
def test_a_recovery_that_never_completes(kind: str) -> None:
    """A process is not started again, lost work gets no place, a replica without weights loads
    none; and nothing that waits for it gives up."""
    world = ran(calm(**SMALL), 3)
    state, members = world.coordinator.state, world.coordinator.state.members
    assert state is not None
    recoveries, name = Recoveries(world), world.rollouts[0].name
    state.run.phase = Phase.RUNNING
    for actor in members.actors.values():
        actor.alive = kind != "process" or actor.name != name
    if kind == "work":
        state.work.lost[make_trajectory_id(train_group(0, 0), 0)] = None
    if kind == "load":
        members.replicas[name] = Replica(name=name, relay="relay-0", capacity=1, failed_loads=1)
    ended = ev.ProcessExited(actor=name, boot_id=f"{name}/1", code=1, restarting=True)
    rejected = ev.WeightsRejected(version=1, reason="wrong digest")
    recoveries.observe(_at(0, rejected if kind == "load" else ended, name), (), state)
    recoveries.observe(_at(200, ev.NodeRecovered(node="node-0", node_incarnation=1)), (), state)
    with pytest.raises(Violation, match=f"{NAME}: {kind} .* has not recovered for 1000 s"):
        recoveries.observe(
            _at(1_000, ev.NodeRecovered(node="node-0", node_incarnation=1)), (), state
        )


def _at(time_s: int, event: Event, peer: str = "node-0") -> Stamped:
    return Stamped(
        seq=1 + time_s, time_ns=time_s * SECOND, peer=peer, incarnation=1, peer_seq=1, event=event
    )


def _runs(state: State) -> Trajectory | None:
    opened = (g for g in state.work.groups.values() if g.status == GroupStatus.OPEN)
    running = (state.work.trajectories[name] for group in opened for name in group.members)
    return next((t for t in running if t.status in IN_ENGINE), None)
