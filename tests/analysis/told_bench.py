"""A bench whose story is written as the event log of a run directory.

Reads   events that a test states, in virtual milliseconds since the run's first event
Writes  events/
"""

from __future__ import annotations

from pathlib import Path

from laminar.events.base import Command, Event, Stamped
from tools.kit.bench import MS, Bench
from tools.kit.logs import Log, write_log


class ToldBench(Bench):
    """It keeps what was said and decided."""

    def __init__(self, **changes: object) -> None:
        self.log: Log = []
        super().__init__(**changes)  # type: ignore[arg-type]

    def hear(self, peer: str, incarnation: int, event: Event) -> list[Command]:
        commands = super().hear(peer, incarnation, event)
        stamped = Stamped(
            seq=self.seq,
            time_ns=self.now_ms * MS,
            peer=peer,
            incarnation=incarnation,
            peer_seq=self.seq,
            event=event,
        )
        self.log.append((stamped, commands))
        return commands

    def write(self, run_dir: Path) -> Path:
        run_dir.mkdir()
        write_log(run_dir, self.log)
        return run_dir

    @property
    def last(self) -> str:
        """The latest event as an answer names it."""
        return f"{self.now_ms / 1000:.3f} s (#{self.seq})"
