"""Update the tables of docs/memory.md: the best layouts, and trainers of several machines.

Usage: python -m tools.make.memory_page
Reads   the shapes below, which are those of the published models; laminar/launch/layouts.py
Writes  docs/memory.md: the tables; a test compares them and adds up each layout that fits
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from laminar.config import resolve_config
from laminar.launch import memory_check as check
from laminar.launch.layouts import Layout, list_layouts, list_trainers
from laminar.launch.memory_check import GB, MemoryEstimate, parse_machine
from laminar.training.model.footprint import ModelSizes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
TABLE = re.compile(r"(\| model .*\n\|---.*\n)((?:\|.*\n)*)")
TRAINERS = re.compile(r"(\| trainer nodes .*\n\|---.*\n)((?:\|.*\n)*)")
NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads tie_word_embeddings"
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, True), "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True), "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False), "32B": (5120, 25600, 64, 64, False),
}  # fmt: skip
MORE = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
EIGHT = parse_machine("8x80")
MACHINES = (("1x24", 1), ("1x80", 1), ("2x80", 1), ("8x80", 1), ("8x80", 2))
SETTINGS = {
    "model.name": "x", "data.dataset": "x", "rollout.engine": "vllm",
    "data.max_prompt_length": 2048, "data.max_response_length": 8192,
}  # fmt: skip


def page() -> str:
    """Return the whole page."""
    rows: dict[str, str] = {}
    for name, found, _ in plan_all():
        rows[name] = f"{rows.get(name, f'| {name} |')} {_format_cell(found)} |"
    lines = "".join(f"{row}\n" for row in rows.values())
    text = TABLE.sub(lambda table: table[1] + lines, PAGE.read_text())
    return TRAINERS.sub(lambda table: table[1] + "".join(_list_trainer_rows()), text)


def _list_trainer_rows() -> Iterator[str]:
    """Yield the rows of 32B on machines of eight GPUs."""
    config, run = resolve_config(SETTINGS), MemoryEstimate(_read_shape("32B"), 1, EIGHT)
    for tried, places in list_trainers(config, run):
        trainer = tried.trainer
        shard = f"`{trainer.shard}`" if trainer.nodes > 1 else ""
        fit = "yes" if check.has_room(tried, places) else "no"
        gpu, host = f"{places[0].want / GB:.1f}", f"{places[-2].want / GB:.0f}"
        yield f"| {trainer.nodes} | {trainer.total_ranks} | {shard} | {gpu} | {host} | {fit} |\n"


def plan_all() -> Iterator[tuple[str, Layout | None, MemoryEstimate]]:
    """Yield each row's name with the best layout for each machine, if one fits."""
    for name in SHAPES:
        sizes = _read_shape(name)
        for rank, (gpus, nodes) in product((0, 16), MACHINES):
            run = MemoryEstimate(sizes, 1, parse_machine(gpus))
            config = resolve_config(SETTINGS | {"lora.rank": rank, "run.nodes": nodes})
            yield (
                f"{name}, LoRA" if rank else name,
                next(iter(list_layouts(config, run)), None),
                run,
            )


def _read_shape(name: str) -> ModelSizes:
    with TemporaryDirectory() as model:
        fields = MORE | dict(zip(NAMES.split(), SHAPES[name], strict=True))
        (Path(model) / "config.json").write_text(json.dumps(fields))
        return check.read_planned_sizes("model.name", model)


def _format_cell(layout: Layout | None) -> str:
    if layout is None:
        return "no"
    (gpu, *_, host, _), config = layout.places[0], layout.config
    size = config.rollout.vllm.tensor_parallel_size
    split = f"{config.trainer.ranks}+{config.total_replicas}" + (f"x{size}" if size > 1 else "")
    moved = f", offload {host.want / GB:.0f}" if config.trainer.offload == "all" else ""
    return f"{split}: {gpu.want / GB:.0f}{moved}"


if __name__ == "__main__":
    PAGE.write_text(page())
