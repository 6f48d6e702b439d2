"""Forks: a run that begins with a checkpoint of another one, and goes on with its data.

Reads   the origin in the first CoordinatorStarted, DataLoaded
Writes  state.origin, state.again, and what of the state counts steps, versions and prompts

A fork counts steps and versions on from its checkpoint. To the trainer that is a checkpoint which
the log confirms: it is loaded, and is the oldest that a trainer which comes back can go on from
(core/steps/step_replay.py). Prompts that the other run had ended by then are not handed out again
in that pass; those that it had not ended begin anew, before all others. The pass it was in keeps
its order, the ones after it have that of this run. Another set of prompts is begun with its first
pass.
"""

from __future__ import annotations

import msgspec

from laminar.core.state.state import State, StepRecord
from laminar.events import events as ev


def apply_origin(state: State, origin: ev.ForkOrigin) -> None:
    """Nothing was decided yet."""
    state.origin = origin
    state.completed = state.chosen = origin.step
    state.next_version = origin.version + 1
    if origin.version != origin.step:
        state.numbered[origin.version] = origin.step
    trained = StepRecord(
        step_index=origin.step - 1, version=origin.version, rows="", chain=origin.digest
    )
    state.trained.append(trained)


def data_loaded(state: State, event: ev.DataLoaded) -> None:
    """The first time: are these the prompts that the other run had?"""
    origin = state.origin
    if origin is None:
        return
    same = (event.digest, event.num_train) == (origin.data, origin.num_train)
    if same:
        state.cursor = origin.cursor
        state.again = {prompt.group: prompt.row_index for prompt in origin.unfinished}
    data = origin.data if same else ""
    state.origin = msgspec.structs.replace(origin, unfinished=(), data=data)


def order_of(state: State, pass_index: int) -> tuple[int, bool]:
    """Seed of the order of a pass, and whether it is another than that of the data."""
    origin = state.origin
    if origin is not None and origin.data and pass_index == origin.cursor // origin.num_train:
        return origin.seed, origin.shuffle
    return state.settings.seed, state.settings.shuffle
