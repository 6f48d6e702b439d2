"""What a simulation is configured with: sizes, timings, and which faults may be drawn, as TOML.

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
    """The run that is simulated; names as in configs/reference.toml where they are the same."""

    replicas: Ints = (4, 8, 16)
    nodes: Ints = (1, 2, 4, 8)  #: machines; the replicas are spread over them
    slots: Ints = (4, 8, 16)  #: trajectories that an engine runs at a time
    group_size: Ints = (2, 4)
    groups_per_step: Ints = (2, 4, 8)
    groups_per_version: Ints = (1, 2, 4)
    #: in a world without repack: drain | in-flight, drawn by itself as what becomes of the cache
    update: Words = ("drain", "in-flight")
    kv_on_update: Words = ("keep", "recompute")
    load: Words = ("whole", "whole", "stream")  #: drawn by itself, whatever else a world has
    max_staleness: Ints = (0, 1, 2, 4)
    total_steps: Ints = (0, 6)  #: 0: until the data ends
    num_train: Ints = (20, 40)  #: prompts
    #: steps that another run had made when this one was forked; 0: no fork
    fork_step: Ints = (0, 0, 0, 0, 0, 0, 0, 0, 0, 3)
    num_eval: Ints = (0, 5)
    eval_answers: Ints = 1  #: to each of them
    test_freq: Ints = (0, 2)
    save_freq: Ints = (0, 0, 1, 2)
    max_ckpt_to_keep: Ints = (1, 2, 3)
    payload_gb: Floats = (0.0, 1e-9, 1e-6)  #: of a run with checkpoints
    batch_strategy: Words = ("deadline", "priority", "strategies.py:mine")
    reward_scope: Words = ("trajectory", "group")
    drop_last: bool | tuple[bool, ...] = (False, True)
    resume_wait_ms: Ints = (100, 3_000)
    batch_wait_ms: Ints = (1_000, 5_000)
    stall_ms: Ints = 20_000
    max_restarts: Ints = 100  #: of one process within restart_window_s
    restart_window_s: Floats = 10.0
    #: of the worlds, that have a choice at a boundary instead, for each such choice (scenario.py)
    boundary_share: float = 0.06


class FilterConfig(Section, frozen=True, kw_only=True):
    """Groups without variance are not trained; drawn by itself, whatever else a world has."""

    metric: Words = ("", "", "", "", "", "", "", "score", "acc")  #: empty: off
    gen_batches: Ints = (0, 1, 10)  #: of a run that has steps to make at least 1
    scores: Ints = (2, 2, 2, 2, 2, 1)  #: different ones, in a world with a filter; 1: all are alike


class RepackConfig(Section, frozen=True, kw_only=True):
    """Stragglers are packed on few replicas; drawn by itself, whatever else a world has."""

    policy: Words = ("", "gain", "best-fit")  #: empty: off
    interval_ms: Ints = (200, 2_000)
    release_ms: Ints = (200, 2_000)
    prefill_tokens_per_step: Ints = (1, 500)
    max_batch: Ints = (2, 8, 0)  #: sequences of a decode step; 0: as many as an engine runs
    kv_capacity: Ints = (
        2_000,
        1_000_000,
    )  #: tokens, where an engine has no limit
    #: in a world with a policy, in place of those of [work] and [time]; None: those
    max_staleness: Ints | None = None
    median_tokens: Ints | None = None
    progress_ms: Ints | None = None


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """Answers have turns, between which an environment speaks; drawn by itself."""

    environment_share: float = 0.0  #: of the worlds
    effects: Words = ("once", "pure")  #: what a lost session means
    answer_s: Floats = (0.01, 0.3, 8.0)  #: how long it takes
    #: 0: half as long to one and a half times; else log-normal, with answer_s as its median
    answer_p99_to_median: Floats = 0.0


class TimeConfig(Section, frozen=True, kw_only=True):
    """How long things take in virtual time."""

    quantum_ms: Ints = 2  #: what arrives within it is one turn of the coordinator
    delay_ms: Floats = (0.2, 2.0)  #: mean one-way delay of a message
    heartbeat_ms: Ints = 1_000
    lease_ms: Ints = 8_000  #: of replicas and relays
    node_lease_ms: Ints = 16_000  #: of nodes, store and trainer
    disk_wait_s: Floats = 120.0  #: how long no coordinator may find room on the disk
    progress_ms: Ints = 500  #: between two reports of a replica
    start_s: Floats = (0.5, 3.0)  #: from a process start to its readiness, at most
    transfer_s: Floats = (0.05, 0.5, 3.0)  #: weights from one machine to the next
    load_s: Floats = (0.05, 0.5)  #: loading weights into an engine
    train_s: Floats = (0.2, 1.0, 3.0)  #: one step of the trainer
    score_s: Floats = (0.01, 0.2)  #: one reward
    step_us: Floats = 8_000.0  #: one decode step of an engine, whatever the batch
    sequence_us: Floats = 60.0  #: added to it by each sequence
    token_us: Floats = 0.0  #: added to it by each token in the cache
    prefill_tokens_per_s: Floats = 20_000.0
    #: tokens in an engine's cache; 0: no end
    cache_tokens: Ints = 0
    median_tokens: Ints = (50, 200)  #: of a response; p99 is ten times as much
    max_tokens: Ints = 2_000
    p99_to_median: Floats = 10.0  #: of response lengths


class LogConfig(Section, frozen=True, kw_only=True):
    """The coordinator's event log, small enough that rare things happen in every run."""

    segment_bytes: Ints = (32_768, 131_072)
    snapshot_every: Ints = (200, 1_000)  #: events


class FaultConfig(Section, frozen=True, kw_only=True):
    """What may go wrong; each seed draws its own subset and rates."""

    menu: tuple[str, ...] = ()  #: kinds of fault; empty: all (see docs/simulator.md)
    share: float = 0.4  #: of the menu that is active in one run
    seconds: Floats = (20.0, 60.0)  #: virtual time with faults; then everything heals
    every_s: Floats = (4.0, 12.0, 40.0)  #: mean time between two faults of one kind
    fatal_share: float = 0.1  #: runs that lose a process which they cannot do without
    calm_share: float = 0.05  #: runs without any fault


class CheckConfig(Section, frozen=True, kw_only=True):
    """How much is checked, and when a run is given up as endless."""

    invariants_every: int = 0  #: events between two checks of the whole state; 0: by its size
    events_max: int = 200_000  #: besides gauges
    quiet_s: float = 900.0  #: virtual time without progress that is a standstill


class SimConfig(Section, frozen=True, kw_only=True):
    """One file."""

    work: WorkConfig = WorkConfig()
    filter: FilterConfig = FilterConfig()
    repack: RepackConfig = RepackConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    time: TimeConfig = TimeConfig()
    log: LogConfig = LogConfig()
    faults: FaultConfig = FaultConfig()
    checks: CheckConfig = CheckConfig()


def load(path: Path, kinds: tuple[str, ...]) -> SimConfig:
    """Read and check one file; `kinds` are the faults that there are."""
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
