"""Every key of the tree, its allowed values, and the message for a refused one.

Reads   the declarations of tree.py
Gives   known_keys; list_sections; check_value, a value converted to the declared type
Raises  ConfigError, which names the key, the value and the allowed values
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import inspect

from laminar.config.tree import Config

INT_MAX = (1 << 63) - 1  #: the maximum of every whole number: all encodings have room for it


class ConfigError(ValueError):
    """A mistake of the user: one sentence that names the key, the value and the fix."""


class Key(NamedTuple):
    """A setting, as it is declared."""

    annotation: Any  #: type that msgspec converts a value to
    kind: inspect.Type  #: inspected type: bounds, choices, parts
    help: str  #: description


@cache
def list_sections(root: type[Config] = Config) -> dict[str, type[msgspec.Struct]]:
    """Return the sections by dotted name, in the order of the tree; the root itself is ""."""
    found: dict[str, type[msgspec.Struct]] = {"": root}

    def walk(struct: type[msgspec.Struct], prefix: str) -> None:
        hints = get_type_hints(struct)
        for field in msgspec.structs.fields(struct):
            kind = hints[field.name]
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found[prefix + field.encode_name] = kind
                walk(kind, f"{prefix}{field.encode_name}.")

    walk(root, "")
    return found


@cache
def known_keys(root: type[Config] = Config) -> dict[str, Key]:
    """Return every dotted key with its declaration, in the order of the tree."""
    found: dict[str, Key] = {}
    for section, struct in list_sections(root).items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            key = f"{section}.{field.encode_name}".lstrip(".")
            if key not in list_sections(root):
                found[key] = _parse_declaration(hints[field.name])
    return found


def _parse_declaration(annotation: Any) -> Key:
    kind, text = inspect.type_info(annotation), ""
    if isinstance(kind, inspect.Metadata):
        text = (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return Key(annotation, kind, text)


def can_take_words(kind: inspect.Type) -> bool:
    """Return whether a typed string is taken literally, even `7` or `true`."""
    return isinstance(kind, inspect.StrType | inspect.LiteralType)


def check_value(key: str, value: Any, declared: Key) -> Any:
    """Convert a value to its declared type; refuse a value that the declaration does not allow."""
    kind = declared.kind
    if isinstance(kind, inspect.StrType) and type(value) in (int, float):
        value = str(value)  # run.name=7 on a command line is a name
    if isinstance(kind, inspect.ListType) and isinstance(value, str):
        value = [value] if value else []
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, float) and not math.isfinite(part):
            raise ConfigError(f"{key} = {value!r} is not a finite number")
        if isinstance(part, int) and part > INT_MAX:
            raise ConfigError(f"{key} = {value!r} is too large: it must be at most {INT_MAX}")
    try:
        return msgspec.convert(value, declared.annotation)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{key} = {value!r} is not allowed: it must be {describe_allowed(kind)}"
        ) from None


def describe_allowed(kind: inspect.Type) -> str:
    """Describe the allowed values in words."""
    match kind:
        case inspect.IntType():
            return "a whole number" + _describe_bounds(kind)
        case inspect.FloatType():
            return "a number" + _describe_bounds(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return _join_words([repr(value) for value in values], "or")
        case inspect.UnionType(types=types):
            return _join_words([describe_allowed(part) for part in types], "or")
        case inspect.ListType(item_type=inspect.StructType(fields=fields)):
            return f"a list of tables with {_join_words([f.encode_name for f in fields], 'and')}"
        case inspect.ListType(item_type=inspect.LiteralType() as words):
            return f"a list of {describe_allowed(words)}"
        case inspect.ListType():
            return "a list of strings"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)} numbers, each {describe_allowed(items[0])}"
        case inspect.StrType():
            return "a string"
    return "a table"


def _describe_bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    words = {"of at least": kind.ge, "above": kind.gt, "of at most": kind.le, "below": kind.lt}
    parts = [f"{word} {bound}" for word, bound in words.items() if bound is not None]
    return f" {' and '.join(parts)}" if parts else ""


def _join_words(words: list[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
