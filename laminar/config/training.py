"""The settings of training: its optimizer, its adapters, and a critic.

Gives   OptimConfig, LoraConfig, CriticConfig; tree.py has [trainer], algorithm.py the step
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from laminar.config.declaring import Natural, NonNegative, Section, Share, doc, path_form


class OptimConfig(Section, frozen=True, kw_only=True):
    """AdamW; parameters and state are float32."""

    lr: Annotated[NonNegative, doc("learning rate")] = 1e-6
    weight_decay: Annotated[NonNegative, doc("decoupled")] = 0.01
    betas: Annotated[
        tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]],
        doc("decay of the two moments"),
    ] = (0.9, 0.999)
    eps: Annotated[NonNegative, doc("added to the root of the second moment")] = 1e-8
    clip_grad: Annotated[NonNegative, doc("largest gradient norm; 0: no clipping")] = 1.0
    lr_scheduler_type: Annotated[
        Literal["constant", "linear", "cosine"], doc("the learning rate after warm-up")
    ] = "constant"
    lr_warmup_steps: Annotated[Natural, doc("training steps of linear warm-up")] = 0


class LoraConfig(Section, frozen=True, kw_only=True):
    """Adapters that are trained in place of the model's own weights; see docs/training.md."""

    rank: Annotated[Natural, doc("rank of the adapters; 0: all weights are trained")] = 0
    alpha: Annotated[
        float, Meta(gt=0), doc("the output of an adapter is scaled by alpha / rank")
    ] = 16.0
    target_modules: Annotated[
        list[str],
        Meta(min_length=1),
        doc('matrices with an adapter in each layer: ["q_proj", "v_proj"]; all-linear: all'),
    ] = msgspec.field(default_factory=lambda: ["all-linear"])


class CriticModelConfig(Section, frozen=True, kw_only=True):
    name: Annotated[
        str,
        path_form("model"),
        doc("initial model of the critic, with the tokenizer of model.name; empty: model.name"),
    ] = ""


class CriticConfig(Section, frozen=True, kw_only=True):
    """Critic, only read with algorithm.adv_estimator = "gae"; AdamW as in [optim] but for lr."""

    lr: Annotated[NonNegative, doc("learning rate")] = 1e-5
    cliprange_value: Annotated[
        float, Meta(gt=0), doc("greatest distance of a value from that before the step")
    ] = 0.5
    lam: Annotated[Share, doc("lambda of the returns that the critic is trained on")] = 1.0
    model: CriticModelConfig = CriticModelConfig()
