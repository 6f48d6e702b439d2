"""Extension of vLLM's worker processes: weights from the relay's shared memory, masked ids.

Reads   a path, an offset and a table of tensors (the same on every rank; each keeps its share)
Writes  the live model of the worker, and its cache

vLLM gets it as worker_extension_cls, so `self` is its worker. The order of a load matters: vLLM's
layer-wise reload takes tensors of Hugging Face names, shards and fuses them, and repacks them for
the device. A tied output head and experts are packed too, but vLLM does not repack them on CPU
(0.32): without the last steps they would still compute with the former weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from laminar.config.families import get_family, remove_text_prefix
from laminar.engines.protocol import EngineError, TensorPlace, WeightSource
from laminar.engines.vllm.output import print_failures
from laminar.engines.weight_file import MappedWeights
from laminar.run.parent_death import die_with_parent

SHARED_MEMORY = Path("/dev/shm")

print_failures()
die_with_parent()  # an orphaned core would never free its memory


class LaminarWorker:
    """Methods that vLLM adds to its worker; each may be called by name on all ranks at once."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def laminar_begin(self, vocab_limit: int) -> None:
        """Initialize, once all ranks are up: mask ids at or above `vocab_limit`.

        Masked ids have no mass, in sampling and in scores. Shared memory is unlinked here too."""
        _remove_names()
        model = self.model_runner.get_model()
        compute_logits = model.compute_logits

        def masked(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute_logits(*args, **kwargs)
            if logits is not None:  # only the first rank gathers them
                logits[..., vocab_limit:] = -torch.inf
            return logits

        model.compute_logits = masked

    def laminar_load(
        self,
        path: str,
        offset: int,
        nbytes: int,
        tensors: list[tuple[str, str, list[int], int]],
        broken: bool,
    ) -> str:
        """Replace all weights; return an error, or nothing. Only while the core runs no step.

        `broken`: the former weights gave values that are not finite. In the cache these would
        outlive the weights: masked positions are multiplied by 0, and 0 * NaN is NaN.
        """
        places = tuple(TensorPlace(n, d, tuple(shape), at) for n, d, shape, at in tensors)
        source = WeightSource(path, offset, nbytes, places)
        for cache in self.model_runner.kv_caches if broken else ():
            cache.zero_()
        try:
            self._replace_weights(source)
        except (EngineError, KeyError, ValueError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _replace_weights(self, source: WeightSource) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        if not hasattr(self, "_laminar_mapped"):
            self._laminar_mapped = MappedWeights()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            names = {name for name, _ in model.named_parameters()}
            loaded = model.load_weights(self._iter_tensors(source))
            finalize_layerwise_reload(model, self.model_config)
            self._copy_late(model, source)
            _pack_head_again(model)
            _pack_experts_again(model)
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            names.discard("lm_head.weight")  # another name of the embedding
        missing = names - set(loaded) if loaded is not None else set()
        if missing:
            raise EngineError(f"the version lacks {', '.join(sorted(missing)[:5])}")

    def _iter_tensors(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors; names are those of multimodal files, the model has text alone."""
        family = get_family(self.model_config.hf_config.model_type)
        for name, tensor in self._laminar_mapped.iter_tensors(source):
            yield remove_text_prefix(family, name), tensor

    def _copy_late(self, model: Any, source: WeightSource) -> None:
        """Load once more what vLLM (0.32) has copied to parameters on the meta device.

        A layer-wise reload keeps only what passes through a parameter's weight loader."""
        if pattern := get_family(self.model_config.hf_config.model_type).vllm_copies:
            model.load_weights(t for t in self._iter_tensors(source) if re.search(pattern, t[0]))


def _remove_names() -> None:
    """Unlink the memory that ranks on CPU share, once all have it mapped.

    vLLM (0.32) never does, so every engine would leave 8 MB a rank, however it ends."""
    name = os.environ.get("VLLM_DIST_IDENT")
    for path in SHARED_MEMORY.glob(f"{name}-*") if name else ():
        path.unlink(missing_ok=True)


def _pack_head_again(model: Any) -> None:
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    method = getattr(head, "quant_method", None)
    if weight is not None and method is not None and weight.device.type == "cpu":
        method.process_weights_after_loading(head)


def _pack_experts_again(model: Any) -> None:
    """Pack experts on CPU after each load: vLLM (0.32) does so after the first one only."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        weight = getattr(layer, "w13_weight", None)
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(layer)
