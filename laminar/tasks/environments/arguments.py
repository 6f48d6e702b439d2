"""Conversion of a call's arguments to the types of the tool's schema.

Reads   the arguments, the JSON schema of the tool's parameters
Gives   convert_arguments; raises ValueError for one of another type, with a text for the policy

Models write "1" for 1; a tool that adds would join the texts, and no one would see it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def convert_arguments(
    arguments: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with the types of the schema; raise ValueError."""
    known, required = parameters.get("properties", {}), parameters.get("required") or ()
    return {
        name: value
        if value is None and name not in required
        else _convert(name, value, known.get(name, {}))
        for name, value in arguments.items()
    }


def list_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows; empty: any. Also takes values that are not schemas."""
    kinds = schema.get("type", []) if isinstance(schema, Mapping) else []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    kinds = [kind for kind in kinds if isinstance(kind, str)]
    return [*kinds, "null"] if kinds and schema.get("nullable") else kinds


def _convert(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kinds = list_types(schema)
    if any(kind not in _TYPES for kind in kinds) or not kinds:
        return value
    for candidate in (value, *_read_alternatives(value, kinds)):
        if any(_is_of(candidate, kind) for kind in kinds):
            if isinstance(candidate, list):
                return [_convert(name, item, schema.get("items", {})) for item in candidate]
            return candidate
    raise ValueError(
        f"the argument {name!r} must be of the type {' or '.join(kinds)}, not {reprlib.repr(value)}"
    )


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _read_alternatives(value: Any, kinds: Sequence[str]) -> list[Any]:
    """Return other values that the policy may have meant."""
    if isinstance(value, float) and value.is_integer():
        return [int(value), json.dumps(value)]
    if isinstance(value, int | float):
        return [json.dumps(value)]
    if not isinstance(value, str):
        return []
    text = value.strip().lower() if "boolean" in kinds else value
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []
