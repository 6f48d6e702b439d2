"""Events that the core could not handle: the exception that ends the coordinator, and their names.

Reads   an event with its sender, the exception that its handler raised
Gives   HandlingFailed; name_of an event; the Crash to be recorded; RunGivenUp

Pure. The name is the same whenever the same event comes again: by the sender's number where it has
one, else by what the event is about.
"""

from __future__ import annotations

from laminar.eventlog.crashes import CRASHES_MAX, Crash
from laminar.events import events as ev
from laminar.events.base import Event, Stamped, kebab

ERROR_CHARS_MAX = 500


class HandlingFailed(Exception):
    """The core raised on an event: it is neither logged nor acknowledged; end the coordinator.

    `__cause__` is what was raised.
    """

    def __init__(self, stamped: Stamped, cause: Exception) -> None:
        self.stamped = stamped
        self.what = name_of(stamped.peer, stamped.incarnation, stamped.peer_seq, stamped.event)
        self.error = _described(cause)
        super().__init__(f"{self.what} cannot be handled: {self.error}")


class RunGivenUp(Exception):
    """An event is given up, and the core cannot end the run because of it either."""


def name_of(peer: str, incarnation: int, peer_seq: int, event: Event) -> str:
    """What an event is called in records of crashes and in the reason of a failed run."""
    tag = kebab(type(event).__name__)
    if peer_seq:
        return f"{tag}, message {peer_seq} of {peer} (incarnation {incarnation})"
    if isinstance(event, ev.ActorJoined):
        return f"{tag} of {event.name} (process {event.boot_id})"
    if isinstance(event, ev.HeartbeatLost):
        return f"{tag} of {event.actor} (incarnation {event.actor_incarnation})"
    if isinstance(event, ev.NodeSilent | ev.NodeHeard):
        return f"{tag} of {event.node} (incarnation {event.node_incarnation})"
    return f"{tag} {event.timer}" if isinstance(event, ev.TimerFired) else f"{tag} of {peer}"


def crash_of(incarnation: int, failed: HandlingFailed) -> Crash:
    return Crash(incarnation, failed.what, failed.error)


def instead_of(stamped: Stamped, crash: Crash) -> ev.EventGivenUp:
    """The event that is handled in the place of one that is given up."""
    event = stamped.event
    return ev.EventGivenUp(
        what=crash.what,
        crashes=CRASHES_MAX,
        error=crash.error,
        actor=stamped.peer,
        actor_incarnation=stamped.incarnation,
        peer_seq=stamped.peer_seq,
        timer=event.timer if isinstance(event, ev.TimerFired) else "",
        ended_by=event.command_id if isinstance(event, ev.TrajectoriesEnded) else 0,
    )


def _described(error: BaseException) -> str:
    """Type, message and the line that raised it."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        _, package, file = trace.tb_frame.f_code.co_filename.rpartition("/laminar/")
        place = f" ({package.lstrip('/')}{file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX] + place
