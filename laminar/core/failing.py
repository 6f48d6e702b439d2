"""Failures that end the run: a handler records one, and the planner ends the run with it.

Reads   state.run.failed, state.run.phase
Writes  ctx.failure, state.run.draining, state.run.drain_failure

lifecycle.py takes the steps that follow, as for every end of a run.
"""

from __future__ import annotations

from laminar.core.context import Context
from laminar.core.state.failures import Failure, FailureKind
from laminar.core.state.statuses import Phase


def fail_run(ctx: Context, kind: FailureKind, subject: str, detail: str = "") -> bool:
    """End the run with a reason; return False if it has one already, or stops: keep the first."""
    run = ctx.state.run
    if ctx.failure is not None or run.failed or run.phase in (Phase.STOPPING, Phase.ENDED):
        return False
    ctx.failure = Failure(kind, subject, ctx.stamped.seq, detail)
    return True


def drain_run(ctx: Context, kind: FailureKind, subject: str, detail: str) -> None:
    """End the run gracefully, as on a user's request, and with this failure."""
    ctx.state.run.draining = True
    ctx.state.run.drain_failure = Failure(kind, subject, ctx.stamped.seq, detail)
