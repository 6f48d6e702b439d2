"""What the records of each schema become here: those of the present one.

Reads   the body of a record, and the schema that the header of its segment names
Gives   UPCASTS: the decoders of every schema that this release reads; `state_digest`: what a hash
        or a snapshot of a schema says of a state

A log may hold segments of several schemas, since a later release goes on where an earlier one
ended. So the schema is that of a segment, and no code behind the reader meets an old form. A new
schema replaces the present entry, and where a form changed, gives the old ones decoders that make
the new from it. A schema that is not in the table is refused by name.

Schema 2    the state was encoded with every field (eventlog/schema_2.py)
Schema 1    the same forms as 2; but where a coordinator was replaced, decisions of its last event
            can be missing (they were decided again, never written): `has_every_decision`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import msgspec
import xxhash

from laminar.core.state import State, digest
from laminar.eventlog.record import Header, LaterRecord, Record
from laminar.eventlog.schema_2 import encode_schema_2

_T = TypeVar("_T")


class Decoders(NamedTuple, Generic[_T]):
    """How the bodies of one segment become records."""

    header: Callable[[bytes], _T]
    later: Callable[[bytes], _T]


_PRESENT: Decoders[Record] = Decoders(
    msgspec.msgpack.Decoder(Header).decode, msgspec.msgpack.Decoder(LaterRecord).decode
)

UPCASTS: dict[int, Decoders[Record]] = {1: _PRESENT, 2: _PRESENT, 3: _PRESENT}


def has_every_decision(schema: int) -> bool:
    """Whether a writer of this schema began with the decisions that its predecessor did not
    write."""
    return schema >= 2


def state_digest(schema: int, state: State) -> str:
    """The name of a state in the records of a segment of this schema."""
    if schema <= 2:
        return xxhash.xxh3_128_hexdigest(encode_schema_2(state))
    return digest(state)
