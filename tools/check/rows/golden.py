"""Row 4: golden logs still replay to the decisions that they contain.

Reads   tests/golden: MANIFEST.json and a file for each log
Gives   ROWS; Golden, `manifest`, `follow`, `problem` for the test and for tools/make/golden.py

A log is replayed as a coordinator would: from its first event, from every snapshot, and one step
beyond its end.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zstandard

from laminar.core.rules import LOGIC_VERSION, LogicError
from laminar.core.state.state import hash_state
from laminar.eventlog.reader import NotInHistory
from laminar.eventlog.record import LogRefused
from laminar.eventlog.replay import Replay, replay_records
from laminar.eventlog.restore import restore_log, take_over_log
from laminar.eventlog.snapshot import Snapshot, read_snapshots
from laminar.events.base import COORDINATOR, Stamped
from laminar.names.ports import Disk
from tools.check.rows.base import Figure, Gate, Row
from tools.kit.world_parts import coordinator_started
from tools.simulator.disk import SimDisk

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden"
MANIFEST = "MANIFEST.json"
LOGS_MIN = 12


class Refused(Exception):
    """Failure of a coordinator to continue from a log, with the reason."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of the replay of a whole log."""

    events: int
    decisions: int  #: decisions in the log, all of which the replay reproduced
    unlogged: int  #: decisions that a coordinator died before logging; the replay makes them
    hashes: int  #: state hashes in the log
    snapshots: int  #: snapshots of the log, each of which leads to the same state
    digest: str  #: digest of the last state


class Golden(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the manifest."""

    name: str  #: file name without the suffix
    what: str
    seed: int  #: seed of the simulated run that wrote it
    facts: Facts

    @property
    def file(self) -> str:
        """Path of the log relative to tests/golden."""
        return f"{self.name}.zst"


def manifest(folder: Path = GOLDEN) -> list[Golden]:
    """Read the manifest, which lists every log that must exist."""
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=list[Golden])


def packed(files: dict[str, bytes]) -> bytes:
    """Pack the files of a log into one compressed file."""
    data = msgspec.msgpack.encode(files, order="deterministic")
    return zstandard.ZstdCompressor(level=19, write_checksum=True).compress(data)


def disk_of(log: Path) -> SimDisk:
    """Unpack a log into a disk in memory, so that the file cannot change."""
    data = zstandard.ZstdDecompressor().decompress(log.read_bytes())
    return SimDisk(msgspec.msgpack.decode(data, type=dict[str, bytes]))


def disk_of_golden(golden: Golden) -> SimDisk:
    return disk_of(GOLDEN / golden.file)


def problem(golden: Golden, disk: Disk) -> str:
    """Describe how a log differs from the manifest, or return an empty string."""
    try:
        facts = follow(disk)
    except Refused as error:
        return f"{golden.name}: refused: {error}"
    return "" if facts == golden.facts else f"{golden.name}: {facts} instead of {golden.facts}"


def follow(disk: Disk) -> Facts:
    """Replay a log in every way, then take it over; raise Refused if that fails."""
    try:
        decided: list[int] = []
        whole = _identical(
            replay_records(disk, observer=lambda _, made, state: decided.append(len(made)))
        )
        found = read_snapshots(disk)
        for name, why in found.unusable.items():
            raise Refused(f"{name}: {why}")
        for snapshot in found.usable:
            _same_state(whole, disk, snapshot)
        facts = Facts(
            whole.events,
            whole.decisions,
            sum(decided) - whole.decisions,
            whole.hashes,
            len(found.usable),
            hash_state(whole.machine.state),
        )
        _go_on(disk)
    except (LogRefused, LogicError, NotInHistory) as error:
        raise Refused(str(error)) from error
    return facts


def _identical(found: Replay) -> Replay:
    if found.difference is not None:
        raise Refused(str(found.difference))
    return found


def _same_state(whole: Replay, disk: Disk, snapshot: Snapshot) -> None:
    rest = _identical(replay_records(disk, snapshot=snapshot))
    if hash_state(rest.machine.state) != hash_state(whole.machine.state):
        raise Refused(f"the replay from {snapshot.name} leads to another state")


def _go_on(disk: Disk) -> None:
    """Take the log over and start the next coordinator, as a resumed run does."""
    restored = restore_log(disk)
    machine = _identical(restored.replay).machine
    state = machine.state
    take_over_log(disk, restored, logic=LOGIC_VERSION, run="golden", seed=0, config_hash="")
    started = coordinator_started(state.settings, restored.incarnation)
    machine.handle_event(
        Stamped(
            seq=state.seq + 1,
            time_ns=state.time_ns,
            peer=COORDINATOR,
            incarnation=restored.incarnation,
            peer_seq=0,
            event=started,
        )
    )
    _identical(replay_records(disk))


def replay_all(gate: Gate) -> Figure:
    """Replay all golden logs, at both gates alike."""
    goldens = manifest()
    problems = [said for golden in goldens if (said := problem(golden, disk_of_golden(golden)))]
    facts = [golden.facts for golden in goldens]
    reached = (
        f"{len(goldens)} logs, "
        f"{sum(f.events for f in facts):,} events, {sum(f.decisions for f in facts):,} decisions, "
        f"{sum(f.snapshots for f in facts)} snapshots; {len(problems)} problems"
    )
    return Figure(reached, len(goldens) >= LOGS_MIN and not problems, "\n".join(problems))


ROWS = (
    Row(
        4,
        "golden logs replay to the decisions that they contain",
        "all goldens (12 or more)",
        "the same",
        replay_all,
    ),
)
