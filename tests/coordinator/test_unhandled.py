"""What takes the place of an event that is not handled any more."""

from __future__ import annotations

import msgspec

from laminar.coordinator.unhandled import instead_of
from laminar.eventlog.crashes import Crash
from laminar.events import events as ev
from laminar.events.base import Stamped


def test_answer_that_is_given_up_names_what_it_answered() -> None:
    """The core never sees the answer, and has to know that it does not come any more."""
    answer = ev.TrajectoriesEnded(command_id=17, ended=())
    crash = Crash(3, "trajectories-ended, message 2 of store-0 (incarnation 2)", "KeyError: '0.1'")
    stamped = Stamped(seq=9, time_ns=0, peer="store-0", incarnation=2, peer_seq=2, event=answer)
    assert instead_of(stamped, crash).ended_by == 17
    ready = ev.TrainerReady(num_parameters=1, weights_bytes=4)
    assert instead_of(msgspec.structs.replace(stamped, event=ready), crash).ended_by == 0
