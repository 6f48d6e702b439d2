"""The wire form of events and commands: exact both ways, one error for everything else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.codec import decode_command, decode_envelope, decode_event, encode
from laminar.events.families import MESSAGE_BYTES_MAX, WireError, to_kebab_case
from laminar.names.ids import TrajectoryId

FINISHED = ev.TrajectoryFinished(
    trajectory_id=TrajectoryId("0.17.3"), placement=2, num_tokens=5, finish_reason="stop"
)
STOP = cmd.StopActor(to="store-0", reason="done")


def test_names_are_kebab_case() -> None:
    assert to_kebab_case("TrajectoryFinished") == "trajectory-finished"
    assert msgspec.msgpack.decode(encode(FINISHED))["type"] == "trajectory-finished"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ev.ALL_EVENTS).flatmap(lambda kind: st.from_type(kind)))
def test_every_event_comes_back_as_it_was(event: ev.Event) -> None:
    assume_encodable(event)
    again = decode_event(encode(event))
    assert type(again) is type(event) and encode(again) == encode(event)


def assume_encodable(event: ev.Event) -> None:
    """MessagePack integers end at 64 bits; the core counts nothing beyond them."""
    try:
        encode(event)
    except (OverflowError, UnicodeEncodeError):
        assume(False)


def test_equal_messages_are_equal_bytes() -> None:
    """Replay compares decisions byte by byte; the order of a dict must not matter."""
    values = {"loss": 1.0, "kl": 2.0}
    one, two = (
        ev.StepCompleted(
            step_index=0,
            version=1,
            changed=True,
            reason="",
            num_tokens=1,
            digest="",
            metrics=metrics,
        )
        for metrics in (values, dict(reversed(values.items())))
    )
    assert encode(one) == encode(two)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x91" * 100_000,
        b"\x81\xa4type\xa3odd",
        b"\x81\xa4type\xa4\xff\xff\xff\xff",
        b"\xff" * 64,
        encode(STOP),
        encode(FINISHED) + b"\x00",
        encode(FINISHED)[:-1],
        msgspec.msgpack.encode({"type": "actor-left", "unknown": 1}),
        msgspec.msgpack.encode({"type": "relay-ready", "address": 5}),
        b"\x00" * (MESSAGE_BYTES_MAX + 1),
    ],
)
def test_anything_else_is_a_wire_error(data: bytes) -> None:
    """Garbage, depth, bad UTF-8, a command where an event should be, unknown and wrong fields, one
    byte too many or too few, too much."""
    with pytest.raises(WireError):
        decode_event(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    for decode in (decode_event, decode_command, decode_envelope):
        try:
            decode(data)
        except WireError:
            pass
