"""Absolute paths for settings, so that every process, and a later reader, finds the same file.

Reads   the keys that are declared as paths (tree.py); whether a path exists
Gives   make_absolute
Raises  ConfigError for a path of a config file that does not exist

A path in a config file is resolved against the directory of that file, then against the working
directory; a path on a command line against the working directory only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from laminar.config.keys import ConfigError, Key

HUB_MODEL = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?")
"""A model on the Hugging Face hub; a directory of that name takes precedence."""
HUB_FILE = "hf://"
OBJECTS = "./objects/"
"""Beginning of a path in a run's config.toml to a file of the run (run/user_code.py)."""


def make_absolute(key: str, value: Any, declared: Key, file: Path | None, *, must_be: bool) -> Any:
    """Return a checked value with absolute paths; `file` is its config file, if any."""

    def found(form: str, name: str) -> str:
        path, colon, function = name.rpartition(":") if form == "code:name" else (name, "", "")
        if not path or Path(path).is_absolute() or path.startswith(HUB_FILE):
            return name
        here = Path.cwd()
        places = [here] if file is None else list(dict.fromkeys([file.parent.resolve(), here]))
        for place in places:
            if (joined := place / path).exists() and (form != "word" or joined.is_file()):
                joined = joined.parent.resolve() / joined.name if ".." in path else joined
                return f"{joined}{colon}{function}"
        if form == "word":  # of a command line
            return name
        if form.startswith("code") and (module := find_module(path)):
            return f"{module}{colon}{function}"
        if file is None or not must_be or (form == "model" and HUB_MODEL.fullmatch(path)):
            return name
        where = " nor in ".join(map(str, places))
        neither = "neither " if len(places) > 1 else "not "
        fix = "correct the path, or start in the directory that has it"
        if key.startswith("data.") and (prepare := file.parent / "prepare.py").is_file():
            fix = f"make it with python {prepare}"
        raise ConfigError(f"{file}: {key} = {name!r} is {neither}in {where}; {fix}")

    return _replace_paths(value, inspect.type_info(declared.annotation), found)


def find_module(name: str) -> Path | None:
    """Return the file of a module, without an import of its packages; None if there is none."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    places = [Path(folder, *parts) for folder in (str(Path.cwd()), *sys.path)]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file.resolve() for file in files if file.is_file()), None)


def replace_prefix(value: Any, old: str, new: str) -> Any:
    """Return the value with every string in it that begins with `old` begun with `new`."""
    if isinstance(value, str):
        return new + value.removeprefix(old) if value.startswith(old) else value
    if isinstance(value, list):
        return [replace_prefix(part, old, new) for part in value]
    if isinstance(value, dict):
        return {name: replace_prefix(part, old, new) for name, part in value.items()}
    return value


def _replace_paths(value: Any, kind: inspect.Type, found: Callable[[str, str], str]) -> Any:
    """Return `value` with each path replaced, where `kind` is its part of the declaration."""
    if isinstance(kind, inspect.Metadata):
        form = (kind.extra or {}).get("path")
        if form is None:
            return _replace_paths(value, kind.type, found)
        return [found(form, v) for v in value] if isinstance(value, list) else found(form, value)
    if not isinstance(kind, inspect.ListType) or not isinstance(kind.item_type, inspect.StructType):
        return value
    fields = kind.item_type.fields
    return [
        msgspec.structs.replace(
            entry, **{f.name: _replace_paths(getattr(entry, f.name), f.type, found) for f in fields}
        )
        for entry in value
    ]
