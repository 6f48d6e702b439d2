"""THE MACHINE: one funnel from a logged event to the commands that it causes. Read this first.

Reads   Stamped events, in the order of the log
Writes  State (nothing else changes it)
Emits   commands, each with its cause

    handle(event) = refuse it if its sender is fenced, or is not the one to report it,
                    or if it cannot be true
                  -> its handler records the fact          (one function per event, HANDLERS)
                  -> the planner acts on the new situation (core/planner.py),
                     unless no decision can depend on the fact

The handlers only record; every decision is made by the planner from the state as it then is, so the
order in which facts arrived cannot be forgotten or counted twice. Pure: no clock, no randomness, no
file. Choice is a hash of (seed, what it is about); sets are never walked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.core import (
    buffering,
    dispatch,
    evaluation,
    lifecycle,
    lookup,
    membership,
    publishing,
    recovery,
    relays,
    reward_errors,
    siblings,
    weights,
)
from laminar.core.planner import plan
from laminar.core.plausible import plausible
from laminar.core.state import State, Trajectory
from laminar.core.transitions import move
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.events.index import SENDERS
from laminar.ids import EVAL, TrajectoryId

LOGIC_VERSION = 1
"""Raised with every change of a decision rule; a log of another version is refused by name."""

UNPLANNED = (ev.TokenProgress, ev.TrajectoryStarted)
"""No decision depends on what these report, and after every event nothing is left to decide."""


class LogicError(RuntimeError):
    """The log was written by decision rules that this program does not have."""


class Machine:
    """State and the only way to change it."""

    def __init__(self, state: State | None = None) -> None:
        """At the beginning of a run, or with the state that a snapshot has kept."""
        self._state = state

    @property
    def started(self) -> bool:
        """The first event has come."""
        return self._state is not None

    @property
    def state(self) -> State:
        if self._state is None:
            raise LogicError("the first event of a log must be coordinator-started")
        return self._state

    def handle(self, stamped: Stamped) -> list[Command]:
        """Apply one event; returns the commands that it causes, in order."""
        if self._state is None:
            self._state = _first_state(stamped)
        state = self._state
        state.seq = stamped.seq
        state.time_ns = max(state.time_ns, stamped.time_ns)
        turn = Turn(state, stamped)
        if _from_known_sender(turn) and _from_right_sender(turn) and _plausible(turn):
            event = stamped.event
            HANDLERS[type(event)](turn, event)
            if not isinstance(event, UNPLANNED):
                plan(turn)
                siblings.send_endings(turn)
        return turn.commands


def _first_state(stamped: Stamped) -> State:
    event = stamped.event
    if not isinstance(event, ev.CoordinatorStarted):
        raise LogicError("the first event of a log must be coordinator-started")
    return State(settings=event.settings, logic=event.logic)


def _from_known_sender(turn: Turn) -> bool:
    """Only the sender's incarnation refuses an event; late words of the living are welcome."""
    stamped = turn.stamped
    if stamped.peer == COORDINATOR or isinstance(stamped.event, ev.ActorJoined):
        return True
    actor = turn.state.actors.get(stamped.peer)
    if actor is None or not actor.alive or actor.incarnation != stamped.incarnation:
        turn.ignore("fenced")
        return False
    if stamped.peer_seq:
        actor.last_peer_seq = stamped.peer_seq
    return True


def _from_right_sender(turn: Turn) -> bool:
    """An event counts only from the roles that can know it (events/index.py)."""
    stamped = turn.stamped
    actor = turn.state.actors.get(stamped.peer)
    role = actor.role if actor is not None else COORDINATOR
    if isinstance(stamped.event, ev.ActorJoined) or role in SENDERS[type(stamped.event)]:
        return True
    turn.ignore("wrong-sender")
    return False


def _plausible(turn: Turn) -> bool:
    """What cannot be true is not believed, though its sender is alive and the right one."""
    if plausible(turn.state, turn.stamped.event):
        return True
    turn.ignore("impossible")
    return False


# --- handlers ---------------------------------------------------------------------------------


def on_coordinator_started(turn: Turn, event: ev.CoordinatorStarted) -> None:
    """A coordinator begins, or comes back: leases get a full grace outside, timers here."""
    state = turn.state
    if event.logic != state.logic:
        raise LogicError(
            f"this log was begun with logic version {state.logic}, this program has {event.logic}"
        )
    if state.coordinator_incarnation == 0:
        turn.set_timer("start", state.settings.start_timeout_ms)
    state.coordinator_incarnation = event.incarnation
    for replica in state.replicas.values():
        replica.progress_ns = turn.stamped.time_ns
    turn.touch_all()


def on_timer_fired(turn: Turn, event: ev.TimerFired) -> None:
    """One timer, one meaning; one that has been cleared meanwhile is late and ignored."""
    state = turn.state
    if not lookup.clear_timer(state, event.timer):
        return turn.ignore("late")
    kind, _, subject = event.timer.partition(":")
    if kind == "start":
        lifecycle.on_start_timeout(turn)
    elif kind == "weights":
        lifecycle.fail(turn, f"the relay did not publish the weights of step {state.completed}", 1)
    elif kind == "batch-wait":
        recovery.batch_wait_expired(turn)
    elif kind == "resume":
        lookup.end_wait(state, TrajectoryId(subject))
        turn.touch_all()
    elif kind == "progress":
        recovery.watch_progress(turn, subject)
    elif kind == "rejoin":
        membership.on_rejoin_expired(turn, subject)
    elif kind == "receive":
        relays.receive_expired(turn, subject)
    else:
        _command_expired(turn, subject)


def _command_expired(turn: Turn, key: str) -> None:
    """What was to be done has not been done in time: the one who should have is restarted."""
    state = turn.state
    command = state.commands[key].command
    what = type(command).__name__
    if isinstance(command, cmd.ProposeBatch):
        state.proposal_failed = True
        turn.done(key)
    elif isinstance(command, cmd.StopActor):
        turn.done(key)
        lookup.end_actor(state, command.to)
    elif isinstance(command, cmd.RestartActor):
        membership.restart_expired(turn, command)
    elif isinstance(command, cmd.ForwardWeights):
        relays.link_expired(turn, command.to, command.successor)
    elif command.to in state.replicas:
        turn.restart(command.to, f"{what} was not done in time")
    else:
        lifecycle.fail(turn, f"{command.to} did not finish {what} in time", 1)


def on_heartbeat_lost(turn: Turn, event: ev.HeartbeatLost) -> None:
    membership.on_heartbeat_lost(turn, event)


def on_training_warning(turn: Turn, event: ev.TrainingWarning) -> None:
    """Remembered, so that it is given once; nothing depends on it."""
    turn.state.warnings[event.kind] = event.text


def on_batch_proposed(turn: Turn, event: ev.BatchProposed) -> None:
    buffering.proposal_answered(turn, event.step, event.groups)


def on_trajectories_ended(turn: Turn, event: ev.TrajectoriesEnded) -> None:
    """The store has the ends on disk: the ledger moves."""
    outstanding = turn.done(f"end:{event.command_id}")
    if outstanding is None or not isinstance(outstanding.command, cmd.EndTrajectories):
        return turn.ignore("repeat")
    rows = {row.trajectory: row for row in event.ended}
    for ending in outstanding.command.endings:
        row = rows.get(ending.trajectory)
        siblings.close(turn, ending, row.num_tokens if row else 0, row.tokens_lost if row else 0)


def on_step_completed(turn: Turn, event: ev.StepCompleted) -> None:
    """The trainer's own book has the step; the batch ends as trained."""
    state = turn.state
    if state.batch is None or state.batch.step != event.step:
        return turn.ignore("repeat")
    ordered = turn.done("train")
    assert ordered is not None, "a batch is outstanding as long as the trainer has it"
    buffering.step_completed(turn, event.left_out)
    publishing.expect_version(turn, event.version, ordered.cause)
    turn.touch_all()


def on_trajectory_started(turn: Turn, event: ev.TrajectoryStarted) -> None:
    trajectory = _generated_by(turn, event.trajectory, event.placement)
    if trajectory is None or not move(trajectory, "started"):
        turn.ignore("old-placement")


def on_token_progress(turn: Turn, event: ev.TokenProgress) -> None:
    """A gauge: the last value wins; more tokens than before is progress."""
    replica = turn.state.replicas.get(turn.stamped.peer)
    if replica is None:
        return turn.ignore("not-ready")
    if event.tokens_total != replica.tokens_total:
        replica.tokens_total = event.tokens_total
        replica.progress_ns = turn.stamped.time_ns


def on_trajectory_finished(turn: Turn, event: ev.TrajectoryFinished) -> None:
    """Every token is durable; the reward comes next."""
    state = turn.state
    trajectory = _generated_by(turn, event.trajectory, event.placement)
    if trajectory is None or not move(trajectory, "finished"):
        return turn.ignore("old-placement")
    dispatch.leave_engine(turn, trajectory)
    state.ledger.tokens.issued += event.num_tokens - trajectory.num_tokens
    trajectory.num_tokens = event.num_tokens
    together = siblings.scorable(state, trajectory)
    if together:
        siblings.score(turn, together, turn.stamped.peer)


def on_trajectory_failed(turn: Turn, event: ev.TrajectoryFailed) -> None:
    trajectory = _present(turn, event.trajectory, event.placement)
    if trajectory is None or trajectory.status in ("rewarded", "ending"):
        return turn.ignore("old-placement")
    purpose = turn.state.groups[trajectory.group].purpose
    recovery.fail_sibling(turn, trajectory, event.reason)
    reason = reward_errors.FAILED_REASONS.get(event.reason)
    if reason is not None:
        reward_errors.count(turn, purpose, reason, event.detail)


def on_trajectory_rewarded(turn: Turn, event: ev.TrajectoryRewarded) -> None:
    state = turn.state
    trajectory = _present(turn, event.trajectory, event.placement)
    if trajectory is None or not move(trajectory, "rewarded"):
        return turn.ignore("old-placement")
    trajectory.score_bits, trajectory.correct = event.score_bits, event.correct
    state.unscored.pop(trajectory.id, None)
    siblings.finish_score_command(turn, trajectory)
    group = state.groups[trajectory.group]
    siblings.sibling_done(turn, group)
    if group.purpose == EVAL:
        evaluation.group_evaluated(turn, group, event)
    reward_errors.count(turn, group.purpose, event.reason, event.detail)


def _present(turn: Turn, trajectory_id: TrajectoryId, placement: int) -> Trajectory | None:
    """The trajectory, if this is its present placement."""
    trajectory = turn.state.trajectories.get(trajectory_id)
    if trajectory is None or trajectory.placement != placement:
        return None
    return trajectory


def _generated_by(turn: Turn, trajectory_id: TrajectoryId, placement: int) -> Trajectory | None:
    """The same, if the sender is the replica that it was placed on."""
    trajectory = _present(turn, trajectory_id, placement)
    if trajectory is None or trajectory.replica != turn.stamped.peer:
        return None
    return trajectory


Handler = Callable[[Turn, Any], None]

HANDLERS: dict[type[Event], Handler] = {
    ev.CoordinatorStarted: on_coordinator_started,
    ev.TimerFired: on_timer_fired,
    ev.HeartbeatLost: on_heartbeat_lost,
    ev.NodeSilent: membership.on_node_silent,
    ev.NodeHeard: membership.on_node_heard,
    ev.DrainRequested: lifecycle.on_drain_requested,
    ev.EventGivenUp: lifecycle.on_event_given_up,
    ev.TrainingWarning: on_training_warning,
    ev.BatchProposed: on_batch_proposed,
    ev.ActorJoined: membership.on_actor_joined,
    ev.ActorLeft: membership.on_actor_left,
    ev.ActorFailed: membership.on_actor_failed,
    ev.ProcessExited: membership.on_process_exited,
    ev.DataLoaded: membership.on_data_loaded,
    ev.TrajectoriesEnded: on_trajectories_ended,
    ev.TrainerReady: membership.on_trainer_ready,
    ev.StepCompleted: on_step_completed,
    ev.PublishSkipped: publishing.on_publish_skipped,
    ev.ModelExported: lifecycle.on_model_exported,
    ev.CheckpointSaved: weights.on_checkpoint_saved,
    ev.RelayReady: membership.on_relay_ready,
    ev.WeightsPublished: weights.on_weights_published,
    ev.WeightsReceived: relays.on_weights_received,
    ev.RelayLinked: relays.on_relay_linked,
    ev.TransferTrouble: relays.on_transfer_trouble,
    ev.ReplicaReady: membership.on_replica_ready,
    ev.WeightsLoaded: weights.on_weights_loaded,
    ev.WeightsRejected: weights.on_weights_rejected,
    ev.VersionGone: weights.on_version_gone,
    ev.CheckpointRefused: weights.on_checkpoint_refused,
    ev.TrajectoryStarted: on_trajectory_started,
    ev.TokenProgress: on_token_progress,
    ev.TrajectoryFinished: on_trajectory_finished,
    ev.TrajectoryFailed: on_trajectory_failed,
    ev.TrajectoryRewarded: on_trajectory_rewarded,
}
