"""Why repack left a replica as it was: a story for each reason that a plan can have."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from laminar.analysis.facts.repack_reasons import REASONS, Outcome, list_decisions
from laminar.core.machine import StateMachine
from laminar.core.state.migrations import NotStragglerReason, StayReason
from tests.analysis.told_bench import ToldBench
from tests.core.repack.test_migration import DESTINATION, OTHER, SOURCE, Tail


class ToldTail(Tail, ToldBench):
    """Its story is kept."""


def looked(bench: ToldBench) -> dict[str, list[tuple[str, str]]]:
    """By replica, the reason each time and its figures."""
    machine, found = StateMachine(), dict[str, list[tuple[str, str]]]()
    for stamped, _ in bench.log:
        commands = machine.handle_event(stamped)
        for replica, reason, detail in list_decisions(stamped, commands, machine.state):
            found.setdefault(replica.name, []).append((reason, detail))
    return found


@pytest.mark.parametrize(
    ("changes", "name", "reason", "detail"),
    [
        ({}, SOURCE, "emptied", ""),
        ({}, DESTINATION, "receives", "1 incoming"),
        ({}, OTHER, "changed", ""),
        ({"repack_policy": "best-fit"}, DESTINATION, "full", "4 of 4 running or incoming"),
        ({"repack_prefill_tokens": 1}, SOURCE, "no-gain", "it would have been empty in 5 steps"),
        ({"total_steps": 3}, SOURCE, "data", ""),
        (
            {"groups_per_version": 3, "max_staleness": 3},
            SOURCE,
            "bound",
            "room for 2 with the newest weights",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_it_found_when_a_version_was_published(
    changes: dict[str, Any], name: str, reason: str, detail: str
) -> None:
    bench = ToldTail(**changes)
    bench.publish(1, 1)
    found, figures = looked(bench)[name][0]
    assert found == reason and figures.startswith(detail)


def test_every_reason_has_a_text() -> None:
    assert REASONS.keys() == {*NotStragglerReason, *StayReason, *get_args(Outcome)}


def test_what_it_found_later() -> None:
    bench = ToldTail()
    bench.publish(1, 1)
    bench.wait(6_000)
    found = {name: [reason for reason, _ in looks] for name, looks in looked(bench).items()}
    assert found[OTHER][-1] == "others-first"  # the one that was emptied loads
    assert (
        found[DESTINATION][-1] == "no-gauges"
    )  # its engine has not said that it knows of the move
