"""Check, before anything starts, that a run fits into the memory of this machine.

Reads   the config; config.json and the headers of the weight files; the machine's memory, /dev/shm
        and GPUs
Gives   MemoryPlace and memory_lines: the lines of the plan; for machines and models that are not
        here parse_machine and read_planned_sizes
Raises  ConfigError with the figures and the fix if it cannot fit

Counted are the trainer (training/model/footprint.py: its state, a pass, the copies for
checkpoints), the relays' slots, each replica's weights, and with vLLM the share of a GPU that it
takes. Other key-value caches, and processes, come on top: a refused run could not work, while an
accepted one may still need too much.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from laminar.actors.system.processes import assign_gpus
from laminar.config import Config, ConfigError, replace_keys
from laminar.engines.check import count_gpus, weight_shapes
from laminar.engines.environment import ASK_S, gpus_per_replica, visible_gpus
from laminar.engines.hf_config import read_hf_config
from laminar.engines.protocol import EngineError
from laminar.run.memory_limit import memory_limit
from laminar.tasks.data.hub import find_model
from laminar.training.model import footprint
from laminar.weights.arena.arena import SHARED_MEMORY
from laminar.weights.arena.slots import MIN_SLOTS

GB = 10**9
RESERVE = 4 * GB  #: of each GPU of the trainer, for CUDA, collectives and fragmentation
GPU = "GPU "
GPUS_MAX = 64  #: of a machine
GPU_GB = {
    "A10": 24, "A100-40": 40, "A100-80": 80, "A6000": 48, "B200": 180, "H100": 80, "H20": 96,
    "H200": 141, "L4": 24, "L40S": 48, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32,
}  # fmt: skip
"""Memory as its maker names it, which is at most what the driver reports."""
SIZE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
"""Fields of config.json for which transformers would take the default of another model."""
VLLM_CPU_CACHE = 1 << 30  #: cache of vLLM on a CPU by default, in bytes (engines/vllm/start.py)
ON_TOP = "caches of keys and values that are not listed, CUDA and processes come on top"
TOKENS, CHECKPOINTING = "trainer.micro_batch_tokens", "trainer.activation_checkpointing"
VLLM_SHARE = "rollout.vllm.gpu_memory_utilization"
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
CACHE = 0.2  #: smallest cache of vLLM in addition to the weights, as a share of their bytes


@dataclass(frozen=True)
class MachineMemory:
    memory: int  #: bytes available to all processes of the run together
    shared: int  #: bytes of /dev/shm
    gpus: dict[str, int]  #: bytes of each GPU, by its name for CUDA; 0 if unknown


@dataclass(frozen=True)
class MemoryPlace:
    """Memory of one kind, with the parts to be placed in it."""

    name: str
    have: int  #: bytes; 0 if unknown
    parts: dict[str, int]  #: bytes by name of the part

    @property
    def want(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.have or self.want <= self.have

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {_format_gb(size)}" for what, size in self.parts.items())
        have = f" of {_format_gb(self.have)}" if self.have else ""
        return f"{_format_gb(self.want)}{have} GB of {self.name} ({parts})"


def this_machine() -> MachineMemory:
    gpus = visible_gpus()
    gpus = gpus if gpus and count_gpus() else []
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    return MachineMemory(memory_limit(), shared, {gpu: _gpu_bytes(gpu) for gpu in gpus})


def parse_machine(gpus: str, host_gb: float = 0, key: str = "--gpus") -> MachineMemory:
    """Return a machine with these GPUs; half of its memory, if given, is for /dev/shm."""
    name, _, count = gpus.rpartition(":")
    known = {re.sub(r"\W", "", name).lower(): str(gb) for name, gb in GPU_GB.items()}
    size = known.get(re.sub(r"\W", "", name).lower(), "")
    if not name:
        count, _, size = gpus.partition("x")
    number = int(count) if re.fullmatch(r"[0-9]{1,3}", count) else 0
    if not (0 < number <= GPUS_MAX and re.fullmatch(r"[1-9][0-9]{0,3}", size)):
        raise ConfigError(
            f"{key} = {gpus!r}: give 1 to {GPUS_MAX} GPUs of a machine as number and GB, such as "
            f"8x80, or as name and number, such as H100:8, with one of {', '.join(GPU_GB)}"
        )
    host = int(host_gb * GB)
    return MachineMemory(host, host // 2, {str(n): int(size) * GB for n in range(number)})


def check_memory(
    config: Config, machines: int, machine: MachineMemory | None = None
) -> list[MemoryPlace]:
    """Check that every place has room; raise ConfigError if not.

    `machines`: number of the run's nodes that are this machine, as MemoryEstimate has it.
    """
    if config.is_emulated:
        return []
    return check_estimate(config, estimate_memory(config, machines, machine or this_machine()))


def estimate_memory(config: Config, machines: int, machine: MachineMemory) -> MemoryEstimate:
    critic = read_sizes(config.critic_name) if config.has_critic else None
    return MemoryEstimate(read_sizes(config.model.name), machines, machine, critic)


def check_estimate(config: Config, run: MemoryEstimate) -> list[MemoryPlace]:
    """Return the places of a run; raise ConfigError if one has no room."""
    places = run.list_places(config)
    short = [place for place in places if not place.fits]
    if not short:
        run.check_slots(config)
        return places
    worst = max(short, key=lambda place: place.want / place.have)
    raise ConfigError(
        f"{config.model.name} has {format_count(run.model.parameters)} parameters, and the run "
        f"would take more memory than there is: {worst}; {ON_TOP}; {_suggest_fix(config, run)}"
    )


def has_room(config: Config, places: Sequence[MemoryPlace]) -> bool:
    """Return whether all fits, and the trainer's GPUs, the first ones, have some to spare."""
    of_trainer = (place for place in places[: config.trainer.ranks] if GPU in place.name)
    reserved = (not place.have or place.want + RESERVE <= place.have for place in of_trainer)
    return all(reserved) and all(place.fits for place in places)


def choose_shard(config: Config, run: MemoryEstimate) -> Config:
    """Decide trainer.shard = "auto": "node" if a node's memory suffices, else "all"."""
    if config.trainer.shard != "auto" or config.trainer.nodes == 1:
        return config
    config = replace_keys(config, {"trainer.shard": "node"})
    is_room = has_room(config, run.list_places(config))
    return config if is_room else replace_keys(config, {"trainer.shard": "all"})


def read_sizes(directory: str) -> footprint.ModelSizes:
    return footprint.sizes_of(read_hf_config(directory), weight_shapes(directory))


def read_planned_sizes(key: str, name: str) -> footprint.ModelSizes:
    """Return the sizes of a model's decoder by its config.json alone; raise ConfigError."""
    import torch  # take longer to load than all the rest
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    directory = find_model(key, name, ["config.json"])
    try:
        fields = read_hf_config(directory)
        if (kind := str(fields.get("model_type"))) not in CONFIG_MAPPING:
            raise EngineError(f"transformers has no model_type = {kind!r}; update it")
        config = CONFIG_MAPPING[kind].from_dict(fields).get_text_config()
        fields = fields.get("text_config", fields)
        for field in (config.attribute_map.get(size, size) for size in SIZE_FIELDS):
            if getattr(type(config), field, None) is not None and fields.get(field) is None:
                raise EngineError(f"config.json lacks {field}; add it, or download the file again")
        with torch.device("meta"):
            parameters = AutoModelForCausalLM.from_config(config).named_parameters()
    except Exception as error:  # each model checks its fields in its way
        raise ConfigError(f"{key} = {name!r}: {' '.join(str(error).split())}") from None
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    return footprint.sizes_of(config.to_dict(), shapes)


def memory_lines(places: Sequence[MemoryPlace], title: str = "memory, 10^9 bytes") -> list[str]:
    """Return the table of the plan: the parts in each memory."""
    if not places:
        return []
    columns = _group_places(places)
    names = dict.fromkeys(chain.from_iterable(place.parts for place in columns.values()))
    rows = [[title, *columns]]
    for name in names:
        sizes = [place.parts.get(name, 0) for place in columns.values()]
        rows.append([f"  {name}", *(_format_gb(size) if size else "" for size in sizes)])
    rows.append(["  all", *(_format_gb(place.want) for place in columns.values())])
    rows.append(["  there is", *(_format_gb(p.have) if p.have else "?" for p in columns.values())])
    return [*align_rows(rows), f"  {ON_TOP}"]


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in rows
    ]


def _group_places(places: Iterable[MemoryPlace]) -> dict[str, MemoryPlace]:
    """Return the places by name; GPUs with equal size and parts share one column."""
    alike: dict[Any, list[MemoryPlace]] = {}
    for place in places:
        on_gpu = place.name.startswith(GPU)
        alike.setdefault((on_gpu, place.have, tuple(place.parts.items())), []).append(place)
    return {
        GPU + ",".join(p.name.removeprefix(GPU) for p in same) if on_gpu else same[0].name: same[0]
        for (on_gpu, *_), same in alike.items()
    }


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate of a model for a number of a run's nodes, all of them this machine.

    Further nodes of the trainer take no more than the first."""

    model: footprint.ModelSizes
    nodes: int  #: the first ones of Config.node_names
    machine: MachineMemory
    critic: footprint.ModelSizes | None = None  #: sizes of its initial model
    first: int = 0  #: number of the first of these machines; the trainer is on machine 0

    def list_places(self, config: Config) -> list[MemoryPlace]:
        machine, trainer_gpus = self.machine, self._trainer_gpus(config)
        way = footprint.way_of(config, gpu=bool(trainer_gpus), critic=self.critic)
        nothing = footprint.Footprint()
        trained = nothing if self.first else footprint.estimate_footprint(self.model, way)
        gpus: dict[str, dict[str, int]] = {name: {} for name in machine.gpus}
        host: dict[str, int] = {}
        for name in trainer_gpus:
            gpus[name] |= trained.device
        of_trainer = 1 + max(self.nodes - config.run.nodes, 0)
        if not trainer_gpus:
            ranks = of_trainer * config.trainer.ranks
            host |= {name: ranks * size for name, size in trained.device.items()}
        host |= {name: of_trainer * size for name, size in trained.host.items()}
        self._add_replicas(config, host, gpus)
        slots, machines = self._count_slots(config), self._count_machines(config)
        each = f" on each of {machines} machines" if machines > 1 else ""
        relays = {f"{slots} weight slots{each}": machines * slots * self._version_bytes(config)}
        return [
            *(MemoryPlace(GPU + name, machine.gpus[name], parts) for name, parts in gpus.items()),
            MemoryPlace("this machine", machine.memory, host | relays),
            MemoryPlace(str(SHARED_MEMORY), machine.shared, relays),
        ]

    def _count_machines(self, config: Config) -> int:
        """Return the number of these nodes that have a relay and may have replicas."""
        return min(self.nodes, config.run.nodes)

    def compute_excess(self, config: Config) -> int:
        """Return the number of bytes that do not fit."""
        return sum(place.want - place.have for place in self.list_places(config) if not place.fits)

    def check_slots(self, config: Config) -> None:
        version = self._version_bytes(config)
        limit, least = self._slot_limit(config), MIN_SLOTS * version
        if 0 < limit < least:  # 0: unknown memory
            what = "" if config.weights.max_bytes else ", half of the memory that this job may take"
            raise ConfigError(
                f"weights.max_bytes = {config.weights.max_bytes} ({_format_gb(limit)} GB{what}) "
                f"has no room for {MIN_SLOTS} versions of {_format_gb(version)} GB: set it to "
                f"{least} or more, or take a smaller model"
            )

    def _trainer_gpus(self, config: Config) -> list[str]:
        if config.trainer.device == "cpu":
            return []
        return assign_gpus("trainer", "", list(self.machine.gpus), ranks=config.trainer.ranks)

    def _version_bytes(self, config: Config) -> int:
        """Return the bytes of one version as published."""
        way = footprint.way_of(config, gpu=bool(self._trainer_gpus(config)))
        return way.published * self.model.parameters

    def _count_slots(self, config: Config) -> int:
        """Return the number of slots of the relay; a limit below MIN_SLOTS is ignored."""
        most = self._slot_limit(config) // max(self._version_bytes(config), 1)
        return max(MIN_SLOTS, min(config.weights.slots, most))

    def _slot_limit(self, config: Config) -> int:
        return config.weights.max_bytes or self.machine.memory // 2

    def _add_replicas(
        self, config: Config, host: dict[str, int], gpus: dict[str, dict[str, int]]
    ) -> None:
        """Add the engines' copies of the weights, each spread over all GPUs of its replica."""
        names = list(gpus) if config.rollout.device != "cpu" else []
        copies: dict[str, int] = {}
        machines = range(self._count_machines(config))
        counts = [config.replicas_on(self.first + machine) for machine in machines]
        per_replica, ranks = gpus_per_replica(config), 0 if self.first else config.trainer.ranks
        for index in chain.from_iterable(map(range, counts)):
            for name in assign_gpus("rollout", f"rollout-{index}", names, per_replica, ranks):
                copies[name] = copies.get(name, 0) + 1
        for name, count in copies.items():
            what, size = _estimate_replica(config, self.model, self.machine.gpus[name])
            gpus[name][_format_times(count, what)] = count * size
        if not names:
            what, size = _estimate_replica(config, self.model, 0, on_gpu=False)
            host[_format_times(sum(counts), what)] = sum(counts) * size


def _estimate_replica(
    config: Config, model: footprint.ModelSizes, gpu: int, *, on_gpu: bool = True
) -> tuple[str, int]:
    """Return the name and size of a replica's memory on each of its GPUs, or on the host.

    vLLM fills its share of a GPU with keys and values; with `kv_cache_bytes` it does not measure.
    """
    vllm = config.rollout.vllm
    weights = model.parameters * _weight_bytes(config, on_gpu=on_gpu) // gpus_per_replica(config)
    if config.rollout.engine != "vllm":
        return "replica's weights", weights
    if vllm.kv_cache_bytes or not on_gpu:
        return "vLLM replica", weights + (vllm.kv_cache_bytes or VLLM_CPU_CACHE)
    return "vLLM replica", max(int(vllm.gpu_memory_utilization * gpu), weights)


def count_cache_tokens(config: Config, model: footprint.ModelSizes, gpu: int) -> int:
    """Return how many tokens the keys and values of a vLLM replica on GPUs have room for."""
    number, gpus = _weight_bytes(config, on_gpu=True), gpus_per_replica(config)
    one = 2 * model.layers * model.kv_heads * model.head_dim * number
    left = _estimate_replica(config, model, gpu)[1] - model.parameters * number // gpus
    return left * min(gpus, model.kv_heads) // max(one, 1)


def _weight_bytes(config: Config, *, on_gpu: bool) -> int:
    """Return the bytes of a replica's numbers."""
    dtype = next((t for t in (config.rollout.dtype, config.weights.dtype) if t != "auto"), "")
    return footprint.BYTES[dtype or ("bfloat16" if on_gpu else "float32")]


def _suggest_fix(config: Config, run: MemoryEstimate) -> str:
    """Suggest the mildest and fewest settings that make it fit, or say that there are none."""
    ways = dict(_list_reductions(config, run))
    chosen: dict[str, Any] = {}
    over = run.compute_excess(config)
    for key, values in ways.items():
        left = run.compute_excess(replace_keys(config, chosen | {key: values[-1]}))
        if left < over:
            chosen[key], over = values[-1], left
    if over:
        return "no setting makes it fit: take a smaller model, or a machine with more memory"
    for key in list(chosen):
        others = {name: value for name, value in chosen.items() if name != key}
        milder = [others, *(others | {key: value} for value in ways[key])]
        chosen = next(
            tried for tried in milder if not run.compute_excess(replace_keys(config, tried))
        )
    words = ", ".join(f"{key} = {str(value).lower()}" for key, value in chosen.items())
    return f"set {words}, or take a smaller model"


def _list_reductions(config: Config, run: MemoryEstimate) -> Iterator[tuple[str, list[Any]]]:
    """Yield settings that can be reduced, with their smaller values, mildest first."""
    if config.trainer.activation_checkpointing != "on":
        yield CHECKPOINTING, ["on"]
    if smaller := list_budgets(config)[1:]:
        yield TOKENS, smaller
    if config.rollout.engine == "vllm" and not config.rollout.vllm.kv_cache_bytes:
        yield from _smaller_share(config, run)
    if gpus := len(run.machine.gpus) if config.trainer.device != "cpu" else 0:
        more = [n for n in (2, 4, 8, 16) if config.trainer.ranks < n <= gpus]
        yield from [("trainer.ranks", more)] if more else []
        yield from [("trainer.offload", ["all"])] if config.trainer.offload == "none" else []
    if config.weights.slots > MIN_SLOTS:
        yield "weights.slots", [MIN_SLOTS]
    if config.rollout.replicas > 1:
        yield "rollout.replicas", [1]
    if config.weights.dtype != "bfloat16":
        yield "weights.dtype", ["bfloat16"]
    if config.rollout.dtype == "float32":
        yield "rollout.dtype", ["bfloat16"]
    if config.algorithm.use_kl_loss:
        yield "algorithm.use_kl_loss", [False]
    if config.trainer.save_freq:
        yield "trainer.save_freq", [0]


def list_budgets(config: Config) -> list[int]:
    """Return the tokens of a pass and its halves, at least those of one row."""
    budget, row = footprint.pass_tokens(config), footprint.longest_row(config)
    halves = [budget >> n for n in range(budget.bit_length()) if budget >> n > row]
    return [*halves, row]


def _smaller_share(config: Config, run: MemoryEstimate) -> Iterator[tuple[str, list[float]]]:
    """Yield GPU shares with which vLLM still has room for its weights and a small cache."""
    gpu = min((size for size in run.machine.gpus.values() if size), default=0)
    one = run.model.parameters * footprint.BYTES["bfloat16"] // gpus_per_replica(config)
    present = config.rollout.vllm.gpu_memory_utilization
    if shares := [s for s in SHARES if s < present and s * gpu >= (1 + CACHE) * one]:
        yield VLLM_SHARE, shares


def _gpu_bytes(name: str) -> int:
    """Return 0 if the driver gives no answer; PyTorch itself would occupy memory of the GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", name]
    try:
        said = subprocess.run(query, capture_output=True, timeout=ASK_S, check=True).stdout
        return int(said.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _format_times(count: int, what: str) -> str:
    plural = what.replace("replica's", "replicas'") if "'" in what else f"{what}s"
    return f"{count} {plural}" if count > 1 else f"a {what}"


def _format_gb(size: int) -> str:
    """Format a size in 10^9 bytes."""
    return f"{size / 1e9:.{1 if size >= 1e9 else 3}f}"


def format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} G" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
