"""The way from files and overrides to a checked tree, and back.

Reads   TOML files (left to right, the later wins) and `a.b=c` overrides
Gives   Config, or ConfigError

An unknown key is an error that names the nearest key; a key of another system is answered with
ours.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from laminar.config.foreign_keys import ours
from laminar.config.keys import ConfigError, checked, known_keys, takes_words
from laminar.config.rules import CONFIG_CHARS_MAX, check_together
from laminar.config.tree import Config


def is_key(key: str) -> bool:
    """Whether `load` knows what is meant: a key, a section, or a key of another system."""
    keys = known_keys()
    return key in keys or bool(ours(key)) or any(k.startswith(key + ".") for k in keys)


def load(
    files: Iterable[str | Path],
    overrides: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """Read TOML files left to right, apply `key=value` overrides, check everything. `settings`:
    nested or dotted, with values of their own types, in the place of overrides."""
    flat: dict[str, Any] = {}
    for file in files:
        flat.update(_flatten(read_toml(Path(file)), str(file)))
    for text in overrides:
        key, value = _parse_override(text)
        flat[key] = value
    flat.update(_flatten(settings or {}, ""))
    return resolve(flat)


def resolve(flat: Mapping[str, Any]) -> Config:
    """Build and check the tree from dotted keys; raises ConfigError."""
    keys = known_keys()
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if key not in keys:
            raise ConfigError(_unknown_key(key, keys))
        value = checked(key, value, keys[key])
        node = tree
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    config = msgspec.convert(tree, Config)
    check_together(config)
    if (chars := len(dumps(config))) > CONFIG_CHARS_MAX:
        raise ConfigError(
            f"the configuration has {chars} characters, at most {CONFIG_CHARS_MAX} are allowed: it "
            "is written into the event log at every start; put long lists (data.train_files, "
            "data.dataset_config) into files"
        )
    return config


def dumps(config: Config) -> str:
    """The resolved tree as TOML; `load` of it gives the same Config."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"config file {path} does not exist; give the path of a TOML file to -c"
        ) from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def _flatten(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Nested tables to dotted keys; tables below a dict-typed key stay values."""
    keys = known_keys()
    flat: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = prefix + name
            is_table = isinstance(value, Mapping) and key not in keys
            if is_table and any(k.startswith(key + ".") for k in keys):
                walk(value, key + ".")
            elif key not in keys:
                where = f"{source}: " if source else ""
                raise ConfigError(f"{where}{_unknown_key(key, keys)}")
            else:
                flat[key] = value

    walk(tree, "")
    return flat


def _unknown_key(key: str, keys: Mapping[str, Any]) -> str:
    if any(k.startswith(key + ".") for k in keys):
        return f"{key} is a section, not a key; write {key}.NAME=VALUE"
    if here := ours(key):
        return f"unknown key {key}; here it is {here}"
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    near = (same_leaf or close or difflib.get_close_matches(key, keys, n=1, cutoff=0.0))[0]
    return f"unknown key {key}; the nearest key is {near}"


def _parse_override(text: str) -> tuple[str, Any]:
    key, sign, raw = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {text!r} is not of the form key=value")
    key = key.strip()
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw
    declared = known_keys().get(key)
    if declared and takes_words(declared.kind) and not isinstance(value, str):
        return key, raw  # a name that looks like a number or a date is still a name
    return key, value
