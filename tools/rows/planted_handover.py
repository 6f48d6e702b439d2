"""Planted bugs of repack: the plan, the hand-over, and what a replica does that gives work away.

Reads   nothing
Gives   HANDOVER_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

from typing import Any

from laminar.actors import rollout
from laminar.core import admission, dispatch, handover, trajectories, weights
from laminar.core.context import Context
from laminar.core.repack import Standing
from laminar.core.state import Replica, State, Trajectory
from laminar.events import commands as cmd
from tools.rows.planted import Planter


def emptied_replica_admits(plant: Planter) -> None:
    refusal = admission.refusal

    def planted(state: State, replica: Replica) -> str:
        found = refusal(state, replica)
        return "" if found == "repacked" else found

    plant.replace(admission, "refusal", planted)


def emptied_replica_loads_before_its_work_has_started_elsewhere(plant: Planter) -> None:
    def planted(state: State, replica: Replica) -> bool:
        busy = replica.running or replica.incoming or replica.loading
        return not busy and state.actor_alive(replica.name)

    plant.replace(weights, "_can_pull", planted)


def placement_stays_when_work_is_handed_over(plant: Planter) -> None:
    place = dispatch.place_released

    def planted(ctx: Context, trajectory: Trajectory, destination: Replica) -> None:
        trajectory.placement -= 1
        place(ctx, trajectory, destination)

    plant.replace(handover, "place_released", planted)


def release_has_no_deadline(plant: Planter) -> None:
    command = Context.command

    def planted(self: Context, decided: Any, key: Any = None, timeout_ms: int = 0) -> None:
        if isinstance(decided, cmd.ReleaseTrajectories):
            timeout_ms = 0
        command(self, decided, key, timeout_ms)

    plant.replace(Context, "command", planted)


def work_moves_to_another_version(plant: Planter) -> None:
    tails = handover.tails

    def planted(state: State) -> dict[int, list[Standing]]:
        together = [standing for found in tails(state).values() for standing in found]
        return {0: together}

    plant.replace(handover, "tails", planted)


def source_is_waited_for_by_nobody(plant: Planter) -> None:
    """It stays closed: what it gave away is never seen to have started."""

    def planted(ctx: Context, trajectory: Trajectory) -> None:
        return None

    plant.replace(trajectories.dispatch, "end_move", planted)


def tokens_are_not_handed_over(plant: Planter) -> None:
    """The replica reports the release, and its last tokens are gone."""
    release = rollout.release

    async def planted(
        host: Any, engine: Any, running: Any, flush: Any, order: Any, command: Any
    ) -> None:
        async def nothing() -> None:
            return None

        await release(host, engine, running, nothing, order, command)

    plant.replace(rollout, "release", planted)


HANDOVER_BUGS = (
    emptied_replica_admits,
    emptied_replica_loads_before_its_work_has_started_elsewhere,
    placement_stays_when_work_is_handed_over,
    release_has_no_deadline,
    work_moves_to_another_version,
    source_is_waited_for_by_nobody,
    tokens_are_not_handed_over,
)
