"""Export of a run as Parquet tables, for pandas, DuckDB or Polars.

Reads   the event log of a run directory, by replay
Writes  DIR/events.parquet, decisions.parquet, trajectories.parquet, each by rename
Raises  ConfigError for existing tables without `force`, and for failed writes

events has a row per event, decisions a row per command with the event that caused it, trajectories
a row per trajectory with the times of its stages, including those open at the end of the log. Rows
are written in groups, so memory does not depend on the length of the log.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from laminar.analysis.facts.trajectory_history import (
    EventClock,
    HistoryTracker,
    Moment,
    Stage,
    TrajectoryHistory,
)
from laminar.analysis.log.display import step_number
from laminar.analysis.log.run_log import replay_log
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.events.base import Command, Event, Stamped, get_tag
from laminar.run.renames import rename

ROW_GROUP = 50_000  #: rows held before they are written: some 20 MB of events

TIME = pa.timestamp("us", tz="UTC")  # Python and pandas read it without loss
SCHEMAS = {
    "events": pa.schema(
        [
            ("seq", pa.int64()),
            ("time_ns", pa.int64()),  # of the coordinator's clock, not the time of day
            ("time", TIME),
            ("peer", pa.string()),
            ("incarnation", pa.int64()),
            ("peer_seq", pa.int64()),
            ("type", pa.string()),
            ("payload", pa.string()),  # JSON
        ]
    ),
    "decisions": pa.schema(
        [
            ("cause", pa.int64()),
            ("index", pa.int32()),
            ("type", pa.string()),
            ("to", pa.string()),
            ("payload", pa.string()),  # JSON
        ]
    ),
}

Row = tuple[Any, ...]


def _to_us(moment: Moment | None) -> int | None:
    return moment.unix_ns // 1_000 if moment is not None else None


def _get_step(life: TrajectoryHistory) -> int | None:
    if life.end == "trained":
        return step_number(life.end_step)
    return life.end_step if life.end_step >= 0 else None


def _get_staleness(life: TrajectoryHistory) -> int | None:
    return life.end_step - life.placement.step if life.end == "trained" else None


#: Name, type and value of each column.
TRAJECTORY_COLUMNS: tuple[tuple[str, pa.DataType, Callable[[TrajectoryHistory], Any]], ...] = (
    ("trajectory", pa.string(), lambda life: life.trajectory_id),
    ("group", pa.string(), lambda life: life.group),
    ("sibling", pa.int32(), lambda life: life.sibling),
    ("purpose", pa.string(), lambda life: life.purpose),
    ("row_index", pa.int64(), lambda life: life.row_index),
    ("replica", pa.string(), lambda life: life.placement.replica),  # the latest
    ("replicas", pa.list_(pa.string()), lambda life: [p.replica for p in life.placements]),
    ("version", pa.int64(), lambda life: life.placement.version),
    ("version_step", pa.int64(), lambda life: life.placement.step),
    ("attempts", pa.int32(), lambda life: life.placement.attempt),
    ("placements", pa.int32(), lambda life: life.placement.number),
    ("dispatched", TIME, lambda life: _to_us(life.placements[0].dispatched)),
    ("started", TIME, lambda life: _to_us(life.placement.started)),  # of the last placement
    ("finished", TIME, lambda life: _to_us(life.finished)),
    ("rewarded", TIME, lambda life: _to_us(life.rewarded)),
    ("chosen", TIME, lambda life: _to_us(life.chosen)),
    ("ended", TIME, lambda life: _to_us(life.ended)),
    ("tokens", pa.int64(), lambda life: life.num_tokens),
    ("tokens_lost", pa.int64(), lambda life: life.tokens_lost),
    ("finish_reason", pa.string(), lambda life: life.finish_reason or None),
    ("reward", pa.float64(), lambda life: life.reward),
    ("reward_reason", pa.string(), lambda life: life.reward_reason or None),
    ("end", pa.string(), lambda life: life.end or None),  # trained | evaluated | dropped | null
    ("end_reason", pa.string(), lambda life: life.end_reason or None),
    ("step", pa.int64(), _get_step),  # that trained it, from 1, or completed before its evaluation
    ("staleness", pa.int64(), _get_staleness),  # of trained trajectories
)
SCHEMAS["trajectories"] = pa.schema([(name, kind) for name, kind, _ in TRAJECTORY_COLUMNS])


def _build_trajectory_row(life: TrajectoryHistory) -> Row:
    return tuple(get_value(life) for _, _, get_value in TRAJECTORY_COLUMNS)


def export_tables(run_dir: Path, directory: Path, *, force: bool = False) -> dict[str, int]:
    """Write the tables; return the number of rows by table name."""
    paths = {name: directory / f"{name}.parquet" for name in SCHEMAS}
    present = [path for path in paths.values() if path.exists()]
    if present and not force:
        raise ConfigError(f"{present[0]} exists: name another directory, or add --force")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return _write_tables(run_dir, paths)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}") from error


def _write_tables(run_dir: Path, paths: dict[str, Path]) -> dict[str, int]:
    """Write all tables under temporary names; rename them once all are complete."""
    with ExitStack() as stack:
        tables = {}
        for name, path in paths.items():
            tables[name] = _Table(path, SCHEMAS[name])
            stack.callback(tables[name].discard)
        exporter = _Exporter(*(table.add for table in tables.values()))
        replay_log(run_dir, exporter)
        exporter.finish()
        for table in tables.values():
            table.close()
        for table in tables.values():
            rename(table.new, table.path, durable=False)
    return {name: table.rows for name, table in tables.items()}


class _Table:
    """Parquet file that grows by row groups under a temporary name."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.rows = path, 0
        self.new = path.with_name(f".{path.name}.{os.getpid()}")
        self._schema = schema
        self._rows: list[Row] = []
        self._writer = pq.ParquetWriter(self.new, schema, compression="zstd")

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self.rows += 1
        if len(self._rows) >= ROW_GROUP:
            self._write()

    def close(self) -> None:
        self._write()
        self._writer.close()

    def discard(self) -> None:
        """Remove the temporary file if it is unfinished."""
        self._writer.close()
        self.new.unlink(missing_ok=True)

    def _write(self) -> None:
        columns = list(zip(*self._rows, strict=True)) or [()] * len(self._schema)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._rows.clear()


class _Exporter:
    """Replay observer that builds the rows."""

    def __init__(
        self,
        add_event: Callable[[Row], None],
        add_decision: Callable[[Row], None],
        add_trajectory: Callable[[Row], None],
    ) -> None:
        self._add_event, self._add_decision = add_event, add_decision
        self._add_trajectory = add_trajectory
        self._moments, self._lives = EventClock(), HistoryTracker()

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        now = self._moments.locate_event(stamped)
        place = (stamped.seq, stamped.time_ns, _to_us(now))
        sender = (stamped.peer, stamped.incarnation, stamped.peer_seq)
        self._add_event((*place, *sender, get_tag(stamped.event), _encode_json(stamped.event)))
        for index, command in enumerate(commands):
            row = (stamped.seq, index, get_tag(command), command.to, _encode_json(command))
            self._add_decision(row)
        for what, life in self._lives.record_event(now, stamped.event, commands, state):
            if what == Stage.ENDED:
                self._add_trajectory(_build_trajectory_row(life))

    def finish(self) -> None:
        """Add the trajectories that have not ended."""
        for life in self._lives.open.values():
            self._add_trajectory(_build_trajectory_row(life))


def _encode_json(message: Event | Command) -> str:
    return msgspec.json.encode(message).decode()
