"""The settings of generation: engines, their sampling, and how they load weights.

Gives   RolloutConfig, with the sampling of evaluation and vLLM's own settings; GROUP_SIZE_MAX
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from laminar.config.deciding import Decides
from laminar.config.declaring import (
    Count,
    Device,
    Dtype,
    Natural,
    NonNegative,
    Seconds,
    Section,
    doc,
)

GROUP_SIZE_MAX = 4_096
"""The maximum group size: a group that is rewarded together is one request to the store."""


class VllmConfig(Section, frozen=True, kw_only=True):
    """Settings of vLLM, only read with rollout.engine = "vllm"; see docs/engines.md."""

    tensor_parallel_size: Annotated[Count, doc("GPUs of one replica, all on its machine")] = 1
    kv_cache_bytes: Annotated[
        Natural, doc("0: what gpu_memory_utilization leaves; on a CPU 1 GiB")
    ] = 0
    gpu_memory_utilization: Annotated[
        float, Meta(ge=0.01, le=1), doc("share of a GPU for weights, activations and cache")
    ] = 0.85
    enforce_eager: Annotated[
        bool, doc("true: no CUDA graphs, a faster start; always so on a CPU")
    ] = False
    max_num_batched_tokens: Annotated[
        Natural, doc("tokens of one engine step, prefill included; 0: vLLM's choice")
    ] = 0
    extra: Annotated[dict[str, Any], doc("further arguments of vLLM's engine, by its names")] = {}


class ValKwargsConfig(Section, frozen=True, kw_only=True):
    """Sampling of the evaluation prompts."""

    n: Annotated[
        Count,
        Meta(le=1_024),
        doc("responses to each prompt; several need a temperature"),
        Decides("eval_answers", absent=1),
    ] = 1
    temperature: Annotated[NonNegative, doc("0: greedy")] = 0.0


class RolloutConfig(Section, frozen=True, kw_only=True):
    engine: Annotated[
        Literal["torch", "vllm", "emulated"],
        doc("torch runs Qwen2, Qwen3 and Llama; emulated runs no model; see docs/engines.md"),
    ] = "torch"
    replicas: Annotated[Count, doc("engines on each machine; default on GPUs: as many as fit")] = 2
    replicas_on_trainer_node: Annotated[
        Natural | Literal["auto"],
        doc("the same on the machine that has store and trainer; auto: as on the others"),
    ] = "auto"
    group_size: Annotated[
        Count, Meta(le=GROUP_SIZE_MAX), doc("responses to one prompt"), Decides()
    ] = 8
    max_num_seqs: Annotated[Count, doc("sequences of a replica; default of vLLM: 64 to 512")] = 64
    max_model_len: Annotated[
        int, doc("0: max_prompt_length + max_response_length (+ env.max_context_tokens)")
    ] = 0
    weight_update: Annotated[
        Literal["drain", "in-flight"],
        doc(
            "drain: a replica finishes its sequences before it loads newer weights; in-flight: "
            "it loads newer weights at once, and its sequences continue with them"
        ),
    ] = "drain"
    kv_on_update: Annotated[
        Literal["keep", "recompute"],
        doc("in flight, the cache of running sequences: keep, or prefill it with the new weights"),
    ] = "keep"
    load: Annotated[
        Literal["auto", "whole", "stream"],
        doc(
            "how a replica loads the first weights of its machine: whole; stream: while they "
            "arrive, and prefills its first prompts meanwhile; auto: stream with torch"
        ),
    ] = "auto"
    groups_per_version: Annotated[
        Natural, doc("prompts that a replica starts on one version; 0: max_num_seqs / group_size")
    ] = 0
    temperature: Annotated[float, doc("sampling temperature of training responses")] = 1.0
    top_p: Annotated[float, doc("only 1: the trainer could not mirror a filter")] = 1.0
    top_k: Annotated[int, doc("only 0, for the same reason")] = 0
    min_p: Annotated[float, doc("only 0, for the same reason")] = 0.0
    repetition_penalty: Annotated[float, doc("only 1, for the same reason")] = 1.0
    progress_interval_ms: Annotated[
        int, Meta(ge=10), doc("interval of a replica's reports, with the tokens to save")
    ] = 500
    device: Annotated[Device, doc("where the replicas compute")] = "auto"
    dtype: Annotated[Dtype, doc("the replicas' type; auto: weights.dtype")] = "auto"
    threads: Annotated[Count, doc("torch threads of one replica on a CPU")] = 1
    start_timeout_s: Annotated[
        Seconds, doc("an engine's start; then its process is restarted"), Decides("engine_start_ms")
    ] = 900.0
    decode_budget_ms: Annotated[
        Count | Literal["none"], doc("with repack: the longest decode step of a packed replica")
    ] = "none"
    max_batch: Annotated[
        Count | Literal["auto"],
        doc(
            "with repack: sequences of a packed replica; auto: as many as decode_budget_ms allows "
            "by measurement, else max_num_seqs"
        ),
    ] = "auto"
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def in_flight(self) -> Annotated[bool, Decides(absent=False)]:
        """Whether replicas load newer weights while they run, and running responses continue."""
        return self.weight_update == "in-flight"

    @property
    def streams(self) -> Annotated[bool, Decides("stream", absent=False)]:
        """Whether a replica without weights loads those that are still arriving."""
        return self.load == "stream" or (self.load == "auto" and self.engine == "torch")

    @property
    def stall_ms(self) -> Annotated[int, Decides()]:
        """Time without a sampled token after which an engine with work is considered hung.

        A long prefill of a large model on a CPU stays below it."""
        return 120_000
