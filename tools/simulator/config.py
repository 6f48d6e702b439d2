"""Configuration of a simulation: sizes, timings, and which faults may be drawn, as TOML.

Reads   a TOML file
Gives   SimConfig; ConfigError names the key, the value and the fix

A value written as a list is a choice: each seed draws one of its members, so that one file
describes a swarm of different runs.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec

from laminar.config import ConfigError, read_toml

Ints = int | tuple[int, ...]
Floats = float | tuple[float, ...]
Words = str | tuple[str, ...]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keyword-only, strict."""


class WorkConfig(Section, frozen=True, kw_only=True):
    """Work of the simulated run; names as in configs/reference.toml where they are the same."""

    replicas: Ints = (4, 8, 16)
    nodes: Ints = (1, 2, 4, 8)  #: machines; the replicas are spread over them
    slots: Ints = (4, 8, 16)  #: trajectories that an engine runs at a time
    group_size: Ints = (2, 4)
    groups_per_step: Ints = (2, 4, 8)
    groups_per_version: Ints = (1, 2, 4)
    #: drain | in-flight, in a world without repack; drawn separately, as is kv_on_update
    weight_update: Words = ("drain", "in-flight")
    kv_on_update: Words = ("keep", "recompute")
    load: Words = ("whole", "whole", "stream")  #: drawn separately, in every world
    max_staleness: Ints = (0, 1, 2, 4)
    total_steps: Ints = (0, 6)  #: 0: until the data ends
    num_train: Ints = (20, 40)  #: prompts
    #: steps that another run had made when this one was forked; 0: no fork
    fork_step: Ints = (0, 0, 0, 0, 0, 0, 0, 0, 0, 3)
    num_eval: Ints = (0, 5)
    eval_answers: Ints = 1  #: samples of each evaluation prompt
    test_freq: Ints = (0, 2)
    save_freq: Ints = (0, 0, 1, 2)
    max_ckpt_to_keep: Ints = (1, 2, 3)
    payload_gb: Floats = (0.0, 1e-9, 1e-6)  #: limit in a run with checkpoints
    batch_strategy: Words = ("deadline", "priority", "strategies.py:mine")
    reward_scope: Words = ("trajectory", "group")
    drop_last: bool | tuple[bool, ...] = (False, True)
    resume_timeout_ms: Ints = (100, 3_000)
    batch_timeout_ms: Ints = (1_000, 5_000)
    stall_ms: Ints = 20_000
    max_restarts: Ints = 100  #: restarts of one process within restart_window_s
    restart_window_s: Floats = 10.0
    #: share of the worlds that have a boundary in place of a choice, for each (scenario.py)
    boundary_share: float = 0.06


class FilterConfig(Section, frozen=True, kw_only=True):
    """Filter that drops groups without variance; drawn separately, in every world."""

    metric: Words = ("", "", "", "", "", "", "", "score", "acc")  #: empty: off
    gen_batches: Ints = (0, 1, 10)  #: at least 1 in a run with total_steps
    scores: Ints = (2, 2, 2, 2, 2, 1)  #: distinct scores in a world with a filter; 1: all are equal


class RepackConfig(Section, frozen=True, kw_only=True):
    """Repacking of stragglers on few replicas; drawn separately, in every world."""

    policy: Words = ("", "gain", "best-fit")  #: empty: off
    interval_ms: Ints = (200, 2_000)
    release_timeout_ms: Ints = (200, 2_000)
    prefill_tokens_per_step: Ints = (1, 500)
    max_batch: Ints = (2, 8, 0)  #: sequences of a decode step; 0: as many as an engine runs
    kv_capacity: Ints = (2_000, 1_000_000)  #: tokens, where an engine has no limit
    #: replacements for [work] and [time] in a world with a policy; None: unchanged
    max_staleness: Ints | None = None
    median_tokens: Ints | None = None
    progress_ms: Ints | None = None


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """Environment that speaks between the turns of a response; drawn separately."""

    environment_share: float = 0.0  #: share of the worlds
    call_semantics: Words = ("at-most-once", "retryable")  #: semantics of a lost session
    answer_s: Floats = (0.01, 0.3, 8.0)  #: time to answer
    #: 0: uniform, 0.5 to 1.5 times answer_s; else log-normal with answer_s as its median
    answer_p99_to_median: Floats = 0.0


class TimeConfig(Section, frozen=True, kw_only=True):
    """Durations in virtual time."""

    quantum_ms: Ints = 2  #: messages within it share one turn of the coordinator
    delay_ms: Floats = (0.2, 2.0)  #: mean one-way delay of a message
    heartbeat_ms: Ints = 1_000
    lease_ms: Ints = 8_000  #: lease of replicas and relays
    node_lease_ms: Ints = 16_000  #: lease of nodes, store and trainer
    disk_full_timeout_s: Floats = 120.0  #: longest time that no coordinator has room on the disk
    progress_ms: Ints = 500  #: interval between reports of a replica
    start_s: Floats = (0.5, 3.0)  #: longest from a process start to readiness
    transfer_s: Floats = (0.05, 0.5, 3.0)  #: transfer of weights from one machine to the next
    load_s: Floats = (0.05, 0.5)  #: loading weights into an engine
    train_s: Floats = (0.2, 1.0, 3.0)  #: one step of the trainer
    score_s: Floats = (0.01, 0.2)  #: one reward
    step_us: Floats = 8_000.0  #: one decode step of an engine, whatever the batch
    sequence_us: Floats = 60.0  #: added to a decode step by each sequence
    token_us: Floats = 0.0  #: added to a decode step by each token in the cache
    prefill_tokens_per_s: Floats = 20_000.0
    #: tokens in an engine's cache; 0: unlimited
    cache_tokens: Ints = 0
    median_tokens: Ints = (50, 200)  #: response length; p99 is p99_to_median times as much
    max_tokens: Ints = 2_000
    p99_to_median: Floats = 10.0  #: ratio for response lengths


class LogConfig(Section, frozen=True, kw_only=True):
    """Sizes of the coordinator's event log, small enough that rare things happen in every run."""

    segment_bytes: Ints = (32_768, 131_072)
    snapshot_every: Ints = (200, 1_000)  #: events


class FaultConfig(Section, frozen=True, kw_only=True):
    """Faults that may be drawn; each seed draws its own subset and rates."""

    menu: tuple[str, ...] = ()  #: kinds of fault; empty: all (see docs/simulator.md)
    share: float = 0.4  #: share of the menu that is active in one run
    seconds: Floats = (20.0, 60.0)  #: virtual time with faults; then everything heals
    every_s: Floats = (4.0, 12.0, 40.0)  #: mean time between two faults of one kind
    fatal_share: float = 0.1  #: share of runs that lose a process that they need
    calm_share: float = 0.05  #: share of runs without faults


class CheckConfig(Section, frozen=True, kw_only=True):
    """Extent of the checks, and limits past which a run is considered endless."""

    invariants_every: int = 0  #: events between two checks of the whole state; 0: by its size
    events_max: int = 200_000  #: most events, gauges excluded
    quiet_s: float = 900.0  #: virtual time without progress that is a standstill


class SimConfig(Section, frozen=True, kw_only=True):
    """Contents of one configuration file."""

    work: WorkConfig = WorkConfig()
    filter: FilterConfig = FilterConfig()
    repack: RepackConfig = RepackConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    time: TimeConfig = TimeConfig()
    log: LogConfig = LogConfig()
    faults: FaultConfig = FaultConfig()
    checks: CheckConfig = CheckConfig()


def load(path: Path, kinds: tuple[str, ...]) -> SimConfig:
    """Read and check one file; `kinds` are the kinds of fault that exist."""
    tree = read_toml(path)
    _refuse_unknown(tree, path)
    try:
        config = msgspec.convert(tree, SimConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {error}; see docs/simulator.md for what each key takes"
        ) from None
    for kind in config.faults.menu:
        if kind not in kinds:
            raise ConfigError(
                f"{path}: unknown fault {kind!r} in faults.menu; known: {', '.join(kinds)}"
            )
    return config


def _refuse_unknown(tree: dict[str, object], path: Path) -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(SimConfig)}
    for section, values in tree.items():
        if section not in sections:
            raise ConfigError(f"{path}: unknown section [{section}]; {_nearest(section, sections)}")
        known = [field.name for field in msgspec.structs.fields(sections[section])]
        for key in values if isinstance(values, dict) else ():
            if key not in known:
                raise ConfigError(f"{path}: unknown key {section}.{key}; {_nearest(key, known)}")


def _nearest(name: str, known: object) -> str:
    names = list(known)  # type: ignore[call-overload]
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
