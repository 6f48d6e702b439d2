"""Corpus of real encoded messages of every type, by the decoder that reads them.

Reads   the runs of the core's random worlds, the store's replies to the requests of its tests
Gives   Target, `targets()`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from laminar.events import codec
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.events.families import WireError
from laminar.net import frames
from laminar.storage import messages as store
from laminar.weights import messages as relay
from laminar.weights.version import manifest
from tools.kit import store_samples as samples
from tools.kit.manifest_samples import PROBE, TENSORS, build
from tools.kit.message_samples import sample
from tools.kit.random_worlds import random_world

FRAME_BYTES_MAX = 1 << 20
SEEDS = 20  #: random worlds, which produce nearly every event and command
MEMORY_FACTOR = 8
UNTYPED_MEMORY_FACTOR = 96
"""Memory factor of prompts, which keep the user's columns: any MessagePack, at worst a dict of 232
bytes for three bytes. They come from the run's own store, which read them from the user's data."""


class Target(NamedTuple):
    """A decoder of bytes from another process."""

    name: str
    decode: Callable[[bytes], Any]
    error: type[Exception]  #: the only exception that it may raise
    encode: Callable[[Any], bytes]  #: inverse of `decode`
    messages: tuple[bytes, ...]
    memory_factor: int  #: bytes of memory that decoding may take per byte of input


@functools.cache
def targets() -> tuple[Target, ...]:
    events, commands = _seen_in_runs()
    orders = [
        cmd.Envelope(command_id=(7 << 20) + i, cause=7, command=msgspec.Raw(codec.encode(c)))
        for i, c in enumerate(commands)
    ]
    requests, replies = _store_messages()
    wire = [
        ("event", codec.decode_event, WireError, codec.encode, events),
        ("command", codec.decode_command, WireError, codec.encode, commands),
        ("order", codec.decode_envelope, WireError, _encode_order, orders),
        ("client frame", _client_frame, WireError, frames.encode, _client_frames(events)),
        ("server frame", _server_frame, WireError, frames.encode, _server_frames(commands)),
        ("store request", store.decode_request, store.StoreWireError, store.encode, requests),
        ("store reply", store.decode_reply, store.StoreWireError, store.encode, replies),
        ("prompt", store.decode_prompt, store.StoreWireError, store.encode_prompt, _prompts()),
        ("relay request", relay.decode_request, relay.RelayWireError, relay.encode, _to_relay()),
        ("relay reply", relay.decode_reply, relay.RelayWireError, relay.encode, _from_relay()),
        ("manifest", manifest.decode, manifest.ManifestError, manifest.encode, [build()]),
    ]
    return tuple(
        Target(
            name,
            decode,
            error,
            encode,
            messages=tuple(_distinct(encode, messages)),
            memory_factor=UNTYPED_MEMORY_FACTOR if name == "prompt" else MEMORY_FACTOR,
        )
        for name, decode, error, encode, messages in wire
    )


def _distinct(encode: Callable[[Any], bytes], messages: Iterable[Any]) -> Iterable[bytes]:
    return dict.fromkeys(map(encode, messages))


def _encode_order(order: cmd.Envelope | tuple[cmd.Envelope, Command]) -> bytes:
    """Encode an order, or what `decode_envelope` makes of one."""
    return codec.encode(order[0] if isinstance(order, tuple) else order)


def _client_frame(data: bytes) -> frames.ClientFrame:
    return frames.decode_client(data, FRAME_BYTES_MAX)


def _server_frame(data: bytes) -> frames.ServerFrame:
    return frames.decode_server(data, FRAME_BYTES_MAX)


def _seen_in_runs() -> tuple[list[Event], list[Command]]:
    """Return the shortest and longest of each event and command in random runs, or a sample."""
    wanted = (*ev.ALL_EVENTS, *cmd.ALL_COMMANDS)
    seen: dict[type, list[Any]] = {kind: [] for kind in wanted}
    for seed in range(SEEDS):
        for stamped, commands in random_world(seed).run().log:
            for item in (stamped.event, *commands):
                seen[type(item)].append(item)
    for kind in wanted:
        seen[kind] = seen[kind] or [sample(kind)]
    kept = {kind: sorted(items, key=lambda i: len(codec.encode(i))) for kind, items in seen.items()}
    return (
        [kept[kind][end] for kind in ev.ALL_EVENTS for end in (0, -1)],
        [kept[kind][end] for kind in cmd.ALL_COMMANDS for end in (0, -1)],
    )


def _client_frames(events: list[Event]) -> list[frames.Frame]:
    info = {"node": "node-0", "pid": "4711", "host": "localhost"}
    return [
        frames.Hello("rollout-0", "rollout", "f3a9", 3, 7, info),
        frames.Ack("s1", 2),
        frames.Gauge(codec.encode(events[-1])),
        frames.Heartbeat("s1", 2**40),
        frames.Bye(),
        *(frames.Data("s1", 7 + i, i, codec.encode(e)) for i, e in enumerate(events)),
    ]


def _server_frames(commands: list[Command]) -> list[frames.Frame]:
    return [
        frames.Welcome("c1:f3a9", 3, 6),
        frames.Ack("c1:f3a9", 7),
        frames.Refused("it was declared lost; start it again"),
        *(frames.Data("c1:f3a9", 1 + i, 7, codec.encode(c)) for i, c in enumerate(commands)),
    ]


def _store_messages() -> tuple[list[store.Request], list[store.Reply]]:
    """Return the requests of a short life of two trajectories, and the store's replies."""
    requests: list[store.Request] = [
        samples.open_("0.0.0"),
        samples.append("0.0.0", tuple(range(40))),
        samples.finish("0.0.0", 40),
        store.Fetch(ids=("0.0.0", "9.9.9"), with_prompt=True),
        samples.reward("0.0.0", 1.0, reason="ok", detail="", text="forty-two"),
        samples.reward("0.0.0", None),
        samples.open_("e0.1.0", replica="rollout-1"),
        samples.end("0.0.0", "trained", step=3),
        samples.end("e0.1.0", reason="run-ended"),
        samples.open_("0.0.0", placement=9),
        store.SamplePrompts(count=2),
        store.RemovePayloads(before_step=3, keep_bytes=0),
        store.Stats(),
    ]
    with TemporaryDirectory() as folder:
        database = samples.filled(Path(folder) / "store.sqlite")
        replies = [database.handle_batch([request])[0] for request in requests]
        database.close()
    return requests, [*replies, store.ErrorReply(reason="the disk is full")]


def _prompts() -> list[store.PromptPayload]:
    return [samples.prompt(index) for index in range(samples.PROMPTS)]


ARENA = "/dev/shm/laminar-arena"


def _to_relay() -> list[relay.Request]:
    return [
        relay.OpenArena(version_bytes=512),
        relay.GrantSlot(arena=ARENA),
        relay.CommitSlot(arena=ARENA, slot=1, version=7, step=6, tensors=TENSORS, probe=PROBE),
        relay.LeaseVersion(version=7, exact=True),
        relay.ReleaseLease(arena=ARENA, lease_id=3),
    ]


def _from_relay() -> list[relay.Reply]:
    return [
        relay.ArenaOpened(arena=ARENA),
        relay.ArenaReplaced(),
        relay.SlotGranted(slot=-1),
        relay.SlotCommitted(),
        relay.VersionLeased(lease_id=3, slot=1, arena=ARENA, manifest=manifest.encode(build())),
        relay.VersionUnavailable(held=(6, 7)),
        relay.LeaseReleased(valid=True),
    ]
