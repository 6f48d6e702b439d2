"""Every event and command is declared, handled and in docs/events.md."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from laminar.core import registry
from laminar.core.machine import HANDLING
from laminar.core.validation import accept_any
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import ENDS, Command, Event, get_tag
from laminar.names.roles import ROLE_TABLE, find_roles
from tools.make.events_page import markdown

ROOT = Path(__file__).parents[2]


def test_every_event_is_declared_and_has_a_handler() -> None:
    """What makes one valid is part of its handler's registration, which none can leave out."""
    assert set(Event.__subclasses__()) == set(ev.ALL_EVENTS) == set(HANDLING)
    assert set(Command.__subclasses__()) == set(cmd.ALL_COMMANDS)


def test_what_is_registered_is_complete() -> None:
    """An event has two parameters that are its own; without one of them there is no handler."""
    with pytest.raises(TypeError, match="valid"):
        registry.handles(ev.ActorLeft)  # type: ignore[call-arg]
    with pytest.raises(AssertionError, match="ActorLeft already has a handler"):
        registry.handles(ev.ActorLeft, valid=accept_any)(lambda ctx, event: None)


def test_everything_is_declared_with_its_roles() -> None:
    """An event without a sender would never be handled, a command without an addressee be lost."""
    assert all(map(find_roles, map(get_tag, (*ev.ALL_EVENTS, *cmd.ALL_COMMANDS))))
    for record in ROLE_TABLE.values():
        assert {*record.reports} <= set(map(get_tag, ev.ALL_EVENTS))
        assert {*record.carries_out} <= set(map(get_tag, cmd.ALL_COMMANDS))
    assert {command for ended in ENDS.values() for command in ended} <= set(cmd.ALL_COMMANDS)


def test_docs_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change: python -m tools.make.events_page > docs/events.md"""
    assert (ROOT / "docs" / "events.md").read_text() == markdown()
    with pytest.warns(RuntimeWarning, match="tools.make.events_page"):
        runpy.run_module("tools.make.events_page", run_name="__main__")
    assert capsys.readouterr().out == markdown()
