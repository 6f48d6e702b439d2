"""Batching: finished groups become batches.

Reads   state.work.ready, state.work.deadlines, settings
Writes  state.steps.batch, state.steps.chosen, state.steps.proposal
Emits   TrainStep, ProposeBatch

Batches are chosen by (deadline, dispatch order), never by order of completion: that would put short
responses first. A user's strategy proposes a batch, which is taken only if it preserves the
staleness bound.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.failing import fail_run
from laminar.core.registry import handles
from laminar.core.scheduling.admission import bound_holds, groups_wanted
from laminar.core.scheduling.groups import drop_scored, end_group, remove_unchosen, scored_members
from laminar.core.state import keys
from laminar.core.state.failures import FailureKind
from laminar.core.state.indexes import indexes_of, remove_ready, working_trainer
from laminar.core.state.scores import float_of
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus, Phase
from laminar.core.state.steps import Batch, StepRecord
from laminar.core.state.transitions import move_group
from laminar.core.state.work import Group
from laminar.core.validation import accept_any, is_allocated, is_count
from laminar.core.versions import publishing
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import STRATEGY
from laminar.events.reasons import DropReason, EndKind
from laminar.names import ids
from laminar.names.ids import GroupId, Purpose, TrajectoryId

PROPOSAL_TIMEOUT_MS = 5_000
"""The timeout of a strategy, which sees metadata only; the trainer idles meanwhile."""
TRAIN_TIMEOUT_MS = 7_200_000
"""The timeout of one batch: more than a large model takes, and a hang does not cost a night."""
GRADIENT = "gradient"  #: the subject of failures of the gradient

# --- batches ----------------------------------------------------------------------------------


def is_trainer_idle(state: State) -> bool:
    """Return whether no command to the trainer is outstanding."""
    if (
        state.steps.batch is not None
        or keys.PUBLISH in state.orders.commands
        or keys.EXPORT in state.orders.commands
    ):
        return False
    return working_trainer(state) is not None and state.versions.newest >= 0


def choose_batch(ctx: Context) -> bool:
    """Give the trainer its next batch if there is one; return whether the state changed."""
    state = ctx.state
    if (
        state.run.phase != Phase.RUNNING
        or state.run.draining
        or not is_trainer_idle(state)
        or are_steps_done(state)
    ):
        return False
    count = batch_size(state)
    chosen = _select_batch(ctx, count) if count else None
    if chosen is None:
        _wait_for_batch(ctx)
        return False
    _train_groups(ctx, chosen)
    return True


def are_steps_done(state: State) -> bool:
    total = state.settings.total_steps
    return bool(total) and state.steps.chosen >= total


def batch_size(state: State) -> int:
    """Return the groups of the next batch: G, or the rest when the data has ended; 0: not yet."""
    full = state.settings.groups_per_step
    if len(state.work.ready) >= full:
        return full
    everything_ready = len(state.work.ready) == sum(state.work.deadlines.values())
    no_more = groups_wanted(state) <= 0
    if state.work.ready and everything_ready and no_more and not state.settings.drop_last:
        return len(state.work.ready)
    return 0


def by_deadline(state: State) -> list[Group]:
    """Return finished groups in the order in which they must be trained."""
    return [state.work.groups[GroupId(group_id)] for _, _, group_id in indexes_of(state).ready]


def by_priority(state: State) -> list[Group]:
    """Return groups whose siblings disagree, which carry the signal, before the others.

    Each part is ordered by deadline."""

    def agrees(group: Group) -> bool:
        bits = [state.work.trajectories[m].reward_bits for m in scored_members(state, group)]
        return min(bits) == max(bits)

    return sorted(by_deadline(state), key=agrees)


STRATEGIES = {"deadline": by_deadline, "priority": by_priority}


def _select_batch(ctx: Context, count: int) -> list[Group] | None:
    """Choose the strategy's batch if it keeps the bound, else the earliest deadlines, or None."""
    state = ctx.state
    name = state.settings.batch_strategy
    if name not in STRATEGIES and state.steps.proposal is None and not state.steps.proposal_failed:
        _ask_strategy(ctx, count)
        return None
    if not _earliest_preserve_bound(state, count):
        return None
    if name in STRATEGIES:
        batch = STRATEGIES[name](state)[:count]
    else:
        batch = [state.work.groups[g] for g in state.steps.proposal or ()]
    if len(batch) == count and preserves_bound(state, batch):
        return batch
    return by_deadline(state)[:count]


def preserves_bound(state: State, batch: list[Group]) -> bool:
    """Return whether the inequality holds for the remaining groups once this batch is chosen."""
    rest = dict(state.work.deadlines)
    for group in batch:
        rest[group.deadline] -= 1
    return bound_holds(rest, state.steps.chosen + 1, state.settings.groups_per_step)


def _earliest_preserve_bound(state: State, count: int) -> bool:
    """Return whether any batch of this size preserves the bound: if one does, the earliest does.

    Called after every event while the trainer waits, so it counts instead of listing."""
    rest = dict(state.work.deadlines)
    for deadline in sorted(rest):
        taken = min(count, indexes_of(state).count_ready(deadline))
        rest[deadline] -= taken
        count -= taken
    return bound_holds(rest, state.steps.chosen + 1, state.settings.groups_per_step)


def _ask_strategy(ctx: Context, count: int) -> None:
    if keys.PROPOSE in ctx.state.orders.commands:
        return
    candidates = tuple(_make_candidate(ctx.state, group) for group in by_deadline(ctx.state))
    ctx.issue_command(
        cmd.ProposeBatch(
            to=STRATEGY, step_index=ctx.state.steps.chosen, count=count, candidates=candidates
        ),
        key=keys.PROPOSE,
        timeout_ms=PROPOSAL_TIMEOUT_MS,
    )


def _make_candidate(state: State, group: Group) -> cmd.BatchCandidate:
    scored = [state.work.trajectories[m] for m in scored_members(state, group)]
    return cmd.BatchCandidate(
        group=group.id,
        row_index=group.row_index,
        deadline=group.deadline,
        step=group.step,
        order=group.order,
        num_tokens=sum(m.num_tokens for m in scored),
        rewards=tuple(float_of(m.reward_bits) for m in scored),
    )


@handles(ev.BatchProposed, valid=accept_any)
def on_batch_proposed(ctx: Context, event: ev.BatchProposed) -> None:
    """Keep a usable answer; otherwise fall back to the default and count it."""
    state, groups = ctx.state, event.groups
    if event.step_index != state.steps.chosen or ctx.end_command(keys.PROPOSE) is None:
        return ctx.ignore("late")
    distinct = list(dict.fromkeys(groups))
    if len(distinct) == len(groups) == batch_size(state) and all(
        g in state.work.ready for g in groups
    ):
        state.steps.proposal = distinct
    else:
        state.steps.proposal_failed = True
        ctx.ignore("unusable-proposal")


def _train_groups(ctx: Context, groups: list[Group]) -> None:
    state = ctx.state
    step = state.steps.chosen
    shuffled = sorted(groups, key=lambda g: ids.hash64(state.settings.seed, "batch", step, g.id))
    for group in shuffled:
        move_group(group, "choose")
        remove_ready(state, group)
        remove_unchosen(state, group)
    version = state.versions.allocate_number(step + 1)
    state.steps.batch = Batch(step_index=step, version=version, groups=[g.id for g in shuffled])
    state.steps.chosen += 1
    state.steps.proposal, state.steps.proposal_failed = None, False
    ctx.clear_timer(keys.BATCH_TIMEOUT)
    order_batch(ctx, state.steps.batch)
    ctx.touch_all()


def rows_of(state: State, batch: Batch) -> list[TrajectoryId]:
    """Return the trajectories of the batch in the order in which they are trained."""
    return [m for g in batch.groups for m in scored_members(state, state.work.groups[g])]


def order_batch(ctx: Context, batch: Batch) -> None:
    """Order the trainer to consume the batch."""
    trainer = working_trainer(ctx.state)
    assert trainer is not None
    ctx.issue_command(
        cmd.TrainStep(
            to=trainer.name,
            step_index=batch.step_index,
            version=batch.version,
            trajectories=tuple(rows_of(ctx.state, batch)),
        ),
        key=keys.TRAIN,
        timeout_ms=TRAIN_TIMEOUT_MS,
    )


def _has_version_of_step(state: State, event: ev.StepCompleted) -> bool:
    allocated = is_allocated(state, event.version, event.step_index + 1)
    return allocated and is_count(event.nonfinite_updates)


@handles(ev.StepCompleted, valid=_has_version_of_step)
def on_step_completed(ctx: Context, event: ev.StepCompleted) -> None:
    """End a batch that the trainer's step log has as trained."""
    state = ctx.state
    if state.steps.batch is None or state.steps.batch.step_index != event.step_index:
        return ctx.ignore("repeat")
    ordered = ctx.end_command(keys.TRAIN)
    if ordered is None:  # a returning trainer has not been given it yet
        return ctx.ignore("not-ordered")
    _record_step(state, state.steps.batch)
    _end_batch(ctx, state.steps.batch, event.left_out)
    publishing.expect_version(ctx, event.version, ordered.cause)
    _count_nonfinite(ctx, event)
    ctx.touch_all()


def _record_step(state: State, batch: Batch) -> None:
    """Record a trained batch, which a returning trainer may have to repeat."""
    if not state.settings.keeps_checkpoints:
        return
    trained, rows = state.steps.trained, rows_of(state, batch)
    record = StepRecord(
        step_index=batch.step_index,
        version=batch.version,
        trajectory_ids=" ".join(rows),
        chain=ids.extend_chain_digest(trained[-1].chain if trained else "", rows),
        digest=state.versions.newest_digest if state.versions.newest == batch.version else "",
    )
    trained.append(record)


def _count_nonfinite(ctx: Context, event: ev.StepCompleted) -> None:
    """Count updates without a finite gradient since the weights changed; too many end the run."""
    state, limit = ctx.state, ctx.state.settings.max_nonfinite_updates
    state.signals.nonfinite_in_row = event.nonfinite_updates + (
        0 if event.changed else state.signals.nonfinite_in_row
    )
    if not 0 < limit <= state.signals.nonfinite_in_row or state.run.draining:
        return
    what = (
        f"the gradients of the last {state.signals.nonfinite_in_row} updates were not finite, and "
        f"they were skipped (trainer.max_nonfinite_updates = {limit}): training has probably "
        "diverged; fork the run from a checkpoint before that, or start it again, with a smaller "
        "optim.lr"
    )
    fail_run(ctx, FailureKind.NON_FINITE, GRADIENT, what)


def _end_batch(ctx: Context, batch: Batch, left_out: tuple[ev.ExcludedRows, ...]) -> None:
    """End the groups of a trained batch, except excluded rows, and count staleness."""
    state = ctx.state
    untrained = {member for part in left_out for member in part.trajectories}
    for group_id in batch.groups:
        group = state.work.groups[group_id]
        scored = scored_members(state, group)
        trained = [member for member in scored if member not in untrained]
        for member in trained:
            staleness = batch.step_index - state.work.trajectories[member].step
            state.steps.staleness_sum += staleness
            state.steps.staleness_max = max(state.steps.staleness_max, staleness)
        if not trained:
            end_group(ctx, group, EndKind.DROPPED, DropReason.MISMATCH, -1)
            continue
        drop_scored(ctx, group, [m for m in scored if m in untrained], DropReason.MISMATCH)
        end_group(ctx, group, EndKind.TRAINED, DropReason.NONE, batch.step_index)
    state.steps.batch = None
    state.steps.completed += 1


# --- waiting ----------------------------------------------------------------------------------


def find_awaited_group(state: State) -> Group | None:
    """Return the unfinished group that the next batch needs most."""
    training = [g for g in state.work.groups.values() if g.purpose == Purpose.TRAIN]
    unfinished = [g for g in training if g.status == GroupStatus.OPEN]
    return min(unfinished, key=lambda g: (g.deadline, g.order), default=None)


def _wait_for_batch(ctx: Context) -> None:
    """Publish an owed version while the trainer is idle, or start the timer of the batch wait."""
    state = ctx.state
    if publishing.is_republish_due(state):
        return publishing.order_republish(ctx)
    if keys.BATCH_TIMEOUT not in state.orders.timers:
        ctx.set_timer(keys.BATCH_TIMEOUT, state.settings.batch_timeout_ms)
