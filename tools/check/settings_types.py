"""mypy plugin: the types of the fields of `Settings`, which are made from the declared keys.

Reads   laminar.events.base.Settings, as it is at run time
Gives   each field's type to mypy, and an error for a field that no key declares
"""

from __future__ import annotations

from functools import partial
from typing import get_type_hints

from mypy.plugin import AttributeContext, Plugin, ReportConfigContext
from mypy.types import Type

from laminar.events.base import Settings

CLASS = f"{Settings.__module__}._Declared"
TYPES = {name: kind for name, kind in get_type_hints(Settings).items() if isinstance(kind, type)}


class SettingsPlugin(Plugin):
    def get_attribute_hook(self, fullname: str) -> partial[Type] | None:
        owner, _, name = fullname.rpartition(".")
        return partial(find_type, name) if owner == CLASS else None

    def report_config_data(self, ctx: ReportConfigContext) -> list[str]:
        """Let mypy check again what was checked with other fields."""
        return sorted(f"{name}: {kind.__name__}" for name, kind in TYPES.items())


def find_type(name: str, context: AttributeContext) -> Type:
    """Return the type of a field that a key declares."""
    if name in TYPES:
        return context.api.named_generic_type(f"builtins.{TYPES[name].__name__}", [])
    if name not in dir(Settings):
        context.api.fail(f"no key of the config tree decides {name!r}", context.context)
    return context.default_attr_type


def plugin(version: str) -> type[Plugin]:
    return SettingsPlugin
