"""Recovery: lost work finds a new place; waiting that went on too long is acted upon.

Reads   state.lost, state.unscored, timers, replicas
Writes  trajectory placements and attempts
Emits   GenerateTrajectory, ScoreTrajectories, EndTrajectories, RestartActor

A lost sibling resumes from the store's tokens on a replica of the same version. Only when none has
turned up within resume_wait_ms does it start over, on any live replica with room at the same or a
newer version, before any new group there; restarting is mostly done to long answers, and a fresh
draw shortens the data, so it is the second choice and is counted.
"""

from __future__ import annotations

from laminar import ids
from laminar.core import buffering, evaluation, lookup, siblings
from laminar.core.dispatch import lose, place_again
from laminar.core.losses import Entry
from laminar.core.state import Group, Replica, State, Trajectory
from laminar.core.transitions import GENERATED, IN_ENGINE, UNFINISHED
from laminar.core.turn import Turn

DEATHS_MAX = 3
"""A prompt that has killed three replicas is quarantined (dask marks such a task bad, too)."""
WAITS_MAX = 3
"""Third expiry of a batch's wait for the same group: it is given up, the only such drop."""
EVALUATION_ATTEMPTS_MAX = 3
"""A held-out answer that was lost so often is missing: an evaluation always ends."""


def replica_lost(turn: Turn, name: str) -> None:
    """Everything that ran or was scored there needs another place."""
    state = turn.state
    replica = state.replicas.get(name)
    turn.clear_timer(f"progress:{name}")
    if replica is None:
        return
    for trajectory_id in list(replica.running):
        trajectory = state.trajectories[trajectory_id]
        trajectory.deaths += 1
        if state.groups[trajectory.group].purpose == ids.EVAL:
            fail_sibling(turn, trajectory, "replica-lost")
        elif trajectory.deaths >= DEATHS_MAX:
            siblings.drop_sibling(turn, trajectory, "quarantined")
        else:
            lose(turn, trajectory_id)
    lookup.remove_replica(state, replica)
    for trajectory in _generated_on(state, name):
        turn.done(siblings.score_key(state, trajectory))
        state.unscored[trajectory.id] = None
    turn.touch_all()


def _generated_on(state: State, name: str) -> list[Trajectory]:
    """What waits for its reward there, in the order of dispatch."""
    there = [state.trajectories[t] for t in state.lookup.trajectories.get(name, ())]
    generated = [t for t in there if t.status == GENERATED]
    return sorted(generated, key=lambda t: (state.groups[t.group].order, t.sibling))


def fail_sibling(turn: Turn, trajectory: Trajectory, reason: str) -> None:
    """This sibling cannot be trained; an evaluation answer is tried again a few times."""
    group = turn.state.groups[trajectory.group]
    if group.purpose == ids.TRAIN:
        return siblings.drop_sibling(turn, trajectory, reason)
    siblings.drop_group(turn, group, reason)
    if trajectory.attempt < EVALUATION_ATTEMPTS_MAX:
        evaluation.group_lost(turn, group)
    else:
        evaluation.group_given_up(turn, group)


def plan_lost(turn: Turn) -> None:
    """Place lost work: same version first; after its wait, anywhere at least as new."""
    state = turn.state
    while state.lost and (trajectory := _next_lost(state)) is not None:
        replica = _place_for(state, trajectory)
        if replica is None:
            return
        place_again(turn, trajectory, replica)


def _next_lost(state: State) -> Trajectory | None:
    """The most urgent one for which there is a place."""
    roster, losses = state.lookup.roster, state.lookup.losses
    newest = roster.newest_able()
    first: list[Entry] = []
    for version in losses.versions():
        here, newer = bool(roster.able(version)), newest > version
        first += losses.anywhere.get(version, [])[:1] if here or newer else []
        gone = version not in state.lookup.held and version not in state.saved
        first += losses.waiting.get(version, [])[:1] if here or (newer and gone) else []
    return state.trajectories[min(first)[3]] if first else None


def _place_for(state: State, trajectory: Trajectory) -> Replica | None:
    """The least loaded replica of its version; where there is none, of the newest one."""
    roster = state.lookup.roster
    able = roster.able(trajectory.version) or roster.able(roster.newest_able())
    return roster.least(able, room=1)


def plan_unscored(turn: Turn) -> None:
    """Rewards whose replica is gone are worked out on another."""
    state = turn.state
    while state.unscored:
        roster = state.lookup.roster
        scorer = roster.least(roster.kinds, room=0)
        if scorer is None:
            return
        first = state.trajectories[next(iter(state.unscored))]
        together = siblings.scorable(state, first)
        if together:
            siblings.score(turn, together, scorer.name)
        else:
            del state.unscored[first.id]


def batch_wait_expired(turn: Turn) -> None:
    """The trainer has idled for batch_wait_s: act on the group that it waits for."""
    state = turn.state
    group = buffering.awaited(state)
    if group is None or not buffering.trainer_idle(state):
        return turn.ignore("nothing-awaited")
    turn.set_timer("batch-wait", state.settings.batch_wait_ms)
    late = [t for t in siblings.members(state, group.id) if t.status in UNFINISHED]
    for trajectory in late:
        trajectory.waits += 1
    if any(t.waits >= WAITS_MAX for t in late):
        return siblings.drop_group(turn, group, "batch-wait")
    for trajectory in late:
        _unstick(turn, group, trajectory)


def _unstick(turn: Turn, group: Group, trajectory: Trajectory) -> None:
    """Elsewhere on its version; else without it, if enough siblings are rewarded; else anew."""
    state = turn.state
    if trajectory.status == GENERATED:
        turn.done(siblings.score_key(state, trajectory))
        state.unscored[trajectory.id] = None
        return
    roster = state.lookup.roster
    elsewhere = roster.least(roster.able(trajectory.version), 1, but=(trajectory.replica,))
    if trajectory.status in IN_ENGINE and elsewhere is not None:
        lose(turn, trajectory.id)
        place_again(turn, trajectory, elsewhere)
    elif len(siblings.scored_members(state, group)) >= state.settings.min_scored:
        siblings.drop_sibling(turn, trajectory, "batch-wait")
    else:
        if trajectory.status in IN_ENGINE:
            lose(turn, trajectory.id)
        lookup.begin_again(state, trajectory)


def watch_progress(turn: Turn, name: str) -> None:
    """A replica's progress timer fired: re-arm it, or have the silent engine restarted."""
    state = turn.state
    replica = state.replicas[name]
    if not state.actor_alive(name):
        return  # it said goodbye when the run stopped
    stall_ms = state.settings.stall_ms
    silent_ms = (turn.stamped.time_ns - replica.progress_ns) // 1_000_000
    if replica.running and silent_ms >= stall_ms:
        turn.restart(name, f"sampled nothing for {silent_ms} ms with work to do")
        replica.progress_ns = turn.stamped.time_ns
    turn.set_timer(f"progress:{name}", stall_ms)
