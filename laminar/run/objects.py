"""Python objects and rows that a program passes to a run: kept in files of the run directory.

Reads   functions, classes and rows of this process
Writes  a temporary folder (ObjectFolder), which becomes RUN/objects
Gives   ObjectFolder; take_objects and write_config, which name its files in config.toml
Raises  ConfigError, which names the argument, the captured object and the fix

A function or class that can be imported is not stored: the config names its file. Others are stored
by cloudpickle. A line before the pickle has the folders of the program's sys.path, where the
modules are that the object refers to.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import msgspec

from laminar.config import Config, ConfigError, dump_config
from laminar.config.paths import OBJECTS, replace_prefix
from laminar.run.directory import CONFIG_FILE, OBJECTS_DIR, run_config
from laminar.run.renames import sync, write_whole
from laminar.run.user_import import SUFFIX, module_name


class ObjectFolder:
    """Temporary folder for the objects of one run, until its directory exists."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="laminar-"))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def describe(self, text: str) -> str:
        """Return a message with the program's names in place of the folder's files."""
        text = re.sub(rf"{re.escape(str(self.path))}/(\w+)\.parquet", r"\1_dataset", text)
        return text.replace(f"{self.path}/", "")

    def name_object(self, argument: str, value: Any) -> tuple[str, str]:
        """Return the file and the name by which processes load the function or class."""
        if isinstance(value, str):
            path, _, name = value.rpartition(":")
            if path:
                return path, name
        elif callable(value):
            return find_file(value) or self._store(argument, value)
        raise ConfigError(
            f"{argument} has {value!r}: give a function, a class, or its name as path.py:name or "
            "module:name"
        )

    def _store(self, argument: str, value: Any) -> tuple[str, str]:
        import cloudpickle  # only for programs that pass such objects

        named = value.func if isinstance(value, partial) else value
        name = re.sub(r"\W", "", getattr(named, "__name__", type(named).__name__)) or "function"
        while (path := self.path / f"{name}{SUFFIX}").exists():
            name += "_2"
        try:
            data = cloudpickle.dumps(value)
        except Exception as error:  # pickle raises whatever a __reduce__ raises
            captured = _find_captured(value, set()) or "an object"
            raise ConfigError(
                f"{argument} has {name}, which the processes of the run cannot load: it holds "
                f"{captured} ({str(error).splitlines()[0]}); create that inside the function"
            ) from None
        path.write_bytes(json.dumps(_list_folders()).encode() + b"\n" + data)
        return str(path), name

    def write_rows(self, argument: str, rows: Any) -> list[str]:
        """Write rows to one parquet file, unless they are paths already; return the files."""
        paths = [rows] if isinstance(rows, str | Path) else rows
        if isinstance(paths, list | tuple) and paths and isinstance(paths[0], str | Path):
            return [str(path) for path in paths]
        path = self.path / f"{argument.removesuffix('_dataset')}.parquet"
        if hasattr(rows, "to_parquet"):  # of pandas or datasets, which Laminar does not import
            rows.to_parquet(str(path), **({"index": False} if hasattr(rows, "iloc") else {}))
        else:
            _write_table(argument, rows, path)
        return [str(path)]


def find_file(value: Any) -> tuple[str, str] | None:
    """Return the file and name of a function or class of an importable module, else None."""
    name, module = getattr(value, "__qualname__", "."), getattr(value, "__module__", None)
    found = sys.modules.get(module or "")
    file = str(getattr(found, "__file__", None) or "")
    if module == "__main__" or not name.isidentifier() or not file.endswith(".py"):
        return None
    is_same = getattr(found, name, None) is value and module_name(Path(file))[1] == module
    return (os.path.realpath(file), name) if is_same else None


def take_objects(source: Path, run_dir: Path) -> None:
    """Copy a folder of objects, if there are any, into a new run, whose config names them."""
    if not source.is_dir() or not any(source.iterdir()):
        return
    target = run_dir / OBJECTS_DIR
    target.mkdir()
    for path in source.iterdir():
        write_whole(target / path.name, path.read_bytes(), durable=True)
    sync(run_dir)
    write_config(run_config(run_dir), run_dir, source)


def write_config(config: Config, run_dir: Path, source: Path | None = None) -> None:
    """Write config.toml; paths below `source`, or RUN/objects, begin with OBJECTS.

    So they are the same in a run that was moved."""
    tree = msgspec.to_builtins(config)
    for folder in (source, run_dir.resolve() / OBJECTS_DIR):
        tree = replace_prefix(tree, f"{folder}/", OBJECTS)
    text = dump_config(msgspec.convert(tree, Config))
    write_whole(run_dir / CONFIG_FILE, text.encode(), durable=True)


def _list_folders() -> list[str]:
    """Return the folders of sys.path that belong to the program, not to the installation."""
    own = [os.path.abspath(folder) for folder in sys.path]
    return [f for f in own if os.path.isdir(f) and not f.startswith((sys.prefix, sys.base_prefix))]


def _find_captured(value: Any, seen: set[int]) -> str:
    """Return the innermost captured object that cannot be stored: its name and type."""
    for name, part in _list_parts(value):
        if id(part) not in seen and not _can_store(part):
            seen.add(id(part))
            return _find_captured(part, seen) or f"{name!r}, a {type(part).__name__}"
    return ""


def _list_parts(value: Any) -> Iterator[tuple[object, Any]]:
    """Yield the objects that a function or another object refers to, by name."""
    if isinstance(value, MethodType):
        yield from _list_parts(value.__self__)
        value = value.__func__
    if isinstance(value, FunctionType):
        captured = inspect.getclosurevars(value)
        yield from {**captured.globals, **captured.nonlocals}.items()
    elif isinstance(value, partial):
        yield from (("func", value.func), *enumerate(value.args), *value.keywords.items())
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _can_store(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _write_table(argument: str, rows: Any, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    if not isinstance(rows, pa.Table):
        rows = _build_table(argument, rows)
    try:
        pyarrow.parquet.write_table(rows, path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{argument} cannot be written as parquet: {error}") from None


def _build_table(argument: str, rows: Any) -> Any:
    import pyarrow as pa

    if not hasattr(rows, "__len__") or isinstance(rows, Mapping):
        raise ConfigError(
            f"{argument} is a {type(rows).__name__} without a number of rows; give a list of "
            "dicts, a table, a datasets.Dataset, or the path of a .jsonl or .parquet file"
        )
    found = [rows[index] for index in range(len(rows))]
    if wrong := next((row for row in found if not isinstance(row, Mapping)), None):
        raise ConfigError(f"{argument} has the row {wrong!r}; each row is a dict of its columns")
    columns = {}
    for name in dict.fromkeys(name for row in found for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in found])
        except (pa.ArrowException, OverflowError) as error:
            raise ConfigError(
                f"{argument} has the column {name!r}, whose values have no common type: {error}; "
                "give them one, or write the rows to a .jsonl file"
            ) from None
    return pa.table(columns)
