"""Weight versions: which exist, who pulls which, and when.

Reads   WeightsPublished, WeightsLoaded, WeightsRejected, VersionGone, CheckpointSaved,
        CheckpointRefused
Writes  state.newest, state.saved, relay.held, replica.version
Emits   PullWeights, RestartActor

A replica changes its version only when it holds no trajectory, so every trajectory has exactly one.
A number is allocated with the step that makes the weights and never used again. A replica pulls
from the relay of its own machine and from no other; what that has evicted, from a checkpoint.
"""

from __future__ import annotations

from laminar.core import evaluation, lifecycle, lookup, publishing, relays
from laminar.core.roster import Kind
from laminar.core.state import Replica, State
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev

PULL_TIMEOUT_MS = 300_000
"""One copy of the model inside a machine; five minutes cover a terabyte and a slow engine."""
FAILED_LOADS_MAX = 2
"""A replica that rejects weights twice in a row is restarted; the fault is then its own."""


def on_weights_published(turn: Turn, event: ev.WeightsPublished) -> None:
    """Whatever is newest is what an empty replica pulls next, once its relay has it."""
    state = turn.state
    relay = state.master()
    if relay is None or relay.name != turn.stamped.peer:
        return turn.ignore("not-the-head")
    previous_step, news = state.newest_step, event.version > state.newest
    if news and event.version == state.exported and event.digest != state.newest_digest:
        return _export_differs(turn, event)
    if news:
        state.newest, state.newest_step = event.version, event.step
        state.newest_digest = event.digest
    known = not relays.hold(turn, relay, event.version, event.digest, event.held)
    if relay.newest < event.version:  # it has other bytes, and starts afresh
        return turn.ignore("repeat") if known else None
    if publishing.settle_debt(turn, event.step) or not known or news:
        if event.version >= publishing.last_made(state):  # after an older one the clock runs on
            turn.clear_timer("weights")
    else:
        turn.ignore("repeat")
    if news:
        evaluation.version_published(turn, event.version, event.step, previous_step)
        _expect_everywhere(turn)


def _export_differs(turn: Turn, event: ev.WeightsPublished) -> None:
    trained = turn.state.newest_digest
    reason = f"the export read back has digest {event.digest}, but {trained} was trained"
    if not lifecycle.fail(turn, reason, 1):
        turn.ignore("run-ending")


def _expect_everywhere(turn: Turn) -> None:
    """A newer version is out: who has it already can be used, the others have a time to get it."""
    state = turn.state
    for relay in state.relays.values():
        if relay.newest == state.newest and relay.newest_digest != state.newest_digest:
            relays.restart_for_other_bytes(turn, relay, relay.newest_digest)
        elif relay.newest >= state.newest:
            relays.touch_replicas(turn, relay)
        else:
            relays.await_newest(turn, relay)


def _pulled(turn: Turn) -> Replica | None:
    """The sender, whose order to load ends here; None if it has none, and then that is counted."""
    name = turn.stamped.peer
    replica = turn.state.replicas.get(name)
    if replica is None or turn.done(f"pull:{name}") is None:
        turn.ignore("not-pulling")
        return None
    return replica


def on_weights_loaded(turn: Turn, event: ev.WeightsLoaded) -> None:
    """The replica serves again, with a fresh share of new groups."""
    state, replica = turn.state, _pulled(turn)
    if replica is None:
        return
    replica.version, replica.step, replica.digest = event.version, event.step, event.digest
    replica.took, replica.loading, replica.failed_loads = 0, False, 0
    replica.progress_ns = turn.stamped.time_ns
    lookup.replica_changed(state, replica)
    if state.lost or evaluation.waits(state):
        turn.touch_all()  # who has which version decides what the others load
    else:
        turn.touch(replica.name)


def on_weights_rejected(turn: Turn, event: ev.WeightsRejected) -> None:
    """Digest or probe failed: it does not serve; it tries once more, then it is restarted."""
    replica = _pulled(turn)
    if replica is None:
        return
    replica.version, replica.step, replica.loading = -1, -1, False
    replica.failed_loads += 1
    lookup.replica_changed(turn.state, replica)
    turn.touch(replica.name)
    if replica.failed_loads >= FAILED_LOADS_MAX:
        turn.restart(replica.name, f"rejected weights {event.version}: {event.reason}")


def on_version_gone(turn: Turn, event: ev.VersionGone) -> None:
    """The relay has evicted it: decide again without it.

    What the relay has got since, it has told itself; what it had before and has no more is gone.
    """
    state = turn.state
    replica = _pulled(turn)
    if replica is None:
        return
    replica.loading = False
    lookup.replica_changed(state, replica)
    relay = state.relays.get(replica.relay)
    if relay is not None:
        latest = max(event.held, default=event.version)
        left = [v for v in relay.held if v in event.held or v > latest]
        lookup.set_held(state, relay, left)
    turn.touch_all()


def on_checkpoint_saved(turn: Turn, event: ev.CheckpointSaved) -> None:
    """Lost work whose version no relay has any more may have it again."""
    state = turn.state
    if event.version in state.saved:
        return turn.ignore("repeat")
    saved = {**state.saved, event.version: event.path}
    state.saved = {version: path for version, path in saved.items() if version in event.kept}
    turn.touch_all()


def on_checkpoint_refused(turn: Turn, event: ev.CheckpointRefused) -> None:
    """What one replica cannot read, no other is sent to: decide again without it."""
    replica = _pulled(turn)
    if replica is None:
        return
    replica.loading = False
    lookup.replica_changed(turn.state, replica)
    turn.state.saved.pop(event.version, None)
    turn.touch_all()


def pull(turn: Turn, replica: Replica, version: int, exact: bool, purpose: str) -> None:
    """Order a load; this very version (exact) is in reach of the replica."""
    state = turn.state
    replica.loading = True
    replica.progress_ns = turn.stamped.time_ns
    evicted = exact and version not in state.held_for(replica)
    command = cmd.PullWeights(
        to=replica.name,
        version=version,
        exact=exact,
        purpose=purpose,
        checkpoint=state.saved[version] if evicted else "",
    )
    turn.command(command, key=f"pull:{replica.name}", timeout_ms=PULL_TIMEOUT_MS)
    lookup.replica_changed(state, replica)


def plan_reserved_pull(turn: Turn, replica: Replica) -> None:
    """An empty replica fetches a version for lost work, or for an evaluation, before new groups."""
    state = turn.state
    if not _can_pull(state, replica):
        return
    wanted = _version_of_lost_work(state, replica)
    if wanted >= 0 and wanted != replica.version:
        return pull(turn, replica, wanted, exact=True, purpose="resume")
    if state.newest_for(replica) < 0:
        return  # its relay will be back: an evaluation does not move on for that
    wanted = evaluation.version_wanted(turn, replica)
    if wanted >= 0 and wanted != replica.version:
        pull(turn, replica, wanted, exact=state.evaluation is not None, purpose="evaluation")


def plan_pull(turn: Turn, replica: Replica) -> None:
    """An empty replica pulls what is newer: had it admitted, it would have been given a group."""
    state = turn.state
    if not _can_pull(state, replica):
        return
    newest = state.newest_for(replica)
    if newest <= replica.version:
        return
    purpose = "start" if replica.version < 0 else "newer"
    pull(turn, replica, newest, exact=False, purpose=purpose)


def _can_pull(state: State, replica: Replica) -> bool:
    """Alive, empty, not loading; and not one that waits to be restarted for rejecting weights."""
    busy = replica.running or replica.loading
    given_up = replica.failed_loads >= FAILED_LOADS_MAX
    return not busy and not given_up and state.actor_alive(replica.name)


def may_pull_reserved(state: State) -> list[Kind]:
    """Kinds of empty replicas that may be told to: plan_reserved_pull is for them."""
    lost, roster = _wanted_by_lost_work(state), state.lookup.roster
    if not lost and not evaluation.may_want(state):
        return []
    return roster.of(lambda kind: not kind.loading and kind.failed_loads < FAILED_LOADS_MAX)


def _version_of_lost_work(state: State, replica: Replica) -> int:
    """One in reach of this replica that lost work needs and no live one has or loads; -1: none."""
    wanted = _wanted_by_lost_work(state)
    return next((v for v in wanted if state.in_reach(replica, v)), -1)


def _wanted_by_lost_work(state: State) -> list[int]:
    """Versions that no live replica has or loads, what was lost first at the head."""
    if not state.lost:
        return []
    return [v for v in state.lookup.losses.wanted() if not _somebody_has(state, v)]


def _somebody_has(state: State, version: int) -> bool:
    """Serves it, or is loading this very version."""
    serving = state.lookup.roster.of(lambda kind: kind.version == version and kind.serving)
    return bool(serving) or version in state.lookup.fetched
