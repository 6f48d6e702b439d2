"""SQL over the facts of runs.

Reads   the tables of facts; of each Parquet file only the columns that a query names
Gives   query_facts
Raises  ConfigError for a missing DuckDB, and for a query that cannot run or is not one SELECT

A query sees the tables of facts only: DuckDB may neither open files nor load extensions, and its
configuration is locked, so that a query of another person is safe to run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from laminar.analysis.facts.reader import Facts
from laminar.analysis.facts.tables import RUN_TABLE, TABLES
from laminar.analysis.facts.writer import CALLS, KINDS, get_table_path
from laminar.config import ConfigError

INSTALL = 'pip install "laminar-rl[view]"'
SAFE = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "memory_limit": "2GB",
}
"""Settings of a connection; no Python variable is a table, and a query that needs more fails."""
LOCKS = ("temp_directory = ''", "enable_external_access = false", "lock_configuration = true")


def query_facts(facts: Sequence[Facts], query: str) -> pa.Table:
    """Run one SELECT; of several runs, every table has a column `run`."""
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(f"`laminar log sql` needs duckdb: install it with `{INSTALL}`") from error
    with duckdb.connect(config=SAFE) as connection:
        _register_tables(connection, facts, query)
        for setting in LOCKS:
            connection.execute(f"SET {setting}")
        try:
            kinds = [found.type for found in connection.extract_statements(query)]
            if kinds != [duckdb.StatementType.SELECT]:
                raise ConfigError(f"the query must be one SELECT, not {query.strip()!r}")
            return _simplify_types(connection.sql(query).to_arrow_table())
        except duckdb.Error as error:
            raise ConfigError(_describe_error(str(error))) from error


def _register_tables(connection: Any, facts: Sequence[Facts], query: str) -> None:
    names = _name_runs(facts)
    rows = [_describe_run(name, found) for name, found in zip(names, facts, strict=True)]
    schema = pa.schema([(column.name, KINDS[column.kind]) for column in RUN_TABLE.columns])
    connection.register(RUN_TABLE.name, pa.Table.from_pylist(rows, schema))
    for table in TABLES:
        if table == CALLS and table not in query.lower():
            continue  # they are read from the store
        parts = []
        for number, found in enumerate(facts):
            path = get_table_path(found.directory, table)
            rows_of_run = found.table(table) if table == CALLS else ds.dataset(path)
            part = f"_{number}_{table}" if len(facts) > 1 else table
            connection.register(part, rows_of_run)
            literal = names[number].replace("'", "''")
            parts.append(f"SELECT '{literal}' AS run, * FROM {part}")
        if len(facts) > 1:
            connection.execute(f"CREATE VIEW {table} AS {' UNION ALL '.join(parts)}")


def _name_runs(facts: Sequence[Facts]) -> list[str]:
    """Name runs by their directories, with the whole path where two have one name."""
    names = [found.run_dir.resolve().name for found in facts]
    unique = len(set(names)) == len(names)
    return names if unique else [str(found.run_dir) for found in facts]


def _describe_run(name: str, facts: Facts) -> dict[str, Any]:
    return {
        "run": name,
        "directory": str(facts.run_dir.resolve()),
        "started": facts.header.first_ns // 1000,
        "seconds": facts.seconds,
        "events": facts.events,
        "begins_at": facts.begins_at,
    }


def _simplify_types(table: pa.Table) -> pa.Table:
    """Turn the wide integers of sums into int64, or into floats where they are larger."""
    for place, field in enumerate(table.schema):
        if not pa.types.is_decimal(field.type):
            continue
        column = table.column(place)
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:
            column = column.cast(pa.float64())
        table = table.set_column(place, field.name, column)
    return table


def _describe_error(text: str) -> str:
    """Return an error of DuckDB as one sentence; name the nearest tables or columns."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if missing := re.search(r'Table with name "?([^"\s]+)"? does not exist', text):
        tables = [RUN_TABLE.name, *TABLES]
        near = difflib.get_close_matches(missing[1].lower(), tables, n=2, cutoff=0.5)
        which = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(tables)}"
        return f"there is no table {missing[1]}: {which}"
    what = re.sub(r"^[A-Z]\w+(?: \w+)? Error: ", "", lines[0]).rstrip("!")
    near = [line for line in lines[1:] if line.startswith("Candidate")]
    return "; ".join([f"the query cannot run: {what}", *near[:1]])
