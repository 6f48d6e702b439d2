"""A sample message of any type, made from the types of its fields.

Reads   a struct type
Gives   `sample`: an instance with every field, including optional ones; `field_types`
"""

from __future__ import annotations

import functools
import typing
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)

_PLAIN: dict[Any, Any] = {bool: True, int: 1, float: 0.5, str: "x"}


def sample(kind: type[Struct], **known: Any) -> Struct:
    """Return a message with these fields, and sample values in the others."""
    return kind(
        **{
            name: known[name] if name in known else sample_value(hint)
            for name, hint in field_types(kind).items()
        }
    )


@functools.cache
def field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def sample_value(hint: Any) -> Any:
    """Return a value of this type: the last word of an enumeration, one element of a sequence."""
    hint = getattr(hint, "__supertype__", hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return (sample_value(inner[0]),)
    if origin is dict:
        return {sample_value(inner[0]): sample_value(inner[1])}
    if origin in (UnionType, typing.Union):
        return sample_value(inner[0])
    if issubclass(hint, Enum):
        return list(hint)[-1]
    return sample(hint)
