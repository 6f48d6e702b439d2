"""Update the table of docs/memory.md: the best layout of each model on each machine.

Usage: python -m tools.make.memory_page
Reads   the shapes below, as in the config.json of each published model; laminar/launch/layouts.py
Writes  docs/memory.md: the table; a test compares it and adds up each layout that fits
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from laminar.config import Config, resolve_config
from laminar.launch.layouts import GB, Layout, list_layouts
from laminar.launch.memory_check import MemoryEstimate, parse_machine, read_planned_sizes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
TABLE = re.compile(r"(\| model .*\n\|---.*\n)((?:\|.*\n)*)")
SHAPES = {  # of Qwen3: hidden size, width of the MLP, layers, heads, whether the head is tied
    "0.6B": (1024, 3072, 28, 16, True), "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True), "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False), "32B": (5120, 25600, 64, 64, False),
}  # fmt: skip
NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads tie_word_embeddings"
MORE = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
MACHINES = (("1x24", 1), ("1x80", 1), ("2x80", 1), ("8x80", 1), ("8x80", 2))
SETTINGS = {
    "model.name": "x", "data.dataset": "x", "rollout.engine": "vllm",
    "data.max_prompt_length": 2048, "data.max_response_length": 8192,
}  # fmt: skip


def page() -> str:
    """Return the whole page."""
    rows: dict[str, list[str]] = {}
    for name, found, _ in plan_all():
        rows.setdefault(name, []).append(_format_cell(found))
    lines = "".join(f"| {name} | {' | '.join(cells)} |\n" for name, cells in rows.items())
    return TABLE.sub(lambda table: table[1] + lines, PAGE.read_text())


def plan_all() -> Iterator[tuple[str, Layout | None, MemoryEstimate]]:
    """Yield each row's name with the best layout for each machine, if one fits."""
    for name, shape in SHAPES.items():
        with TemporaryDirectory() as model:
            config = MORE | dict(zip(NAMES.split(), shape, strict=True))
            (Path(model) / "config.json").write_text(json.dumps(config))
            sizes = read_planned_sizes("model.name", model)
        for rank in (0, 16):
            for gpus, nodes in MACHINES:
                run = MemoryEstimate(sizes, 1, parse_machine(gpus))
                layouts = list_layouts(_configure(rank, nodes), run)
                what = f"{name}, LoRA" if rank else name
                yield what, layouts[0] if layouts else None, run


def _configure(rank: int, nodes: int) -> Config:
    more: dict[str, Any] = {"lora.rank": rank, "run.nodes": nodes}
    return resolve_config(SETTINGS | more)


def _format_cell(layout: Layout | None) -> str:
    if layout is None:
        return "no"
    trainer, rollout = layout.config.trainer, layout.config.rollout
    size, first = rollout.vllm.tensor_parallel_size, layout.places[0]
    split = f"{trainer.ranks}+{layout.config.total_replicas}" + (f"x{size}" if size > 1 else "")
    moved = f", offload {first[-2].want / GB:.0f}" if trainer.offload == "all" else ""
    return f"{split}: {first[0].want / GB:.0f}{moved}"


if __name__ == "__main__":
    PAGE.write_text(page())
