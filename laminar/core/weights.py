"""Weight versions: which exist, who pulls which, and when.

Reads   WeightsPublished, PublishSkipped, WeightsLoaded, WeightsRejected, VersionGone
Writes  state.newest, state.held, state.owed, replica.version
Emits   PullWeights, PublishWeights, RestartActor

A replica changes its version only when it holds no trajectory, so every trajectory has exactly one.
A number is allocated with the step that makes the weights and never used again.
"""

from __future__ import annotations

from laminar.core import buffering, evaluation, lifecycle
from laminar.core.state import Replica, State
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev

PULL_TIMEOUT_MS = 300_000
"""One copy of the model inside a machine; five minutes cover a terabyte and a slow engine."""
FAILED_LOADS_MAX = 2
"""A replica that rejects weights twice in a row is restarted; the fault is then its own."""


def on_weights_published(turn: Turn, event: ev.WeightsPublished) -> None:
    """Whatever is newest is what an empty replica pulls next."""
    state = turn.state
    evicted = state.held != list(event.held)
    state.held = list(event.held)
    if event.version <= state.newest:
        return None if evicted else turn.ignore("repeat")
    previous_step = state.newest_step
    if event.version == state.exported and event.digest != state.newest_digest:
        trained = state.newest_digest
        reason = f"the export read back has digest {event.digest}, but {trained} was trained"
        if not (lifecycle.fail(turn, reason, 1) or evicted):
            turn.ignore("run-ending")
        return
    state.newest, state.newest_step = event.version, event.step
    state.newest_digest = event.digest
    if state.owed >= 0 and event.step >= state.owed_step:
        state.owed = state.owed_step = -1
    if state.owed < 0:  # else it is an older one, and the owed one is still asked for
        turn.done("publish")
    made = (state.batch.version if state.batch else state.next_version) - 1
    if event.version >= made:  # an older one that was still on its way leaves the clock running
        turn.clear_timer("weights")
    evaluation.version_published(turn, event.version, event.step, previous_step)
    turn.touch_all()


def expect_version(turn: Turn, version: int) -> None:
    """A step is complete: its weights are published, owed, or due at the relay within a time."""
    if turn.state.newest < version and turn.state.owed < version:
        turn.set_timer("weights", buffering.PUBLISH_TIMEOUT_MS)


def on_publish_skipped(turn: Turn, event: ev.PublishSkipped) -> None:
    """The trainer went on; the newest skipped version is owed."""
    state = turn.state
    if event.version <= state.newest or event.version <= state.owed:
        return turn.ignore("repeat")
    state.owed, state.owed_step = event.version, event.step
    turn.clear_timer("weights")


def on_weights_loaded(turn: Turn, event: ev.WeightsLoaded) -> None:
    """The replica serves again, with a fresh share of new groups."""
    state = turn.state
    replica = state.replicas.get(turn.stamped.peer)
    if replica is None or turn.done(f"pull:{turn.stamped.peer}") is None:
        return turn.ignore("not-pulling")
    replica.version, replica.step, replica.digest = event.version, event.step, event.digest
    replica.took, replica.loading, replica.failed_loads = 0, False, 0
    replica.progress_ns = turn.stamped.time_ns
    turn.touch_all()


def on_weights_rejected(turn: Turn, event: ev.WeightsRejected) -> None:
    """Digest or probe failed: it does not serve; it tries once more, then it is restarted."""
    state = turn.state
    replica = state.replicas.get(turn.stamped.peer)
    if replica is None or turn.done(f"pull:{turn.stamped.peer}") is None:
        return turn.ignore("not-pulling")
    replica.version, replica.step, replica.loading = -1, -1, False
    replica.failed_loads += 1
    turn.touch(replica.name)
    if replica.failed_loads >= FAILED_LOADS_MAX:
        restart(turn, replica.name, f"rejected weights {event.version}: {event.reason}")


def on_version_gone(turn: Turn, event: ev.VersionGone) -> None:
    """The relay has evicted it: decide again with what it holds now."""
    state = turn.state
    replica = state.replicas.get(turn.stamped.peer)
    if replica is None or turn.done(f"pull:{turn.stamped.peer}") is None:
        return turn.ignore("not-pulling")
    replica.loading = False
    state.held = list(event.held)
    turn.touch_all()


def restart(turn: Turn, name: str, reason: str) -> None:
    """Have a node kill and start one of its actors."""
    actor = turn.state.actors[name]
    if f"restart:{name}" not in turn.state.commands:
        turn.command(
            cmd.RestartActor(to=actor.node, actor=name, reason=reason), key=f"restart:{name}"
        )


def pull(turn: Turn, replica: Replica, version: int, exact: bool, purpose: str) -> None:
    replica.loading = True
    replica.progress_ns = turn.stamped.time_ns
    turn.command(
        cmd.PullWeights(to=replica.name, version=version, exact=exact, purpose=purpose),
        key=f"pull:{replica.name}",
        timeout_ms=PULL_TIMEOUT_MS,
    )


def plan_reserved_pull(turn: Turn, replica: Replica) -> None:
    """An empty replica fetches a version for lost work, or for an evaluation, before new groups."""
    state = turn.state
    if not _can_pull(state, replica):
        return
    wanted = _version_of_lost_work(state)
    if wanted >= 0 and wanted != replica.version:
        return pull(turn, replica, wanted, exact=True, purpose="resume")
    wanted = evaluation.version_wanted(turn)
    if wanted >= 0 and wanted != replica.version:
        pull(turn, replica, wanted, exact=state.evaluation is not None, purpose="evaluation")


def plan_pull(turn: Turn, replica: Replica) -> None:
    """An empty replica pulls what is newer: had it admitted, it would have been given a group."""
    state = turn.state
    if not _can_pull(state, replica) or state.newest <= replica.version:
        return
    purpose = "start" if replica.version < 0 else "newer"
    pull(turn, replica, state.newest, exact=False, purpose=purpose)


def _can_pull(state: State, replica: Replica) -> bool:
    """Alive, empty, not loading; and not one that waits to be restarted for rejecting weights."""
    if replica.running or replica.loading or replica.failed_loads >= FAILED_LOADS_MAX:
        return False
    return state.newest >= 0 and state.actor_alive(replica.name)


def _version_of_lost_work(state: State) -> int:
    """A held version that lost work needs and that no live replica has or loads; -1: none."""
    served: set[int] = set()
    for trajectory_id in state.lost:
        trajectory = state.trajectories[trajectory_id]
        version = trajectory.version
        if trajectory.restart or version in served or version not in state.held:
            continue
        if not _somebody_has(state, version):
            return version
        served.add(version)
    return -1


def _somebody_has(state: State, version: int) -> bool:
    for replica in state.live_replicas():
        if replica.version == version and not replica.loading:
            return True
        pulling = state.commands.get(f"pull:{replica.name}") if replica.loading else None
        command = pulling.command if pulling is not None else None
        if isinstance(command, cmd.PullWeights) and command.version == version and command.exact:
            return True
    return False
