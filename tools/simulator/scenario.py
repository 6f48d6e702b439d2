"""Scenario of one seed: every choice of a SimConfig drawn, each concern from a separate stream.

Reads   SimConfig, the seed
Gives   Scenario; `stream(seed, concern)`

Each concern draws from its own generator, so that a new fault, or a longer run, does not change
the others, and two versions of the product meet the same world.
"""

from __future__ import annotations

import random
from typing import Literal, Protocol, TypeVar, cast

import msgspec

from laminar.config.rollout import RolloutConfig
from laminar.config.tree import (
    Config,
    CoordinatorConfig,
    DataConfig,
    EnvConfig,
    RecoveryConfig,
    RepackConfig,
    RepackPolicy,
    StoreConfig,
    TrainerConfig,
)
from laminar.core.rules import NEW_RUN
from laminar.core.scheduling.dispatch import permute_rows
from laminar.engines.emulated.timing import EngineTiming, ResponseLengths
from laminar.events.base import Settings
from laminar.events.of_coordinator import ForkOrigin, UnfinishedPrompt
from laminar.names.ids import GroupId, train_group, trajectory_seed
from laminar.storage.rules import Row
from tools.simulator.config import (
    CheckConfig,
    EnvironmentConfig,
    FilterConfig,
    SimConfig,
    WorkConfig,
)
from tools.simulator.config import RepackConfig as RepackDraw
from tools.simulator.scheduler import MS, SECOND

T = TypeVar("T")

START_TIMEOUT_MS = 120_000
ENGINE_START_MS = 30_000
MAX_ERROR_PERMILLE = 500
DATA_DIGEST = "data"  #: digest of the prompts, as the store reports it
FORK_UNFINISHED, FORK_SAME_DATA = 0.2, 0.8
"""Share of the prompts that the other run left unfinished; share of forks that have its data."""
BOUNDARIES: dict[str, tuple[int, ...]] = {
    "replicas": (1,), "nodes": (1,), "slots": (1,), "group_size": (2, 11), "groups_per_step": (1,),
    "groups_per_version": (1,), "max_staleness": (0,), "total_steps": (1, 11), "num_train": (1, 11),
    "num_eval": (1, 11), "test_freq": (1,), "save_freq": (0, 1), "max_ckpt_to_keep": (1, 0),
    "resume_timeout_ms": (0,), "fork_step": (1, 10),
}  # fmt: skip
"""Smallest values that a run may have, none, and numbers with two digits: ids in text must sort as
their numbers do. Engines take at least a whole group."""
MANY_SIBLINGS = 10
"""Group size from which one response is nearly always long. Where batch_wait_ms is a choice it is
then the longest, or nearly every group would be given up for it, and the run would not end."""
LONG_LEASE_ROLES = ("node", "store", "trainer")


ANSWERS_IN_A_WAIT = 8  #: answers of an environment that fit in a batch wait at least: timeouts nest


def stream(seed: int, concern: str) -> random.Random:
    """Return the generator of one concern: the same on every machine, whatever the hash seed."""
    return random.Random(f"{seed}/{concern}")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a run, apart from its faults."""

    seed: int
    settings: Settings
    replicas: int
    nodes: int
    slots: int
    num_train: int
    num_eval: int
    max_restarts: int
    restart_window_s: float
    quantum_ns: int
    delay_ms: float
    heartbeat_ns: int
    lease_ms: int
    node_lease_ms: int
    disk_full_timeout_s: float
    progress_ns: int
    start_s: float
    transfer_s: float
    load_s: float
    train_s: float
    score_s: float
    engine: EngineTiming
    lengths: ResponseLengths
    segment_bytes: int
    snapshot_every: int
    kv_on_update: Literal["keep", "recompute"]
    save_freq: int
    max_ckpt_to_keep: int
    payload_gb: float
    max_batch: int
    kv_capacity: int
    checks: CheckConfig
    scores: int = 2  #: distinct scores of responses
    origin: ForkOrigin | None = None  #: other run of a fork
    call_semantics: str = ""  #: at-most-once | retryable; empty: no environment
    answer_s: float = 0.0  #: time that the environment takes to answer
    answer_p99_to_median: float = 0.0  #: ratio of a log-normal; 0: uniform, 0.5 to 1.5 times

    @property
    def lease_ns(self) -> int:
        return self.lease_ms * MS

    def lease_of_ms(self, role: str) -> int:
        """Return the lease of a process of this role."""
        return self.node_lease_ms if role in LONG_LEASE_ROLES else self.lease_ms

    def seed_of(self, row: Row) -> int:
        """Return the seed of a stored row's trajectory, which gives its tokens and length."""
        group = GroupId(row.group_id)
        return trajectory_seed(self.settings.seed, group, row.sibling, row.attempt)


class Pick(Protocol):
    """Function that draws a value of a key from its choices; a single value consumes no draw."""

    def __call__(self, value: T | tuple[T, ...]) -> T: ...


def _pick_from(chance: random.Random) -> Pick:
    def pick(value: T | tuple[T, ...]) -> T:
        return chance.choice(value) if isinstance(value, tuple) else value

    return pick


def _with_boundaries(work: WorkConfig, seed: int) -> WorkConfig:
    """Return the same work, with some choices replaced by a boundary value.

    In as many of the worlds whose data is a choice, the data ends with the last step.
    """
    chance, made = stream(seed, "boundaries"), dict[str, int]()
    for key, values in BOUNDARIES.items():
        struck, value = chance.random() < work.boundary_share, chance.choice(values)
        if struck and isinstance(getattr(work, key), tuple):
            made[key] = value
    ends = chance.random() < work.boundary_share, chance.choice((1, 6, 10))
    work = msgspec.structs.replace(work, **made)
    if not ends[0] or not all(isinstance(v, tuple) for v in (work.num_train, work.total_steps)):
        return work
    groups = _pick_from(chance)(work.groups_per_step)
    return msgspec.structs.replace(
        work, groups_per_step=groups, total_steps=ends[1], num_train=groups * ends[1]
    )


def _settings(work: WorkConfig, seed: int, pick: Pick) -> Settings:
    """Return the settings of the core, without those of repack."""
    group_size = pick(work.group_size)
    settings = Settings(
        seed=seed,
        groups_per_step=pick(work.groups_per_step),
        group_size=group_size,
        min_scored=2,
        max_staleness=pick(work.max_staleness),
        groups_per_version=pick(work.groups_per_version),
        total_steps=pick(work.total_steps),
        total_epochs=1,
        shuffle=True,
        drop_last=pick(work.drop_last),
        test_freq=pick(work.test_freq),
        val_before_train=True,
        batch_strategy=pick(work.batch_strategy),
        reward_scope=pick(work.reward_scope),
        resume_timeout_ms=pick(work.resume_timeout_ms),
        batch_timeout_ms=pick(work.batch_timeout_ms),
        start_timeout_ms=START_TIMEOUT_MS,
        stall_ms=pick(work.stall_ms),
        engine_start_ms=ENGINE_START_MS,
        max_error_permille=MAX_ERROR_PERMILLE,
        rules=NEW_RUN,
        eval_answers=_pick_from(stream(seed, "answers"))(work.eval_answers),
    )
    if group_size < MANY_SIBLINGS or isinstance(work.batch_timeout_ms, int):
        return settings
    return msgspec.structs.replace(settings, batch_timeout_ms=max(work.batch_timeout_ms))


def draw(config: SimConfig, seed: int) -> Scenario:
    """Return the scenario of this seed."""
    pick = _pick_from(stream(seed, "scenario"))
    work, time, repack = _with_boundaries(config.work, seed), config.time, config.repack
    packing, caching = _pick_from(stream(seed, "repack")), _pick_from(stream(seed, "cache"))
    settings, updating = _settings(work, seed, pick), _pick_from(stream(seed, "update"))
    if policy := packing(repack.policy):
        settings = msgspec.structs.replace(
            settings,
            repack_policy=policy,
            repack_interval_ms=packing(repack.interval_ms),
            repack_release_timeout_ms=packing(repack.release_timeout_ms),
            repack_prefill_tokens=packing(repack.prefill_tokens_per_step),
        )
    elif updating(work.weight_update) == "in-flight":
        settings = msgspec.structs.replace(settings, in_flight=True, groups_per_version=0)
    if _pick_from(stream(seed, "load"))(work.load) == "stream":
        settings = msgspec.structs.replace(settings, stream=True)
    replicas = pick(work.replicas)
    scenario = Scenario(
        seed=seed,
        settings=settings,
        replicas=replicas,
        nodes=min(replicas, pick(work.nodes)),
        slots=max(settings.group_size, pick(work.slots)),
        num_train=pick(work.num_train),
        num_eval=pick(work.num_eval),
        max_restarts=pick(work.max_restarts),
        restart_window_s=_pick_from(stream(seed, "restart window"))(work.restart_window_s),
        quantum_ns=pick(time.quantum_ms) * MS,
        delay_ms=pick(time.delay_ms),
        heartbeat_ns=pick(time.heartbeat_ms) * MS,
        lease_ms=pick(time.lease_ms),
        node_lease_ms=pick(time.node_lease_ms),
        disk_full_timeout_s=pick(time.disk_full_timeout_s),
        progress_ns=pick(time.progress_ms) * MS,
        start_s=pick(time.start_s),
        transfer_s=pick(time.transfer_s),
        load_s=pick(time.load_s),
        train_s=pick(time.train_s),
        score_s=pick(time.score_s),
        engine=EngineTiming(
            step_us=pick(time.step_us),
            sequence_us=pick(time.sequence_us),
            prefill_tokens_per_s=caching(time.prefill_tokens_per_s),
            token_us=caching(time.token_us),
            cache_tokens=caching(time.cache_tokens),
        ),
        lengths=ResponseLengths(
            median=pick(time.median_tokens),
            limit=pick(time.max_tokens),
            p99_to_median=caching(time.p99_to_median),
        ),
        segment_bytes=pick(config.log.segment_bytes),
        snapshot_every=pick(config.log.snapshot_every),
        kv_on_update=cast(Literal["keep", "recompute"], updating(work.kv_on_update)),
        save_freq=pick(work.save_freq),
        max_ckpt_to_keep=pick(work.max_ckpt_to_keep),  # drawn last: older seeds keep their worlds
        payload_gb=_pick_from(stream(seed, "payloads"))(work.payload_gb),
        max_batch=packing(repack.max_batch),
        kv_capacity=packing(repack.kv_capacity),
        checks=config.checks,
    )
    settings = msgspec.structs.replace(scenario.settings, save_freq=scenario.save_freq)
    scenario = msgspec.structs.replace(scenario, settings=settings)
    scenario = _filtered(scenario, config.filter)
    scenario = _forked(scenario, work.fork_step)
    scenario = _with_environment(scenario, config.environment)
    return _with_tails(scenario, repack, packing) if policy else scenario


def _filtered(scenario: Scenario, filter: FilterConfig) -> Scenario:
    """Add the drawn filter, if any; an unlimited search for batches needs an end of data."""
    pick = _pick_from(stream(scenario.seed, "filter"))
    metric, batches, scores = pick(filter.metric), pick(filter.gen_batches), pick(filter.scores)
    if not metric:
        return scenario
    settings = msgspec.structs.replace(
        scenario.settings,
        filter_metric=metric,
        filter_batches=max(batches, 1) if scenario.settings.total_steps else batches,
    )
    return msgspec.structs.replace(scenario, settings=settings, scores=scores)


def _with_environment(scenario: Scenario, environment: EnvironmentConfig) -> Scenario:
    """Add the environment, if drawn; rewards are then per trajectory."""
    chance = stream(scenario.seed, "environment")
    pick = _pick_from(chance)
    if chance.random() >= environment.environment_share:
        return scenario
    call_semantics, answer_s = pick(environment.call_semantics), pick(environment.answer_s)
    wait_ms = int(ANSWERS_IN_A_WAIT * answer_s * 1_000)  # else no batch wait would ever suffice
    settings = msgspec.structs.replace(
        scenario.settings,
        max_sessions=2 * (scenario.slots + scenario.settings.group_size),
        reward_scope="trajectory",
        batch_timeout_ms=max(scenario.settings.batch_timeout_ms, wait_ms),
    )
    return msgspec.structs.replace(
        scenario,
        settings=settings,
        call_semantics=call_semantics,
        answer_s=answer_s,
        answer_p99_to_median=pick(environment.answer_p99_to_median),
    )


def _forked(scenario: Scenario, steps: int | tuple[int, ...]) -> Scenario:
    """Start the same world after so many steps of another run, with the rest of its prompts."""
    chance = stream(scenario.seed, "begin")
    step, settings, count = _pick_from(chance)(steps), scenario.settings, scenario.num_train
    if not step:
        return scenario
    cursor, seed = chance.randrange(count), chance.randrange(1 << 32)
    rows = permute_rows(seed, 0, count)
    left = [at for at in range(cursor) if chance.random() < FORK_UNFINISHED]
    origin = ForkOrigin(
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
    total = settings.total_steps and settings.total_steps + step
    settings = msgspec.structs.replace(settings, total_steps=total)
    return msgspec.structs.replace(scenario, origin=origin, settings=settings)


def _with_tails(scenario: Scenario, repack: RepackDraw, packing: Pick) -> Scenario:
    """Apply the values of [repack] over those of [work] and [time], so that stragglers occur."""
    settings, lengths = scenario.settings, scenario.lengths
    if repack.max_staleness is not None:
        staleness = packing(repack.max_staleness)
        settings = msgspec.structs.replace(settings, max_staleness=staleness)
    if repack.median_tokens is not None:
        lengths = msgspec.structs.replace(lengths, median=packing(repack.median_tokens))
    progress_ns = scenario.progress_ns
    if repack.progress_ms is not None:
        progress_ns = packing(repack.progress_ms) * MS
    return msgspec.structs.replace(
        scenario, settings=settings, lengths=lengths, progress_ns=progress_ns
    )


def seconds(value: float) -> int:
    """Return seconds as nanoseconds."""
    return int(value * SECOND)


def actor_config(scenario: Scenario) -> Config:
    """Return the configuration that the actors of this world read from their run directory."""
    settings = scenario.settings
    return Config(
        seed=settings.seed,
        data=DataConfig(max_response_length=scenario.lengths.limit),
        rollout=RolloutConfig(
            replicas=scenario.replicas,
            group_size=settings.group_size,
            max_num_seqs=scenario.slots,
            progress_interval_ms=scenario.progress_ns // MS,
            max_batch=scenario.max_batch or "auto",
            weight_update="in-flight" if settings.in_flight else "drain",
            kv_on_update=scenario.kv_on_update,
        ),
        env=EnvConfig(
            path="environment.py" if scenario.call_semantics else "",
            call_semantics=cast(
                Literal["at-most-once", "retryable"], scenario.call_semantics or "at-most-once"
            ),
        ),
        repack=RepackConfig(policy=cast(RepackPolicy, settings.repack_policy or "off")),
        recovery=RecoveryConfig(
            max_restarts=scenario.max_restarts, restart_window_s=scenario.restart_window_s
        ),
        coordinator=CoordinatorConfig(
            heartbeat_ms=scenario.heartbeat_ns // MS,
            lease_ms=scenario.lease_ms,
            node_lease_ms=scenario.node_lease_ms,
            disk_full_timeout_s=scenario.disk_full_timeout_s,
        ),
        store=StoreConfig(payload_gb=scenario.payload_gb if scenario.save_freq else 0.0),
        trainer=TrainerConfig(
            save_freq=scenario.save_freq, max_ckpt_to_keep=scenario.max_ckpt_to_keep
        ),
    )
