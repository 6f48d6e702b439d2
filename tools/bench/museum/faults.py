"""Faults of the product itself, planted in the processes of a run.

Reads   a module of the product, once a process has imported it (only some import torch)
Writes  the module: one function is replaced by one with a fault that was seen in public
Gives   write_hook: a sitecustomize.py, for runs with its directory in their PYTHONPATH
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

HOOK = "import sys; from {module} import plant_fault; plant_fault({name!r})\n"


def write_hook(name: str, directory: Path) -> None:
    (directory / "sitecustomize.py").write_text(HOOK.format(module=__name__, name=name))


def plant_fault(name: str) -> None:
    """Plant a fault in this process as soon as it imports the module."""
    sys.meta_path.insert(0, _AfterImport(*FAULTS[name]))


class _AfterImport(MetaPathFinder):
    """A finder that changes one module once it has been executed."""

    def __init__(self, module: str, change: Callable[[Any], None]) -> None:
        self._module, self._change = module, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), self._change(module))
        return spec


def _serve_first_adapter(lora: Any) -> None:
    """Publish each matrix with the adapter that it had when it was merged first."""
    merge, first = lora.merge_adapter, dict[int, Any]()

    def merge_first(layer: Any) -> Any:
        first[id(layer)] = first[id(layer)] if id(layer) in first else merge(layer)
        return first[id(layer)]

    lora.merge_adapter = merge_first


def _sample_with_old_weights(engine: Any) -> None:
    """Sample with the first weights for ever; scores, and so the probe, have the loaded ones."""
    step = engine.TorchEngine.step

    def step_with_first(self: Any) -> Any:
        loaded, model = self._model.weights, self._model
        model.weights = model.__dict__.setdefault("first_weights", copy.deepcopy(loaded))
        try:
            return step(self)
        finally:
            model.weights = loaded

    engine.TorchEngine.step = step_with_first


def _encode_again(learner: Any) -> None:
    """Train on ids of a tokenizer in which two letters have changed places."""
    train, e, a = learner.Learner.train_step, ord("e"), ord("a")

    def encode(sample: Any) -> Any:
        ids = sample.response_ids.copy()
        ids[sample.response_ids == e], ids[sample.response_ids == a] = a, e
        return dataclasses.replace(sample, response_ids=ids)

    learner.Learner.train_step = lambda self, samples, step: train(
        self, list(map(encode, samples)), step
    )


def _refer_to_policy(learner: Any) -> None:
    start = learner.Learner.__init__
    learner.Learner.__init__ = lambda self, config, policy, **more: start(
        self, config, policy, **more | {"reference": policy}
    )


def _turn_kl(terms: Any) -> None:
    right = terms.kl_term
    terms.kl_term = lambda *arguments: -right(*arguments)


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "adapter": ("laminar.training.model.lora", _serve_first_adapter),
    "old-weights": ("laminar.engines.torch.engine", _sample_with_old_weights),
    "tokenizer": ("laminar.training.learner", _encode_again),
    "reference": ("laminar.training.learner", _refer_to_policy),
    "kl-sign": ("laminar.training.algorithms.loss_terms", _turn_kl),
}
"""The module that each fault changes, and the change."""
