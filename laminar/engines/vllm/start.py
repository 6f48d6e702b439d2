"""Construction of a running vLLM from the configuration.

Reads   rollout.vllm.*, model.name, the devices of this machine
Starts  vLLM's engine core (and its workers), which end with this process
Gives   VllmEngine without our weights; ConfigError for what vLLM cannot run

The model directory gives only the shape: the weights come from the relay, like every later version.
The core is forked if vLLM allows it, because importing vLLM takes longer than everything else in a
start.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from laminar.config import Config, ConfigError
from laminar.engines.environment import VLLM_ENVIRONMENT, get_vllm_environment
from laminar.engines.protocol import EngineError, TokenDelta
from laminar.engines.vllm.output import ProcessOutput, print_failures
from laminar.run.parent_death import die_with_parent

os.environ.update(VLLM_ENVIRONMENT | os.environ)  # before any call of CUDA
os.environ.update(get_vllm_environment(torch.cuda.is_available()) | os.environ)

import dataclasses
import difflib
from collections.abc import Collection, Mapping

from pydantic import ValidationError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from laminar.engines.vllm.engine import Gauges, VllmEngine

print_failures()

WORKER = "laminar.engines.vllm.worker.LaminarWorker"
IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Alias of the executor: vLLM's CPU platform replaces the usual name and adds a process."""
CPU_BLOCK = 32  #: tokens; vLLM's attention on CPU takes multiples of 32


async def start_vllm(
    config: Config,
    dtype: str,
    vocab_limit: int,
    seed: int,
    on_deltas: Callable[[list[TokenDelta]], None],
    output: Path | None = None,
) -> VllmEngine:
    """Start the engine of one replica.

    The core's parent is a thread that lives as long as the engine: the kernel notifies a child
    of the end of the thread that forked it."""
    _tie_cores_to_process()
    thread = ThreadPoolExecutor(1, "vllm")
    loop, printed = asyncio.get_running_loop(), ProcessOutput(output)
    made: list[Gauges] = []

    def gauges(vllm_config: Any, engine_index: int = 0) -> Gauges:
        made.append(Gauges(vllm_config, engine_index))
        return made[-1]

    llm = await loop.run_in_executor(
        thread, lambda: _start_llm(config, dtype, seed, gauges, printed)
    )
    engine = VllmEngine(
        llm,
        made[0],
        thread,
        on_deltas,
        printed,
        max_model_len=config.max_model_len,
        vocab_limit=vocab_limit,
    )
    await engine.initialize_workers()
    return engine


@functools.cache
def _tie_cores_to_process() -> None:
    """Have forked cores end with this process; once, in the replica after its own fork."""
    os.register_at_fork(after_in_child=die_with_parent)


def engine_config(config: Config, dtype: str, seed: int) -> Any:
    """Convert the configuration to vLLM's; ConfigError if vLLM cannot run it; starts nothing."""
    arguments = _build_arguments(config, dtype, seed)
    try:
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
    except Exception as error:  # vLLM raises errors of many types
        raise ConfigError(_describe_refusal(config, error)) from error
    _check_kv(config, vllm_config)
    return vllm_config


def _start_llm(
    config: Config, dtype: str, seed: int, gauges: Any, printed: ProcessOutput
) -> AsyncLLM:
    vllm_config = engine_config(config, dtype, seed)
    if current_platform.is_cpu():  # create_engine_config has set it to spawn
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    try:
        return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[gauges])
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"vLLM's engine core did not start: {printed.find_failure()}") from error


def _build_arguments(config: Config, dtype: str, seed: int) -> dict[str, Any]:
    """Build vLLM's arguments from our settings; `extra` adds to them."""
    rollout, vllm = config.rollout, config.rollout.vllm
    arguments: dict[str, Any] = {
        "model": config.model.name,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": seed,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        # While all our sequences run, newly loaded weights must be proved.
        "max_num_seqs": rollout.max_num_seqs + rollout.in_flight,
        "enforce_eager": vllm.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER,
        "distributed_executor_backend": "mp" if vllm.tensor_parallel_size > 1 else IN_CORE,
        "disable_log_stats": True,  # switches off vLLM's loggers; ours is passed explicitly
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "hf_overrides": select_language_model,
    }
    if vllm.max_num_batched_tokens:
        arguments["max_num_batched_tokens"] = vllm.max_num_batched_tokens
    if vllm.kv_cache_bytes:
        arguments["kv_cache_memory_bytes"] = vllm.kv_cache_bytes
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK}
        arguments.setdefault("kv_cache_memory_bytes", _CPU_KV_BYTES)
    if problem := find_bad_extra_reason(vllm.extra, arguments):
        raise ConfigError(problem)
    return arguments | dict(vllm.extra)


def select_language_model(config: Any) -> Any:
    """Return the config of the language model alone, which is what a run trains and publishes."""
    text = config.get_text_config()
    if text is not config:
        text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return text


_CPU_KV_BYTES = 1 << 30
"""Default in place of most of the machine's memory; touching a gigabyte takes three seconds."""


def _check_kv(config: Config, vllm_config: Any) -> None:
    """Refuse a cache too small for one sequence: the core would end and only print the reason."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    size = cache.kv_cache_memory_bytes
    if not size:
        return
    parallel = vllm_config.parallel_config
    per_token = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * model.dtype.itemsize
    )
    blocks = -(-config.max_model_len // cache.block_size) + 1
    wanted = blocks * cache.block_size * per_token
    if size < wanted:
        raise ConfigError(
            f"rollout.vllm.kv_cache_bytes = {size} cannot hold one sequence of "
            f"{config.max_model_len} tokens, which takes {wanted}; raise it, or lower "
            "data.max_response_length"
        )


def _describe_refusal(config: Config, error: Exception) -> str:
    """Describe an error of vLLM in one sentence; it names the keys of `extra` involved, or all."""
    extra = config.rollout.vllm.extra
    found = error.errors() if isinstance(error, ValidationError) else []
    about = {str(part) for one in found for part in one["loc"]} | set(
        re.findall(r"\w+", str(error))
    )
    if keys := [key for key in extra if key in about]:
        said = " and ".join(f"rollout.vllm.extra.{key} = {extra[key]!r}" for key in keys)
        return f"vLLM refuses {said}: {_get_first_sentence(error)}"
    given = f" with rollout.vllm.extra = {extra!r}" if extra else ""
    why = _get_first_sentence(error)
    return f"vLLM cannot run model.name = {config.model.name!r} as configured{given}: {why}"


def _get_first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error, without a leading count of problems."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = (lines[0] if lines else type(error).__name__).removeprefix("Value error, ")
    return line.partition(". ")[0][:400]


def find_bad_extra_reason(extra: Mapping[str, Any], ours: Collection[str]) -> str | None:
    """Return the problem of rollout.vllm.extra; None: there is none.

    It may have any argument of vLLM that no setting of ours decides."""
    if not extra:
        return None
    from vllm import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    known = [field.name for field in fields if not field.name.startswith("_")]
    for key in extra:
        if key in ours:
            return f"rollout.vllm.extra.{key} is set by other keys of rollout; remove it"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            return f"rollout.vllm.extra.{key} is not an argument of vLLM; the nearest is {near}"
    return None
