"""The run as a whole: starting, running, exporting, the last evaluation, ending, stopping.

Reads   readiness of actors, completed steps, DrainRequested, EventGivenUp, ModelExported
Writes  state.phase, state.draining, state.drained_for, state.failure, state.exit_code
Emits   PublishWeights (version 0), ExportModel, StopActor

Each phase ends by an event that has an owner and a deadline; what cannot be helped ends the run
with a reason and a non-zero exit code, and the ledger still closes: leftovers are dropped as
"run-ended".
"""

from __future__ import annotations

from laminar.core import buffering, publishing, siblings
from laminar.core.admission import groups_wanted
from laminar.core.lookup import clear_timer
from laminar.core.state import (
    ENDED,
    ENDING,
    EXPORTING,
    FINAL_EVALUATION,
    RUNNING,
    STARTING,
    STOPPING,
    State,
)
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev

EXPORT_TIMEOUT_MS = 1_800_000
"""Writing and reading back a large model from a shared file system."""
STOP_TIMEOUT_MS = 20_000
"""A process that was told to stop flushes a few buffers; after this it is left to its node."""


def plan(turn: Turn) -> bool:
    """Move the run to its next phase if its condition holds; True when it did."""
    return _PLANS[turn.state.phase](turn)


def fail(turn: Turn, reason: str, exit_code: int) -> bool:
    """End the run with a reason; False when it has one already, or stops: the first is kept."""
    state = turn.state
    if state.failure or state.phase in (STOPPING, ENDED):
        return False
    state.failure, state.exit_code = reason, exit_code
    _begin_ending(turn)
    return True


def drain(turn: Turn, reason: str) -> None:
    """End the run in good order as on_drain_requested does; it has failed, with this reason."""
    turn.state.draining, turn.state.drained_for = True, reason


def on_drain_requested(turn: Turn, event: ev.DrainRequested) -> None:
    """Ctrl-C: no new work; the batch in training is completed, the model is exported.

    At once, or before anything was trained, there is nothing to complete.
    """
    state = turn.state
    repeat, state.draining = state.draining, True
    if event.at_once or (state.phase == STARTING and not repeat):
        when = "before it began" if state.phase == STARTING else "at once"
        if not fail(turn, f"stopped {when}: {event.reason}", 130) and repeat:
            turn.ignore("run-ending")
    elif repeat:
        turn.ignore("repeat")


def on_event_given_up(turn: Turn, event: ev.EventGivenUp) -> None:
    """The message counts as received and its timer as fired, or they would come again for ever.

    An answer of the store is not waited for: it has come, and what it said is lost to the ledger.
    """
    actor = turn.state.actors.get(event.actor)
    new = actor is not None and actor.incarnation == event.actor_incarnation
    if actor is not None and new and (new := event.peer_seq > actor.last_peer_seq):
        actor.last_peer_seq = event.peer_seq
    fired = clear_timer(turn.state, event.timer)
    awaited = turn.done(f"end:{event.ended_by}") is not None
    if not (fail(turn, event.reason, 1) or new or fired or awaited):
        turn.ignore("run-ending")


def on_model_exported(turn: Turn, event: ev.ModelExported) -> None:
    ordered = turn.done("export") if event.version == turn.state.exported else None
    if ordered is None:
        return turn.ignore("not-exporting")
    turn.state.export_path = event.path
    publishing.expect_version(turn, event.version, ordered.cause)


def on_start_timeout(turn: Turn) -> None:
    """Name what the start is waiting for."""
    state = turn.state
    missing = [role for role in ("store", "trainer") if not _ready(state, role)]
    if not state.relays or (state.the("trainer") is not None and state.master() is None):
        missing.insert(1, "relay")
    if not state.replicas:
        missing.append("rollout")
    waited = ", ".join(missing) or "the first weights to be published"
    fail(turn, f"not started within {state.settings.start_timeout_ms} ms: missing {waited}", 1)


def _ready(state: State, role: str) -> bool:
    actor = state.the(role)
    return actor is not None and actor.ready


def _starting(turn: Turn) -> bool:
    state = turn.state
    if state.newest >= 0:
        state.phase = RUNNING
        turn.clear_timer("start")
        turn.touch_all()
        return True
    trainer = state.the("trainer")
    all_ready = _ready(state, "store") and _ready(state, "trainer") and state.master() is not None
    if not all_ready or trainer is None or "publish" in state.commands:
        return False
    state.next_version = 1
    turn.command(cmd.PublishWeights(to=trainer.name, version=0, step=0), key="publish")
    return True


def _running(turn: Turn) -> bool:
    """The steps are done, the data has ended, or the user asked to stop."""
    state = turn.state
    if state.batch is not None:
        return False
    if state.draining:
        _drop_leftovers(turn)
    elif not buffering.steps_done(state) and not _data_ended(turn):
        return False
    state.phase = EXPORTING
    turn.touch_all()
    return True


def _data_ended(turn: Turn) -> bool:
    """Nothing left to generate and too little for a batch: the rest is dropped."""
    state = turn.state
    if groups_wanted(state) > 0 or state.settings.total_steps:
        return False
    if sum(state.deadlines.values()) > len(state.ready):
        return False  # some are unfinished
    if state.ready and buffering.batch_size(state):
        return False
    for group_id in list(state.ready):
        siblings.drop_group(turn, state.groups[group_id], "end-of-data")
    return True


def _exporting(turn: Turn) -> bool:
    state = turn.state
    trainer = state.the("trainer")
    if trainer is None or state.batch is not None or _publishes(turn):
        return False
    if state.exported < 0:
        if state.newest < publishing.last_made(state):
            return False  # the last step's weights are on their way
        state.exported = state.next_version
        state.next_version += 1
        turn.command(
            cmd.ExportModel(to=trainer.name, version=state.exported, step=state.newest_step),
            key="export",
            timeout_ms=EXPORT_TIMEOUT_MS,
        )
        return True
    if state.newest < state.exported:
        return False
    if state.num_eval and not state.draining:
        state.phase = FINAL_EVALUATION
        turn.touch_all()
    else:
        _begin_ending(turn)
    return True


def _publishes(turn: Turn) -> bool:
    """The trainer is about to hand over weights; True also when it is told to pay what it owes."""
    state = turn.state
    if "publish" in state.commands or "export" in state.commands:
        return True
    if not publishing.debt_due(state):
        return False
    publishing.publish_owed(turn)
    return True


def _final_evaluation(turn: Turn) -> bool:
    state = turn.state
    finished = any(result.final for result in state.evaluations)
    if not finished and not state.draining:
        _publishes(turn)  # the machine of the trainer may have lost its copy
        return False
    _begin_ending(turn)
    return True


def _begin_ending(turn: Turn) -> None:
    state = turn.state
    if state.drained_for:
        state.failure, state.exit_code = state.drained_for, 1
    state.phase = ENDING
    turn.clear_timer("batch-wait")
    turn.clear_timer("start")
    if state.batch is not None:  # only when the run failed: a lost trainer's batch is not trained
        turn.done("train")
        for group_id in state.batch.groups:
            siblings.end_group(turn, state.groups[group_id], "dropped", "run-ended", -1)
        state.batch = None
    _drop_leftovers(turn)
    state.evaluation, state.evaluation_due = None, -1
    plan(turn)


def _drop_leftovers(turn: Turn) -> None:
    for group in list(turn.state.groups.values()):
        if group.status in ("open", "ready"):
            siblings.drop_group(turn, group, "run-ended")
    turn.state.evaluation = None


def _ending(turn: Turn) -> bool:
    """Wait until the store has written every end; without one that does, the books stay open."""
    state = turn.state
    writing = turn.endings or any(t.startswith("command:end:") for t in state.timers)
    if state.groups and writing and state.the("store") is not None:
        return False
    state.phase = STOPPING
    for actor in state.actors.values():
        if actor.alive:
            turn.command(
                cmd.StopActor(to=actor.name, reason=state.failure or "the run is complete"),
                key=f"stop:{actor.name}",
                timeout_ms=STOP_TIMEOUT_MS,
            )
    return True


def _stopping(turn: Turn) -> bool:
    if any(key.startswith("stop:") for key in turn.state.commands):
        return False
    turn.state.phase = ENDED
    for key in list(turn.state.commands):
        turn.done(key)
    for name in list(turn.state.timers):
        turn.clear_timer(name)
    return True


def _ended(turn: Turn) -> bool:
    return False


_PLANS = {
    STARTING: _starting,
    RUNNING: _running,
    EXPORTING: _exporting,
    FINAL_EVALUATION: _final_evaluation,
    ENDING: _ending,
    STOPPING: _stopping,
    ENDED: _ended,
}
