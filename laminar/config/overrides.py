"""Settings of a command line: `key=value`, with a TOML value or a list in Hydra's syntax.

Gives   parse_override: the key and the value
Raises  ConfigError, which names the setting

A shell removes quotes around words, so `trainer.logger=[wandb]` and
`data.apply_chat_template_kwargs={enable_thinking:false}` are lists and tables of words, too.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from laminar.config.keys import ConfigError, can_take_words, known_keys

_QUOTED = re.compile(r"""\s*(?P<quote>["'])(?P<text>(?:\\.|(?!(?P=quote)).)*)(?P=quote)\s*""", re.S)
_BARE = re.compile(r"[^,\[\]{}:'\"]+")
_BARE_VALUE = re.compile(r"[^,\[\]{}'\"]+")
_CONSTANTS = {"true": True, "false": False}


def parse_override(text: str) -> tuple[str, Any]:
    """Parse a setting into its key and value; an unquoted word is a string."""
    key, sign, raw = text.partition("=")
    key = key.strip()
    if not sign or not key:
        raise ConfigError(f"override {text!r} is not of the form key=value")
    declared = known_keys().get(key)
    words = declared is not None and can_take_words(declared.kind)
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        listed = not words and raw.lstrip()[:1] in ("[", "{")
        return key, _HydraParser(text, raw).parse_all() if listed else raw
    # a name that looks like a number or a date is still a name
    return key, raw if words and not isinstance(value, str) else value


class _HydraParser:
    """Parser for lists and tables whose words need no quotes: [a, 'b c', {d: 1}]."""

    def __init__(self, setting: str, raw: str) -> None:
        self._setting, self._raw, self._at = setting, raw, 0

    def parse_all(self) -> Any:
        """Parse the whole text as one value."""
        found = self._parse_value()
        if self._raw[self._at :].strip():
            raise self._make_error("continues after its end")
        return found

    def _parse_value(self) -> Any:
        if self._take_sign("["):
            return list(self._parse_until("]", self._parse_value))
        if self._take_sign("{"):
            return dict(self._parse_until("}", self._parse_pair))
        return self._parse_word(_BARE_VALUE)

    def _parse_pair(self) -> tuple[str, Any]:
        name = str(self._parse_word(_BARE))
        if not self._take_sign(":"):
            raise self._make_error(f"has no ':' after {name!r}")
        return name, self._parse_value()

    def _parse_until(self, end: str, entry: Any) -> list[Any]:
        entries: list[Any] = []
        while not self._take_sign(end):
            if entries and not self._take_sign(","):
                raise self._make_error(f"has no ',' or {end!r} after {entries[-1]!r}")
            entries.append(entry())
        return entries

    def _parse_word(self, bare: re.Pattern[str]) -> Any:
        if quoted := _QUOTED.match(self._raw, self._at):
            self._at = quoted.end()
            return re.sub(r"\\(.)", r"\1", quoted["text"], flags=re.S)
        found = bare.match(self._raw, self._at)
        if found is None or not found[0].strip():
            raise self._make_error("lacks a word")
        self._at = found.end()
        return _convert_word(found[0].strip())

    def _take_sign(self, sign: str) -> bool:
        """Return whether that sign comes next, and skip it if so."""
        while self._raw[self._at : self._at + 1].isspace():
            self._at += 1
        there = self._raw.startswith(sign, self._at)
        self._at += len(sign) if there else 0
        return there

    def _make_error(self, what: str) -> ConfigError:
        return ConfigError(
            f"setting {self._setting!r} {what}; a list is [a,b], a table {{name:value}}, and a "
            "word with one of these characters needs quotes"
        )


def _convert_word(word: str) -> Any:
    """Convert a word to a number or truth value, if it is one."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
