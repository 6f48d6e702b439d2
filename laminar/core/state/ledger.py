"""The ledger: issued = trained + evaluated + dropped(reason) + live, exactly, at every event.

Reads   what transitions report about groups, trajectories and tokens
Writes  state.ledger

Three books of the same form: groups, trajectories, tokens. A token is issued when the store has it;
the core learns of it with `trajectory-finished` and `trajectories-ended` (which also reports tokens
lost by earlier attempts, dropped as "restarted"). Live is not stored but counted from the state, so
that the balance is a check and not a definition.
"""

from __future__ import annotations

import msgspec

from laminar.events.reasons import DropReason, EndKind


class LedgerCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The counts of one kind of thing."""

    issued: int = 0
    trained: int = 0
    evaluated: int = 0
    dropped: dict[str, int] = {}  #: by reason

    def record_end(self, end: EndKind, reason: DropReason, count: int = 1) -> None:
        """Move `count` things from live to their end."""
        if end == EndKind.TRAINED:
            self.trained += count
        elif end == EndKind.EVALUATED:
            self.evaluated += count
        else:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    @property
    def live(self) -> int:
        return self.issued - self.trained - self.evaluated - sum(self.dropped.values())


class Ledger(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The three books of a run."""

    groups: LedgerCounts = msgspec.field(default_factory=LedgerCounts)
    trajectories: LedgerCounts = msgspec.field(default_factory=LedgerCounts)
    tokens: LedgerCounts = msgspec.field(default_factory=LedgerCounts)
