"""What is published against the model's files: every difference is found before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from laminar.config import ConfigError
from laminar.training import distributed_learner
from laminar.training.shared_safetensors import iter_rows
from tools.kit import rank_cases
from tools.kit.extras import needs_peft
from tools.kit.one_process import OneLearner
from tools.kit.rank_cases import replaced
from tools.kit.rank_group import RankGroup

Make = Callable[..., Any]
Tensors = dict[str, Tensor]
QUERY, KEY, VALUE = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
GATE, UP, GATE_1 = (
    f"model.layers.{n}_proj.weight" for n in ("0.mlp.gate", "0.mlp.up", "1.mlp.gate")
)
FUSED = "model.layers.0.mlp.gate_up_proj.weight"


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


NO_FILE, VALUES = r"\S* is not in the files", r" has other values, from row \d+ on"
FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no prefix": (renamed(lambda n: n.removeprefix("model.")), f"layers.0.{NO_FILE}"),
    "multimodal": (renamed(lambda n: n.replace("model.", "model.text.")), f"model.text{NO_FILE}"),
    "adapted": (renamed(lambda n: n.replace("q_proj.", "q_proj.base_layer.")), f"base_l{NO_FILE}"),
    "fused": (lambda t: t | {FUSED: torch.cat([t.pop(GATE), t.pop(UP)])}, FUSED + NO_FILE),
    "left out": (lambda t: {k: t[k] for k in t if k != KEY}, f"{KEY} of the files is not publish"),
    "next layer": (renamed(lambda n: n.replace(".1.", ".2.")), rf"model\.layers\.2{NO_FILE}"),
    "transposed": (changed(GATE, Tensor.t), rf"{GATE} has the shape \(32, 64\), and \(64, 32\)"),
    "transposed square": (changed(QUERY, Tensor.t), QUERY + VALUES),
    "rotary rows": (changed(QUERY, lambda t: t.view(-1, 2, 4, 32).transpose(1, 2).flatten(0, 2)),
                    QUERY + VALUES),
    "swapped key and value": (lambda t: t | {KEY: t[VALUE], VALUE: t[KEY]}, KEY + VALUES),
    "swapped layers": (lambda t: t | {GATE: t[GATE_1], GATE_1: t[GATE]}, GATE + VALUES),
    "last row": (changed(UP, lambda t: torch.cat([t[:-1], t[-1:] * 1.000001])),
                 f"{UP} has other values, from row 63 on"),
}  # fmt: skip


def rewrite(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.fixture
async def learner(model_directory: Make, make_config: Make) -> OneLearner:
    return await loaded(model_directory(tied=False), make_config)


async def loaded(directory: Path, make_config: Make, **settings: Any) -> OneLearner:
    found = OneLearner(make_config({"model.name": str(directory)} | settings), 28)
    await found.load()
    return found


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS)
async def test_what_differs_from_the_files_is_refused(
    fault: Callable[[Tensors], Tensors], said: str, learner: OneLearner
) -> None:
    await check_refused(learner, fault, said)


async def check_refused(learner: Any, fault: Callable[[Tensors], Tensors], said: str) -> None:
    """Check that a learner which would publish the tensors with this fault says so."""
    usual = distributed_learner.iter_weight_rows

    def faulty(model: Any) -> Any:
        return iter_rows(fault({name: rows.data for name, rows in usual(model)}).items())

    with (
        replaced(distributed_learner, "iter_weight_rows", faulty),
        pytest.raises(ConfigError, match=said),
    ):
        await learner.check_weights("float32")


async def test_an_error_names_three_differences_and_their_number(learner: OneLearner) -> None:
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(1.0)
    with pytest.raises(ConfigError) as caught:
        await learner.check_weights("float32")
    number = await learner.check_weights(None)  # of a resumed run, whose values are trained
    assert str(caught.value).count("has other values") == 3
    assert f"({number} in all)" in str(caught.value)


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("published", ["float32", "bfloat16"])
async def test_values_are_compared_in_the_published_type(
    kept: str, published: str, model_directory: Make, make_config: Make
) -> None:
    directory = model_directory()
    rewrite(directory, lambda tensors: {k: t.to(getattr(torch, kept)) for k, t in tensors.items()})
    learner = await loaded(directory, make_config)
    assert await learner.check_weights(published)
    with torch.no_grad():
        learner.model.model.layers[0].mlp.up_proj.weight[5, 3] *= 1.001
    if published == "float32":
        with pytest.raises(ConfigError, match=f"{UP} has other values, from row 5 on"):
            await learner.check_weights(published)


async def test_files_may_have_frequencies_and_heads_for_more_tokens_but_not_vision(
    model_directory: Make, make_config: Make
) -> None:
    directory = model_directory()
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.up_proj.weight")
    rewrite(directory, lambda tensors: tensors | {name: torch.ones(3) for name in more})
    learner = await loaded(directory, make_config)
    assert await learner.check_weights("float32") == len(learner.get_weights())
    rewrite(directory, lambda tensors: tensors | {"visual.patch_embed.weight": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"visual\.patch_embed\.weight of the files is not publ"):
        await learner.check_weights("float32")


async def test_packed_tensors_are_refused(learner: OneLearner) -> None:
    packed = changed(UP, lambda tensor: tensor.to(torch.float8_e4m3fn))
    rewrite(Path(learner.config.model.name), packed)
    with pytest.raises(ConfigError, match=f"{UP} has the packed type F8_E4M3"):
        await learner.check_weights(None)


@needs_peft
async def test_new_adapters_publish_what_their_base_has(
    model_directory: Make, make_config: Make
) -> None:
    learner = await loaded(model_directory(), make_config, **{"lora.rank": 2})
    assert await learner.check_weights("float32")
    with torch.no_grad():
        learner.model.model.layers[0].mlp.up_proj.lora_B["default"].weight.fill_(0.1)
    with pytest.raises(ConfigError, match=f"{UP} has other values, from row 0 on"):
        await learner.check_weights("float32")


@pytest.mark.parametrize("more", [{}, pytest.param({"lora.rank": 2}, marks=needs_peft)])
def test_each_rank_compares_rows(more: dict[str, Any], tmp_path: Path, ranks: RankGroup) -> None:
    rank_cases.make_model(3).save_pretrained(tmp_path / "model")
    settings = {"model.name": str(tmp_path / "model")} | more
    for size in (2, 3):
        tensors = ranks.call(size, "on_ranks", "compare", settings)[0]
        assert tensors == len(load_file(tmp_path / "model" / "model.safetensors"))
    with pytest.raises(AssertionError, match=r"rank 1 of 2(.|\n)*has other values, from row 0 on"):
        ranks.call(2, "on_ranks", "compare", settings, planted="rows elsewhere")
