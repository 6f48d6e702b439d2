"""Frames between relays: what comes back, and that bad bytes give BadBytes and nothing else."""

from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.weights.chain import wire
from laminar.weights.chain.wire import BadBytes, FrameHeader, FrameKind
from laminar.weights.version import manifest as mf
from tools.bench.weights.relay_process import describe

DIGEST = "0123456789abcdef" * 2
DOWN = [
    wire.ChainHello(run="r", name="relay-0", incarnation=3, chain=7, nonce=bytes(16)),
    wire.Offer(number=1, manifest=describe(4, bytes(256), 64), base=None),
    wire.Offer(
        number=2, manifest=describe(5, b"y" * 256, 64), base=wire.Base(version=4, digest=DIGEST)
    ),
    wire.Proof(proof=bytes(32)),
]
UP = [
    wire.Challenge(name="relay-1", incarnation=2, nonce=bytes(16), proof=bytes(32)),
    wire.ChainWelcome(held={3: DIGEST, 4: DIGEST}, partial=(5, 6)),
    wire.PeerRefused(reason="another run"),
    wire.Want(offer=1, have=b"\xa0", from_block=None),
    wire.Want(offer=1, have=b"\x00", from_block=2),
    wire.Resend(version=5, position=1),
    wire.VersionDone(version=5, digest=DIGEST),
    wire.Decline(version=5, reason="too large"),
]


def decoded(decoder: Any, data: bytes, limit: int = wire.MESSAGE_BYTES_MAX) -> Any:
    header = wire.unpack_header(data[: wire.HEADER_BYTES], limit)
    return wire.decode(decoder, header, bytearray(data[wire.HEADER_BYTES :]))


def framed(body: bytes) -> bytes:
    """A message whose body is anything, with the right checksum."""
    header = FrameHeader(FrameKind.MESSAGE, len(body), 0, 0, xxhash.xxh3_64_intdigest(body))
    return wire.pack_header(header) + body


def test_messages_come_back_to_the_side_that_may_have_sent_them() -> None:
    for messages, decoder, other in (
        (DOWN, wire.predecessor_decoder, wire.successor_decoder),
        (UP, wire.successor_decoder, wire.predecessor_decoder),
    ):
        for message in messages:
            assert decoded(decoder, wire.encode(message)) == message
            with pytest.raises(BadBytes, match="not-a-message"):
                decoded(other, wire.encode(message))


def test_a_header_comes_back() -> None:
    header = FrameHeader(FrameKind.CHUNK, 1 << 20, 17, 1 << 40, (1 << 64) - 1)
    assert wire.unpack_header(wire.pack_header(header), 100) == header


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: relay-1.lan\r", "not-a-relay"),
        (b"LMRW\x02" + bytes(27), "wire-version"),
        (b"LMRW\x01\x09" + bytes(26), "unknown-kind"),
        (wire.pack_header(FrameHeader(FrameKind.MESSAGE, 101, 0, 0, 0)), "bad-length"),
        (
            wire.pack_header(FrameHeader(FrameKind.CHUNK, wire.CHUNK_BYTES_MAX + 1, 0, 0, 0)),
            "bad-length",
        ),
        (
            wire.pack_header(FrameHeader(FrameKind.BLOCK, wire.BLOCK_BYTES_MAX + 1, 0, 0, 0)),
            "bad-length",
        ),
    ],
)
def test_a_bad_header_has_a_reason(header: bytes, reason: str) -> None:
    with pytest.raises(BadBytes) as raised:
        wire.unpack_header(header[: wire.HEADER_BYTES], 100)
    assert raised.value.reason == reason


def test_an_adapter_is_refused_by_name() -> None:
    offer = msgspec.to_builtins(DOWN[1])
    offer["manifest"]["kind"] = "adapter"
    body = msgspec.msgpack.encode({"type": "offer", **offer})
    with pytest.raises(BadBytes, match="kind 'adapter' is reserved"):
        decoded(wire.predecessor_decoder, framed(body))


def test_hostile_bodies() -> None:
    good = wire.encode(DOWN[1])[wire.HEADER_BYTES :]
    for body in (b"", b"\xc1", b"\x91" * 100_000, good[:-1], good + b"\0", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(BadBytes, match="not-a-message"):
            decoded(wire.predecessor_decoder, framed(body))
    with pytest.raises(BadBytes, match="damaged-message"):
        decoded(wire.predecessor_decoder, wire.encode(DOWN[1])[:-1] + b"\1")


def test_a_manifest_cannot_ask_for_more_chunks_than_fit_into_memory() -> None:
    offer = msgspec.json.decode(msgspec.json.encode(DOWN[1]))
    size = 64 << 40
    offer["manifest"] |= {"total_bytes": size, "chunk_bytes": 1}
    offer["manifest"]["tensors"][0] |= {"nbytes": size, "shape": [size // 2]}
    with pytest.raises(BadBytes, match="chunks are above the limit"):
        decoded(wire.predecessor_decoder, framed(msgspec.msgpack.encode(offer)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_gives_a_message_or_bad_bytes(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([*DOWN, *UP]))
    decoder = wire.predecessor_decoder if message in DOWN else wire.successor_decoder
    body = bytearray(wire.encode(message)[wire.HEADER_BYTES :])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decoded(decoder, framed(bytes(body)))
    except BadBytes:
        return
    if isinstance(found, wire.Offer):
        assert mf.check_tensors(found.manifest.tensors) == found.manifest.total_bytes
