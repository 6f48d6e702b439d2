"""The roles of actors: the class of each, and the modules that its process needs.

Reads   the configuration
Gives   make, the actor of a process; modules, what a process of a role imports; kind, which
        processes may share their imports

Modules are named, not imported: a node knows what to import and imports none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.actors.host import Actor, Host
from laminar.config import Config
from laminar.engines.environment import engine_modules

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


def kind(role: str, config: Config) -> str:
    """Processes of one kind have the same imports and the same environment."""
    return config.rollout.engine if role == "rollout" else COMMON


def modules(roles: Iterable[str], config: Config, gpus: bool) -> list[str]:
    """What processes of these roles import sooner or later, without the user's own code."""
    found: dict[str, None] = {"uvloop": None}
    for role in roles:
        found |= dict.fromkeys(_MODULES[role])
        if role == "store" and config.data.dataset:
            found["reasoning_gym.factory"] = None
        if role == "rollout":
            found |= dict.fromkeys(engine_modules(config, gpus))
    return list(found)


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
