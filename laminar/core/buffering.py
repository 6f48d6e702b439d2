"""Buffering: finished groups become batches.

Reads   state.ready, state.deadlines, settings
Writes  state.batch, state.chosen, state.proposal
Emits   TrainStep, ProposeBatch

Batches are chosen by (deadline, dispatch order), never by order of completion: that would put short
answers first. A user's strategy proposes; what it proposes is taken only if the staleness bound
survives it.
"""

from __future__ import annotations

from laminar import ids
from laminar.core import publishing
from laminar.core.admission import bound_holds, groups_wanted
from laminar.core.lookup import remove_ready
from laminar.core.scores import float_of
from laminar.core.siblings import drop_scored, end_group, scored_members, unchosen_less
from laminar.core.state import RUNNING, Batch, Group, State
from laminar.core.turn import Turn
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import STRATEGY
from laminar.ids import GroupId

PROPOSAL_TIMEOUT_MS = 5_000
"""A strategy sees metadata only; five seconds of an idle trainer is the most it may cost."""
MISMATCH = "mismatch"  #: why the trainer leaves out what it was given
TRAIN_TIMEOUT_MS = 7_200_000
"""Two hours for one batch: above what a large model takes, below a night of silence."""

# --- batches ----------------------------------------------------------------------------------


def trainer_idle(state: State) -> bool:
    """Nothing that the trainer was told to do is outstanding."""
    if state.batch is not None or "publish" in state.commands or "export" in state.commands:
        return False
    trainer = state.the("trainer")
    return trainer is not None and trainer.ready and state.newest >= 0


def choose_batch(turn: Turn) -> bool:
    """Give the trainer its next batch if there is one; True when the state changed."""
    state = turn.state
    if state.phase != RUNNING or state.draining or not trainer_idle(state) or steps_done(state):
        return False
    count = batch_size(state)
    chosen = _select(turn, count) if count else None
    if chosen is None:
        _wait_for_batch(turn)
        return False
    _train(turn, chosen)
    return True


def steps_done(state: State) -> bool:
    total = state.settings.total_steps
    return bool(total) and state.chosen >= total


def batch_size(state: State) -> int:
    """Groups of the next batch: G, or what is left when the data has ended; 0: not yet."""
    full = state.settings.groups_per_step
    if len(state.ready) >= full:
        return full
    everything_ready = len(state.ready) == sum(state.deadlines.values())
    no_more = groups_wanted(state) <= 0
    if state.ready and everything_ready and no_more and not state.settings.drop_last:
        return len(state.ready)
    return 0


def by_deadline(state: State) -> list[Group]:
    """Finished groups in the order in which they must be trained."""
    return [state.groups[GroupId(group_id)] for _, _, group_id in state.lookup.ready]


def by_priority(state: State) -> list[Group]:
    """Groups whose siblings disagree first (they carry the signal), each part by deadline."""

    def agrees(group: Group) -> bool:
        bits = [state.trajectories[m].score_bits for m in scored_members(state, group)]
        return min(bits) == max(bits)

    return sorted(by_deadline(state), key=agrees)


STRATEGIES = {"deadline": by_deadline, "priority": by_priority}


def _select(turn: Turn, count: int) -> list[Group] | None:
    """The strategy's batch if it preserves the bound, else the earliest deadlines, else None."""
    state = turn.state
    name = state.settings.batch_strategy
    if name not in STRATEGIES and state.proposal is None and not state.proposal_failed:
        _ask_strategy(turn, count)
        return None
    if not _earliest_preserve_bound(state, count):
        return None
    if name in STRATEGIES:
        batch = STRATEGIES[name](state)[:count]
    else:
        batch = [state.groups[g] for g in state.proposal or ()]
    if len(batch) == count and preserves_bound(state, batch):
        return batch
    return by_deadline(state)[:count]


def preserves_bound(state: State, batch: list[Group]) -> bool:
    """Whether the inequality holds for what is left once this batch is chosen."""
    rest = dict(state.deadlines)
    for group in batch:
        rest[group.deadline] -= 1
    return bound_holds(rest, state.chosen + 1, state.settings.groups_per_step)


def _earliest_preserve_bound(state: State, count: int) -> bool:
    """Whether any batch of this size preserves the bound: if one does, the earliest does.

    Asked after every event while the trainer waits, so it counts and does not list.
    """
    rest = dict(state.deadlines)
    for deadline in sorted(rest):
        taken = min(count, state.lookup.num_ready(deadline))
        rest[deadline] -= taken
        count -= taken
    return bound_holds(rest, state.chosen + 1, state.settings.groups_per_step)


def _ask_strategy(turn: Turn, count: int) -> None:
    if "propose" in turn.state.commands:
        return
    candidates = tuple(_candidate(turn.state, group) for group in by_deadline(turn.state))
    turn.command(
        cmd.ProposeBatch(to=STRATEGY, step=turn.state.chosen, count=count, candidates=candidates),
        key="propose",
        timeout_ms=PROPOSAL_TIMEOUT_MS,
    )


def _candidate(state: State, group: Group) -> cmd.Candidate:
    scored = [state.trajectories[m] for m in scored_members(state, group)]
    return cmd.Candidate(
        group=group.id,
        row_index=group.row_index,
        deadline=group.deadline,
        step=group.step,
        order=group.order,
        num_tokens=sum(m.num_tokens for m in scored),
        scores=tuple(float_of(m.score_bits) for m in scored),
    )


def proposal_answered(turn: Turn, step: int, groups: tuple[GroupId, ...]) -> None:
    """Keep a usable answer; anything else falls back to the default and is counted."""
    state = turn.state
    if step != state.chosen or turn.done("propose") is None:
        return turn.ignore("late")
    distinct = list(dict.fromkeys(groups))
    if len(distinct) == len(groups) == batch_size(state) and all(g in state.ready for g in groups):
        state.proposal = distinct
    else:
        state.proposal_failed = True
        turn.ignore("unusable-proposal")


def _train(turn: Turn, groups: list[Group]) -> None:
    state = turn.state
    step, version = state.chosen, state.next_version
    shuffled = sorted(groups, key=lambda g: ids.hash64(state.settings.seed, "batch", step, g.id))
    for group in shuffled:
        group.status = "chosen"
        remove_ready(state, group)
        unchosen_less(state, group)
    state.batch = Batch(step=step, version=version, groups=[g.id for g in shuffled])
    state.chosen += 1
    state.next_version += 1
    state.proposal, state.proposal_failed = None, False
    turn.clear_timer("batch-wait")
    trainer = state.the("trainer")
    assert trainer is not None
    turn.command(
        cmd.TrainStep(
            to=trainer.name,
            step=step,
            version=version,
            trajectories=tuple(m for g in shuffled for m in scored_members(state, g)),
        ),
        key="train",
        timeout_ms=TRAIN_TIMEOUT_MS,
    )
    turn.touch_all()


def step_completed(turn: Turn, left_out: tuple[ev.LeftOut, ...]) -> None:
    """The batch is trained, but for what was left out: its groups end, staleness is counted."""
    state = turn.state
    batch = state.batch
    assert batch is not None
    untrained = {member for part in left_out for member in part.trajectories}
    for group_id in batch.groups:
        group = state.groups[group_id]
        scored = scored_members(state, group)
        trained = [member for member in scored if member not in untrained]
        for member in trained:
            staleness = batch.step - state.trajectories[member].step
            state.staleness_sum += staleness
            state.staleness_max = max(state.staleness_max, staleness)
        if not trained:
            end_group(turn, group, "dropped", MISMATCH, -1)
            continue
        drop_scored(turn, group, [m for m in scored if m in untrained], MISMATCH)
        end_group(turn, group, "trained", "", batch.step)
    state.batch = None
    state.completed += 1


# --- waiting ----------------------------------------------------------------------------------


def awaited(state: State) -> Group | None:
    """The unfinished group that the next batch needs most."""
    unfinished = [g for g in state.groups.values() if g.purpose == ids.TRAIN and g.status == "open"]
    return min(unfinished, key=lambda g: (g.deadline, g.order), default=None)


def _wait_for_batch(turn: Turn) -> None:
    """The trainer is idle: pay an owed publish, and start the clock on the group it waits for."""
    state = turn.state
    if publishing.debt_due(state):
        return publishing.publish_owed(turn)
    if "batch-wait" not in state.timers:
        turn.set_timer("batch-wait", state.settings.batch_wait_ms)
