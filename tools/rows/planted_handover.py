"""Planted bugs of repack: the plan, the hand-over, and what a replica does that gives work away.

Reads   nothing
Gives   HANDOVER_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.actors import rollout
from laminar.core import admission, dispatch, handover, keys, tails, trajectories, weights
from laminar.core.context import Context
from laminar.core.machine import HANDLING
from laminar.core.repack import Standing, _Load
from laminar.core.replica_index import Kind
from laminar.core.state import Replica, State, Trajectory
from laminar.core.statuses import TrajectoryStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.rows.planted import Planter

MOVED = (TrajectoryStatus.DISPATCHED, TrajectoryStatus.RUNNING)
"""What a replica was too late to hand over is on another one by then."""


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
    by_version = handover.tails

    def planted(state: State) -> dict[int, list[Standing]]:
        together = [standing for found in by_version(state).values() for standing in found]
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


def destination_is_emptied_later(plant: Planter) -> None:
    """As in the algorithm as it is printed."""
    take = _Load.take

    def planted(self: _Load, source: _Load) -> None:
        take(self, source)
        self.pinned = False

    plant.replace(_Load, "take", planted)


def late_release_is_believed(plant: Planter) -> None:
    """What the source has handed over by now is placed again, where it went meanwhile."""
    orders: dict[int, cmd.ReleaseTrajectories] = {}
    expired, released = handover.release_expired, HANDLING[ev.TrajectoriesReleased].handler

    def remembered(ctx: Context, command: cmd.ReleaseTrajectories) -> None:
        outstanding = ctx.state.commands[keys.release(command.to)]
        orders[outstanding.command_id] = command
        expired(ctx, command)

    def planted(ctx: Context, event: ev.TrajectoriesReleased) -> None:
        late = orders.pop(event.command_id, None)
        for item in late.items if late is not None else ():
            trajectory = ctx.state.trajectories.get(item.trajectory_id)
            if trajectory is not None and trajectory.status in MOVED:
                dispatch.lose(ctx, trajectory.id)
        released(ctx, event)

    plant.replace(handover, "release_expired", remembered)
    plant.handler(ev.TrajectoriesReleased, planted)


def reservation_is_kept(plant: Planter) -> None:
    """Of what has ended on the replica that was to give it away."""
    end_move = dispatch.end_move

    def planted(ctx: Context, trajectory: Trajectory) -> None:
        progress = ctx.state.progress.get(trajectory.id)
        if progress is not None:
            progress.destination = ""
        end_move(ctx, trajectory)

    plant.replace(dispatch, "end_move", planted)


def lost_work_goes_to_a_replica_that_is_emptied(plant: Planter) -> None:
    plant.replace(Kind, "serving", property(lambda kind: kind.version >= 0 and not kind.loading))


def moves_what_a_batch_has_waited_for(plant: Planter) -> None:
    """Which then moves it back."""
    plant.replace(tails, "trajectory_stays", _unless("waited-for"))


def moves_what_has_seen_a_replica_die(plant: Planter) -> None:
    """With what is packed beside it, that is quarantined."""
    plant.replace(tails, "trajectory_stays", _unless("seen-deaths"))


def _unless(reason: str) -> Callable[[State, Trajectory], str]:
    """What stays, without this reason."""
    stays = tails.trajectory_stays

    def planted(state: State, trajectory: Trajectory) -> str:
        found = stays(state, trajectory)
        return "" if found == reason else found

    return planted


def empties_replicas_that_get_nothing_new(plant: Planter) -> None:
    """The staleness bound leaves no room, or the data has ended."""
    plant.replace(handover, "released_max", lambda state: len(state.replicas))


def replica_takes_the_share_of_others(plant: Planter) -> None:
    """All that the staleness bound admits, while others have nothing to do."""
    plant.replace(admission, "share", lambda state: 0)


HANDOVER_BUGS = (
    emptied_replica_admits,
    emptied_replica_loads_before_its_work_has_started_elsewhere,
    placement_stays_when_work_is_handed_over,
    release_has_no_deadline,
    work_moves_to_another_version,
    source_is_waited_for_by_nobody,
    tokens_are_not_handed_over,
    destination_is_emptied_later,
    late_release_is_believed,
    reservation_is_kept,
    lost_work_goes_to_a_replica_that_is_emptied,
    moves_what_a_batch_has_waited_for,
    moves_what_has_seen_a_replica_die,
    empties_replicas_that_get_nothing_new,
    replica_takes_the_share_of_others,
)
