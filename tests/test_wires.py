"""Each wire gives back what was sent: every message, with every field distinct and none at its
default."""

from __future__ import annotations

import itertools
import re
import socket
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import inspect

from laminar.actors.system import warm_process
from laminar.eventlog import record
from laminar.events import codec
from laminar.events.commands import ALL_COMMANDS, Envelope
from laminar.events.events import ALL_EVENTS
from laminar.net import frames
from laminar.run.child_channel import BlockingChannel, Forked, Ready, Refused
from laminar.storage import messages as store
from laminar.tasks.environments import session_process
from laminar.tasks.rewards import worker
from laminar.tasks.rewards.results import RewardCall, RewardSpec
from laminar.training import rank_processes
from laminar.weights import messages as relay
from laminar.weights.chain import wire as chain
from laminar.weights.version.manifest import Manifest, Probe
from tools.kit.manifest_samples import PROBE, build

LIMIT = 1 << 20


# --- a message in which every field has a value of its own, made from the types ----------------

Struct = TypeVar("Struct")

RULED: dict[type[Any], Any] = {Probe: PROBE, Manifest: build()}
"""An example of each type whose fields have a rule between them."""


def kinds_of(union: Any) -> tuple[type[Any], ...]:
    """The members of a union of structs; a struct by itself is one."""
    is_union = typing.get_origin(union) in (UnionType, typing.Union)
    return typing.get_args(union) if is_union else (union,)


def distinct(kind: type[Struct]) -> Struct:
    """Of a struct or named tuple."""
    made = _made(inspect.type_info(kind), itertools.count(2))
    assert isinstance(made, kind)
    return made


def _made(info: inspect.Type, numbers: Iterator[int]) -> Any:
    """A value of this type; each plain one takes the next of the numbers."""
    if isinstance(info, inspect.StructType):
        if info.cls in RULED:
            return RULED[info.cls]
        values = {field.name: _field(field, numbers) for field in info.fields}
        return info.cls(**values)
    if isinstance(info, inspect.NamedTupleType | inspect.DataclassType):
        return info.cls(**{field.name: _field(field, numbers) for field in info.fields})
    if isinstance(info, inspect.UnionType):
        some = next(t for t in info.types if not isinstance(t, inspect.NoneType))
        return _made(some, numbers)
    if isinstance(info, inspect.Metadata):
        return _made(info.type, numbers)
    if isinstance(info, inspect.VarTupleType):
        return tuple(_made(info.item_type, numbers) for _ in range(2))
    if isinstance(info, inspect.TupleType):
        return tuple(_made(item, numbers) for item in info.item_types)
    if isinstance(info, inspect.ListType):
        return [_made(info.item_type, numbers) for _ in range(2)]
    if isinstance(info, inspect.DictType):
        return {_made(info.key_type, numbers): _made(info.value_type, numbers) for _ in range(2)}
    return _plain(info, next(numbers))


def _field(field: inspect.Field, numbers: Iterator[int]) -> Any:
    """Of the field, and not its default."""
    value = _made(field.type, numbers)
    while field.default is not msgspec.NODEFAULT and value == field.default:
        value = not value if isinstance(value, bool) else _made(field.type, numbers)
    return value


def _plain(info: inspect.Type, number: int) -> Any:
    if isinstance(info, inspect.IntType):
        return number
    if isinstance(info, inspect.FloatType):
        return number + 0.5
    if isinstance(info, inspect.StrType):
        texts = (f"text-{number}", f"{number:032x}")
        return next(text for text in texts if re.search(info.pattern or "", text))
    if isinstance(info, inspect.BytesType):
        return (b"bytes-%d" % number).ljust(info.min_length or 0, b".")
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.EnumType):
        words: list[Enum] = list(info.cls)
        return words[number % len(words)]
    if isinstance(info, inspect.LiteralType):
        return info.values[number % len(info.values)]
    if isinstance(info, inspect.RawType):
        return msgspec.Raw(msgspec.msgpack.encode({"raw": number}))
    if isinstance(info, inspect.AnyType):
        return {"any": [number]}
    raise AssertionError(f"{info}: say here what a value of it is")


# --- the wires ------------------------------------------------------------------------------------


def over_the_chain(decoder: Any) -> Callable[[Any], Any]:
    def there_and_back(message: Any) -> Any:
        data = chain.encode(message)
        header = chain.unpack_header(data[: chain.HEADER_BYTES], LIMIT)
        return chain.decode(decoder, header, bytearray(data[chain.HEADER_BYTES :]))

    return there_and_back


def to_a_child(message: Any) -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        BlockingChannel(ours).send(message)
        return BlockingChannel(theirs).receive(type(message))


def through_the_log(message: Any) -> Any:
    data, _ = record.encode_frame(message, 0)
    (body,) = record.Frames(1, data, 0)
    return msgspec.msgpack.decode(body, type=record.Record)


WIRES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "events": (ALL_EVENTS, lambda m: codec.decode_event(codec.encode(m))),
    "commands": (ALL_COMMANDS, lambda m: codec.decode_command(codec.encode(m))),
    "client frames": (
        kinds_of(frames.ClientFrame),
        lambda m: frames.decode_client(frames.encode(m), LIMIT),
    ),
    "server frames": (
        kinds_of(frames.ServerFrame),
        lambda m: frames.decode_server(frames.encode(m), LIMIT),
    ),
    "store requests": (kinds_of(store.Request), lambda m: store.decode_request(store.encode(m))),
    "store replies": (kinds_of(store.Reply), lambda m: store.decode_reply(store.encode(m))),
    "prompts": ((store.PromptPayload,), lambda m: store.decode_prompt(store.encode_prompt(m))),
    "relay requests": (kinds_of(relay.Request), lambda m: relay.decode_request(relay.encode(m))),
    "relay replies": (kinds_of(relay.Reply), lambda m: relay.decode_reply(relay.encode(m))),
    "chain forward": (kinds_of(chain.FromPredecessor), over_the_chain(chain.predecessor_decoder)),
    "chain back": (kinds_of(chain.FromSuccessor), over_the_chain(chain.successor_decoder)),
    "from any child": ((Ready, Refused, Forked), to_a_child),
    "reward worker": ((RewardSpec, RewardCall, worker.CallScored), to_a_child),
    "environment": (kinds_of(session_process.Request | session_process.Reply), to_a_child),
    "rank": ((rank_processes.OrderMessage, *kinds_of(rank_processes.Reply)), to_a_child),
    "warm process": ((warm_process.Launch,), to_a_child),
    "log records": ((record.SegmentHeader, *kinds_of(record.LaterRecord)), through_the_log),
}
CASES = [
    pytest.param(kind, there_and_back, id=f"{wire}: {kind.__name__}")
    for wire, (kinds, there_and_back) in WIRES.items()
    for kind in kinds
]


@pytest.mark.parametrize(("kind", "there_and_back"), CASES)
def test_a_message_comes_back_as_it_was_sent(
    kind: type[Any], there_and_back: Callable[[Any], Any]
) -> None:
    sent = distinct(kind)
    again = there_and_back(sent)
    assert type(again) is kind and again == sent


def test_an_order_comes_back_with_its_command() -> None:
    for kind in ALL_COMMANDS:
        command = distinct(kind)
        sent = Envelope(command_id=2, cause=3, command=msgspec.Raw(codec.encode(command)))
        assert codec.decode_envelope(codec.encode(sent)) == (sent, command)
