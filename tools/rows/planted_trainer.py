"""Planted bugs in the trainer: its reports, its checkpoints and its publishing.

Gives   TRAINER_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from laminar.actors import checkpoint_writer, trainer
from laminar.actors.checkpoint_writer import CheckpointWriter
from laminar.actors.disk_wait import DiskWait
from laminar.actors.weight_publisher import WeightPublisher

if TYPE_CHECKING:
    from tools.rows.planted import Planter


def checkpoint_has_its_name_before_its_sync(plant: Planter) -> None:
    async def planted(files: Any, directory: Any, weights: Any, extra: Any) -> None:
        partial = await files.begin(directory)
        await files.write(partial, weights, extra)
        await files.rename(partial, directory)
        await files.sync(directory)

    plant.replace(checkpoint_writer, "save_model", planted)


def checkpoint_is_of_the_weights_at_its_end(plant: Planter) -> None:
    """They are not copied, and the next step changes them while they are written."""
    save_model = checkpoint_writer.save_model

    async def planted(files: Any, directory: Any, weights: Any, extra: Any) -> None:
        await save_model(files, directory, None, extra)

    plant.replace(checkpoint_writer, "save_model", planted)


def removed_checkpoint_is_still_reported_as_kept(plant: Planter) -> None:
    save = CheckpointWriter._save

    async def planted(self: CheckpointWriter, *args: Any) -> None:
        kept = dict(self._kept)
        await save(self, *args)
        self._kept.update(kept)

    plant.replace(CheckpointWriter, "_save", planted)


def step_is_reported_before_its_line_is_in_the_book(plant: Planter) -> None:
    until_room = DiskWait.until_room

    async def planted(self: DiskWait, write: Any) -> Any:
        if self._what != "the trainer's book":
            return await until_room(self, write)
        asyncio.get_running_loop().create_task(write())

    plant.replace(DiskWait, "until_room", planted)


def rows_that_were_left_out_are_not_reported(plant: Planter) -> None:
    plant.replace(trainer, "_left_out", lambda result: ())


def slot_is_handed_over_before_the_copy(plant: Planter) -> None:
    """The relay takes the digest of what is there by then."""
    copy = WeightPublisher._copy

    async def planted(self: WeightPublisher, version: int, step: int) -> Any:
        arena = self._arena

        async def write(slot: int, specs: Any) -> None:
            asyncio.get_running_loop().create_task(arena.write(slot, specs))

        self._arena = mock.Mock(wraps=arena, path=arena.path, write=write)
        request = await copy(self, version, step)
        self._arena = arena
        return request

    plant.replace(WeightPublisher, "_copy", planted)


def refused_slot_counts_as_published(plant: Planter) -> None:
    """The relay was started again, and its predecessor's memory was written."""
    hand_over = WeightPublisher._hand_over

    async def planted(self: WeightPublisher, request: Any) -> str:
        await hand_over(self, request)
        return ""

    plant.replace(WeightPublisher, "_hand_over", planted)


def memory_of_a_dead_relay_is_kept(plant: Planter) -> None:
    ask_for_slot = WeightPublisher._ask_for_slot

    async def planted(self: WeightPublisher) -> None:
        arena = self._arena
        await ask_for_slot(self)
        if arena is not None and self._arena is None:
            self._arena, self._slot = arena, 0
            self._granted.set()

    plant.replace(WeightPublisher, "_ask_for_slot", planted)


def skipped_publish_is_not_reported(plant: Planter) -> None:
    plant.replace(WeightPublisher, "_skip", lambda self, *args: None)


def owed_publish_waits_for_no_slot(plant: Planter) -> None:
    async def planted(self: WeightPublisher, deadline_ns: int) -> bool:
        return self._slot >= 0

    plant.replace(WeightPublisher, "_slot_by", planted)


TRAINER_BUGS: tuple[Callable[[Planter], None], ...] = (
    checkpoint_has_its_name_before_its_sync,
    checkpoint_is_of_the_weights_at_its_end,
    removed_checkpoint_is_still_reported_as_kept,
    step_is_reported_before_its_line_is_in_the_book,
    rows_that_were_left_out_are_not_reported,
    slot_is_handed_over_before_the_copy,
    refused_slot_counts_as_published,
    memory_of_a_dead_relay_is_kept,
    skipped_publish_is_not_reported,
    owed_publish_waits_for_no_slot,
)
