"""A run's model as a directory to serve or upload: sharded files, tokenizer, model card.

Reads   RUN/export or a checkpoint; the files of the model that the run started from
Writes  the new directory, under its name when complete
Raises  ConfigError, which names the directory and the fix

The tensors have the names of the source model's files. One shard is in memory at a time. Tensors
that the run did not train because its model class leaves them out, such as heads for multi-token
prediction, are copied from the source.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from laminar.analysis.log.evaluations import format_evaluation
from laminar.config import Config, ConfigError, dump_config
from laminar.engines.check import INDEX_FILE, weight_shapes
from laminar.engines.protocol import EngineError
from laminar.names.version import __version__
from laminar.observe.hardware import commit_of
from laminar.run.directory import CHECKPOINTS_DIR, EXPORT_DIR, SUMMARY_FILE, run_config
from laminar.run.renames import rename
from laminar.tasks.data.hub import localize_model
from laminar.training.checkpoints.file_digests import check_digests
from laminar.training.model.lora_targets import ADAPTER_DIR
from laminar.training.model.weight_files import HEAD, open_slices
from laminar.training.trainer_state import CheckpointError

SHARD = "5GB"  #: largest size of a file of weights, as on the hub
NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TRAINING_FILES = {"digests.json", "optimizer.safetensors", "trainer.json", "version.msgpack"}
"""Files of a checkpoint that only training reads."""


class SavedTensor(NamedTuple):
    """A tensor to be written: where it is, and its size."""

    directory: Path
    nbytes: int


def find_trained_model(run: Path, step: int | None) -> Path:
    """Return the directory of the trained model, or of a checkpoint; raise ConfigError."""
    steps = sorted(
        int(path.name.removeprefix("step_")) for path in (run / CHECKPOINTS_DIR).glob("step_*")
    )
    there = f"it has checkpoints of step {', '.join(map(str, steps))}" if steps else "it has none"
    if step is None:
        if not (run / EXPORT_DIR).is_dir():
            raise ConfigError(
                f"{run} has no {EXPORT_DIR}/, which a run writes at its end; choose a checkpoint "
                f"by --step N ({there})"
            )
        return run / EXPORT_DIR
    directory = run / CHECKPOINTS_DIR / f"step_{step}"
    if not directory.is_dir():
        raise ConfigError(f"{run} has no checkpoint of step {step}: {there}")
    try:
        check_digests(directory)
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"checkpoint {directory} is damaged: {error}") from error
    return directory


def export_model(run: Path, to: Path, *, step: int | None, dtype: str, merge: bool) -> list[str]:
    """Write the model of a run into the new directory `to`; return the names of its files.

    `dtype`: float32, bfloat16 or float16. `merge`: write a model that was trained with adapters
    whole; without it only its adapters are written, as peft reads them.
    """
    if to.exists():
        raise ConfigError(f"{to} exists and is left as it is; name another directory by --to")
    config = run_config(run)
    if config.is_emulated:
        raise ConfigError(f"{run} is emulated: it has no model to export")
    source, adapters = find_trained_model(run, step), bool(config.lora.rank) and not merge
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        if adapters:
            shutil.copytree(source / ADAPTER_DIR, partial, dirs_exist_ok=True)
        else:
            _write_model(config, source, partial, dtype)
        library = "peft" if adapters else "transformers"
        (partial / "README.md").write_text(format_card(config, run, step, library))
        rename(partial, to, durable=False)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{to} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(path.name for path in to.iterdir())


def _write_model(config: Config, source: Path, target: Path, dtype: str) -> None:
    """Write weights, config and tokenizer files."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in TRAINING_FILES and path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
    settings = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(settings | {"dtype": dtype}, indent=2) + "\n")
    trained, number = weight_shapes(source), NUMBER_BYTES[dtype]
    tensors = {
        name: SavedTensor(source, math.prod(shape) * number) for name, shape in trained.items()
    }
    tensors |= _list_untrained(config, settings, trained)
    _write_shards(tensors, target, dtype)


def _list_untrained(
    config: Config, settings: Mapping[str, Any], trained: Mapping[str, Any]
) -> dict[str, SavedTensor]:
    """Return the tensors of the source model that the run left out; a tied head is not one."""
    origin = Path(localize_model(config).model.name)
    tied = settings.get("tie_word_embeddings", False)
    return {
        name: SavedTensor(origin, math.prod(shape) * NUMBER_BYTES["float32"])
        for name, shape in weight_shapes(origin).items()
        if name not in trained and not (tied and name.startswith(HEAD))
    }


def _write_shards(tensors: Mapping[str, SavedTensor], target: Path, dtype: str) -> None:
    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD,
    )
    with ExitStack() as files:
        directories = {tensor.directory for tensor in tensors.values()}
        saved = {directory: open_slices(directory, files) for directory in directories}
        for file, names in plan.filename_to_tensors.items():
            slices = {name: saved[tensors[name].directory][name] for name in names}
            _write_shard(slices, target / file, dtype)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(slices: Mapping[str, Any], file: Path, dtype: str) -> None:
    """Write one file; integers of the source keep their type."""
    wanted = getattr(torch, dtype)
    tensors = ((name, tensor[...]) for name, tensor in slices.items())
    cast = {name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors}
    save_file(cast, file, metadata={"format": "pt"})
    file.chmod((file.parent / "config.json").stat().st_mode)  # else only its owner could read it


def format_card(config: Config, run: Path, step: int | None, library: str) -> str:
    """Return the model card: base model, evaluations of the run, its settings."""
    base = config.model.name
    linked = [] if Path(base).exists() else [f"base_model: {base}"]
    made = f"Laminar {__version__} {commit_of(Path(__file__).parent)}".strip()
    try:
        summary = json.loads((run / SUMMARY_FILE).read_bytes())
    except (OSError, ValueError):
        summary = {}
    evaluations = [e for e in summary.get("evaluations", []) if step is None or e["step"] <= step]
    lines = [
        "---", *linked, f"library_name: {library}", "tags: [reinforcement-learning]", "---",
        f"# {config.run.name}", "",
        f"Trained from `{base}` by reinforcement learning with {made}, "
        + (f"step {step}." if step is not None else f"{summary.get('steps', '?')} steps."),
        *(["", "Evaluations:", ""] if evaluations else []),
        *(f"- step {found['step']}: {format_evaluation(found)}" for found in evaluations),
        "", "Settings of the run:", "", "```toml", dump_config(config).strip(), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)
