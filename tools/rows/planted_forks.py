"""Planted bugs of forks: what a run takes over of the one that it begins in.

Reads   nothing
Gives   FORK_BUGS
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.core import forks
from laminar.core.state import State
from laminar.events import events as ev
from tools.rows.planted import Planter


def prompts_of_a_fork_are_sampled_again(plant: Planter) -> None:
    """It begins with the first row, whatever had ended by then."""
    plant.replace(forks, "data_loaded", lambda state, event: None)


def prompts_without_an_end_are_forgotten(plant: Planter) -> None:
    data_loaded = forks.data_loaded

    def planted(state: State, event: ev.DataLoaded) -> None:
        data_loaded(state, event)
        state.again.clear()

    plant.replace(forks, "data_loaded", planted)


def pass_of_a_fork_has_another_order(plant: Planter) -> None:
    def planted(state: State, pass_index: int) -> Any:
        return state.settings.seed, state.settings.shuffle

    plant.replace(forks, "order_of", planted)


FORK_BUGS: tuple[Callable[[Planter], None], ...] = (
    prompts_of_a_fork_are_sampled_again,
    prompts_without_an_end_are_forgotten,
    pass_of_a_fork_has_another_order,
)
