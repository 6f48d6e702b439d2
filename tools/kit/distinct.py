"""A message of any struct type in which every field has a value of its own, made from the types.

Reads   a struct type, with the bounds that stand at its fields
Gives   `distinct`: no two plain values are equal (but for truth values and words of small sets),
        and no field equals its default; `kinds_of`, the types of a union
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterator
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from laminar.weights.version.manifest import Draft, Probe, unseal
from tools.kit.manifest_samples import PROBE, build

Struct = TypeVar("Struct")

RULED: dict[type[Any], Any] = {Probe: PROBE, Draft: unseal(build())}
"""An example of each type whose fields have a rule between them."""


def kinds_of(union: Any) -> tuple[type[Any], ...]:
    """The members of a union of structs; a struct by itself is one."""
    is_union = typing.get_origin(union) in (UnionType, typing.Union)
    return typing.get_args(union) if is_union else (union,)


def distinct(kind: type[Struct]) -> Struct:
    """Of a struct or named tuple."""
    made = _made(inspect.type_info(kind), itertools.count(2))
    assert isinstance(made, kind)
    return made


def _made(info: inspect.Type, numbers: Iterator[int]) -> Any:
    """A value of this type; each plain one takes the next of the numbers."""
    if isinstance(info, inspect.StructType):
        if info.cls in RULED:
            return RULED[info.cls]
        values = {field.name: _field(field, numbers) for field in info.fields}
        return info.cls(**values)
    if isinstance(info, inspect.NamedTupleType | inspect.DataclassType):
        return info.cls(**{field.name: _field(field, numbers) for field in info.fields})
    if isinstance(info, inspect.UnionType):
        some = next(t for t in info.types if not isinstance(t, inspect.NoneType))
        return _made(some, numbers)
    if isinstance(info, inspect.Metadata):
        return _made(info.type, numbers)
    if isinstance(info, inspect.VarTupleType):
        return tuple(_made(info.item_type, numbers) for _ in range(2))
    if isinstance(info, inspect.TupleType):
        return tuple(_made(item, numbers) for item in info.item_types)
    if isinstance(info, inspect.ListType):
        return [_made(info.item_type, numbers) for _ in range(2)]
    if isinstance(info, inspect.DictType):
        return {_made(info.key_type, numbers): _made(info.value_type, numbers) for _ in range(2)}
    return _plain(info, next(numbers))


def _field(field: inspect.Field, numbers: Iterator[int]) -> Any:
    """Of the field, and not its default."""
    value = _made(field.type, numbers)
    while field.default is not msgspec.NODEFAULT and value == field.default:
        value = not value if isinstance(value, bool) else _made(field.type, numbers)
    return value


def _plain(info: inspect.Type, number: int) -> Any:
    if isinstance(info, inspect.IntType):
        return number
    if isinstance(info, inspect.FloatType):
        return number + 0.5
    if isinstance(info, inspect.StrType):
        texts = (f"text-{number}", f"{number:032x}")
        return next(text for text in texts if re.search(info.pattern or "", text))
    if isinstance(info, inspect.BytesType):
        return (b"bytes-%d" % number).ljust(info.min_length or 0, b".")
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.EnumType):
        words: list[Enum] = list(info.cls)
        return words[number % len(words)]
    if isinstance(info, inspect.LiteralType):
        return info.values[number % len(info.values)]
    if isinstance(info, inspect.RawType):
        return msgspec.Raw(msgspec.msgpack.encode({"raw": number}))
    if isinstance(info, inspect.AnyType):
        return {"any": [number]}
    raise AssertionError(f"{info}: say here what a value of it is")
