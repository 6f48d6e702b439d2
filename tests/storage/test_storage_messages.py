"""The codec: what goes in comes out, and everything else is one kind of error."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.events.families import MESSAGE_BYTES_MAX
from laminar.storage import messages as m
from laminar.storage.rules import TokenSpan
from tools.kit.store_samples import (
    CALL,
    DONE,
    append,
    end,
    finish,
    go_on,
    intend,
    open_,
    prompt,
    reward,
)

REQUESTS = [
    open_("0.1.2"),
    append("0.1.2", (1, 2)),
    finish("0.1.2", 2),
    intend("0.1.2", (CALL,)),
    go_on("0.1.2", (7, 8), effects=(DONE,)),
    m.Fetch(ids=("0.1.2",), with_prompt=True),
    reward("0.1.2", 0.1, reason="right", detail="{}", text="4"),
    reward("0.1.2", None),
    end("0.1.2", "trained", step=3),
    m.SamplePrompts(count=8),
    m.RemovePayloads(before_step=20, keep_bytes=1000),
    m.Stats(),
]


def test_requests_come_back():
    for request in REQUESTS:
        assert m.decode_request(m.encode(request)) == request
    assert {type(request) for request in REQUESTS} == set(typing.get_args(m.Request))


def test_replies_come_back():
    reply = m.AppendReply(results=(m.Result(trajectory_id="0.0.0", answer="fenced", reason="x"),))
    assert m.decode_reply(m.encode(reply)) == reply
    assert msgspec.msgpack.decode(m.encode(m.ErrorReply(reason="x")))["type"] == "error-reply"
    with pytest.raises(m.StoreWireError):
        m.decode_request(m.encode(reply))


def test_a_prompt_comes_back():
    assert m.decode_prompt(m.encode_prompt(prompt(3))) == prompt(3)


def _altered(request: m.Request, **changes: object) -> bytes:
    content = msgspec.msgpack.decode(m.encode(request))
    content["items"][0] |= changes
    return msgspec.msgpack.encode(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"colour": "red"},
        {"placement": -1},
        {"placement": 2**63},
        {"placement": "1"},
        {"attempt": 0},
        {"temperature": float("nan")},
        {"temperature": -0.5},
        {"temperature": float("inf")},
        {"purpose": "test"},
        {"trajectory_id": ""},
        {"trajectory_id": "x" * 65},
        {"row_index": None},
    ],
)
def test_fields_out_of_their_range_are_refused(changes):
    assert m.decode_request(_altered(open_("0.0.0"), placement=2**63 - 1))
    with pytest.raises(m.StoreWireError):
        m.decode_request(_altered(open_("0.0.0"), **changes))


def test_a_missing_field_and_an_unknown_tag_are_refused():
    for content in ({"type": "fetch"}, {"type": "drop-tables"}, {}, [], None, 3):
        with pytest.raises(m.StoreWireError):
            m.decode_request(msgspec.msgpack.encode(content))


def test_too_many_items_are_refused():
    m.decode_request(m.encode(m.Fetch(ids=("x",) * m.MAX_ITEMS)))
    with pytest.raises(m.StoreWireError):
        m.decode_request(m.encode(m.Fetch(ids=("x",) * (m.MAX_ITEMS + 1))))


def test_the_size_limit_holds_both_ways():
    big = append("0.0.0", (1,))
    item = msgspec.structs.replace(big.items[0], tokens=bytes(MESSAGE_BYTES_MAX))
    with pytest.raises(m.StoreWireError, match="limit"):
        m.encode(m.Append(items=(item,)))
    with pytest.raises(m.StoreWireError, match="limit"):
        m.decode_reply(bytes(MESSAGE_BYTES_MAX + 1))


def test_no_span_takes_more_than_a_reply_has_room_for():
    largest = TokenSpan("\U0001f600" * 64, 2**63 - 1, 2**63 - 1, 2**63 - 1)
    assert len(msgspec.msgpack.encode(largest)) < m.SPAN_BYTES


@pytest.mark.parametrize("data", [b"", b"\x91" * 100_000, b"\x81\xa1\xff\x01", b"\xc1"])
def test_nasty_bytes(data):
    with pytest.raises(m.StoreWireError):
        m.decode_request(data)
    with pytest.raises(m.StoreWireError):
        m.decode_reply(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data):
    for decode in (m.decode_request, m.decode_reply):
        try:
            decode(data)
        except m.StoreWireError:
            pass


@given(st.sampled_from(REQUESTS), st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(request_, data):
    raw = bytearray(m.encode(request_))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.decode_request(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    except m.StoreWireError:
        pass
