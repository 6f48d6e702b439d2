"""TensorBoard files: the figures of each step as scalars.

Reads   Scalars
Writes  RUN/tensorboard/events.out.tfevents.*, a new one for each coordinator
Raises  OSError, PartlyWritten: the outlet counts what is lost

The records are those of tensorboardX; its own writer is not used, because its threads end with the
first write that fails, and then block whoever writes next. A reader stops at a torn record, so one
is cut off before the next.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from laminar.observe.files import GrowingFile, cut_off
from laminar.rundir import TENSORBOARD_DIR


class Scalars(NamedTuple):
    """The figures of one step."""

    step: int
    time_s: float  #: of the day
    figures: dict[str, float]


class Board:
    """One file of events."""

    def __init__(self, run_dir: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(run_dir, f"{TENSORBOARD_DIR}/{name}", cut_off)
        self._begun = False

    def write(self, items: list[Scalars]) -> None:
        """Imports tensorboardX with the first call, which takes a second."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        if not self._begun:
            self._file.write([_record(Event(wall_time=time.time(), file_version="brain.Event:2"))])
            self._begun = True
        records = []
        for item in items:
            event = Event(wall_time=item.time_s, step=item.step)
            for name, value in item.figures.items():
                event.summary.value.extend(scalar(name, value).value)
            records.append(_record(event))
        self._file.write(records)


def _record(event: Any) -> bytes:
    """Length, its checksum, the event, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    body = event.SerializeToString()
    length = struct.pack("<Q", len(body))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, body))
    return length + next(checksums) + body + next(checksums)
