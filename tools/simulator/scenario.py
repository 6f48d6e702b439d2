"""Scenario of one seed: every choice of a configuration drawn, each concern from a separate stream.

Reads   Choices, the seed
Gives   Scenario; `stream(seed, concern)`

Each concern draws from its own generator, so that a new fault, or a longer run, does not change
the others, and two versions of the product meet the same world.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from laminar.config.reading import nest_keys
from laminar.core.rules import NEW_RUN
from laminar.core.scheduling.dispatch import permute_rows
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.events.base import Settings
from laminar.events.of_coordinator import ForkOrigin, UnfinishedPrompt
from laminar.names.ids import GroupId, train_group, trajectory_seed
from laminar.storage.rules import Row
from tools.simulator.config import FAULTS, WITH_REPACK, Choices, SimConfig, WorldConfig
from tools.simulator.scheduler import MS, SECOND

DATA_DIGEST = "data"  #: digest of the prompts, as the store reports it
FORK_UNFINISHED, FORK_SAME_DATA = 0.2, 0.8
"""Share of the prompts that the other run left unfinished; share of forks that have its data."""
BOUNDARIES: dict[str, tuple[int, ...]] = {
    "rollout.replicas": (1,), "world.nodes": (1,), "rollout.max_num_seqs": (1,),
    "rollout.group_size": (2, 11), "data.train_batch_size": (1,),
    "rollout.groups_per_version": (1,), "async.max_staleness": (0,),
    "trainer.total_training_steps": (1, 11), "world.num_train": (1, 11), "data.val_size": (1, 11),
    "trainer.test_freq": (1,), "trainer.save_freq": (0, 1), "trainer.max_ckpt_to_keep": (1, 0),
    "recovery.resume_timeout_ms": (0,), "world.fork_step": (1, 10),
}  # fmt: skip
"""Smallest values that a run may have, none, and numbers with two digits: ids in text must sort as
their numbers do. Engines take at least a whole group."""
DRAWN: dict[str, tuple[str, ...]] = {
    "scenario": (
        "rollout.group_size", "data.train_batch_size", "async.max_staleness",
        "rollout.groups_per_version", "trainer.total_training_steps", "data.drop_last",
        "trainer.test_freq", "algorithm.batch_strategy", "reward.scope",
        "recovery.resume_timeout_ms", "trainer.batch_timeout_s", "rollout.replicas", "world.nodes",
        "rollout.max_num_seqs", "world.num_train", "data.val_size", "world.delay_ms",
        "world.start_s", "world.transfer_s", "world.load_s", "emulation.train_s", "world.score_s",
        "emulation.median_response", "world.segment_bytes", "world.snapshot_every",
        "trainer.save_freq", "trainer.max_ckpt_to_keep",
    ),
    "update": ("rollout.kv_on_update",),
    "load": ("rollout.load",),
    "payloads": ("store.payload_gb",),
    "repack": ("rollout.max_batch", "world.kv_capacity"),
    "filter": ("world.filter", "algorithm.filter_groups.max_num_gen_batches", "world.scores"),
    "begin": ("world.fork_step",),
}  # fmt: skip
"""Streams of several keys, in the order of their draws; any other key has its own stream."""
_REPACK = ("repack.interval_ms", "repack.release_timeout_ms", "repack.prefill_tokens_per_step")
_NUM_TRAIN, _STEPS = "world.num_train", "trainer.total_training_steps"
_BATCH_TIMEOUT = "trainer.batch_timeout_s"
_ENVIRONMENT = ("env.call_semantics", "world.answer_s", "world.answer_p99_to_median")
MANY_SIBLINGS = 10
"""Group size from which one response is nearly always long. Where batch_timeout_s is a choice it is
then the longest, or nearly every group would be given up for it, and the run would not end."""
LONG_LEASE_ROLES = ("node", "store", "trainer")
AGENTS_SHARE = 0.5  #: share of agents among environments: they run at most once
ANSWERS_IN_A_WAIT = 8  #: answers of an environment that fit in a batch wait at least: timeouts nest


def stream(seed: int, concern: str) -> random.Random:
    """Return the generator of one concern: the same on every machine, whatever the hash seed."""
    return random.Random(f"{seed}/{concern}")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a run, apart from its faults."""

    seed: int
    config: SimConfig
    settings: Settings
    engine: EngineTiming
    lengths: ResponseLengths
    origin: ForkOrigin | None = None  #: other run of a fork

    @property
    def world(self) -> WorldConfig:
        return self.config.world

    @property
    def lease_ns(self) -> int:
        return self.config.coordinator.lease_ms * MS

    def lease_of_ms(self, role: str) -> int:
        """Return the lease of a process of this role."""
        leases = self.config.coordinator
        return leases.node_lease_ms if role in LONG_LEASE_ROLES else leases.lease_ms

    def seed_of(self, row: Row) -> int:
        """Return the seed of a stored row's trajectory, which gives its tokens and length."""
        group = GroupId(row.group_id)
        return trajectory_seed(self.settings.seed, group, row.sibling, row.attempt)


class _Draw:
    """Values drawn so far, from the streams of one seed."""

    def __init__(self, choices: Choices, seed: int) -> None:
        self.choices, self._seed = choices, seed
        self.values: dict[str, Any] = {"seed": seed}
        self.values |= {key: value for key, value in choices.items() if key.startswith(FAULTS)}
        self._streams: dict[str, random.Random] = {}

    def stream(self, concern: str) -> random.Random:
        return self._streams.setdefault(concern, stream(self._seed, concern))

    def take(self, concern: str, *keys: str) -> Any:
        """Draw keys in this order, and return the last value; a single value consumes no draw."""
        chance = self.stream(concern)
        for key in keys:
            value = self.choices[key]
            self.values[key] = chance.choice(value) if isinstance(value, list) else value
        return self.values[keys[-1]]


def _with_boundaries(choices: Choices, seed: int) -> Choices:
    """Return the same choices, some of them replaced by a boundary value.

    In as many of the worlds whose data is a choice, the data ends with the last step.
    """
    chance, share, made = stream(seed, "boundaries"), choices["world.boundary_share"], dict(choices)
    for key, values in BOUNDARIES.items():
        struck, value = chance.random() < share, chance.choice(values)
        if struck and isinstance(choices[key], list):
            made[key] = value
    ends, steps = chance.random() < share, chance.choice((1, 6, 10))
    if ends and all(isinstance(made[key], list) for key in (_NUM_TRAIN, _STEPS)):
        groups = made["data.train_batch_size"]
        groups = chance.choice(groups) if isinstance(groups, list) else groups
        made |= {"data.train_batch_size": groups, _STEPS: steps, _NUM_TRAIN: groups * steps}
    return made


def draw(choices: Choices, seed: int) -> Scenario:
    """Return the scenario of this seed."""
    drawn = _Draw(_with_boundaries(choices, seed), seed)
    packs = drawn.take("repack", "repack.policy") != "off"
    if packs:
        drawn.take("repack", *_REPACK)
        drawn.values["rollout.weight_update"] = "drain"
    else:
        drawn.take("update", "rollout.weight_update")
    for concern, keys in DRAWN.items():
        drawn.take(concern, *keys)
    for key in drawn.choices.keys() - drawn.values.keys():
        drawn.take(key, key)
    _fit_values(drawn)
    origin = _fork(drawn)
    _add_environment(drawn)
    if packs and (replaced := drawn.choices[WITH_REPACK]):
        drawn.choices |= replaced
        drawn.take("repack", *replaced)
    return _make_scenario(msgspec.convert(nest_keys(drawn.values), SimConfig), origin)


def _make_scenario(config: SimConfig, origin: ForkOrigin | None) -> Scenario:
    emulated, world = config.emulation, config.world
    settings = msgspec.structs.replace(
        Settings.from_config(config, NEW_RUN),
        stall_ms=world.stall_ms,
        disk_full_timeout_ms=0,  # no deadline needs more time for the simulated disks and tools
        turn_timeout_ms=0,
    )
    return Scenario(
        seed=config.seed,
        config=config,
        settings=settings,
        engine=EngineTiming(
            step_us=emulated.step_us,
            sequence_us=emulated.sequence_us,
            prefill_tokens_per_s=emulated.prefill_tokens_per_s,
            token_us=emulated.token_us,
            cache_tokens=world.cache_tokens,
        ),
        lengths=ResponseLengths(
            median=emulated.median_response,
            limit=config.data.max_response_length,
            p99_to_median=world.p99_to_median,
        ),
        origin=origin,
    )


def _fit_values(drawn: _Draw) -> None:
    """Change the values that others do not allow, and turn on the drawn filter, if any."""
    values, group_size = drawn.values, drawn.values["rollout.group_size"]
    values["rollout.max_num_seqs"] = max(group_size, values["rollout.max_num_seqs"])
    values["world.nodes"] = min(values["rollout.replicas"], values["world.nodes"])
    waits = drawn.choices[_BATCH_TIMEOUT]
    if group_size >= MANY_SIBLINGS and isinstance(waits, list):
        values[_BATCH_TIMEOUT] = max(waits)
    if not values["trainer.save_freq"]:
        values["store.payload_gb"] = 0.0
    if metric := values["world.filter"]:
        filtered, least = "algorithm.filter_groups.", 1 if values[_STEPS] else 0
        values |= {filtered + "enable": True, filtered + "metric": metric}
        batches = values[filtered + "max_num_gen_batches"]
        values[filtered + "max_num_gen_batches"] = max(batches, least)
    else:
        values["world.scores"] = 2


def _fork(drawn: _Draw) -> ForkOrigin | None:
    """Start the same world after some steps of another run, with the rest of its prompts."""
    values, chance = drawn.values, drawn.stream("begin")
    step, count = values["world.fork_step"], values[_NUM_TRAIN]
    if not step:
        return None
    cursor, seed = chance.randrange(count), chance.randrange(1 << 32)
    rows = permute_rows(seed, 0, count)
    left = [at for at in range(cursor) if chance.random() < FORK_UNFINISHED]
    values[_STEPS] = values[_STEPS] and values[_STEPS] + step
    return ForkOrigin(
        run="another",
        step=step,
        version=step + chance.choice((0, 2)),
        digest="of all its batches",
        data=DATA_DIGEST if chance.random() < FORK_SAME_DATA else "of other data",
        num_train=count,
        cursor=cursor,
        seed=seed,
        shuffle=True,
        unfinished=tuple(
            UnfinishedPrompt(group=train_group(0, at), row_index=rows[at]) for at in left
        ),
    )


def _add_environment(drawn: _Draw) -> None:
    """Add the environment, if drawn; rewards are then per trajectory."""
    values = drawn.values
    if drawn.stream("environment").random() >= values["world.environment_share"]:
        return
    drawn.take("environment", *_ENVIRONMENT)
    wait_s = ANSWERS_IN_A_WAIT * values["world.answer_s"]  # else no batch wait would ever suffice
    is_agent = drawn.stream("environment").random() < AGENTS_SHARE
    values |= {
        **({"agents.run": "agent.py:solve"} if is_agent else {"env.path": "environment.py"}),
        "reward.scope": "trajectory",
        _BATCH_TIMEOUT: max(values[_BATCH_TIMEOUT], wait_s),
    }


def seconds(value: float) -> int:
    """Return seconds as nanoseconds."""
    return int(value * SECOND)
