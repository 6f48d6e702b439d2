"""Publishing: what the trainer has made, what of it the relay lacks, and when it is made good.

Reads   PublishSkipped, state.batch, state.exported, state.newest
Writes  state.owed, the timer "weights"
Emits   PublishWeights (an owed one)

A publish is owed when the trainer skipped it for want of a slot, or when the relay that took it is
gone. It is paid when the trainer is idle, and in any case before it waits for a batch.
"""

from __future__ import annotations

from laminar.core.state import State
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev

PUBLISH_TIMEOUT_MS = 300_000
"""A copy and a digest, plus waiting for a slot; readers hold a slot only while they load."""


def last_made(state: State) -> int:
    """Number of the weights that the trainer has now."""
    if state.batch is not None:
        return state.batch.version - 1
    return state.exported - 1 if "export" in state.commands else state.next_version - 1


def expect_version(turn: Turn, version: int, ordered_seq: int) -> None:
    """What was ordered then is made: its weights are published, owed, or due within a time.

    They may have been handed to a process of the relay that is gone; then they are owed.
    """
    state = turn.state
    master = state.master()
    if state.owed >= version or (master is not None and master.newest >= version):
        return
    if master is None or master.ready_seq > ordered_seq:
        owe_newest(turn)
    else:
        turn.set_timer("weights", PUBLISH_TIMEOUT_MS)


def owe_newest(turn: Turn) -> None:
    """The relay of the trainer's machine lacks what the trainer has: it is published again."""
    state, made = turn.state, last_made(turn.state)
    master = state.master()
    if state.newest < 0 or (master is not None and master.newest >= made):
        return
    state.owed, state.owed_step = made, state.completed
    turn.done("publish")
    turn.clear_timer("weights")


def on_publish_skipped(turn: Turn, event: ev.PublishSkipped) -> None:
    """The trainer went on; the newest skipped version is owed."""
    state = turn.state
    if event.version <= state.newest or event.version <= state.owed:
        return turn.ignore("repeat")
    state.owed, state.owed_step = event.version, event.step
    turn.clear_timer("weights")


def settle_debt(turn: Turn, step: int) -> bool:
    """A publish of this step is known: it ends the order to publish, unless a later one is owed."""
    state = turn.state
    settled = state.owed >= 0 and step >= state.owed_step
    if settled:
        state.owed = state.owed_step = -1
    return (state.owed < 0 and turn.done("publish") is not None) or settled


def debt_due(state: State) -> bool:
    """A publish is owed, no later one that would make up for it is on its way, and there is a relay
    to take it."""
    return state.owed >= 0 and "weights" not in state.timers and state.master() is not None


def publish_owed(turn: Turn) -> None:
    trainer = turn.state.the("trainer")
    assert trainer is not None
    turn.command(
        cmd.PublishWeights(to=trainer.name, version=turn.state.owed, step=turn.state.owed_step),
        key="publish",
        timeout_ms=PUBLISH_TIMEOUT_MS,
    )
