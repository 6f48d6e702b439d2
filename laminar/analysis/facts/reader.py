"""Facts about a run, from RUN/facts or from a replay of its log.

Reads   RUN/events/, RUN/facts/, the calls of RUN/store.sqlite
Writes  RUN/facts/ (the tables, states, facts.json), renamed once it is complete; for a run that
        cannot be written, a directory below the user's cache instead
Gives   load_facts, of the log as it is now; follow_run, of an active run; Facts
Raises  ConfigError for a run directory that cannot be read

The facts are built again when their version, the logic version or the log has changed. They keep a
state after each KEEP_EVERY events, so that `state_at` replays few events; the log keeps only its
two newest snapshots. Where the beginning of the log was removed, the facts begin with its oldest
snapshot: `facts.begins_at` is its event, and times count from the event after it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from laminar.analysis.facts.collector import FactCollector
from laminar.analysis.facts.tables import FACTS_VERSION, TABLES, Row
from laminar.analysis.facts.writer import CALLS, SCHEMAS, TableWriter, build_batch, get_table_path
from laminar.analysis.log.run_log import GrowingReplay, log_ends_at, replay_from
from laminar.config import ConfigError
from laminar.core.rules import LOGIC_VERSION
from laminar.core.state.state import State
from laminar.eventlog.record import Takeover
from laminar.eventlog.replay import Observer
from laminar.eventlog.snapshot import Snapshot, encode_snapshot, format_name, parse_snapshot
from laminar.events.base import Stamped
from laminar.events.events import ALL_EVENTS
from laminar.run.directory import FACTS_DIR, STORE_FILE
from laminar.run.renames import rename
from laminar.storage import books

_decode_event = msgspec.json.Decoder(reduce(or_, ALL_EVENTS)).decode

HEADER_FILE = "facts.json"
STATE_SUFFIX = ".zst"
NOT_FOLLOWED = ("events", "decisions", CALLS)
"""Tables that are read where they are needed, and not kept in memory for an active run."""

Progress = Callable[[int, float], None]
"""Called while facts are built: events so far, share of the log."""


class FactsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Description of facts: what they were made of, and by which rules."""

    facts: int = FACTS_VERSION
    logic: int = LOGIC_VERSION
    begins_at: int  #: event after which they begin: 0, or that of the oldest snapshot
    events: int  #: number of the last event
    first_ns: int  #: unix time of the first event
    last_ns: int
    end: Takeover | None  #: end of the log that they were made of


class Facts:
    """Tables of facts, and the states behind them."""

    def __init__(self, run_dir: Path, directory: Path, header: FactsHeader) -> None:
        self.run_dir, self.directory, self.header = run_dir, directory, header

    @property
    def begins_at(self) -> int:
        """Event after which the facts begin; 0: they are of the whole run."""
        return self.header.begins_at

    @property
    def events(self) -> int:
        """Number of the last event."""
        return self.header.events

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the last."""
        return (self.header.last_ns - self.header.first_ns) / 1e9

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Return a table, or some of its columns."""
        return self._select(name, columns, None)

    def rows(
        self, name: str, columns: list[str] | None = None, **wanted: Any
    ) -> list[dict[str, Any]]:
        """Return the rows of a table, as dicts; `wanted`: values, or sets of values, by column."""
        found: list[dict[str, Any]] = self._select(name, columns, _build_filter(wanted)).to_pylist()
        return found

    def _select(self, name: str, columns: list[str] | None, rows: pc.Expression | None) -> pa.Table:
        if name == CALLS:
            return _select_rows(_read_calls(self.run_dir), columns, rows)
        path = get_table_path(self.directory, name)
        return pq.read_table(path, columns=columns, filters=rows)

    def read_events(self, numbers: Collection[int]) -> dict[int, Stamped]:
        """Return events of the log by their numbers."""
        found = self.rows("events", event=set(numbers))
        return {row["event"]: decode_row(row) for row in found}

    def list_times(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers and the times of all events."""
        found = self.table("events", ["event", "time"])
        return found["event"].to_numpy(), found["time"].to_numpy()

    def to_unix_ns(self, seconds: float) -> int:
        """Return the unix time of a time in a table."""
        return self.header.first_ns + round(seconds * 1e9)

    @cached_property
    def state(self) -> State:
        """State after the last event."""
        return self.state_at(self.events)

    def state_at(self, event: int, observer: Observer | None = None) -> State:
        """Return the state after an event; raise ConfigError for one that the facts do not have.

        The observer receives the events since the state that is kept before it."""
        if not self.begins_at < event <= self.events:
            raise ConfigError(
                f"event {event} is outside the facts of {self.run_dir}: give one from "
                f"{self.begins_at + 1} to {self.events}"
            )
        kept = self._find_state(event if observer is None else event - 1)
        return replay_from(self.run_dir, kept, event, observer)

    def _find_state(self, event: int) -> Snapshot | None:
        """Return the latest state kept that is not after the event."""
        names = (path.name.removesuffix(STATE_SUFFIX) for path in self.directory.glob("*.bin.zst"))
        kept = sorted(int(name.split("-")[1].removesuffix(".bin")) for name in names)
        for seq in reversed([seq for seq in kept if seq <= event]):
            path = self.directory / f"{format_name(seq)}{STATE_SUFFIX}"
            with suppress(OSError):
                if found := _unpack_state(path.read_bytes(), seq):
                    return found
        return None

    def refresh(self) -> bool:
        """Follow the run; return whether there are new facts. These do not change."""
        return False


class _Collection:
    """Replay of a log that passes rows to `add`, and packed states to `keep`."""

    def __init__(
        self,
        run_dir: Path,
        add: Callable[[str, Row], None],
        keep: Callable[[int, bytes], None],
        progress: Progress | None,
    ) -> None:
        self._keep, self._progress = keep, progress
        self.collector = FactCollector(add)
        self.replay = GrowingReplay(run_dir, self.collector, self.keep_state)
        if self.replay.begins_at:  # the open work of the snapshot is known, not its beginning
            self.collector.begin_with(self.replay.state)

    def keep_state(self, state: State, place: Takeover, share: float) -> None:
        self._keep(state.seq, zstandard.compress(encode_snapshot(state, place)))
        if self._progress is not None:
            self._progress(state.seq, share)

    def advance(self) -> FactsHeader:
        """Handle all further records of the log."""
        end, clock = self.replay.advance(), self.collector.clock
        return FactsHeader(
            begins_at=self.replay.begins_at,
            events=clock.now.seq,
            first_ns=clock.first_ns,
            last_ns=clock.now.unix_ns,
            end=end,
        )


def load_facts(run_dir: Path, progress: Progress | None = None) -> Facts:
    """Return the facts of the log as it is now; build them if there are none, or older ones.

    Where they cannot be written, as on a full disk, they are kept in memory."""
    try:
        return _load_files(run_dir, progress)
    except OSError:
        return LiveFacts(run_dir, progress)


def follow_run(run_dir: Path, progress: Progress | None = None) -> Facts:
    """Return the facts of a run, from files if they are of the whole log, else to be followed."""
    return _find_files(run_dir) or LiveFacts(run_dir, progress)


def _find_files(run_dir: Path) -> Facts | None:
    """Return facts from files; None: there are none of the log as it is now."""
    for directory in _list_places(run_dir):
        header = _read_header(directory)
        if header is not None and log_ends_at(run_dir, header.end):
            return Facts(run_dir, directory, header)
    return None


def _load_files(run_dir: Path, progress: Progress | None = None) -> Facts:
    """Return facts from files; raise OSError if they have to be built and cannot be written."""
    if found := _find_files(run_dir):
        return found
    for directory in _list_places(run_dir):
        try:
            return _build_facts(run_dir, directory, progress)
        except OSError as error:
            failed = error
    raise failed


def _list_places(run_dir: Path) -> Iterator[Path]:
    """Yield the directories where facts may be: of the run, else of the user's cache."""
    yield run_dir / FACTS_DIR
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    yield cache / "laminar" / f"facts-{digest}"


def _read_header(directory: Path) -> FactsHeader | None:
    """Return the description of usable facts; None: they are missing, or of other rules."""
    try:
        data = (directory / HEADER_FILE).read_bytes()
        header = msgspec.json.decode(data, type=FactsHeader)
    except (OSError, msgspec.MsgspecError):
        return None
    usable = (header.facts, header.logic) == (FACTS_VERSION, LOGIC_VERSION)
    files = (get_table_path(directory, name) for name in TABLES if name != CALLS)
    return header if usable and all(path.is_file() for path in files) else None


def _build_facts(run_dir: Path, directory: Path, progress: Progress | None) -> Facts:
    """Build all tables under a temporary name; rename them once they are complete."""
    new = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)

    def keep(seq: int, data: bytes) -> None:
        (new / f"{format_name(seq)}{STATE_SUFFIX}").write_bytes(data)

    try:
        new.mkdir(parents=True)
        tables = TableWriter(new)
        found = _Collection(run_dir, tables.add, keep, progress)
        header = found.advance()
        if header.end is not None:
            found.keep_state(found.replay.state, header.end, 1.0)
        for name, row in found.collector.list_open():
            tables.add(name, row)
        tables.close()
        (new / HEADER_FILE).write_bytes(msgspec.json.encode(header))
        shutil.rmtree(directory, ignore_errors=True)
        rename(new, directory, durable=False)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Facts(run_dir, directory, header)


def _unpack_state(data: bytes, seq: int) -> Snapshot | None:
    """Return a kept state; None if it is damaged, or of another release."""
    try:
        found = parse_snapshot(zstandard.decompress(data), seq)
    except zstandard.ZstdError:
        return None
    return found if isinstance(found, Snapshot) else None


class LiveFacts(Facts):
    """Facts of an active run: `refresh` handles the records that were added since."""

    def __init__(self, run_dir: Path, progress: Progress | None = None) -> None:
        self.run_dir, self._progress = run_dir, progress
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in TABLES}
        self._states: dict[int, bytes] = {}
        self._numbers, self._times = array("q"), array("d")
        keep = self._states.__setitem__
        self._found = _Collection(self.run_dir, self._add, keep, self._progress)
        self._advance()

    def list_times(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return np.array(self._numbers, np.int64), np.array(self._times, np.float64)

    def _select(self, name: str, columns: list[str] | None, rows: pc.Expression | None) -> pa.Table:
        if name == CALLS:
            return super()._select(name, columns, rows)
        if name in NOT_FOLLOWED:
            return self._load_files()._select(name, columns, rows)
        if self._rows[name]:
            self._batches[name].append(build_batch(name, self._rows[name]))
            self._rows[name] = []
        unfinished = build_batch(name, self._open.get(name, ()))
        found = pa.Table.from_batches([*self._batches[name], unfinished], SCHEMAS[name])
        return _select_rows(found, columns, rows)

    def _load_files(self) -> Facts:
        try:
            return _load_files(self.run_dir)
        except OSError as error:
            raise ConfigError(f"the facts of {self.run_dir} cannot be written: {error}") from error

    @property
    def state(self) -> State:
        """State after the last event; it changes with the next `refresh`."""
        return self._found.replay.state

    def refresh(self) -> bool:
        """Handle new records; return whether there were any."""
        if not self._found.replay.has_grown():
            return False
        before = self.events
        try:
            self._advance()
        except ConfigError:
            self._begin()  # a coordinator took the log over before the last place
        return self.events != before

    def _advance(self) -> None:
        self.header = self._found.advance()
        self._open: dict[str, list[Row]] = {}
        for name, row in self._found.collector.list_open():
            self._open.setdefault(name, []).append(row)

    def _add(self, name: str, row: Row) -> None:
        if name == "events":
            self._numbers.append(row[0])
            self._times.append(row[1])
        elif name not in NOT_FOLLOWED:
            self._rows[name].append(row)

    def _find_state(self, event: int) -> Snapshot | None:
        seq = max((seq for seq in self._states if seq <= event), default=0)
        return _unpack_state(self._states[seq], seq) if seq else None


def _build_filter(wanted: dict[str, Any]) -> pc.Expression | None:
    """Build the condition that each column has its value, or one of its set."""
    found: pc.Expression | None = None
    for name, value in wanted.items():
        values = list(value) if isinstance(value, set | frozenset | list | tuple) else [value]
        one = pc.field(name).isin(values)
        found = one if found is None else found & one
    return found


def _select_rows(
    table: pa.Table, columns: list[str] | None, rows: pc.Expression | None
) -> pa.Table:
    found = table if rows is None else table.filter(rows)
    return found.select(columns) if columns else found


def decode_row(row: dict[str, Any]) -> Stamped:
    """Return the event of a row of the table `events`, without its time and sequence number."""
    return Stamped(
        seq=row["event"],
        time_ns=0,
        peer=row["sender"],
        incarnation=row["incarnation"],
        peer_seq=0,
        event=_decode_event(row["fields"]),
    )


def _read_calls(run_dir: Path) -> pa.Table:
    """Return the calls of environments, as the store has them now."""
    rows: list[Row] = []
    if (run_dir / STORE_FILE).is_file():
        with books.open_tables(run_dir / STORE_FILE) as tables:
            rows = tables.turns.list_calls()
    return pa.Table.from_batches([build_batch(CALLS, rows)], SCHEMAS[CALLS])
