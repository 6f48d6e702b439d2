"""configs/reference.toml: every key with its default, its choices and its text, as declared.

    python -m tools.make.reference_toml > configs/reference.toml

Reads   laminar/config/tree.py
Gives   the file as text; a test compares it with the one on disk
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from laminar.config import Config, known_keys
from laminar.config.keys import Key, list_sections

WIDTH = 100
HEAD = """\
# Every key of a Laminar configuration, with its default and what it means.
# Made by `python -m tools.make.reference_toml` from laminar/config/tree.py.
# A run needs model.name and one of data.dataset and data.train_files; all other keys are optional.
# Files are combined from left to right, then `key=value` of the command line: the last one wins.
"""
ADVANCED = ("weights", "coordinator", "repack", "recovery", "emulation")
ADVANCED_HEAD = "# ---- Advanced: the defaults of these sections fit almost every run. ----"


def text() -> str:
    """Return the file: keys without a section first, each section, the advanced ones last."""
    defaults = msgspec.to_builtins(Config())
    lines = [HEAD]
    for section, struct in sorted(list_sections().items(), key=lambda item: item[0] in ADVANCED):
        if section == ADVANCED[0]:
            lines += ["", ADVANCED_HEAD]
        if section:
            lines += ["", *_comment(inspect.cleandoc(struct.__doc__ or "")), f"[{section}]"]
        lines += _keys(section, defaults)
    return "\n".join(lines) + "\n"


def _keys(section: str, defaults: Any) -> Iterator[str]:
    """Yield the lines of the keys that are directly in a section."""
    for part in filter(None, section.split(".")):
        defaults = defaults[part]
    for key, declared in known_keys().items():
        parent, _, name = key.rpartition(".")
        if parent == section:
            yield from _lines(f"{name} = {json.dumps(defaults[name])}", declared)


def _lines(setting: str, declared: Key) -> list[str]:
    """Return a setting with its text behind it where that fits, else above it."""
    kind = declared.kind
    if isinstance(kind, msgspec.inspect.ListType):
        kind = kind.item_type
    words = kind.values if isinstance(kind, msgspec.inspect.LiteralType) else ()
    help = ": ".join(filter(None, [" | ".join(map(str, words)), declared.help]))
    line = f"{setting}  # {help}"
    return [line] if len(line) <= WIDTH else [*_comment(help), setting]


def _comment(words: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(words, WIDTH - 2, break_on_hyphens=False)]


if __name__ == "__main__":
    print(text(), end="")
