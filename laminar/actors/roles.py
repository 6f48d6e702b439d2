"""The roles of actors: the class of each, and the modules that its process needs.

Reads   the configuration
Gives   make, the actor of a process; kind, which processes may share their imports; needs, what
        those are

Modules are named, not imported: a node knows what to import and imports none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from laminar.config import Config
from laminar.engines.environment import engine_modules, environment

if TYPE_CHECKING:
    from laminar.actors.host import Actor, Host

COMMON = "torch"
"""The kind of every process without an engine of another kind."""
_TOKENIZER = "transformers.models.auto.tokenization_auto"
_MODEL = "transformers.models.auto.modeling_auto"
_MODULES = {
    "store": ("laminar.actors.store", _TOKENIZER),
    "relay": ("laminar.actors.relay",),
    "trainer": ("laminar.actors.trainer", _TOKENIZER, _MODEL),
    "rollout": ("laminar.actors.rollout", _TOKENIZER),
}

ROLES = tuple(_MODULES)


def kind(role: str, config: Config) -> str:
    """Processes of one kind have the same imports and the same environment."""
    return config.rollout.engine if role == "rollout" else COMMON


class Needs(NamedTuple):
    """What a warm process has for the actors that are forked from it."""

    modules: list[str]
    environment: dict[str, str]  #: below what the user has set


def needs(roles: Iterable[str], config: Config, *, gpus: bool) -> dict[str, Needs]:
    """By kind: what processes of these roles import sooner or later, the user's own code aside."""
    found: dict[str, Needs] = {}
    for role in dict.fromkeys(roles):
        need = found.setdefault(kind(role, config), Needs(["uvloop"], {}))
        need.modules.extend(_MODULES[role])
        if role == "store" and config.data.dataset:
            need.modules.append("reasoning_gym.factory")
        if role == "rollout":
            need.modules.extend(engine_modules(config, gpus))
            need.environment.update(environment(config, gpus))
    return found


def make(host: Host) -> Actor:
    """The actor of a role; each role imports only what it needs."""
    if host.role == "store":
        from laminar.actors.store import Store

        return Store(host)
    if host.role == "relay":
        from laminar.actors.relay import Relay

        return Relay(host)
    if host.role == "trainer":
        from laminar.actors.trainer import Trainer

        return Trainer(host)
    from laminar.actors.rollout import Rollout

    return Rollout(host)
