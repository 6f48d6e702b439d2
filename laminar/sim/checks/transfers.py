"""Check of transfers along the chain of relays: one that does not come has an end.

Reads   the coordinator's state when a timer has fired
Raises  Violation
"""

from __future__ import annotations

from laminar.core import keys
from laminar.core.state import State
from laminar.events import events as ev
from laminar.events.base import Stamped
from laminar.sim.runtime.violation import Violation


def late_transfer_has_an_end(stamped: Stamped, state: State) -> None:
    """A relay that did not get in time what its predecessor has is to be started again."""
    if not isinstance(stamped.event, ev.TimerFired):
        return
    kind, name = keys.parse_timer(stamped.event.timer)
    overdue = kind == keys.TimerKind.RECEIVE and name in state.chain
    position = state.chain.index(name) if overdue else 0
    if not position or keys.restart(name) in state.commands:
        return
    relay, before = state.relays[name], state.relays[state.chain[position - 1]]
    if relay.newest < state.newest <= before.newest:
        what = f"version {state.newest} did not come from {before.name}, and nobody acts"
        raise Violation("late_transfer_has_an_end", what, name)
