"""Base classes and declarations of events and commands: frozen, strict, tagged in kebab-case.

Reads   the keys of the config tree that decisions depend on
Gives   Event, Command (bases), Settings (the part of the config that decisions depend on);
        ends_commands, the declaration of the commands that an event ends; get_tag

Which roles report an event or carry out a command: names/roles.py, by their tags.

Values that the core keeps are integers and strings only: a reward travels as the bits of its
float64, because the core's state holds no floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from laminar.config.deciding import list_fields, list_values
from laminar.config.tree import Config
from laminar.events.families import Message
from laminar.names.roles import Role


class Event(Message, frozen=True, kw_only=True, gc=False):
    """A fact, in the past tense. It may arrive more than once; handling is idempotent."""


class Command(Message, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A decision, in the imperative, addressed to one process.

    A field that is added later has a default with the old meaning. The default is left out of the
    encoding (core/state/state.py lists the possible defaults), so the decisions of older logs stay
    equal.
    """

    to: str  #: actor name


AnEvent = TypeVar("AnEvent", bound=Event)

#: commands that are no longer outstanding once each event has arrived
ENDS: dict[type[Event], tuple[type[Command], ...]] = {}


def get_tag(message: Message | type[Message]) -> str:
    return str(message.__struct_config__.tag)


def ends_commands(*commands: type[Command]) -> Callable[[type[AnEvent]], type[AnEvent]]:
    """Declare the commands that an event ends."""

    def declare(kind: type[AnEvent]) -> type[AnEvent]:
        ENDS[kind] = commands
        return kind

    return declare


if TYPE_CHECKING:

    class _Declared(msgspec.Struct, frozen=True):
        def __getattr__(self, name: str) -> Any: ...  # types: tools/check/settings_types.py
else:
    _Declared = msgspec.defstruct("_Declared", list_fields(Config()), frozen=True, kw_only=True)


class Settings(
    _Declared, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The part of the configuration that decisions depend on, logged with `coordinator-started`.

    The settings are fixed for a run. Their fields are the keys that the config tree marks with
    `Decides`. A field that is added later has a default that keeps the old decisions, so an older
    log is replayed by the rules that it was written with.
    """

    rules: tuple[str, ...] = ()  #: changed decision rules of this run, by name (core/rules.py)

    @classmethod
    def from_config(cls, config: Config, rules: tuple[str, ...]) -> Settings:
        """Return the settings of a run that begins."""
        return cls(**list_values(config), rules=rules)

    @property
    def has_environment(self) -> bool:
        """Whether another turn may follow a turn."""
        return self.max_sessions > 0

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether checkpoints are saved, so that a lost trainer returns and a run can resume."""
        return self.save_freq > 0


class Stamped(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as the machine sees it: with its place in the log and its sender."""

    seq: int  #: 1-based place in the run's history
    time_ns: int  #: the coordinator's clock, never decreasing
    peer: str  #: actor name; "coordinator" for its own
    incarnation: int  #: of the sender
    peer_seq: int  #: session number of the message, 0 for gauges and the coordinator's own
    event: Event


COORDINATOR = str(Role.COORDINATOR)  #: the peer name of events that the coordinator itself reports
STRATEGY = str(Role.STRATEGY)  #: the addressee of commands for the batch strategy's worker
