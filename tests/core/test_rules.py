"""Changed decision rules: the table, what a run is decided by, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from laminar.core import rules
from laminar.core.machine import StateMachine
from laminar.core.rules import (
    LOGIC_VERSION,
    NEW_RUN,
    OLDEST_LOGIC,
    RULES,
    LogicError,
    Rule,
    is_rule_active,
    rules_of,
)
from laminar.core.state.state import State, decode, encode
from laminar.core.state.work import Group
from laminar.core.steps import batching
from laminar.events import commands as cmd
from laminar.events.base import Settings, Stamped
from tools.kit.world import World
from tools.kit.world_parts import coordinator_started, settings

LATEST_FIRST = Rule(
    "latest-first",
    LOGIC_VERSION + 1,
    "of one deadline, groups are trained in the order of dispatch",
    "of one deadline, the group that was dispatched last is trained first",
)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later program: the choice of a batch was changed behind a flag."""
    old = batching.by_deadline

    def by_deadline(state: State) -> list[Group]:
        if not is_rule_active(state.settings, LATEST_FIRST):
            return old(state)
        return sorted(old(state), key=lambda group: (group.deadline, -group.order))

    monkeypatch.setattr(rules, "RULES", (*RULES, LATEST_FIRST))
    monkeypatch.setattr(rules, "LOGIC_VERSION", LATEST_FIRST.since)
    monkeypatch.setitem(batching.STRATEGIES, "deadline", by_deadline)


def batches(config: Settings) -> list[tuple[str, ...]]:
    world = World(config, num_train=60, seed=3).run()
    ordered = [command for _, commands in world.log for command in commands]
    return [c.trajectories for c in ordered if isinstance(c, cmd.TrainStep)]


def test_table_is_in_order() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(before.since <= after.since for before, after in pairwise(RULES))
    assert all(OLDEST_LOGIC < rule.since <= LOGIC_VERSION for rule in RULES)
    assert all(rule.old and rule.new and rule.old != rule.new for rule in RULES)


@pytest.mark.usefixtures("changed")
def test_a_new_run_is_decided_by_the_new_rule_and_an_old_one_by_the_old() -> None:
    new = settings(rules=(*NEW_RUN, LATEST_FIRST.name))
    assert rules_of(new)[-1] == LATEST_FIRST.name and LATEST_FIRST.name not in rules_of(settings())
    assert batches(new) != batches(settings())


def test_the_change_itself_alters_no_old_run(request: pytest.FixtureRequest) -> None:
    before = batches(settings())
    request.getfixturevalue("changed")
    assert batches(settings()) == before


def started(logic: int, config: Settings) -> Stamped:
    event = coordinator_started(config, logic=logic)
    return Stamped(seq=1, time_ns=0, peer="coordinator", incarnation=1, peer_seq=0, event=event)


def test_an_unknown_rule_is_refused_by_its_name() -> None:
    """At the beginning of a log, and in a state that a snapshot has kept."""
    config = settings(rules=(*NEW_RUN, LATEST_FIRST.name))
    with pytest.raises(LogicError, match="decision rule 'latest-first'"):
        StateMachine().handle_event(started(LOGIC_VERSION, config))
    with pytest.raises(LogicError, match="decision rule 'latest-first'"):
        StateMachine(decode(encode(State(settings=config, logic=LOGIC_VERSION))))


def test_a_later_logic_is_refused_and_an_earlier_one_goes_on(
    request: pytest.FixtureRequest,
) -> None:
    with pytest.raises(LogicError, match=f"logic version {LOGIC_VERSION + 1}"):
        StateMachine().handle_event(started(LOGIC_VERSION + 1, settings()))
    machine = StateMachine()
    machine.handle_event(started(LOGIC_VERSION, settings()))
    request.getfixturevalue("changed")
    later = msgspec.structs.replace(started(LATEST_FIRST.since, settings()), seq=2)
    machine.handle_event(later)
    assert machine.state.logic == LOGIC_VERSION
