"""Checks of engine and model that start nothing.

Reads   rollout.engine and its settings, model.name's config.json
Raises  ConfigError with one sentence that names the value and the fix

Without torch, except to count a machine's GPUs: the checks run before a run starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from laminar.config import Config, ConfigError, dump_config
from laminar.engines.environment import VLLM_ENVIRONMENT
from laminar.engines.hf_config import (
    get_positions,
    parse_hf_config,
    read_hf_config,
    refuse_auxiliary_loss,
    refuse_packed_weights,
    refuse_remote_code,
)
from laminar.engines.protocol import EngineError
from laminar.run.command_line import with_extra

PROBE_TIMEOUT_S = 180.0  #: time for vLLM's import and its check of the model, on a busy machine
PARALLEL_SUFFIXES = ("parallel_size", "parallel_rank")
PARALLEL_PREFIXES = ("data_parallel", "nnodes", "node_rank", "master_addr", "master_port")
"""Suffixes and prefixes of vLLM's arguments that spread an engine over more processes."""
TAKEN = b"taken"  #: output of engines/vllm/check.py when vLLM accepts the configuration

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EMBEDDING_SUFFIX = "embed_tokens.weight"
"""Suffix of the embedding's name in the models of transformers."""

Shapes = dict[str, tuple[int, ...]]


def check_engine(config: Config, *, here: bool = True) -> None:
    """Check that the model has a position for every token and, if `here`, that it runs here."""
    name = config.model.name
    try:
        hf_config = read_hf_config(name)
        refuse_packed_weights(hf_config)
        refuse_remote_code(hf_config)
        refuse_auxiliary_loss(hf_config)
        if config.rollout.engine == "vllm":
            (check_vllm if here else _check_parallelism)(config)
            positions = get_positions(hf_config)
        else:
            positions = parse_hf_config(hf_config).max_positions
        check_embedding(hf_config, weight_shapes(name))
    except EngineError as error:
        raise ConfigError(f"model.name = {name!r}: {error}") from None
    if positions and config.max_model_len > positions:
        context = " + env.max_context_tokens" if config.has_sessions else ""
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length{context} = "
            f"{config.max_model_len} is more than the {positions} positions of model {name!r}; "
            "lower one of them"
        )


def check_vllm(config: Config) -> None:
    """Check that vLLM is installed, and has enough GPUs, if there are any."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'rollout.engine = "vllm", but vLLM is not installed here: '
            f"{with_extra('vllm')}; see docs/engines.md for a machine without a GPU"
        )
    _check_parallelism(config)
    size = config.rollout.vllm.tensor_parallel_size
    if size > 1:
        gpus = count_gpus()
        if 0 < gpus < size:
            raise ConfigError(
                f"rollout.vllm.tensor_parallel_size = {size} is more than the {gpus} GPUs of this "
                "machine, and a replica cannot span machines; lower it"
            )


def _check_parallelism(config: Config) -> None:
    """Refuse settings that give an engine GPUs other than those of its node."""
    for key, value in config.rollout.vllm.extra.items():
        if key.endswith(PARALLEL_SUFFIXES) or key.startswith(PARALLEL_PREFIXES):
            raise ConfigError(
                f"rollout.vllm.extra.{key} = {value!r}: a replica is one engine on one machine, "
                "with rollout.vllm.tensor_parallel_size GPUs; remove it, and raise that setting or "
                "rollout.replicas to use more GPUs"
            )


def count_gpus() -> int:
    import torch  # takes longer to load than everything else

    return torch.cuda.device_count()


@contextlib.contextmanager
def probe_vllm(config: Config) -> Iterator[Callable[[], None]]:
    """Ask vLLM, in a separate process, whether it runs this model and accepts `extra`.

    That takes as long as its import, which leaves time for other checks. The yielded function
    waits for the result; raises ConfigError.
    """
    if config.rollout.engine != "vllm":
        yield lambda: None
        return
    child = subprocess.Popen(
        [sys.executable, "-m", "laminar.engines.vllm.check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=VLLM_ENVIRONMENT | os.environ,
    )
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(dump_config(config).encode())
        child.stdin = None
        yield partial(_check_vllm_answer, child)
    finally:
        child.kill()
        child.communicate()


def _check_vllm_answer(child: subprocess.Popen[bytes]) -> None:
    try:
        out, err = child.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f'rollout.engine = "vllm", but vLLM has not been imported within {PROBE_TIMEOUT_S:g} '
            "s; try "
            '`python -c "import vllm"`'
        ) from None
    if child.returncode != 0:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f'rollout.engine = "vllm", but vLLM does not start here: {last}')
    if out != TAKEN:
        raise ConfigError(out.decode(errors="replace"))


def weight_shapes(directory: str | Path) -> Shapes:
    """Return the shape of every tensor by its name; check that each file's header fits its length.

    Only headers are read, so a model of any size takes a moment. They reveal a truncated download,
    and a file that Git LFS has left as a pointer.
    """
    directory, found = Path(directory), Shapes()
    for file in _list_weight_files(directory):
        try:
            with safe_open(directory / file, framework="np") as tensors:
                names = list(tensors.keys())
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"{directory / file} cannot be read as safetensors ({error}); download it again"
            ) from None
    return found


def check_embedding(hf_config: Mapping[str, Any], shapes: Shapes) -> None:
    """Check that config.json and the weight files have equally many tokens, of the same width."""
    wide = "word_embed_proj_dim" if "word_embed_proj_dim" in hf_config else "hidden_size"
    for name, shape in shapes.items():
        if not name.endswith(EMBEDDING_SUFFIX):
            continue
        for key, size, what in zip(("vocab_size", wide), shape, ("rows", "columns"), strict=False):
            wanted = hf_config.get(key)
            if isinstance(wanted, int) and size != wanted:
                raise EngineError(
                    f"config.json has {key} = {wanted}, but {name} in the weight files has "
                    f"{size} {what}; the two must match: correct {key}, or download "
                    "the model again"
                )


def _list_weight_files(directory: Path) -> list[str]:
    if (directory / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    index = directory / INDEX_FILE
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError:
        raise EngineError(
            f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} exists"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{index} cannot be read ({error!r}); download it again") from None
