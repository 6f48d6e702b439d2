"""Planted bugs in the way of a trainer that comes back: what it loads, what it does again.

Gives   REDO_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from laminar.actors.checkpoint_writer import CheckpointWriter
from laminar.actors.trainer import Trainer
from laminar.core import redo
from laminar.core.machine import HANDLING
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.sim.models.learner import SimTrainer

if TYPE_CHECKING:
    from tools.rows.planted import Planter


def _other_rows(plant: Planter, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
    begin = Trainer._redo

    async def planted(self: Trainer, order: Any, command: Any, *args: Any) -> None:
        rows = change(command.trajectories)
        await begin(self, order, msgspec.structs.replace(command, trajectories=rows), *args)

    plant.replace(Trainer, "_redo", planted)


def one_row_is_left_out_of_a_redo(plant: Planter) -> None:
    _other_rows(plant, lambda rows: rows[:-1] or rows)


def order_of_a_redo_is_changed(plant: Planter) -> None:
    _other_rows(plant, lambda rows: rows[::-1])


def optimizer_is_not_restored(plant: Planter) -> None:
    """The weights are; the next step shows the difference."""
    restore = SimTrainer.restore

    async def planted(self: SimTrainer, directory: Any) -> Any:
        resume = await restore(self, directory)
        self.moment = "w0"
        return resume

    plant.replace(SimTrainer, "restore", planted)


def checkpoint_ahead_of_the_log_is_loaded(plant: Planter) -> None:
    plant.replace(redo, "_is_confirmed", lambda state, checkpoint: True)


def redo_is_published(plant: Planter) -> None:
    begin = Trainer._redo

    async def planted(self: Trainer, order: Any, command: Any, *args: Any) -> None:
        assert self.publisher is not None
        await self.publisher.publish(command.version, command.step_index + 1, order.cause)
        await begin(self, order, command, *args)

    plant.replace(Trainer, "_redo", planted)


def redo_is_entered_in_the_book(plant: Planter) -> None:
    begin = Trainer._redo

    async def planted(self: Trainer, order: Any, command: Any, *args: Any) -> None:
        line = {"step": command.step_index, "version": command.version, "left_out": []}
        await self.book.enter(msgspec.json.encode({**line, "ids": command.trajectories}))
        await begin(self, order, command, *args)

    plant.replace(Trainer, "_redo", planted)


def redo_is_counted(plant: Planter) -> None:
    handling = HANDLING[ev.StepRedone]

    def planted(ctx: Any, event: Any) -> None:
        handling.handler(ctx, event)
        ctx.state.ledger.trajectories.trained += 1

    plant.enter_context(_patched(ev.StepRedone, handling._replace(handler=planted)))


def _patched(kind: type[Event], handling: Any) -> Any:
    return mock.patch.dict(HANDLING, {kind: handling})


def interrupted_batch_keeps_its_number(plant: Planter) -> None:
    """The dead trainer's weights may be out under it already."""
    plant.replace(redo, "new_version", lambda state, step: state.batch.version)


def redo_begins_one_step_late(plant: Planter) -> None:
    handling = HANDLING[ev.CheckpointLoaded]

    def planted(ctx: Any, event: Any) -> None:
        handling.handler(ctx, event)
        if ctx.state.redone < ctx.state.completed:
            ctx.state.redone += 1

    plant.enter_context(_patched(ev.CheckpointLoaded, handling._replace(handler=planted)))


def old_checkpoint_goes_before_the_log_has_the_new_one(plant: Planter) -> None:
    write = CheckpointWriter._write

    async def planted(self: CheckpointWriter, *args: Any) -> None:
        for directory in list(self._kept.values()):
            await self._files.remove(directory)
        self._kept.clear()
        await write(self, *args)

    plant.replace(CheckpointWriter, "_write", planted)


def chain_begins_anew_after_a_load(plant: Planter) -> None:
    """The next checkpoint does not say what was trained before."""
    resume = CheckpointWriter.resume

    async def planted(self: CheckpointWriter, *args: Any) -> None:
        await resume(self, *args)
        self._before = ""

    plant.replace(CheckpointWriter, "resume", planted)


def payloads_go_that_a_redo_needs(plant: Planter) -> None:
    """Those of the step after the oldest checkpoint as well. It takes a trainer that dies between a
    checkpoint and the next, and a slow write: found with deaths of trainers only, in its test, and
    not within 300 seeds of all faults."""
    remove = Trainer._remove_payloads

    async def planted(self: Trainer, before_step: int) -> None:
        await remove(self, before_step + 1)

    plant.replace(Trainer, "_remove_payloads", planted)


REDO_BUGS: tuple[Callable[[Planter], None], ...] = (
    one_row_is_left_out_of_a_redo,
    order_of_a_redo_is_changed,
    optimizer_is_not_restored,
    checkpoint_ahead_of_the_log_is_loaded,
    redo_is_published,
    redo_is_entered_in_the_book,
    redo_is_counted,
    interrupted_batch_keeps_its_number,
    redo_begins_one_step_late,
    old_checkpoint_goes_before_the_log_has_the_new_one,
    chain_begins_anew_after_a_load,
)
