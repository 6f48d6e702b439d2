"""Admission rule of the Laminar paper, for comparison: drain a fixed batch, then pull.

Gives   `drains`, a context in which the core follows this rule

The product does not have this rule: a replica that took its share continues until there are newer
weights. Under this rule it takes no more work, drains, and takes its next share with the newest
weights, which may be those that it has. With the policy "best-fit" the core then packs like the
paper's Algorithm 1, with pinned destinations: it packs every replica with only stragglers left,
even one that could take new work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from laminar.core import loading, planner
from laminar.core.context import Context
from laminar.core.repack import stragglers
from laminar.core.scheduling import admission
from laminar.core.scheduling.admission import NotAdmittedReason
from laminar.core.state import indexes
from laminar.core.state.members import Replica
from laminar.core.state.migrations import StayReason
from laminar.core.state.replica_index import Kind
from laminar.core.state.state import State

_why_not_admitted, _plan_pull = admission.find_not_admitted_reason, loading.plan_pull
_why_nothing_newer = stragglers._find_not_newer_reason


def _drains(state: State, replica: Replica) -> NotAdmittedReason | None:
    if replica.groups_taken >= state.settings.groups_per_version:
        return NotAdmittedReason.DRAINING
    return _why_not_admitted(state, replica)


def _pulls_or_goes_on(ctx: Context, replica: Replica) -> None:
    """Give an empty replica its next share, with the newest weights."""
    _plan_pull(ctx, replica)
    state = ctx.state
    busy = replica.running or replica.incoming or replica.outgoing or replica.loading
    if not busy and replica.groups_taken >= state.settings.groups_per_version:
        replica.groups_taken = 0
        indexes.update_replica(state, replica)
        ctx.touch_replica(replica.name)


def _takes_nothing(state: State, replica: Replica) -> StayReason | None:
    """Return why a replica does not release work, regardless of newer weights."""
    why = _why_nothing_newer(state, replica)
    newer = StayReason.NO_NEWER_WEIGHTS, StayReason.WEIGHTS_NOT_HERE
    return None if why in newer else why


def _may_admit(others: planner._UntouchedReplicas, kind: Kind) -> bool:
    return kind.serving and not kind.satisfied and kind.step not in others._refused


@contextmanager
def drains() -> Iterator[None]:
    """Apply the paper's rule until the end of the block."""
    with ExitStack() as stack:
        for owner, name, rule in (
            (admission, "find_not_admitted_reason", _drains),
            (stragglers, "find_not_admitted_reason", _drains),
            (stragglers, "_find_not_newer_reason", _takes_nothing),
            (loading, "plan_pull", _pulls_or_goes_on),
            (planner._UntouchedReplicas, "_may_admit", _may_admit),
        ):
            stack.enter_context(patch.object(owner, name, rule))
        yield
