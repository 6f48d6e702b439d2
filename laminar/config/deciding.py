"""The values of a config that decisions depend on, by their names in the event log.

Reads   the marks of keys, and of properties of several keys, in tree.py and its neighbours
Gives   Decides, the mark; list_fields and list_values, for `Settings` in events/base.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgspec

from laminar.config.declaring import Section


class Decides(NamedTuple):
    """Mark of a key, or of the result of a property, that decisions depend on.

    The core has no floats: seconds become milliseconds, a share becomes thousandths."""

    name: str = ""  #: in the event log; empty: the key's, with _ms for _s
    #: value in logs without it, which keeps their decisions: for a key that is added later
    absent: Any = msgspec.NODEFAULT


@cache
def _list_marks(section: type[Section]) -> list[tuple[str, Decides, int]]:
    """Return the marked attributes of a section, with their full marks and units."""
    hints, found = get_type_hints(section, include_extras=True), []
    for name in dir(section):
        if isinstance(member := getattr(section, name), property):
            hints[name] = get_type_hints(member.fget, include_extras=True)["return"]
    for name, hint in hints.items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Decides):
                mark = mark._replace(name=mark.name or re.sub("_s$", "_ms", name))
                found.append((name, mark, 1_000 if hint.__origin__ is float else 1))
    return found


def _iter_marked(section: Section) -> Iterator[tuple[Section, Decides, Any]]:
    """Yield each marked value with its section and its mark."""
    for name, mark, unit in _list_marks(type(section)):
        value = getattr(section, name)
        yield section, mark, round(value * unit) if unit > 1 else value
    for name in section.__struct_fields__:
        if isinstance(part := getattr(section, name), Section):
            yield from _iter_marked(part)


def list_fields(config: Section) -> list[tuple[str, type, Any]]:
    """Return the name, type and default of each value, in the order of their encoding."""
    return [(mark.name, type(value), mark.absent) for _, mark, value in _iter_marked(config)]


def list_values(config: Section) -> dict[str, Any]:
    """Return the values by name, without those of sections that are not used."""
    return {
        mark.name: value for section, mark, value in _iter_marked(config) if config.uses(section)
    }
