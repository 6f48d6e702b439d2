"""The roles of actors: the class of each, and the modules that its process needs.

Reads   the configuration
Gives   make_actor; get_process_kind, the kind of process that can share imports; collect_needs,
        those imports

Modules are named, not imported: a node knows what to import and imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from laminar.config import Config
from laminar.engines.environment import build_environment, engine_modules
from laminar.names.roles import Role
from laminar.net.addresses import LOCALHOST

if TYPE_CHECKING:
    from laminar.actors.host import ActorRole, Host
    from laminar.training.rank_processes import RankProcesses

COMMON = "torch"  #: the kind of all processes except those of another engine
EMULATED = "emulated"  #: the kind of all processes in a run without models
RANK_LOST_S = 5.0  #: time limit for a trainer that lost a rank to report it and leave


class ActorParts(NamedTuple):
    """A role's actor, and what its process imports before that is made."""

    make: Callable[[Host], ActorRole]
    modules: tuple[str, ...]
    emulated: tuple[str, ...]  #: in a run without models


def get_process_kind(role: str, config: Config) -> str:
    """Return the kind of a process; one kind shares imports and environment."""
    if config.is_emulated:
        return EMULATED
    return config.rollout.engine if role == Role.ROLLOUT else COMMON


class Needs(NamedTuple):
    """The modules and the environment of a warm process."""

    modules: list[str]
    environment: dict[str, str]  #: lower priority than the user's variables
    fds: Sequence[int] = ()  #: of the calls among the modules


def collect_needs(roles: Iterable[str], config: Config, *, gpus: bool) -> dict[str, Needs]:
    """Return what processes of these roles import, by kind, except the user's code."""
    found: dict[str, Needs] = {}
    for role in dict.fromkeys(roles):
        need = found.setdefault(get_process_kind(role, config), Needs(["uvloop"], {}))
        if config.is_emulated:
            need.modules.extend(_ACTORS[role].emulated)
            continue
        need.modules.extend(_ACTORS[role].modules)
        if role == Role.STORE and config.data.dataset:
            need.modules.append("laminar.tasks.data.gym")
        if role == Role.ROLLOUT:
            need.modules.extend(engine_modules(config, gpus))
            need.environment.update(build_environment(config, gpus))
    return found


def make_actor(host: Host) -> ActorRole:
    """Return the actor of a role; each role imports only what it needs."""
    return _ACTORS[host.role].make(host)


def _make_relay(host: Host) -> ActorRole:
    from laminar.actors.relay import Relay
    from laminar.weights.machine import RelayMachine

    return Relay(host, RelayMachine(host.run_dir.name, host.run_id, host.node, host.boot_id))


def _make_store(host: Host) -> ActorRole:
    from laminar.actors.store import Store
    from laminar.run.directory import STORE_FILE
    from laminar.storage.database import Database

    def open_database() -> Database:
        in_flight = host.config.rollout.in_flight
        return Database(host.run_dir / STORE_FILE, host.incarnation, in_flight=in_flight)

    if host.config.is_emulated:
        from laminar.actors.system.emulated import EmulatedPrompts

        return Store(host, open_database, EmulatedPrompts(host.config))
    from laminar.tasks.run_prompts import RunPrompts

    return Store(host, open_database, RunPrompts(host.config))


def _make_rollout(host: Host) -> ActorRole:
    from laminar.actors.rollout import Rollout

    if host.config.is_emulated:
        from laminar.actors.system.emulated import EmulatedParts

        return Rollout(host, EmulatedParts(host))
    from laminar.actors.system.replica import RealParts

    return Rollout(host, RealParts(host))


def _make_agent_host(host: Host) -> ActorRole:
    from laminar.actors.agent_host import AgentHost
    from laminar.actors.system.agent_host import RealHostParts

    return AgentHost(host, RealHostParts(host))


def _make_rank_host(host: Host) -> ActorRole:
    from laminar.actors.rank_host import RankHost
    from laminar.actors.system.rank_process import build_rank_command

    return RankHost(host, build_rank_command(host.run_dir, host.name, host.address))


def _make_trainer(host: Host) -> ActorRole:
    from laminar.actors.trainer import Trainer
    from laminar.run.directory import TRAINER_BOOK_FILE
    from laminar.storage.durable_lines import DurableLines
    from laminar.weights.version.slot_writer import SlotWriter

    book = DurableLines(host.run_dir / TRAINER_BOOK_FILE)
    if host.config.is_emulated:
        from laminar.actors.system.emulated import EmulatedFiles, EmulatedLearner, EmulatedWeights

        weights = EmulatedWeights(host.config)
        emulated, slots = EmulatedLearner(host.config, weights), weights.fill_slot
        return Trainer(host, emulated, partial(SlotWriter, slots), EmulatedFiles(weights), book)
    from laminar.actors.system.learners import is_ranked, parts_of
    from laminar.run.fail_points import FailPoints

    gang = _make_gang(host) if is_ranked(host.config) else None
    reached = FailPoints(host.run_dir).hit_failpoint
    learner, files, attach = parts_of(host.config, gang, reached, _address_of_ranks(host))
    return Trainer(host, learner, attach, files, book)


def _make_gang(host: Host) -> RankProcesses:
    from laminar.actors.rank_link import TrainerLinks
    from laminar.actors.system.rank_process import build_rank_command
    from laminar.run.directory import TRAINER_LOCK_FILE
    from laminar.training.rank_processes import RankProcesses

    def lost(reason: str) -> None:
        host.process.force_exit_after(RANK_LOST_S)  # a thread may wait for that rank
        host.fail_process(reason)

    trainer = host.config.trainer
    return RankProcesses(
        host.config,
        build_rank_command(host.run_dir, host.name, _address_of_ranks(host)),
        lock=host.run_dir / TRAINER_LOCK_FILE,
        lost=lost,
        say=host.notify_user,
        numbers=range(1, trainer.ranks),
        hosts=TrainerLinks(host) if trainer.nodes > 1 else None,
    )


def _address_of_ranks(host: Host) -> str:
    """Return where ranks listen: on loopback, unless some are on other machines."""
    return host.address if host.config.trainer.nodes > 1 else LOCALHOST


_STORE = ("laminar.actors.store", "laminar.storage.database")
_RELAY = ("laminar.actors.relay", "laminar.weights.machine")
_TRAINER = "laminar.actors.trainer"
_ROLLOUT, _REPLICA = "laminar.actors.rollout", "laminar.actors.system.replica"
_HOST, _RANKS = "laminar.actors.agent_host", "laminar.actors.rank_host"
_TOKENIZER = "transformers.models.auto.tokenization_auto"
_MODEL = "transformers.models.auto.modeling_auto"
_EMULATED = "laminar.actors.system.emulated"
_ACTORS: dict[str, ActorParts] = {
    Role.STORE: ActorParts(
        _make_store, (*_STORE, "laminar.tasks.run_prompts", _TOKENIZER), (*_STORE, _EMULATED)
    ),
    Role.TRAINER: ActorParts(
        _make_trainer,
        (_TRAINER, "laminar.actors.system.learners", _TOKENIZER, _MODEL),
        (_TRAINER, _EMULATED, "laminar.weights.version.slot_writer"),
    ),
    Role.RELAY: ActorParts(_make_relay, _RELAY, _RELAY),
    Role.ROLLOUT: ActorParts(
        _make_rollout, (_ROLLOUT, _REPLICA, _TOKENIZER), (_ROLLOUT, _EMULATED)
    ),
    Role.AGENT: ActorParts(
        _make_agent_host, ("laminar.actors.system.agent_host", _HOST, _TOKENIZER), (_HOST,)
    ),
    Role.RANKS: ActorParts(_make_rank_host, (_RANKS,), (_RANKS,)),
}
