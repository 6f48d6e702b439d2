"""What equals its default is left out of the state's encoding, whichever object it is.

A later release adds fields. A run that does not use them keeps the digests that it logged, and a
live state, one read from a snapshot and one replayed have one encoding.
"""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any

import msgspec
import pytest

from laminar.core.state.members import ActorState, Replica
from laminar.core.state.state import State, decode, encode, hash_state
from laminar.core.state.work import Group, Trajectory
from tools.kit.world_parts import settings

WRITTEN_ONCE = (None, False, True, "", ())
"""Python has one object of each; of integers it has one each from -5 to 256. A word of an
enumeration is one object, too."""


def parts(kind: Any, found: dict[type, None]) -> dict[type, None]:
    """Every struct that a state can hold, commands included."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
        found[kind] = None
        for field in typing.get_type_hints(kind).values():
            parts(field, found)
    origin = typing.get_origin(kind)
    if origin is not None or isinstance(kind, types.UnionType):
        for inner in typing.get_args(kind):
            parts(inner, found)
    return found


PARTS = list(parts(State, {}))


def test_parts_are_found() -> None:
    assert {"ActorState", "Settings", "TrainStep"} <= {part.__name__ for part in PARTS}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_part_leaves_out_what_can_be_told_by_identity(part: type[msgspec.Struct]) -> None:
    """A default that is written by identity must be one of which there are no equal others."""
    assert part.__struct_config__.omit_defaults
    for field in msgspec.structs.fields(part):
        default = field.default
        if default is msgspec.NODEFAULT:
            continue  # required, an empty dict or list, or a factory's value, which is written
        small = type(default) is int and -5 <= default <= 256
        once = isinstance(default, Enum) or any(default is one for one in WRITTEN_ONCE)
        assert small or once, (part, field.name)


def other(value: Any) -> Any:
    """An equal value that was computed, not taken from the class."""
    if isinstance(value, bool | Enum) or value is None:
        return value
    if isinstance(value, int):
        return int(str(value))
    if isinstance(value, str):
        return "".join(list(value))
    return type(value)(value)


def test_equal_values_have_one_encoding() -> None:
    """As a handler sets a field back to what it was."""
    for made in (
        Trajectory(id="0.1.2", group="0.1", sibling=2),
        Replica(name="rollout-0", relay="relay-0", capacity=4),
        Group(
            id="0.1",
            purpose="train",
            row_index=0,
            step=0,
            deadline=0,
            order=0,
            members=[],
            unfinished=0,
        ),
    ):
        fields = msgspec.structs.asdict(made)
        computed = type(made)(**{name: other(value) for name, value in fields.items()})
        assert msgspec.msgpack.encode(computed) == msgspec.msgpack.encode(made)


def test_what_is_read_back_has_the_same_encoding() -> None:
    state = State(settings=settings(), logic=1)
    work = state.work
    work.trajectories["0.1.2"] = Trajectory(id="0.1.2", group="0.1", sibling=2, status="opened")
    work.trajectories["0.1.2"].status = "".join(["dispatch", "ed"])
    state.run.phase = "".join(["start", "ing"])
    restored = decode(encode(state))
    assert restored == state
    assert encode(restored) == encode(state)
    assert hash_state(decode(encode(restored))) == hash_state(state)


def test_a_field_that_is_added_later_changes_no_encoding() -> None:
    class LaterActor(ActorState, kw_only=True):
        mood: int = -1
        moods: dict[str, int] = msgspec.field(default_factory=dict)

    actor = {"name": "n", "role": "r", "node": "n", "pid": 1, "boot_id": "b", "incarnation": 1}
    assert msgspec.msgpack.encode(LaterActor(**actor)) == msgspec.msgpack.encode(
        ActorState(**actor)
    )
    used = LaterActor(**actor, mood=3)
    assert msgspec.msgpack.encode(used) != msgspec.msgpack.encode(ActorState(**actor))
