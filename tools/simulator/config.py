"""Configuration of a simulation: a run's own keys, and the world around the run in [world].

Reads   a TOML file; swarm.toml, which has the choices of all keys that the file leaves out
Gives   SimConfig, the configuration of one world; load, which returns Choices; ConfigError names
        the key, the value and the fix

A value written as a list is a choice: each seed draws one of its members, so that one file
describes a swarm of different runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from laminar.config import Config, ConfigError, known_keys, read_toml
from laminar.config.declaring import Section
from laminar.config.keys import check_value
from laminar.config.reading import flatten_tables

Choices: TypeAlias = dict[str, Any]  #: values, and lists of them, by dotted key
Floats = float | tuple[float, ...]
SWARM = Path(__file__).with_name("swarm.toml")
FAULTS = "world.faults."  #: keys whose lists are drawn by the faults themselves
WITH_REPACK = "world.with_repack"


class FaultConfig(Section, frozen=True, kw_only=True):
    """Faults that may be drawn; each seed draws its own subset and rates."""

    menu: tuple[str, ...]  #: kinds of fault; empty: all (see docs/simulator.md)
    share: float  #: share of the menu that is active in one run
    seconds: Floats  #: virtual time with faults; then everything heals
    every_s: Floats  #: mean time between two faults of one kind
    fatal_share: float  #: share of runs that lose a process that they need
    calm_share: float  #: share of runs without faults


class CheckConfig(Section, frozen=True, kw_only=True):
    """Extent of the checks, and limits past which a run is considered endless."""

    invariants_every: int  #: events between two checks of the whole state; 0: by its size
    events_max: int  #: most events, gauges excluded
    quiet_s: float  #: virtual time without progress that is a standstill


class WorldConfig(Section, frozen=True, kw_only=True):
    """The world around a run: its machines, data, network, models and faults."""

    nodes: int  #: machines; the replicas are spread over them
    num_train: int  #: prompts
    fork_step: int  #: steps that another run had made when this one was forked; 0: no fork
    stall_ms: int  #: time without progress after which an actor is restarted
    filter: str  #: metric of algorithm.filter_groups; empty: off
    scores: int  #: distinct scores in a world with a filter; 1: all are equal
    kv_capacity: int  #: tokens, where an engine has no limit
    cache_tokens: int  #: tokens in an engine's cache; 0: unlimited
    p99_to_median: float  #: ratio for response lengths
    environment_share: float  #: share of the worlds with an environment
    answer_s: float  #: time that the environment takes to answer
    #: 0: uniform, 0.5 to 1.5 times answer_s; else log-normal with answer_s as its median
    answer_p99_to_median: float
    quantum_ms: int  #: messages within it share one turn of the coordinator
    delay_ms: float  #: mean one-way delay of a message
    start_s: float  #: longest from a process start to readiness
    transfer_s: float  #: transfer of weights from one machine to the next
    load_s: float  #: loading weights into an engine
    score_s: float  #: one reward
    segment_bytes: int  #: size of a segment of the event log
    snapshot_every: int  #: events
    #: share of the worlds that have a boundary in place of a choice, for each (scenario.py)
    boundary_share: float
    with_repack: Choices  #: choices that replace others in worlds with repack
    faults: FaultConfig
    checks: CheckConfig


class SimConfig(Config, frozen=True, kw_only=True):
    """Configuration of one world: the run's, as its actors read it, and the world around it."""

    world: WorldConfig


def load(path: Path, kinds: tuple[str, ...]) -> Choices:
    """Read and check one file; `kinds` are the kinds of fault that exist."""
    choices = _read(SWARM) | _read(path)
    for kind in choices["world.faults.menu"]:
        if kind not in kinds:
            raise ConfigError(
                f"{path}: unknown fault {kind!r} in world.faults.menu; known: {', '.join(kinds)}"
            )
    return choices


def _read(path: Path) -> Choices:
    choices = _check(flatten_tables(read_toml(path), str(path), SimConfig))
    if replaced := choices.get(WITH_REPACK):
        choices[WITH_REPACK] = _check(flatten_tables(replaced, str(path), SimConfig))
    return choices


def _check(choices: Choices) -> Choices:
    """Check each value, and each member of a choice, by its declaration."""
    keys, checked = known_keys(SimConfig), Choices()
    for key, value in choices.items():
        if isinstance(value, list) and not key.startswith(FAULTS):
            checked[key] = [check_value(key, member, keys[key]) for member in value]
        else:
            checked[key] = check_value(key, value, keys[key])
    return checked
