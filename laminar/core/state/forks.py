"""Forks: a run that begins with a checkpoint of another one and continues with its data.

Reads   the origin in the first CoordinatorStarted, DataLoaded
Writes  state.data.origin, state.data.unfinished_prompts, and the state's counts of steps,
        versions and prompts

A fork counts steps and versions on from its checkpoint. To the trainer that is a checkpoint which
the log confirms: it is loaded, and is the oldest that a returning trainer can continue from
(core/steps/step_replay.py). Prompts that the other run had ended by then are not repeated in that
pass; unfinished ones begin again, before all others. The pass it was in keeps its order, later
passes have the order of this run. Another set of prompts is begun with its first pass.
"""

from __future__ import annotations

import msgspec

from laminar.core.state.state import State
from laminar.core.state.steps import StepRecord
from laminar.events import events as ev


def apply_origin(state: State, origin: ev.ForkOrigin) -> None:
    """Apply the origin of a fork, before any decision."""
    state.data.origin = origin
    state.steps.completed = state.steps.chosen = origin.step
    state.versions.next = origin.version + 1
    if origin.version != origin.step:
        state.versions.first_steps[origin.version] = origin.step
    trained = StepRecord(
        step_index=origin.step - 1, version=origin.version, trajectory_ids="", chain=origin.digest
    )
    state.steps.trained.append(trained)


def data_loaded(state: State, event: ev.DataLoaded) -> None:
    """Continue the other run's pass over the data if the prompts are the same."""
    origin = state.data.origin
    if origin is None:
        return
    same = (event.digest, event.num_train) == (origin.data, origin.num_train)
    if same:
        state.data.cursor = origin.cursor
        state.data.unfinished_prompts = {
            prompt.group: prompt.row_index for prompt in origin.unfinished
        }
    data = origin.data if same else ""
    state.data.origin = msgspec.structs.replace(origin, unfinished=(), data=data)


def order_of(state: State, pass_index: int) -> tuple[int, bool]:
    """Return the seed of the order of a pass, and whether the pass is shuffled."""
    origin = state.data.origin
    if origin is not None and origin.data and pass_index == origin.cursor // origin.num_train:
        return origin.seed, origin.shuffle
    return state.settings.seed, state.settings.shuffle
