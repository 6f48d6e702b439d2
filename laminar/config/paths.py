"""Relative paths of settings, as absolute ones: every process, and a reader later, finds the same.

Reads   which keys are declared as paths (tree.py); whether something lies there
Gives   absolute
Raises  ConfigError for a path of a config file that leads nowhere

A path of a config file is looked for beside that file, then in the working directory; a path of a
command line in the working directory only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from laminar.config.keys import ConfigError, Key

HUB_MODEL = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?")
"""A model on the Hugging Face hub; a directory of that name goes before it."""
HUB_FILE = "hf://"


def make_absolute(key: str, value: Any, declared: Key, file: Path | None, *, must_be: bool) -> Any:
    """A checked value with its paths; `file`: the config file that it stands in, if it does."""

    def found(form: str, name: str) -> str:
        path, colon, function = name.rpartition(":") if form == "file:name" else (name, "", "")
        if not path or Path(path).is_absolute() or path.startswith(HUB_FILE):
            return name
        here = Path.cwd()
        places = [here] if file is None else list(dict.fromkeys([file.parent.resolve(), here]))
        for place in places:
            if (place / path).exists():
                return f"{place / path}{colon}{function}"
        if file is None or not must_be or (form == "model" and HUB_MODEL.fullmatch(path)):
            return name
        where = " nor in ".join(map(str, places))
        neither = "neither " if len(places) > 1 else "not "
        raise ConfigError(
            f"{file}: {key} = {name!r} is {neither}in {where}; correct the path, or start where it "
            "is"
        )

    return _replace_paths(value, inspect.type_info(declared.annotation), found)


def _replace_paths(value: Any, kind: inspect.Type, found: Callable[[str, str], str]) -> Any:
    """`value` with each path in it replaced, by the declaration of which `kind` is a part."""
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
