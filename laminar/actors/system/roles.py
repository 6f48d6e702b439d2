"""The roles of actors: the class of each, and the modules that its process needs.

Reads   the configuration
Gives   make, the actor of a process; kind, which processes may share their imports; needs, what
        those are

Modules are named, not imported: a node knows what to import and imports none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
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
    "store": (
        "laminar.actors.store",
        "laminar.storage.database",
        "laminar.tasks.run_prompts",
        _TOKENIZER,
    ),
    "relay": ("laminar.actors.relay", "laminar.weights.machine"),
    "trainer": (
        "laminar.actors.trainer",
        "laminar.training.threaded",
        "laminar.weights.version.slot_writer",
        _TOKENIZER,
        _MODEL,
    ),
    "rollout": ("laminar.actors.rollout", "laminar.actors.system.replica", _TOKENIZER),
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
        return _store(host)
    if host.role == "relay":
        from laminar.actors.relay import Relay
        from laminar.weights.machine import RelayMachine

        return Relay(host, RelayMachine(host.run_dir, host.node, host.boot_id))
    if host.role == "trainer":
        return _trainer(host)
    from laminar.actors.rollout import Rollout
    from laminar.actors.system.replica import RealParts

    return Rollout(host, RealParts(host))


def _store(host: Host) -> Actor:
    from laminar.actors.store import Store
    from laminar.rundir import STORE_FILE
    from laminar.storage.database import Database
    from laminar.tasks.run_prompts import RunPrompts

    return Store(host, partial(Database, host.run_dir / STORE_FILE), RunPrompts(host.config))


def _trainer(host: Host) -> Actor:
    from laminar.actors.trainer import Trainer
    from laminar.rundir import TRAINER_BOOK_FILE
    from laminar.storage.durable_lines import DurableLines
    from laminar.tasks.tokenizer import load_tokenizer, tokenizer_size
    from laminar.training.threaded import ThreadedFiles, ThreadedLearner
    from laminar.weights.version.checkpoint import describe
    from laminar.weights.version.slot_writer import SlotWriter

    name = host.config.model.name
    learner = ThreadedLearner(host.config, lambda: tokenizer_size(load_tokenizer(name)))
    files = ThreadedFiles(lambda: learner.model, name, describe)
    book = DurableLines(host.run_dir / TRAINER_BOOK_FILE)
    return Trainer(host, learner, partial(SlotWriter, learner.weights), files, book)
