"""What a run holds in memory at the least, beside what this machine has: before anything starts.

Reads   the config; config.json and the headers of the weight files; the machine's memory, /dev/shm
        and GPUs
Gives   Place: the lines of the plan
Raises  ConfigError with the figures and the fix, where it cannot fit

Counted is what is there all the time, by the bytes of its numbers: parameters, gradients and Adam's
moments of the trainer, the reference model of a KL term, the copies that checkpoints are made of,
the relays' slots, each replica's weights. Activations, caches of keys and values, and processes
come on top, so what is refused would not run, and what is let through may still be too much.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from laminar.actors.system.processes import gpus_of
from laminar.config import Config, ConfigError
from laminar.engines.check import count_gpus, weight_shapes
from laminar.engines.environment import gpus_per_replica, visible_gpus
from laminar.engines.hf_config import read_hf_config
from laminar.run.memory_limit import memory_limit
from laminar.weights.arena.arena import SHARED_MEMORY
from laminar.weights.arena.slots import MIN_SLOTS

HEAD = "lm_head.weight"
FLOAT32 = 4  #: bytes of each parameter, gradient and moment of the trainer
BYTES = {"float32": 4, "bfloat16": 2}
ASK_S = 20.0
"""The time for nvidia-smi, which is slow on a machine whose GPUs sleep."""


@dataclass(frozen=True)
class Machine:
    memory: int  #: bytes that our processes may take together
    shared: int  #: bytes of /dev/shm
    gpus: dict[str, int]  #: bytes of each GPU, by its name for CUDA; 0: not known


@dataclass(frozen=True)
class Place:
    """One memory, and what is to lie in it."""

    name: str
    have: int  #: bytes; 0: not known
    parts: dict[str, int]  #: bytes by what they are

    @property
    def want(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.have or self.want <= self.have

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {_gb(size)}" for what, size in self.parts.items())
        amount = f"{_gb(self.want)} of {_gb(self.have)}" if self.have else _gb(self.want)
        return f"{amount} GB of {self.name} ({parts})"


def this_machine() -> Machine:
    gpus = visible_gpus()
    gpus = gpus if gpus and count_gpus() else []
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    return Machine(memory_limit(), shared, {gpu: _gpu_bytes(gpu) for gpu in gpus})


def check_memory(config: Config, machines: int, machine: Machine | None = None) -> list[Place]:
    """Every place has room; ConfigError. `machines`: how many of the run's are this one."""
    if config.is_emulated:
        return []
    machine = machine or this_machine()
    parameters = _parameters(config.model.name)
    places = list(_places(config, parameters, machines, machine))
    short = [place for place in places if not place.fits]
    if not short:
        _check_slots(config, _version_bytes(config, parameters, machine), machine)
        return places
    worst = max(short, key=lambda place: place.want / place.have)
    raise ConfigError(
        f"{config.model.name} has {_count(parameters)} parameters, and the run would take more "
        f"memory than there is: {worst}; activations, caches and processes come on top; "
        f"{_fix(config, parameters, machines, machine)}"
    )


def memory_lines(places: Sequence[Place]) -> list[str]:
    """The lines of the plan about memory."""
    if not places:
        return []
    first, *others = map(str, places)
    rest = "activations, caches of keys and values, and processes come on top"
    return [f"memory     {first}", *(f"           {text}" for text in (*others, rest))]


def _parameters(directory: str) -> int:
    """A head that is the embedding counts once."""
    tied = bool(read_hf_config(directory).get("tie_word_embeddings"))
    shapes = weight_shapes(directory)
    return sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name == HEAD))


def _places(config: Config, parameters: int, machines: int, machine: Machine) -> Iterator[Place]:
    names, trainer_gpus = list(machine.gpus), _trainer_gpus(config, machine)
    version = _version_bytes(config, parameters, machine)
    slots = _slots(config, version, machine)
    relays = {f"{slots} weight slots" + _times(machines): machines * slots * version}
    host: dict[str, int] = {}
    gpus: dict[str, dict[str, int]] = {name: {} for name in names}
    trainer = gpus[trainer_gpus[0]] if trainer_gpus else host
    reference = parameters * BYTES[_type(config.trainer.dtype, trainer_gpus)]
    _add_trainer(config, parameters, reference, trainer, host)
    _add_replicas(config, parameters, machines, host, gpus)
    yield Place("this machine", machine.memory, host | relays)
    yield Place(str(SHARED_MEMORY), machine.shared, relays)
    yield from (Place(f"GPU {name}", machine.gpus[name], parts) for name, parts in gpus.items())


def _trainer_gpus(config: Config, machine: Machine) -> list[str]:
    if config.trainer.device == "cpu":
        return []
    return gpus_of("trainer", "", list(machine.gpus), ranks=config.trainer.ranks)


def _version_bytes(config: Config, parameters: int, machine: Machine) -> int:
    """The bytes of one version, as it is published."""
    return parameters * BYTES[_type(config.weights.dtype, _trainer_gpus(config, machine))]


def _add_trainer(
    config: Config, parameters: int, reference: int, device: dict[str, int], host: dict[str, int]
) -> None:
    device["parameters"] = device["gradients"] = FLOAT32 * parameters
    device["Adam's moments"] = 2 * FLOAT32 * parameters
    if config.algorithm.use_kl_loss:
        device["reference model"] = reference  # at the least: embeddings stay float32
    if config.trainer.save_freq:
        host["checkpoint copies"] = 3 * FLOAT32 * parameters


def _add_replicas(
    config: Config,
    parameters: int,
    machines: int,
    host: dict[str, int],
    gpus: dict[str, dict[str, int]],
) -> None:
    """Each engine has a copy of the weights, over all its GPUs."""
    names = list(gpus) if config.rollout.device != "cpu" else []
    copies: dict[str, int] = {}
    counts = [config.replicas_on(machine) for machine in range(machines)]
    for index in chain.from_iterable(map(range, counts)):
        per_replica, ranks = gpus_per_replica(config), config.trainer.ranks
        for name in gpus_of("rollout", f"rollout-{index}", names, per_replica, ranks):
            copies[name] = copies.get(name, 0) + 1
    one = parameters * BYTES[_type(config.rollout.dtype, names, config.weights.dtype)]
    for name, count in copies.items():
        gpus[name][_replicas(count)] = count * one // gpus_per_replica(config)
    if not names:
        host[_replicas(sum(counts))] = sum(counts) * one


def _slots(config: Config, version: int, machine: Machine) -> int:
    """How many slots the relay makes; a limit that is too low for any does not count."""
    most = _slot_limit(config, machine) // max(version, 1)
    return max(MIN_SLOTS, min(config.weights.slots, most))


def _check_slots(config: Config, version: int, machine: Machine) -> None:
    limit, least = _slot_limit(config, machine), MIN_SLOTS * version
    if limit < least:
        what = "" if config.weights.max_bytes else ", half of the memory that this job may take"
        raise ConfigError(
            f"weights.max_bytes = {config.weights.max_bytes} ({_gb(limit)} GB{what}) has no room "
            f"for {MIN_SLOTS} versions of {_gb(version)} GB: set it to {least} or more, or take a "
            "smaller model"
        )


def _slot_limit(config: Config, machine: Machine) -> int:
    return config.weights.max_bytes or machine.memory // 2


def _fix(config: Config, parameters: int, machines: int, machine: Machine) -> str:
    """Settings that make it fit, each of which takes less where there is too little; or none do."""
    least, words = config, []
    over = _over(_places(config, parameters, machines, machine))
    for section, key, value in _smaller(config):
        changed = msgspec.structs.replace(getattr(least, section), **{key: value})
        tried = msgspec.structs.replace(least, **{section: changed})
        left = _over(_places(tried, parameters, machines, machine))
        if left < over:
            least, over = tried, left
            words.append(f"{section}.{key} = {str(value).lower()}")
        if not over:
            return f"set {', '.join(words)}, or take a smaller model"
    return "no setting makes it fit: take a smaller model, or a machine with more memory"


def _over(places: Iterable[Place]) -> int:
    """Bytes for which there is no room."""
    return sum(place.want - place.have for place in places if not place.fits)


def _smaller(config: Config) -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) of settings that are not at their smallest."""
    if config.weights.slots > MIN_SLOTS:
        yield "weights", "slots", MIN_SLOTS
    if config.rollout.replicas > 1:
        yield "rollout", "replicas", 1
    if config.weights.dtype != "bfloat16":
        yield "weights", "dtype", "bfloat16"
    if config.rollout.dtype == "float32":
        yield "rollout", "dtype", "bfloat16"
    if config.algorithm.use_kl_loss:
        yield "algorithm", "use_kl_loss", False
    if config.trainer.save_freq:
        yield "trainer", "save_freq", 0


def _type(name: str, gpus: Sequence[str], other: str = "auto") -> str:
    """What "auto" means on this device."""
    given = next((each for each in (name, other) if each != "auto"), "")
    return given or ("bfloat16" if gpus else "float32")


def _gpu_bytes(name: str) -> int:
    """0 where the driver does not say. PyTorch would take some of the GPU for the answer."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", name]
    try:
        said = subprocess.run(query, capture_output=True, timeout=ASK_S, check=True).stdout
        return int(said.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _replicas(count: int) -> str:
    return f"{count} replicas' weights" if count > 1 else "a replica's weights"


def _times(machines: int) -> str:
    return f" on each of {machines} machines" if machines > 1 else ""


def _gb(size: int) -> str:
    """A size in 10^9 bytes."""
    return f"{size / 1e9:.{1 if size >= 1e9 else 3}f}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} G" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
