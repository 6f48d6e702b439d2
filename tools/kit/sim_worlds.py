"""Small simulated worlds for tests: one config, changed where a test needs it.

Reads   nothing
Gives   `config`, `calm`, `ran`; `log_bytes` of a world that has ended; LoggedRun, for tests of logs
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from laminar.config.reading import flatten_tables
from laminar.core.state.state import State, hash_state
from laminar.eventlog.reader import read_log
from laminar.events.base import Command, Stamped
from tools.kit.memory_disk import MemoryDisk
from tools.simulator.config import SWARM, Choices, SimConfig, load
from tools.simulator.faults.faults import KINDS
from tools.simulator.run import make_world
from tools.simulator.scenario import Scenario
from tools.simulator.world import World


def config(*faults: str, **changes: Any) -> Choices:
    """Return the default swarm, or one in which `faults` are frequent and the only ones.

    `changes`: values by the last part of their key; what a test leaves open is drawn as usual."""
    choices = load(SWARM, KINDS)
    values = {"boundary_share": 0.0, "weight_update": "drain", "filter": ""}
    if faults:
        only = {"share": 1.0, "every_s": 2.0, "fatal_share": 0.0, "calm_share": 0.0}
        values |= {"menu": faults, **only}
    for name, value in (values | changes).items():
        choices[next(key for key in choices if key.endswith(f".{name}"))] = value
    return choices


def calm(**changes: Any) -> Choices:
    """Return a config in which nothing goes wrong."""
    return config(**{"calm_share": 1.0, **changes})


def ran(choices: Choices, seed: int = 1) -> World:
    """Return a world that has run to its end."""
    world = make_world(choices, seed)
    world.run()
    return world


def list_differences(one: Scenario, other: Scenario) -> set[str]:
    """Return the keys whose values differ between two drawn scenarios."""
    mine, others = (
        flatten_tables(msgspec.to_builtins(each.config), "", SimConfig) for each in (one, other)
    )
    return {key for key in mine if mine[key] != others[key]}


def log_bytes(world: World) -> dict[str, bytes]:
    disk = world.coordinator.disk
    return {name: disk.read(name) for name in disk.list_names()}


def records(world: World) -> list[Any]:
    return [record for _, record in read_log(world.coordinator.disk)]


#: A run of two hundred events in several segments, with two snapshots.
SMALL: dict[str, Any] = {
    "replicas": 3, "nodes": 2, "max_num_seqs": 4, "group_size": 2, "train_batch_size": 2,
    "num_train": 10, "val_size": 2, "test_freq": 2, "total_training_steps": 0, "train_s": 0.2,
    "median_response": 50, "max_response_length": 200, "progress_interval_ms": 2_000,
    "seconds": 20.0, "segment_bytes": 16_384, "snapshot_every": 60,
}  # fmt: skip
#: Frequent migrations of trajectories.
PACKED: dict[str, Any] = {
    "policy": "best-fit", "interval_ms": 200, "max_batch": "auto", "kv_capacity": 1_000_000,
    "progress_interval_ms": 500, "max_num_seqs": 8, "replicas": 8, "group_size": 4,
    "train_batch_size": 4, "groups_per_version": 1, "max_staleness": 4, "train_s": 1.0,
    "median_response": 200,
}  # fmt: skip
#: Frequent kills of the coordinator, also while it writes.
KILLED = ("coordinator-killed",)


class LoggedRun:
    """A small run and the log of its coordinators; nothing goes wrong except `faults`."""

    def __init__(self, *faults: str, seed: int = 1, **changes: Any) -> None:
        calm_share = 0.0 if faults else 1.0
        values = {**SMALL, "every_s": 1.0, "calm_share": calm_share, **changes}
        self.digests: dict[int, str] = {}  #: state hash after each event
        self.world = make_world(config(*faults, **values), seed, self._observe)
        self.coordinator = self.world.coordinator

    def _observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self.digests[stamped.seq] = hash_state(state)

    def run(self) -> LoggedRun:
        """Run to the end without judging: the beginning of the log may be gone by then."""
        with self.world:
            self.world.begin()
            while not self.coordinator.ended:
                assert self.world.scheduler.step(), "nothing will ever happen"
        return self

    @cached_property
    def disk(self) -> MemoryDisk:
        """The remaining log and its snapshots."""
        return MemoryDisk(log_bytes(self.world))

    @property
    def state(self) -> State:
        """The last state."""
        assert self.coordinator.state is not None
        return self.coordinator.state

    @property
    def kills(self) -> int:
        return self.coordinator.incarnations - 1
