"""Code of the user: how it is named, stored and imported.

Reads   the user's Python file; RUN/objects/NAME.pkl; functions, classes and rows of this process
Writes  a temporary folder (ObjectFolder), which becomes RUN/objects; config.toml of a run
Gives   UserFunction, load_user_function; import_file; ObjectFolder, for what a program passes to
        its run; take_objects and write_config, which name these files in config.toml
Raises  ConfigError, which names the setting or argument, the file or captured object, and the fix

A function or class that can be imported is named by its file. Others are stored by cloudpickle. A
file NAME.pkl is code of the user, as path.py is, and refused if other users can write it; nothing
else is unpickled. A line before the pickle has the folders of sys.path with the program's modules.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

from laminar.config import Config, ConfigError, dump_config
from laminar.config.paths import OBJECTS, replace_prefix
from laminar.run.directory import CONFIG_FILE, OBJECTS_DIR, run_config
from laminar.run.permissions import OTHERS_WRITE
from laminar.run.renames import sync, write_whole
from laminar.run.user_file import describe_error, digest_file

SUFFIX = ".pkl"  #: of a stored object


class UserFunction:
    """A user function; its exceptions are reported as the user's mistakes."""

    def __init__(self, key: str, path: Path, name: str, function: Callable[..., Any]) -> None:
        self.key, self.path, self.name = key, path, name
        self.digest = digest_file(path)
        self.function = function

    def __str__(self) -> str:
        return f"{self.key}: {self.name} of {self.path}"

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; ConfigError with its exception and line."""
        try:
            return self.function(*arguments)
        except Exception as error:
            raise ConfigError(
                f"{self} raised {describe_error(error, str(self.path))}; correct it"
            ) from error


def load_user_function(key: str, reference: str, names: Iterable[str] = ()) -> UserFunction:
    """Import the function that setting `key` names; `names`: valid built-in names. ConfigError."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        words = ", ".join(names)
        other = f"neither one of {words} nor" if words else "not"
        raise ConfigError(f"{key} = {reference!r} is {other} an existing file as path.py:function")
    try:
        module = import_file(path, what="function")
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{key}: {path} has no {name!r}; name one of its functions")
    if not callable(function):
        raise ConfigError(f"{key}: {name} in {path} is not a function")
    return UserFunction(key, path, name, function)


def import_file(
    path: Path,
    *,
    what: str = "reward",
    keys: str = "reward.custom_reward_function or reward.functions",
) -> ModuleType:
    """Import the user's file for a `what`, named by a setting of `keys`; raise ConfigError."""
    if not path.is_file():
        raise ConfigError(f"the {what}'s {str(path)!r} is not a file; correct the path in {keys}")
    try:
        return _load_module(path, f"laminar_user_{what}_{path.stem}")
    except ConfigError:  # a sandbox that the file asks for
        raise
    except (Exception, SystemExit) as error:
        said = describe_error(error, str(path))
        if path.suffix == SUFFIX:
            said += "; it was stored when the run began: restore the modules that it needs"
        raise ConfigError(f"{path} does not import: {said}") from None


def _load_module(path: Path, name: str) -> ModuleType:
    """Load a stored object, a module of a package, or a file, whose folder is searched last."""
    if path.suffix == SUFFIX:
        module = ModuleType(name)
        setattr(module, path.stem, _load_object(path))
        return module
    root, full_name = module_name(path)
    for folder in map(str, (path.resolve().parent, root)):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that a helper next to the file shadows no library
    if "." in full_name:  # has relative imports
        with suppress(ModuleNotFoundError):  # another package has the name of its package
            inner = importlib.util.find_spec(full_name)
            if inner is not None and inner.origin == str(path.resolve()):
                return importlib.import_module(full_name)
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ConfigError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def module_name(file: Path) -> tuple[Path, str]:
    """Return the folder on the search path and the module's name, by the packages around it."""
    parts = [] if file.stem == "__init__" else [file.stem]
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def _load_object(path: Path) -> Any:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS_WRITE:
        raise ConfigError(
            f"{path} can be written by other users (mode {mode:04o}), and loading it runs code: "
            f"check where it comes from, then chmod go-w {path}"
        )
    with path.open("rb") as file:
        sys.path += [folder for folder in json.loads(file.readline()) if folder not in sys.path]
        return pickle.load(file)  # noqa: S301


class ObjectFolder:
    """Temporary folder for the objects of one run, until its directory exists."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="laminar-"))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def name_object(self, argument: str, value: Any) -> tuple[str, str]:
        """Return the file and the name by which processes load it; no file for a built-in name."""
        if isinstance(value, str):
            path, _, name = value.rpartition(":")
            return path, name
        if callable(value):
            return find_file(value) or self._store(argument, value)
        raise ConfigError(f"{argument} has {value!r}: give a function, path.py:name or module:name")

    def _store(self, argument: str, value: Any) -> tuple[str, str]:
        named = value.func if isinstance(value, partial) else value
        name = re.sub(r"\W", "", getattr(named, "__name__", type(named).__name__)) or "function"
        while (path := self.path / f"{name}{SUFFIX}").exists():
            name += "_2"
        try:
            data = _pickle(value)
        except Exception as error:  # pickle raises whatever a __reduce__ raises
            captured = _find_captured(value, set()) or "an object"
            raise ConfigError(
                f"{argument} has {name}, which the processes of the run cannot load: it holds "
                f"{captured} ({str(error).splitlines()[0]}); create that inside the function"
            ) from None
        path.write_bytes(json.dumps(_list_folders()).encode() + b"\n" + data)
        path.chmod(0o600)  # whatever the umask
        return str(path), name

    def write_rows(self, argument: str, rows: Any) -> list[str]:
        """Write rows to one parquet file, unless they are paths already; return the files."""
        import pyarrow.parquet

        paths = [rows] if isinstance(rows, str | Path) else rows
        if isinstance(paths, list | tuple) and paths and isinstance(paths[0], str | Path):
            return [str(path) for path in paths]
        path = self.path / f"{argument}.parquet"
        if hasattr(rows, "to_parquet"):  # of pandas or datasets, which Laminar does not import
            rows.to_parquet(str(path), **({"index": False} if hasattr(rows, "iloc") else {}))
        else:
            pyarrow.parquet.write_table(_build_table(argument, rows), path)
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
    (run_dir / OBJECTS_DIR).mkdir()
    for path in source.iterdir():
        write_whole(run_dir / OBJECTS_DIR / path.name, path.read_bytes(), durable=True)
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
    for name, part in _list_parts(value).items():
        try:
            _pickle(part)
        except Exception:
            if id(part) not in seen:
                seen.add(id(part))
                return _find_captured(part, seen) or f"{name!r}, a {type(part).__name__}"
    return ""


def _list_parts(value: Any) -> dict[Any, Any]:
    """Return the objects that a function or another object refers to, by name."""
    if isinstance(value, FunctionType):
        captured = inspect.getclosurevars(value)
        return {**captured.globals, **captured.nonlocals}
    if isinstance(value, partial | MethodType):
        names = ("func", "args", "keywords", "__func__", "__self__")
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return dict(value if isinstance(value, Mapping) else getattr(value, "__dict__", {}))


def _pickle(value: Any) -> bytes:
    import cloudpickle  # only for programs that pass such objects

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # of an untyped class
        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, io.TextIOWrapper):  # cloudpickle would store its content
                raise TypeError("an open file cannot be stored")
            return super().reducer_override(part)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _build_table(argument: str, rows: Any) -> Any:
    import pyarrow as pa
    import pyarrow.parquet

    if isinstance(rows, pa.Table):
        return rows
    if not hasattr(rows, "__len__") or isinstance(rows, Mapping):
        raise ConfigError(
            f"{argument} is a {type(rows).__name__} without a number of rows; give a list of "
            "dicts, a table, a datasets.Dataset, or the path of a .jsonl or .parquet file"
        )
    found = list(rows) if hasattr(rows, "__iter__") else [rows[i] for i in range(len(rows))]
    if wrong := [row for row in found if not isinstance(row, Mapping)]:
        raise ConfigError(f"{argument} has the row {wrong[0]!r}; each row is a dict of its columns")
    columns = {}
    for name in dict.fromkeys(name for row in found for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in found])
            pyarrow.parquet.write_table(pa.table({name: columns[name]}), io.BytesIO())
        except (pa.ArrowException, OverflowError) as error:
            raise ConfigError(
                f"{argument} has the column {name!r}, whose values have no common type: {error}; "
                "give them one, or the path of a .jsonl file"
            ) from None
    return pa.table(columns)
