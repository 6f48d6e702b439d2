"""Files of the tables: one Parquet file each, written by row groups.

Writes  DIR/TABLE.parquet
Gives   TableWriter; SCHEMAS, the Arrow schema of each table; build_batch, of rows
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from laminar.analysis.facts.tables import TABLES, Row

ROW_GROUP = 50_000  #: rows held before they are written: some 20 MB of events
KINDS = {
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "bool": pa.bool_(),
    "texts": pa.list_(pa.string()),
    "timestamp": pa.timestamp("us"),
}
CALLS = "tool_calls"  #: read from the store where it is needed, since its rows change
SCHEMAS = {
    table.name: pa.schema([(column.name, KINDS[column.kind]) for column in table.columns])
    for table in TABLES.values()
}


def build_batch(name: str, rows: Sequence[Row]) -> pa.RecordBatch:
    """Build a batch of rows of this table."""
    schema = SCHEMAS[name]
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


class TableWriter:
    """Rows of all tables on their way to files."""

    def __init__(self, directory: Path) -> None:
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._files = {
            name: pq.ParquetWriter(get_table_path(directory, name), schema, compression="zstd")
            for name, schema in SCHEMAS.items()
            if name != CALLS
        }

    def add(self, name: str, row: Row) -> None:
        rows = self._rows[name]
        rows.append(row)
        if len(rows) >= ROW_GROUP:
            self._write(name)

    def close(self) -> None:
        """Write what is left."""
        for name, file in self._files.items():
            self._write(name)
            file.close()

    def _write(self, name: str) -> None:
        if self._rows[name]:
            self._files[name].write_batch(build_batch(name, self._rows[name]))
            self._rows[name] = []


def get_table_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.parquet"
