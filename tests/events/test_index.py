"""The index table: complete, pointing at real handlers, and printed in docs/events.md."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

from laminar.core.machine import HANDLERS
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event
from laminar.events.index import ACTOR_ROLES, INDEX, SENDERS, Row, markdown

ROOT = Path(__file__).parents[2]


def subclasses(base: type) -> set[type]:
    return set(base.__subclasses__())


def test_every_event_is_listed_exactly_once() -> None:
    listed = [row.event for row in INDEX]
    assert len(listed) == len(set(listed))
    events = subclasses(Event) - {ev.EndedTrajectory}  # a part of another event
    assert set(listed) == events == set(ev.ALL_EVENTS) == set(HANDLERS) == set(SENDERS)


def test_every_command_is_caused_by_some_event() -> None:
    """A command that no event leads to would be dead."""
    caused = {command for row in INDEX for command in row.commands}
    assert caused == subclasses(Command) == set(cmd.ALL_COMMANDS)


@pytest.mark.parametrize("row", INDEX, ids=lambda row: row.event.__name__)
def test_row(row: Row) -> None:
    """Its handler is the one that the machine calls; senders are roles; no command twice."""
    module, _, function = row.handler.partition(".")
    handler = getattr(importlib.import_module(f"laminar.core.{module}"), function)
    assert handler is HANDLERS[row.event]
    assert row.senders and set(row.senders) <= {COORDINATOR, *ACTOR_ROLES}
    assert len(set(row.commands)) == len(row.commands)


def test_commands_end_by_events_that_somebody_reports() -> None:
    for command, ended_by in cmd.ENDED_BY.items():
        assert all(event in SENDERS for event in ended_by), command


def test_everything_has_a_first_sentence() -> None:
    for kind in (*ev.ALL_EVENTS, *cmd.ALL_COMMANDS):
        assert kind.__doc__ and kind.__doc__.strip().endswith("."), kind


def test_docs_are_current() -> None:
    """After a change: python -m laminar.events.index > docs/events.md"""
    assert (ROOT / "docs" / "events.md").read_text() == markdown()


def test_program_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """python -m laminar.events.index"""
    with pytest.warns(RuntimeWarning, match="laminar.events.index"):
        runpy.run_module("laminar.events.index", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == markdown()
    assert "### `trajectory-finished`" in printed
