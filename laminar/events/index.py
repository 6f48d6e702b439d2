"""THE INDEX: every event, who may report it, which function handles it, what it may lead to.

Reads   nothing
Gives   INDEX, one row per event; SENDERS by event; as a program, docs/events.md on standard output

Data only. The handler is a name under laminar.core, because this package must not import it. The
machine refuses an event from a sender that is not listed. `commands` is what handling the event,
and planning after it, may decide; a test holds the table against thousands of random situations.

    python -m laminar.events.index > docs/events.md
"""

from __future__ import annotations

from typing import NamedTuple

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event

NODE, STORE, TRAINER, RELAY, ROLLOUT = "node", "store", "trainer", "relay", "rollout"
ACTOR_ROLES = (NODE, STORE, TRAINER, RELAY, ROLLOUT)

_Commands = tuple[type[Command], ...]

#: The run fails: what is open ends as dropped, or, when nothing is open, everybody stops.
_END_RUN: _Commands = (cmd.EndTrajectories, cmd.AbortTrajectories, cmd.StopActor)
#: An actor is lost. A replica's work is placed elsewhere, scored elsewhere or given up, and what is
#: given up may complete a batch, an evaluation or the data; without another role the run fails.
_LOSS: _Commands = (
    cmd.GenerateTrajectory,
    cmd.ScoreTrajectories,
    cmd.EndTrajectories,
    cmd.AbortTrajectories,
    cmd.PullWeights,
    cmd.PinVersion,
    cmd.TrainStep,
    cmd.ProposeBatch,
    cmd.ExportModel,
    cmd.StopActor,
    cmd.ForwardWeights,
)


class Row(NamedTuple):
    """One event."""

    event: type[Event]
    senders: tuple[str, ...]  #: roles
    handler: str  #: "module.function" under laminar.core
    commands: _Commands


INDEX: tuple[Row, ...] = (
    Row(ev.CoordinatorStarted, (COORDINATOR,), "machine.on_coordinator_started", ()),
    Row(
        ev.TimerFired,
        (COORDINATOR,),
        "machine.on_timer_fired",
        (*_LOSS, cmd.RestartActor),
    ),
    Row(
        ev.HeartbeatLost,
        (COORDINATOR,),
        "machine.on_heartbeat_lost",
        (*_LOSS, cmd.RestartActor),
    ),
    Row(ev.NodeSilent, (COORDINATOR,), "membership.on_node_silent", _END_RUN),
    Row(ev.NodeHeard, (COORDINATOR,), "membership.on_node_heard", ()),
    Row(
        ev.DrainRequested,
        (COORDINATOR,),
        "lifecycle.on_drain_requested",
        (*_END_RUN, cmd.ExportModel, cmd.PullWeights),
    ),
    Row(ev.EventGivenUp, (COORDINATOR,), "lifecycle.on_event_given_up", _END_RUN),
    Row(ev.TrainingWarning, (COORDINATOR,), "machine.on_training_warning", ()),
    Row(ev.BatchProposed, (COORDINATOR,), "machine.on_batch_proposed", (cmd.TrainStep,)),
    Row(
        ev.ActorJoined,
        ACTOR_ROLES,
        "membership.on_actor_joined",
        (cmd.AcceptActor, cmd.RefuseActor, *_LOSS),
    ),
    Row(ev.ActorLeft, ACTOR_ROLES, "membership.on_actor_left", _LOSS),
    Row(ev.ActorFailed, ACTOR_ROLES, "membership.on_actor_failed", _LOSS),
    Row(ev.ProcessExited, (NODE,), "membership.on_process_exited", _LOSS),
    Row(ev.DataLoaded, (STORE,), "membership.on_data_loaded", (cmd.PublishWeights,)),
    Row(ev.TrajectoriesEnded, (STORE,), "machine.on_trajectories_ended", (cmd.StopActor,)),
    Row(
        ev.TrainerReady,
        (TRAINER,),
        "membership.on_trainer_ready",
        (cmd.PublishWeights,),
    ),
    Row(
        ev.StepCompleted,
        (TRAINER,),
        "machine.on_step_completed",
        (
            cmd.EndTrajectories,
            cmd.AbortTrajectories,
            cmd.TrainStep,
            cmd.ProposeBatch,
            cmd.PublishWeights,
            cmd.ExportModel,
            cmd.PullWeights,
        ),
    ),
    Row(ev.PublishSkipped, (TRAINER,), "publishing.on_publish_skipped", ()),
    Row(ev.ModelExported, (TRAINER,), "lifecycle.on_model_exported", (cmd.PublishWeights,)),
    Row(
        ev.CheckpointSaved,
        (TRAINER,),
        "weights.on_checkpoint_saved",
        (cmd.PullWeights, cmd.GenerateTrajectory),
    ),
    Row(
        ev.RelayReady,
        (RELAY,),
        "membership.on_relay_ready",
        (cmd.PublishWeights, cmd.ForwardWeights, cmd.PinVersion),
    ),
    Row(
        ev.WeightsPublished,
        (RELAY,),
        "weights.on_weights_published",
        (
            *_END_RUN,
            cmd.PullWeights,
            cmd.GenerateTrajectory,
            cmd.TrainStep,
            cmd.ProposeBatch,
            cmd.ExportModel,
            cmd.PinVersion,
            cmd.RestartActor,
        ),
    ),
    Row(
        ev.WeightsReceived,
        (RELAY,),
        "relays.on_weights_received",
        (
            cmd.PullWeights,
            cmd.PinVersion,
            cmd.ForwardWeights,
            cmd.RestartActor,
            cmd.GenerateTrajectory,
        ),
    ),
    Row(ev.RelayLinked, (RELAY,), "relays.on_relay_linked", ()),
    Row(ev.TransferTrouble, (RELAY,), "relays.on_transfer_trouble", ()),
    Row(
        ev.ReplicaReady,
        (ROLLOUT,),
        "membership.on_replica_ready",
        (cmd.PullWeights, cmd.ScoreTrajectories, cmd.PinVersion, cmd.EndTrajectories),
    ),
    Row(
        ev.WeightsLoaded,
        (ROLLOUT,),
        "weights.on_weights_loaded",
        (cmd.GenerateTrajectory, cmd.PinVersion, cmd.PullWeights),
    ),
    Row(
        ev.WeightsRejected,
        (ROLLOUT,),
        "weights.on_weights_rejected",
        (cmd.PullWeights, cmd.RestartActor),
    ),
    Row(
        ev.VersionGone,
        (ROLLOUT,),
        "weights.on_version_gone",
        (cmd.GenerateTrajectory, cmd.PullWeights, cmd.PinVersion, cmd.EndTrajectories),
    ),
    Row(
        ev.CheckpointRefused,
        (ROLLOUT,),
        "weights.on_checkpoint_refused",
        (cmd.GenerateTrajectory, cmd.PullWeights, cmd.PinVersion, cmd.EndTrajectories),
    ),
    Row(ev.TrajectoryStarted, (ROLLOUT,), "machine.on_trajectory_started", ()),
    Row(ev.TokenProgress, (ROLLOUT,), "machine.on_token_progress", ()),
    Row(
        ev.TrajectoryFinished,
        (ROLLOUT,),
        "machine.on_trajectory_finished",
        (cmd.ScoreTrajectories, cmd.GenerateTrajectory, cmd.PullWeights),
    ),
    Row(
        ev.TrajectoryFailed,
        (ROLLOUT,),
        "machine.on_trajectory_failed",
        (
            cmd.EndTrajectories,
            cmd.AbortTrajectories,
            cmd.GenerateTrajectory,
            cmd.ScoreTrajectories,
            cmd.PullWeights,
            cmd.PinVersion,
            cmd.TrainStep,
            cmd.ProposeBatch,
            cmd.ExportModel,
        ),
    ),
    Row(
        ev.TrajectoryRewarded,
        (ROLLOUT,),
        "machine.on_trajectory_rewarded",
        (
            cmd.EndTrajectories,
            cmd.AbortTrajectories,
            cmd.GenerateTrajectory,
            cmd.PullWeights,
            cmd.PinVersion,
            cmd.TrainStep,
            cmd.ProposeBatch,
            cmd.ExportModel,
        ),
    ),
)

SENDERS: dict[type[Event], tuple[str, ...]] = {row.event: row.senders for row in INDEX}


# --- docs/events.md ---------------------------------------------------------------------------


def _name(kind: type) -> str:
    return f"`{kind.__struct_config__.tag}`"  # type: ignore[attr-defined]


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().replace("\n", " ").split("  ")[0]


def markdown() -> str:
    """The index as a page: events with their commands, then commands with what ends them."""
    lines = ["# Events and commands", "", "Made by `python -m laminar.events.index`.", ""]
    lines += ["## Events", ""]
    for row in INDEX:
        leads_to = ", ".join(_name(c) for c in row.commands) or "nothing"
        lines += [
            f"### {_name(row.event)}",
            "",
            _first_line(row.event),
            "",
            f"- Reported by: {', '.join(row.senders)}",
            f"- Handled by: `laminar.core.{row.handler}`",
            f"- May lead to: {leads_to}",
            "",
        ]
    lines += ["## Commands", ""]
    for command, ended_by in cmd.ENDED_BY.items():
        ends = ", ".join(_name(e) for e in ended_by) or "nothing; losing it breaks nothing"
        lines += [f"### {_name(command)}", "", _first_line(command), "", f"- Ended by: {ends}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
