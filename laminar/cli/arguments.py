"""Parser of the command line.

Reads   the words
Gives   CommandParser: argparse's, but every mistake is one sentence (ConfigError), options cannot
        be abbreviated, and a command may take settings of the config tree

Settings are `key=value`, `--key=value` or `--key value`, anywhere between the options. They keep
their order, and the last value of a key wins. A value may begin with a minus sign.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from laminar.config import ConfigError, is_key
from laminar.run.command_line import NAME, shell_command


class CommandParser(argparse.ArgumentParser):
    """Parser of every Laminar command and its subcommands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._aliases: dict[str, str] | None = None

    def error(self, message: str) -> NoReturn:
        words = self.prog.split()
        command = shell_command(*words[1:], "--help") if words[0] == NAME else f"{self.prog} --help"
        raise ConfigError(f"{message}; see {command}")

    def take_settings(self, **aliases: str) -> None:
        """Accept settings in `namespace.overrides`; `max_steps="a.b"` makes --max-steps a key."""
        self._aliases = {f"--{name.replace('_', '-')}": key for name, key in aliases.items()}
        for name, key in self._aliases.items():
            self.add_argument(name, metavar="VALUE", help=f"the same as {key}=VALUE")
        self.add_argument("overrides", nargs="*", metavar="key=value", help="or --key value")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words as argparse does; also called for the words of a subcommand."""
        words = list(sys.argv[1:] if args is None else args)
        options, overrides = words, None
        if self._aliases is not None:
            options = []
            overrides = list(self._split_settings(iter(words), options))
        found, rest = super().parse_known_args(options, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if overrides is not None:
            found.overrides = overrides
        return found, []

    def _split_settings(self, words: Iterator[str], options: list[str]) -> Iterator[str]:
        """Yield the settings as key=value; append all other words to `options`."""
        named = sum(not a.option_strings and a.dest != "overrides" for a in self._actions)
        for word in words:
            name, sign, value = word.partition("=")
            if word == "--":
                yield from map(_check_setting, words)
            elif self._aliases and name in self._aliases:
                yield f"{self._aliases[name]}={value if sign else self._take_value(name, words)}"
            elif name in self._option_string_actions or word[:2] in self._option_string_actions:
                options.append(word)
                if word in self._option_string_actions:
                    options += self._take_values(word, words)
            elif word.startswith("--"):
                self._check_known(name)
                key = name.removeprefix("--")
                yield f"{key}={value if sign else self._take_value(name, words)}"
            elif word.startswith("-"):
                self.error(f"unknown option {word}")
            elif named and not sign:
                named -= 1
                options.append(word)
            else:
                yield _check_setting(word)

    def _take_values(self, option: str, words: Iterator[str]) -> list[str]:
        """Return the value of an option that takes one, if present; argparse validates it."""
        takes_none = self._option_string_actions[option].nargs == 0
        following = None if takes_none else next(words, None)
        return [] if following is None else [following]

    def _take_value(self, name: str, words: Iterator[str]) -> str:
        value = next(words, None)
        if value is None or value.startswith("--") or value in self._option_string_actions:
            self.error(f"{name} needs a value")
        return value

    def _check_known(self, name: str) -> None:
        """Reject unknown options; known keys and keys with a dot are left to the config."""
        key = name.removeprefix("--")
        if "." in key or is_key(key):
            return
        known = [o for o in self._option_string_actions if o.startswith("--")]
        near = difflib.get_close_matches(name, [*known, "--seed"], n=1)
        self.error(f"unknown option {name}" + (f", the nearest is {near[0]}" if near else ""))


def _check_setting(word: str) -> str:
    key, sign, _ = word.partition("=")
    if not (key and sign) or key.startswith("-"):
        hint = f"; a config file is given as -c {word}" if word.endswith(".toml") else ""
        raise ConfigError(f"{word!r} is neither key=value nor --key value{hint}")
    return word
