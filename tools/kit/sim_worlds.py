"""Small simulated worlds for tests: one config, changed where a test needs it.

Reads   nothing
Gives   `config`, `calm`, `ran`; `log_bytes` of a world that has ended; LoggedRun, for tests of logs
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from laminar.core.state.state import State, hash_state
from laminar.eventlog.reader import read_log
from laminar.events.base import Command, Stamped
from tools.kit.memory_disk import MemoryDisk
from tools.simulator.config import (
    CheckConfig,
    EnvironmentConfig,
    FaultConfig,
    FilterConfig,
    LogConfig,
    RepackConfig,
    SimConfig,
    TimeConfig,
    WorkConfig,
)
from tools.simulator.run import make_world
from tools.simulator.world import World


def config(*faults: str, **changes: Any) -> SimConfig:
    """Return the default swarm, or one in which `faults` are frequent and the only ones."""
    menu = FaultConfig(menu=faults, share=1.0, every_s=2.0, fatal_share=0.0, calm_share=0.0)
    sections = {
        # what else a test leaves open is drawn as usual
        "work": WorkConfig(boundary_share=0.0, weight_update="drain"),
        "time": TimeConfig(),
        "filter": FilterConfig(metric=""),
        "repack": RepackConfig(),
        "environment": EnvironmentConfig(),
        "log": LogConfig(),
        "faults": menu if faults else FaultConfig(),
        "checks": CheckConfig(),
    }
    for key, value in changes.items():
        section = next(s for s, known in sections.items() if key in known.__struct_fields__)
        sections[section] = msgspec.structs.replace(sections[section], **{key: value})
    return SimConfig(**sections)


def calm(**changes: Any) -> SimConfig:
    """Return a config in which nothing goes wrong."""
    return config(**{"calm_share": 1.0, **changes})


def ran(config: SimConfig, seed: int = 1) -> World:
    """Return a world that has run to its end."""
    world = make_world(config, seed)
    world.run()
    return world


def log_bytes(world: World) -> dict[str, bytes]:
    disk = world.coordinator.disk
    return {name: disk.read(name) for name in disk.list_names()}


def records(world: World) -> list[Any]:
    return [record for _, record in read_log(world.coordinator.disk)]


#: A run of two hundred events in several segments, with two snapshots.
SMALL: dict[str, Any] = {
    "replicas": 3, "nodes": 2, "slots": 4, "group_size": 2, "groups_per_step": 2,
    "num_train": 10, "num_eval": 2, "test_freq": 2, "total_steps": 0, "train_s": 0.2,
    "median_tokens": 50, "max_tokens": 200, "progress_ms": 2_000, "seconds": 20.0,
    "segment_bytes": 16_384, "snapshot_every": 60,
}  # fmt: skip
#: Frequent migrations of trajectories.
PACKED: dict[str, Any] = {
    "policy": "best-fit", "interval_ms": 200, "max_batch": 0, "kv_capacity": 1_000_000,
    "progress_ms": 500, "slots": 8, "replicas": 8, "group_size": 4, "groups_per_step": 4,
    "groups_per_version": 1, "max_staleness": 4, "train_s": 1.0, "median_tokens": 200,
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
