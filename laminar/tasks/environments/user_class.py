"""The user's environment: a class whose public methods are the tools of the policy.

Reads   the user's Python file
Gives   the class; the JSON schemas of its tools, made in a separate process by this module's main
Raises  ConfigError at start for a class that cannot work

The class has the form of TRL's `environment_factory`: a constructor without arguments,
`reset(**row) -> str | None`, tools with a docstring and types, and optionally
`get_reward() -> float`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec

from laminar.config import ConfigError
from laminar.config.tasks import EnvConfig
from laminar.run.child_channel import Ready
from laminar.run.child_process import call_isolated, connect_user_code
from laminar.run.user_code import UserFunction, import_file
from laminar.run.user_file import get_first_line
from laminar.tasks.rewards.results import format_names
from laminar.tasks.rewards.user_function import IMPORT_TIMEOUT_S
from laminar.tasks.sandbox.sandbox import permit_unsafe

RESET, REWARD = "reset", "get_reward"
NOT_TOOLS = (RESET, REWARD)
Schemas = Sequence[dict[str, Any]]


def load_class(path: str, name: str) -> type:
    """Load the class `name` of the file, or its only public one; raise ConfigError."""
    module = import_file(Path(path), what="environment", keys="env.path")
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and key[0] != "_"
    }
    if not name and len(own) != 1:
        raise ConfigError(
            f"env.path = {path!r} has the public classes {format_names(own)}; name the "
            "environment by "
            "env.name"
        )
    found = getattr(module, name, None) if name else next(iter(own.values()))
    if callable(found) and not inspect.isclass(found):  # TRL's environment_factory
        found = _class_of_factory(UserFunction("env.name", Path(path), name, found))
    if not inspect.isclass(found):
        raise ConfigError(
            f"env.name = {name!r} is not a class in {path}; it has {format_names(own)}"
        )
    _check_class(found, path)
    return found


def _class_of_factory(factory: UserFunction) -> type:
    """Return a class whose instances are those that the function returns."""
    made = type(factory())
    return type(made.__name__, (made,), {"__new__": lambda _: factory.function()})


def _check_class(found: type, path: str) -> None:
    where = f"{found.__name__} of {path}"
    if not callable(getattr(found, RESET, None)):
        raise ConfigError(f"{where} has no method reset; write reset(self, **row) -> str | None")
    if not tool_names(found):
        raise ConfigError(
            f"{where} has no tool; write a public method with a docstring and types, which the "
            "policy may call"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be created without arguments: {error}; give them defaults"
        ) from None


def has_reward(found: type) -> bool:
    return callable(getattr(found, REWARD, None))


def tool_names(found: type) -> list[str]:
    """Return the tools in the order of the class: all public methods except NOT_TOOLS."""
    names = dict.fromkeys(key for base in reversed(found.__mro__) for key in vars(base))
    return [
        name
        for name in names
        if name[0] != "_" and name not in NOT_TOOLS and inspect.isfunction(getattr(found, name))
    ]


def load_declaration(env: EnvConfig) -> tuple[str, bool]:
    """Return the JSON schemas of the tools, and whether the class has get_reward.

    The class is loaded in a process that the user's file may hang or end. Raises ConfigError.
    """
    words = [env.path, env.name, *(["unsafe"] if env.unsafe_local_code else [])]
    facts = call_isolated(
        "laminar.tasks.environments.user_class",
        words,
        IMPORT_TIMEOUT_S,
        late=f"env.path = {env.path!r} was not imported within {IMPORT_TIMEOUT_S:g} s; move "
        "slow or blocking code into reset",
        ended=f"env.path = {env.path!r} ends the process that imports it",
        advice="a file with an environment must not end its process",
    )
    return facts["tools"], facts["has_reward"]


def decode_tools(env: EnvConfig) -> Schemas:
    """Decode the schemas that were made when the run started; empty without an environment."""
    schemas: Schemas = msgspec.json.decode(env.tools) if env.tools else []
    return schemas


def build_schemas(found: type, path: str) -> Schemas:
    """Build a JSON schema for each tool from its docstring and types; raise ConfigError."""
    from transformers.utils.chat_template_utils import get_json_schema  # seconds to import

    schemas = []
    for name in tool_names(found):
        try:  # not bound to an instance, which may need a server
            schemas.append(get_json_schema(MethodType(getattr(found, name), object())))
        except Exception as error:  # transformers raises several types that it does not export
            raise ConfigError(
                f"the tool {name} of {found.__name__} in {path} cannot be described to the policy: "
                f"{get_first_line(error).rstrip('.')}; give each parameter a type and a line in a "
                "section Args of the docstring"
            ) from None
    return schemas


def main(fd: str, parent: str, path: str, name: str, *permission: str) -> None:
    channel = connect_user_code(fd, parent)
    permit_unsafe(bool(permission))
    with channel.refuse_errors():
        found = load_class(path, name)
        tools = msgspec.json.encode(build_schemas(found, path)).decode()
    channel.send_last(Ready({"tools": tools, "has_reward": has_reward(found)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
