"""Ways to corrupt a MessagePack message: its bytes, its lengths, its meaning.

Reads   a message, a random generator
Gives   `spoil`: a corrupted message, at most a few times as long
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

NESTING_MAX = 4_000  #: levels; Python's recursion limit is 1,000
#: Heads of strings, bytes, arrays, maps and extensions with the longest lengths they can claim.
HUGE = tuple(
    head + b"\xff" * size
    for heads, size in (
        (b"\xd9\xc4\xc7", 1),
        (b"\xda\xc5\xdc\xde\xc8", 2),
        (b"\xdb\xc6\xdd\xdf", 4),
    )
    for head in (heads[i : i + 1] for i in range(len(heads)))
)
BAD_TEXT = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\x80")
NUMBERS = (
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
    b"\xca\xff\x80\x00\x00",  # -infinity, short
    b"\xcf" + b"\xff" * 8,  # 2**64 - 1
    b"\xd3\x80" + b"\x00" * 7,  # -2**63
    b"\xff",
    b"\xc0",
    b"\xc1",  # never used
)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**64 - 1, -(2**63), 0.5, math.nan, math.inf,
    "", "x" * 5_000, b"\xff", [], [[]], [None] * 100, {}, {"type": "actor-left"},
)  # fmt: skip
VALUES = tuple(map(msgspec.msgpack.encode, _VALUES))

Mutation = Callable[[bytearray, random.Random], bytearray]


def spoil(message: bytes, others: tuple[bytes, ...], chance: random.Random) -> bytes:
    """Apply one to three random changes; the end may be taken from another message."""
    if chance.random() < 0.1:
        return _spoil_meaning(message, chance)
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = chance.choice(_MUTATIONS)(data, chance)
    if chance.random() < 0.1:
        other = chance.choice(others)
        data = data[: _at(data, chance)] + other[_at(other, chance) :]
    return bytes(data)


def _at(data: bytes | bytearray, chance: random.Random) -> int:
    return int(chance.random() * (len(data) + 1))


def _flip_bits(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 4)) if data else 0):
        data[int(chance.random() * len(data))] ^= 1 << int(chance.random() * 8)
    return data


def _any_byte(data: bytearray, chance: random.Random) -> bytearray:
    """Change a byte; type and length heads are single bytes, so this changes them too."""
    if data:
        data[int(chance.random() * len(data))] = int(chance.random() * 256)
    return data


def _truncate(data: bytearray, chance: random.Random) -> bytearray:
    return data[: _at(data, chance)]


def _extend(data: bytearray, chance: random.Random) -> bytearray:
    return data + chance.randbytes(1 + int(chance.random() * 16))


def _cut_out(data: bytearray, chance: random.Random) -> bytearray:
    start = _at(data, chance)
    del data[start : start + int(chance.random() * 12)]
    return data


def _repeat_part(data: bytearray, chance: random.Random) -> bytearray:
    """Repeat a part, and often increase the count of the outer map, which duplicates a key."""
    start = _at(data, chance)
    part = data[start : start + int(chance.random() * 40)]
    data[start:start] = part
    if data and 0x80 <= data[0] < 0x8F:
        data[0] += 1
    return data


def _over(parts: tuple[bytes, ...]) -> Mutation:
    def mutation(data: bytearray, chance: random.Random) -> bytearray:
        start, part = _at(data, chance), chance.choice(parts)
        end = start + chance.choice((0, 1, len(part)))
        data[start:end] = part
        return data

    return mutation


def _nest(data: bytearray, chance: random.Random) -> bytearray:
    depth = int(chance.random() ** 4 * NESTING_MAX)
    start = _at(data, chance)
    data[start : start + 1] = chance.choice((b"\x91", b"\x81\xa1x", b"\x81\xa4type")) * depth
    return data


_MUTATIONS: tuple[Mutation, ...] = (
    _flip_bits,
    _any_byte,
    _truncate,
    _extend,
    _cut_out,
    _repeat_part,
    _over(HUGE),
    _over(BAD_TEXT),
    _over(NUMBERS),
    _nest,
)


def _spoil_meaning(message: bytes, chance: random.Random) -> bytes:
    """Change, remove or add fields, while the message stays valid MessagePack."""
    fields = msgspec.msgpack.decode(message)
    for _ in range(chance.choice((1, 1, 2))):
        where = _some_container(fields, chance)
        if isinstance(where, list):
            where[int(chance.random() * len(where))] = _some_value(chance)
        elif chance.random() < 0.15:
            where.pop(chance.choice(list(where)), None)
        elif chance.random() < 0.15:
            where[chance.choice(("type", "unknown", "", "to"))] = _some_value(chance)
        else:
            where[chance.choice(list(where))] = _some_value(chance)
    return msgspec.msgpack.encode(fields)


def _some_value(chance: random.Random) -> Any:
    """Return a random value, a new object each time, because the next change may alter it."""
    return msgspec.msgpack.decode(chance.choice(VALUES))


def _some_container(fields: Any, chance: random.Random) -> Any:
    """Return the message itself or a random non-empty list or map inside it."""
    inside = list(fields.values()) if isinstance(fields, dict) else fields
    deeper = [value for value in inside if isinstance(value, dict | list) and value]
    if deeper and chance.random() < 0.6:
        return _some_container(chance.choice(deeper), chance)
    return fields if fields else {"": None}
