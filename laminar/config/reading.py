"""Conversion from files and overrides to a checked tree, and back.

Reads   TOML files (left to right, the later wins) and `a.b=c` overrides; paths in them
Gives   Config, or ConfigError

An unknown key is an error that names the nearest key; for a key of another system the error names
ours, or the alternative here.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from laminar.config.foreign_keys import RENAMED, explain_foreign_key
from laminar.config.keys import ConfigError, check_value, known_keys
from laminar.config.overrides import parse_override
from laminar.config.paths import OBJECTS, make_absolute, replace_prefix
from laminar.config.rules import CONFIG_CHARS_MAX, check_together
from laminar.config.tree import Config


def is_key(key: str) -> bool:
    """Return whether `load_config` knows the key: its own, a section, or another system's."""
    keys = known_keys()
    return (
        key in keys or bool(explain_foreign_key(key)) or any(k.startswith(key + ".") for k in keys)
    )


def load_config(
    sources: Iterable[str | Path | Mapping[str, Any]],
    overrides: Iterable[str] = (),
    *,
    resolved: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    files_exist: bool = True,
) -> Config:
    """Read the sources left to right, apply `key=value` overrides, check everything.

    `sources`: TOML files, and settings with typed values, nested or dotted. `resolved`: the
    config.toml of a run, read before all others; of its paths only those to files of the run are
    resolved. `defaults`: fallback values by dotted key. `files_exist`: refuse a path to a missing
    file."""
    flat = dict(defaults or {})
    if resolved is not None:
        own = replace_prefix(read_toml(resolved), OBJECTS, f"{resolved.parent.resolve()}/objects/")
        flat |= flatten_tables(own, str(resolved))
    origins: dict[str, Path | None] = {}
    for source in sources:
        file = None if isinstance(source, Mapping) else Path(source)
        table = source if isinstance(source, Mapping) else read_toml(Path(source))
        found = flatten_tables(table, str(file or ""))
        flat |= found
        origins |= dict.fromkeys(found, file)
    given = dict(map(parse_override, overrides))
    flat = _check_values(flat | given)
    origins |= dict.fromkeys(given)
    must_be = files_exist and flat.get("rollout.engine") != "emulated"
    for key, origin in origins.items():
        flat[key] = make_absolute(key, flat[key], known_keys()[key], origin, must_be=must_be)
    return _build_tree(flat)


def resolve_config(flat: Mapping[str, Any]) -> Config:
    """Build and check the tree from dotted keys; raise ConfigError."""
    return _build_tree(_check_values(flat))


def _check_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Check each value by its declaration."""
    keys = known_keys()
    for key in flat:
        if key not in keys:
            raise ConfigError(_unknown_key(key, keys))
    return {key: check_value(key, value, keys[key]) for key, value in flat.items()}


def nest_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested tables of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def _build_tree(flat: Mapping[str, Any]) -> Config:
    config = _resolve_policy(msgspec.convert(nest_keys(flat), Config))
    check_together(config)
    if (chars := len(dump_config(config))) > CONFIG_CHARS_MAX:
        raise ConfigError(
            f"the configuration has {chars} characters, at most {CONFIG_CHARS_MAX} are allowed: it "
            "is written into the event log at every start; put long lists (data.train_files, "
            "data.dataset_config) into files"
        )
    return config


def _resolve_policy(config: Config) -> Config:
    """Replace repack.policy = "auto": what is recorded stays when the replicas of a run change."""
    if config.repack.policy != "auto":
        return config
    packs = config.total_replicas > 1 and not config.rollout.in_flight
    return replace_keys(config, {"repack.policy": "gain" if packs else "off"})


def dump_config(config: Config) -> str:
    """Return the resolved tree as TOML; loading it gives the same Config."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def flatten_config(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted key."""
    return flatten_tables(msgspec.to_builtins(config), "")


def replace_keys(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with other values, by dotted key, unchecked by rules over several keys."""
    return msgspec.convert(nest_keys(flatten_config(config) | dict(changes)), Config)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file; raise a ConfigError that names it."""
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


def flatten_tables(
    tree: Mapping[str, Any], source: str, root: type[Config] = Config
) -> dict[str, Any]:
    """Flatten nested tables to dotted keys; tables below a dict-typed key stay values."""
    keys = known_keys(root)
    sections = {key.rpartition(".")[0] for key in keys}
    flat: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = prefix + name
            is_table = isinstance(value, Mapping) and key not in keys
            if is_table and key in sections:
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
    if key in RENAMED:
        return f"{key} was renamed to {RENAMED[key]}"
    if known := explain_foreign_key(key):
        return f"unknown key {key}; {known}"
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    near = same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"unknown key {key}; " + (
        f"the nearest key is {near[0]}" if near else "configs/reference.toml has all keys"
    )
