"""Run: its phase, and why it drains, pauses or has failed.

Reads   nothing
Gives   Run
"""

from __future__ import annotations

import msgspec

from laminar.core.state.failures import Failure
from laminar.core.state.statuses import Phase, encode_default
from laminar.names import exit_codes


class Run(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The course of a run."""

    phase: Phase = encode_default(Phase.STARTING)
    draining: bool = False
    drain_failure: Failure | None = None  #: reason for draining; None: the user asked
    pausing: bool = False  #: whether it drains, and stops when the last step is saved
    #: stopped or paused: open work stays open until the run is resumed
    stopped: bool = False
    failed: Failure | None = None
    #: completed steps when a process was restarted for a stall, by its name
    stalled: dict[str, int] = {}
    ignored: dict[str, int] = {}  #: events that changed nothing, by reason

    @property
    def failure(self) -> str:
        """Why the run has failed, as a sentence; empty: it has not."""
        return self.failed.sentence if self.failed is not None else ""

    @property
    def exit_code(self) -> int:
        """The exit code of the run once it has ended."""
        if self.failed is not None:
            return self.failed.kind.record.exit_code
        return exit_codes.PAUSED if self.stopped else exit_codes.COMPLETE

    @property
    def paused(self) -> bool:
        """Whether the run is paused: all processes were ordered to end, and it can be resumed."""
        return self.stopped and self.failed is None
