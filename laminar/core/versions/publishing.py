"""Publishing: the versions that the trainer has made, and those it must publish again.

Reads   PublishSkipped, state.steps.batch, state.steps.trained, state.versions
Writes  state.versions, the timer "weights"
Emits   PublishWeights (again)

A version must be published again ("is owed") when the trainer skipped it because no slot was free,
or when the relay that took it is gone. That is done when the trainer is idle, and in any case
before it waits for a batch.

A trainer that was lost after the export may have other bytes than were exported. It publishes
nothing while the relay of its machine has the export, which the final evaluation uses. If that copy
is lost, too, its present weights are published and exported instead. A published version that the
trainer must publish again, and of which it has other bytes, gets another number.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.registry import handles
from laminar.core.state import keys
from laminar.core.state.indexes import master_relay, working_trainer
from laminar.core.state.state import State
from laminar.core.validation import of_a_version
from laminar.events import commands as cmd
from laminar.events import events as ev

PUBLISH_TIMEOUT_MS = 300_000
"""The timeout of a copy and a digest, plus waiting for a slot that readers hold while they load."""


def last_made(state: State) -> int:
    """Return the version that the trainer has now, or will have when it returns.

    The number of an interrupted batch does not count, though it may have been published."""
    versions = state.versions
    if state.steps.batch is not None:
        version = state.steps.batch.version - 1
    else:
        version = (versions.export if keys.EXPORT in state.orders.commands else versions.next) - 1
    while state.settings.keeps_checkpoints and versions.step_of(version) > state.steps.completed:
        version -= 1
    return version


def expect_version(ctx: Context, version: int, ordered_seq: int) -> None:
    """Expect an ordered version: its weights are published, owed, or due within a time.

    They are owed if the relay's process that received them is gone."""
    state = ctx.state
    if state.versions.owed >= version or _is_at_relay(state, version):
        return
    master = master_relay(state)
    if master is None or master.ready_seq > ordered_seq:
        owe_republish(ctx)
    else:
        ctx.set_timer(keys.WEIGHTS, PUBLISH_TIMEOUT_MS)


def owe_republish(ctx: Context) -> None:
    """Publish the trainer's weights again, which the relay of its machine lacks."""
    state, made = ctx.state, last_made(ctx.state)
    if state.versions.newest < 0 or _is_at_relay(state, made):
        return
    if (
        made == state.versions.export
        and working_trainer(state) is not None
        and has_other_bytes(state)
    ):
        repeat_export(ctx)
        made = state.versions.allocate_number(state.steps.completed)
    state.versions.owe_version(made, state.steps.completed)
    ctx.end_command(keys.PUBLISH)
    ctx.clear_timer(keys.WEIGHTS)


def _is_at_relay(state: State, version: int) -> bool:
    """Return whether a version was published and the relay of the trainer's machine has it.

    A relay that reports a version which was never published does not end the wait for it."""
    master = master_relay(state)
    return master is not None and min(master.newest, state.versions.newest) >= version


def has_other_bytes(state: State) -> bool:
    """Return whether the trainer has other weights than those published of the last step."""
    if not state.steps.trained or state.versions.newest_step != state.steps.completed:
        return False
    return state.steps.trained[-1].digest not in ("", state.versions.newest_digest)


def renumber_newest(ctx: Context, digest: str) -> None:
    """Let the digest of the trainer's present weights count, though others of this step are out.

    They go out under another number, once the relay that was restarted for them is back. A later
    version makes that unnecessary, and an export is repeated when it is owed."""
    state, versions = ctx.state, ctx.state.versions
    if state.steps.trained and versions.newest_step == state.steps.completed:
        state.steps.trained[-1].digest = digest
    if versions.export < 0 and state.steps.batch is None and last_made(state) == versions.newest:
        made = versions.allocate_number(state.steps.completed)
        versions.owe_version(made, state.steps.completed)


def repeat_export(ctx: Context) -> None:
    """Re-export after the retrained weights are published; cancel the old export's evaluation."""
    if ctx.state.evaluations.due == ctx.state.versions.export:
        ctx.state.evaluations.due = -1
    forget_export(ctx)


def forget_export(ctx: Context) -> None:
    """Make the export, done or ordered, an ordinary version."""
    state = ctx.state
    if state.versions.export >= 0:
        ctx.end_command(keys.EXPORT)
        state.versions.end_export(state.steps.completed)
    if state.evaluations.running is not None:
        state.evaluations.running.final = False


@handles(ev.PublishSkipped, valid=of_a_version)
def on_publish_skipped(ctx: Context, event: ev.PublishSkipped) -> None:
    """Record a skipped version as owed, unless a later one is."""
    state = ctx.state
    if event.version <= state.versions.newest or event.version <= state.versions.owed:
        return ctx.ignore("repeat")
    state.versions.owe_version(event.version, event.step)
    ctx.clear_timer(keys.WEIGHTS)


def end_republish(ctx: Context, version: int) -> bool:
    """End the order to publish for a published version, unless a later version is owed."""
    state = ctx.state
    settled = 0 <= state.versions.owed <= version
    if settled:
        state.versions.owed = -1
    return (state.versions.owed < 0 and ctx.end_command(keys.PUBLISH) is not None) or settled


def is_republish_due(state: State) -> bool:
    """Return whether a version must be published now.

    No later version is on its way, and there is a relay and a trainer that has the version."""
    if (
        state.versions.owed < 0
        or keys.WEIGHTS in state.orders.timers
        or working_trainer(state) is None
    ):
        return False
    return master_relay(state) is not None


def order_republish(ctx: Context) -> None:
    trainer, version = working_trainer(ctx.state), ctx.state.versions.owed
    assert trainer is not None
    step = ctx.state.versions.known[version].step
    ctx.issue_command(
        cmd.PublishWeights(to=trainer.name, version=version, step=step),
        key=keys.PUBLISH,
        timeout_ms=PUBLISH_TIMEOUT_MS,
    )
