"""The values of a config that decisions depend on, by their names in the event log.

Reads   what tree.py and its neighbours mark with `decides`: keys, and properties of several keys
Gives   list_fields, from which events/base.py makes `Settings`; list_values of a config
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, get_type_hints

from msgspec import inspect

from laminar.config.declaring import Section
from laminar.config.keys import list_sections

_KINDS: dict[type, type] = {
    inspect.BoolType: bool, inspect.IntType: int, inspect.FloatType: int, inspect.StrType: str,
    inspect.LiteralType: str,
}  # fmt: skip
"""Types of the values: the core has no floats."""
_FIRST = (
    "seed", "groups_per_step", "group_size", "min_scored", "max_staleness", "groups_per_version",
    "total_steps", "total_epochs", "shuffle", "drop_last", "test_freq", "val_before_train",
    "batch_strategy", "reward_scope", "resume_timeout_ms", "batch_timeout_ms", "start_timeout_ms",
    "stall_ms", "engine_start_ms", "max_error_permille", "disk_full_timeout_ms", "eval_answers",
    "repack_policy", "repack_interval_ms", "repack_release_timeout_ms", "repack_prefill_tokens",
    "save_freq", "filter_metric", "filter_batches", "in_flight", "stream", "max_sessions",
    "turn_timeout_ms", "max_nonfinite_updates",
)  # fmt: skip
"""The order in which schema 5 hashes them; others follow in the order of the tree."""


class _Value(NamedTuple):
    name: str
    kind: type
    times: int
    absent: Any  #: NODEFAULT: every log has it


@cache
def _list_deciding(section: type[Section]) -> dict[str, _Value]:
    """Return the deciding keys and properties of a section by attribute."""
    found, hints = dict[str, _Value](), get_type_hints(section, include_extras=True)
    for attribute, member in vars(section).items():
        if isinstance(member, property):
            hints[attribute] = get_type_hints(member.fget, include_extras=True)["return"]
    for attribute, hint in hints.items():
        declared = inspect.type_info(hint)
        if isinstance(declared, inspect.Metadata) and "decides" in (declared.extra or {}):
            name, times, absent = (declared.extra or {})["decides"]
            kind = _KINDS[type(declared.type)]
            found[attribute] = _Value(name or attribute, kind, times, absent)
    return found


def list_fields() -> list[tuple[str, type, Any]]:
    """Return the name, type and default of each value, in the order of their encoding."""
    values = [
        value
        for section in list_sections().values()
        if issubclass(section, Section)
        for value in _list_deciding(section).values()
    ]
    values.sort(key=lambda value: _FIRST.index(value.name) if value.name in _FIRST else len(_FIRST))
    return [(value.name, value.kind, value.absent) for value in values]


def list_values(section: Section) -> dict[str, Any]:
    """Return the values of a config, or of a section, by name; one that is not used has none."""
    found = {}
    for attribute, value in _list_deciding(type(section)).items() if section.is_used else ():
        given = getattr(section, attribute)
        found[value.name] = round(given * value.times) if value.times > 1 else given
    for attribute in section.__struct_fields__:
        if isinstance(part := getattr(section, attribute), Section):
            found |= list_values(part)
    return found
