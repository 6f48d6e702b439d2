"""Who gets a new group: each preference of the planner, and each tie between replicas."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from laminar.core import planner
from laminar.core.context import Context
from laminar.core.scheduling import dispatch
from laminar.core.state.indexes import update_replica
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Stamped
from laminar.names.ids import GroupId
from tools.kit.bench import Bench, only

ALL = ()  #: touches all together, none by its name
EACH = (0, 1, 2, 3)


class Loaded(Bench):
    """Replicas that each run as many groups of two as were placed on them by hand."""

    checked = False

    def __init__(self, *groups: int, new: int = 1, **changes: Any) -> None:
        """`new`: how many more groups the data has."""
        bound = {"max_staleness": 9, "groups_per_step": 40, "groups_per_version": 9}
        count = sum(groups) + new
        super().__init__(nodes=len(groups), num_train=count, total_steps=0, **bound | changes)
        with patch.object(planner, "_place_new_groups"):
            self.start()
        tick = ev.TimerFired(timer="")
        stamped = Stamped(seq=99, time_ns=0, peer="", incarnation=0, peer_seq=0, event=tick)
        self.ctx = Context(self.state, stamped)
        self.by_number = [self.replica(name) for name in self.names]
        for replica, count in zip(self.by_number, groups, strict=True):
            for _ in range(count):
                dispatch.new_group(self.ctx, replica)

    def place(self, touched: tuple[int, ...], everyone: bool = False) -> list[int]:
        """Return the numbers of the replicas that get a new group, in order."""
        before = len(self.ctx.commands)
        for number in touched:
            self.ctx.touch_replica(self.names[number])
        if everyone or not touched:
            self.ctx.touch_all()
        planner.run_planner(self.ctx)
        self.sent = only(cmd.GenerateTrajectory, self.ctx.commands[before:])
        assert [c.sibling for c in self.sent] == [0, 1] * (len(self.sent) // 2)
        return [self.names.index(c.to) for c in self.sent if not c.sibling]

    def show_newer(self, number: int = 0) -> None:
        """Let only the relay of this replica have a newer version."""
        relay = self.state.members.relays[self.relays[number]]
        relay.newest = self.state.versions.newest = 1
        relay.held.append(1)
        update_replica(self.state, self.by_number[number])


@pytest.mark.parametrize("touched", [ALL, EACH])
def test_the_emptiest_with_room_for_a_whole_group_gets_it(touched: tuple[int, ...]) -> None:
    assert Loaded(2, 1, 3, 0).place(touched) == [3]
    assert Loaded(2, 3, 1, 2).place(touched) == [2]
    assert Loaded(2, 0, 1, 2, new=4, capacity=20).place(touched) == [1, 1, 2, 0]
    assert Loaded(1, 1, 0, 1, new=3, capacity=3).place(touched) == [2]


@pytest.mark.parametrize(
    ("loads", "touched", "everyone", "chosen"),
    [
        ((1, 1, 1, 1), (2, 1, 3), False, [2, 1, 3]),  # the first that was touched
        ((0, 1, 1, 1), (2, 1, 3), False, [2, 1, 3]),  # others are not asked
        ((1, 1, 1, 1), ALL, True, [0, 1, 2]),  # the first of all
        ((1, 1, 1, 1), (2,), True, [2, 0, 1]),  # a touched one before equal others
        ((1, 2, 2, 1), (2,), True, [0, 3, 2]),  # but after emptier ones
        ((2, 2, 1, 2), (2,), True, [2, 2, 0]),
    ],
)
def test_ties(
    loads: tuple[int, ...], touched: tuple[int, ...], everyone: bool, chosen: list[int]
) -> None:
    assert Loaded(*loads, new=3, capacity=20).place(touched, everyone) == chosen


@pytest.mark.parametrize("number", [0, 2])
def test_the_first_of_all_wins_a_tie_between_kinds(number: int) -> None:
    differs = Loaded(1, 1, 1)
    differs.show_newer(number)
    assert differs.place(ALL) == [0]


@pytest.mark.parametrize("touched", [ALL, EACH[:3]])
@pytest.mark.parametrize(
    ("loads", "changes", "chosen"),
    [
        ((1, 2, 2), {"groups_per_version": 1}, 1),  # the first drains: it took its share
        ((1, 2, 2), {"groups_per_version": 2}, 0),
        ((0, 1, 1), {"in_flight": False}, 0),  # an empty one takes a group before it loads
        ((0, 1, 1), {"in_flight": True}, 1),
    ],
)
def test_one_whose_relay_has_a_newer_version(
    touched: tuple[int, ...], loads: tuple[int, ...], changes: dict[str, Any], chosen: int
) -> None:
    behind = Loaded(*loads, **changes)
    behind.show_newer()
    assert behind.place(touched) == [chosen]


@pytest.mark.parametrize("touched", [ALL, EACH])
def test_one_of_newer_weights_takes_what_older_ones_may_not(touched: tuple[int, ...]) -> None:
    """Step 0 has all five groups that its batch can take."""
    bound = Loaded(0, 2, 1, 2, new=2, max_staleness=0, groups_per_step=5)
    newer = bound.by_number[3]
    newer.version = newer.step = 1
    update_replica(bound.state, newer)
    assert bound.place(touched) == [3, 3]


def test_unfinished_prompts_of_a_fork_come_first() -> None:
    forked = Loaded(0, new=3)
    forked.state.data.unfinished_prompts = {GroupId("0.2"): 7, GroupId("0.1"): 5}
    forked.place((0,))
    assert [c.row_index for c in forked.sent[:4:2]] == [7, 5]
