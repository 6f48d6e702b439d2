"""Whatever bytes arrive, the codec gives a frame or a WireError, never anything else."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.events.families import WireError
from laminar.net.frames import (
    Ack,
    Ask,
    Bye,
    Data,
    Frame,
    Gauge,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    decode_client,
    decode_server,
    encode,
)

LIMIT = 4096
FROM_CLIENT = [
    Hello("rollout-0", "rollout", "b1", 3, 7, {"host": "n1"}),
    Data("s1", 7, 2, b"body"),
    Ack("s1", 2),
    Gauge(b"tokens"),
    Heartbeat("s1", 2),
    Bye(),
    Ask(b"drain"),
]
FROM_SERVER = [Welcome("s1", 3, 6), Data("s1", 1, 7, b"body"), Ack("s1", 7), Refused("no")]


@pytest.mark.parametrize("frame", FROM_CLIENT, ids=lambda f: type(f).__name__)
def test_client_frames_round_trip(frame: Frame):
    assert decode_client(encode(frame), LIMIT) == frame


@pytest.mark.parametrize("frame", FROM_SERVER, ids=lambda f: type(f).__name__)
def test_server_frames_round_trip(frame: Frame):
    assert decode_server(encode(frame), LIMIT) == frame


def test_tag_is_lower_case_under_type():
    assert msgspec.msgpack.decode(encode(Bye())) == {"type": "bye"}


@pytest.mark.parametrize("decode", [decode_client, decode_server])
@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=200))
def test_random_bytes(decode, junk):
    try:
        decode(junk, LIMIT)
    except WireError:
        pass


@pytest.mark.parametrize("decode", [decode_client, decode_server])
@settings(max_examples=300, deadline=None)
@given(
    frame=st.sampled_from(FROM_CLIENT + FROM_SERVER),
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
    cut=st.integers(0, 10_000),
)
def test_damaged_frames(decode, frame, position, value, cut):
    damaged = bytearray(encode(frame))
    damaged[position % len(damaged)] = value
    try:
        decode(bytes(damaged[: 1 + cut % len(damaged)]), LIMIT)
    except WireError:
        pass


def packed(**fields):
    return msgspec.msgpack.encode(fields)


HOSTILE = {
    "empty": b"",
    "no map": b"\x01",
    "deep nesting": b"\x91" * 3000 + b"\x01",
    "deep unknown field": b"\x82\xa4type\xa3bye\xa1x" + b"\x91" * 3000 + b"\x01",
    "bad utf-8 tag": b"\x81\xa4type\xa3\xff\xff\xff",
    "bad utf-8 key": b"\x81\xa4\xff\xff\xff\xff\xa3bye",
    "unknown field": packed(type="bye", why="x"),
    "unknown tag": packed(type="shutdown"),
    "negative number": packed(type="ack", boot="s", ack=-1),
    "huge number": packed(type="ack", boot="s", ack=2**64 - 1),
    "text for bytes": packed(type="data", boot="s", seq=1, ack=0, body=["x"]),
    "trailing bytes": encode(Bye()) + b"\x00",
    "long name": encode(Hello("n" * 129, "rollout", "b", 0, 1, {})),
    "no name": encode(Hello("", "rollout", "b", 0, 1, {})),
    "first below one": encode(Hello("n", "rollout", "b", 0, 0, {})),
    "huge length": b"\x81\xa4type\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("decode", [decode_client, decode_server])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes(decode, name):
    with pytest.raises(WireError):
        decode(HOSTILE[name], LIMIT)


@pytest.mark.parametrize("frame", [Welcome("s", 1, 0), Refused("no")])
def test_a_client_cannot_speak_as_a_server(frame):
    with pytest.raises(WireError, match="invalid client frame"):
        decode_client(encode(frame), LIMIT)


@pytest.mark.parametrize("frame", [Bye(), Gauge(b""), Heartbeat("s", 0)])
def test_a_server_cannot_speak_as_a_client(frame):
    with pytest.raises(WireError, match="invalid server frame"):
        decode_server(encode(frame), LIMIT)


def test_size_is_checked_before_decoding():
    frame = encode(Gauge(b"x" * 100))
    assert decode_client(frame, len(frame)) == Gauge(b"x" * 100)
    with pytest.raises(WireError, match=f"{len(frame)} bytes exceeds the limit of 100"):
        decode_client(frame, 100)
