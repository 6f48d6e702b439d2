"""Tiny random models of each family, by the sizes in tests/family_models.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

ROOT = Path(__file__).parents[2]
_MODELS = json.loads((ROOT / "tests" / "family_models.json").read_text())
FAMILIES: dict[str, dict[str, Any]] = _MODELS["families"]
ATTENTION: dict[str, list[str]] = _MODELS["lora"]  #: lora.target_modules next to experts


def write_family_model(kind: str, directory: Path) -> Path:
    """Write the model of a family, and the quickstart's tokenizer.

    Norms and biases are random too: a tensor that is swapped or left out changes log-probs."""
    fields, auto = _MODELS["text"] | FAMILIES[kind], AutoModelForCausalLM
    if vision := fields.pop("vision_config", None):
        fields, auto = {"text_config": fields, "vision_config": vision}, AutoModelForImageTextToText
    torch.manual_seed(0)
    model: Any = auto.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.ndim == 1):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tokenizer = ROOT / "configs" / "models" / "spell-0.6m"
    for file in [*tokenizer.glob("tokenizer*"), *tokenizer.glob("chat_template*")]:
        shutil.copy(file, directory)
    return directory
