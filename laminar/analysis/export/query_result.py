"""Results of queries, as text or as a file.

Writes  the terminal; or a file, renamed once it is complete
Gives   write_result, as a table, csv, json or parquet
Raises  ConfigError for a file that cannot be written
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from laminar.config import ConfigError
from laminar.run.renames import get_temp_path, rename


def write_result(table: pa.Table, kind: str, output: Path | None, terminal: TextIO) -> None:
    """Write a result to a file, or to the terminal."""
    if output is None:
        return _write_text(table, kind, terminal)
    new = get_temp_path(output)
    try:
        if kind == "parquet":
            pq.write_table(table, new, compression="zstd")
        else:
            with open(new, "w", newline="", encoding="utf-8") as file:
                _write_text(table, kind, file)
        rename(new, output, durable=False)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    finally:
        new.unlink(missing_ok=True)


def _write_text(table: pa.Table, kind: str, file: TextIO) -> None:
    names = table.column_names
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    if kind == "json":
        lines = (json.dumps(dict(zip(names, row, strict=True)), default=str) for row in rows)
        file.write("[" + ",\n ".join(lines) + "]\n")
    elif kind == "csv":
        csv.writer(file, lineterminator="\n").writerows([names, *rows])
    else:
        file.writelines(_align_columns(table.schema, rows))


def _align_columns(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> Iterator[str]:
    """Yield the lines of a table, with numbers on the right of their columns."""
    shown = [schema.names, *([_show_value(value) for value in row] for row in rows)]
    kinds = pa.types
    places = [
        (kinds.is_integer(field.type) or kinds.is_floating(field.type), max(map(len, column)))
        for field, column in zip(schema, zip(*shown, strict=True), strict=True)
    ]
    for row in shown:
        cells = zip(row, places, strict=True)
        line = "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, (right, width) in cells
        )
        yield line.rstrip() + "\n"


def _show_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
