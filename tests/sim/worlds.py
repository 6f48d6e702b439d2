"""Small simulated worlds for tests: one config, changed where a test needs it.

Reads   nothing
Gives   `config`, `calm`, `world`; `log_bytes` of a world that has ended
"""

from __future__ import annotations

from typing import Any

import msgspec

from laminar.eventlog.reader import read_log
from laminar.sim.config import (
    CheckConfig,
    FaultConfig,
    LogConfig,
    SimConfig,
    TimeConfig,
    WorkConfig,
)
from laminar.sim.world import World


def config(*faults: str, **changes: Any) -> SimConfig:
    """The default swarm; with `faults` these and no others, all of them, often."""
    menu = FaultConfig(menu=faults, share=1.0, every_s=2.0, fatal_share=0.0, calm_share=0.0)
    sections = {
        "work": WorkConfig(),
        "time": TimeConfig(),
        "log": LogConfig(),
        "faults": menu if faults else FaultConfig(),
        "checks": CheckConfig(),
    }
    for key, value in changes.items():
        section = next(s for s, known in sections.items() if key in known.__struct_fields__)
        sections[section] = msgspec.structs.replace(sections[section], **{key: value})
    return SimConfig(**sections)


def calm(**changes: Any) -> SimConfig:
    """Nothing goes wrong."""
    return config(**{"calm_share": 1.0, **changes})


def ran(config: SimConfig, seed: int = 1) -> World:
    """A world that has run to its end."""
    world = World(config, seed)
    world.run()
    return world


def log_bytes(world: World) -> dict[str, bytes]:
    disk = world.coordinator.disk
    return {name: disk.read(name) for name in disk.names()}


def records(world: World) -> list[Any]:
    return [record for _, record in read_log(world.coordinator.disk)]
