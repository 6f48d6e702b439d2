"""Rows 20 and 21: their inputs cover every message, come again, and a bad decoder is found."""

from __future__ import annotations

import random
import typing
from typing import Any

import msgspec
import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import WireError
from laminar.net import frames
from laminar.storage import messages as store
from laminar.weights import messages as relay
from tools.rows import wire
from tools.rows.mutations import spoil
from tools.rows.wire import ModelRun, Tried, check_bytes, try_chunk, try_model
from tools.rows.wire_corpus import Target, targets

FORWARD = {target.name: target for target in targets()}


def tags(kinds: typing.Iterable[type]) -> set[str]:
    return {kind.__struct_config__.tag for kind in kinds}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("event", ev.ALL_EVENTS),
        ("command", cmd.ALL_COMMANDS),
        ("client frame", typing.get_args(frames.ClientFrame)),
        ("server frame", typing.get_args(frames.ServerFrame)),
        ("store request", typing.get_args(store.Request)),
        ("store reply", typing.get_args(store.Reply)),
        ("relay request", typing.get_args(relay.Request)),
        ("relay reply", typing.get_args(relay.Reply)),
    ],
)
def test_there_is_a_real_message_of_every_type(name: str, kinds: tuple[type, ...]) -> None:
    found = {msgspec.msgpack.decode(message)["type"] for message in FORWARD[name].messages}
    assert found == tags(kinds)


@pytest.mark.parametrize("name", FORWARD)
def test_real_messages_are_accepted(name: str) -> None:
    target = FORWARD[name]
    assert [check_bytes(name, message) for message in target.messages] == [""] * len(
        target.messages
    )
    for message in target.messages:
        assert target.encode(target.decode(message)) == message


def test_spoiled_messages_come_again() -> None:
    """The same seed gives the same bytes, whatever was spoiled before; most differ."""
    message, others = FORWARD["event"].messages[0], FORWARD["event"].messages
    first = [spoil(message, others, random.Random(seed)) for seed in range(300)]
    assert first == [spoil(message, others, random.Random(seed)) for seed in range(300)]
    assert len(set(first)) > 250


def test_a_chunk_of_spoiled_messages_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK_INPUTS", 2_000)
    tried = try_chunk(0)
    assert (tried.inputs, tried.problem) == (2_000, "")
    assert 0 < tried.accepted < 1_000


def raises_something_else(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, type=ev.RelayReady)


def takes_memory(data: bytes) -> Any:
    kept = bytearray(1 << 20)
    raise WireError(str(len(kept)))


@pytest.mark.parametrize(
    ("decode", "problem"),
    [
        (raises_something_else, "instead of WireError"),
        (takes_memory, "bytes of memory"),
    ],
)
def test_bad_decoder_is_found(decode: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    event = FORWARD["event"]
    bad = Target("event", decode, WireError, lambda message: b"", event.messages, 8)
    monkeypatch.setattr(wire, "targets", lambda: (bad,))
    tried: Tried = try_chunk(0)
    assert problem in tried.problem and "event, chunk 0 of seed 20, input" in tried.problem


def test_slow_decoder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SECONDS_MAX", -1.0)
    assert try_chunk(0).problem.startswith("0.0")


def test_failing_input_can_be_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["wire", "event", FORWARD["event"].messages[0].hex()])
    assert wire.main() == 0 and capsys.readouterr().out == "nothing is wrong\n"
    monkeypatch.setattr("sys.argv", ["wire", "thing", "00"])
    assert wire.main() == 2 and "client frame" in capsys.readouterr().out


def test_model_run_reports_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRun("LossyLink", examples=5, number=0)
    monkeypatch.setattr(wire, "MODEL_STEPS", 5)
    assert try_model(run) == ""
    monkeypatch.setitem(wire.MODELS, "LossyLink", BrokenModel)
    assert "AssertionError: always" in try_model(run)


class BrokenModel(wire.LossyLink):
    def settled(self) -> bool:
        raise AssertionError("always")
