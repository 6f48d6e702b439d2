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
from laminar.training import threaded
from laminar.training.threaded import ThreadedLearner
from tools.kit import rank_cases
from tools.kit.extras import needs_peft
from tools.kit.rank_cases import replaced
from tools.kit.rank_group import RankGroup

Make = Callable[..., Any]
Tensors = dict[str, Tensor]
FIRST, SECOND = "model.layers.0.", "model.layers.1."
QUERY, KEY, VALUE = (f"{FIRST}self_attn.{name}_proj.weight" for name in "qkv")
GATE, UP = (f"{FIRST}mlp.{name}_proj.weight" for name in ("gate", "up"))


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def swapped(one: str, other: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {one: tensors[other], other: tensors[one]}


def fused(tensors: Tensors) -> Tensors:
    whole = torch.cat([tensors.pop(GATE), tensors.pop(UP)])
    return tensors | {f"{FIRST}mlp.gate_up_proj.weight": whole}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def of_heads(tensor: Tensor) -> Tensor:
    """The rows of each head of 8 in another order, as programs with other rotary embeddings have
    them."""
    return tensor.view(-1, 2, 4, 32).transpose(1, 2).reshape(32, 32)


def with_one_bit(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other[-1, -1] = torch.nextafter(other[-1, -1], torch.tensor(9.0))
    return other


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no prefix": (renamed(lambda n: n.removeprefix("model.")), r"layers\.0\.\S+ is not in"),
    "multimodal prefix": (
        renamed(lambda n: n.replace("model.", "model.language_model.")),
        r"model\.language_model\.\S+ is not in the files",
    ),
    "compiled": (renamed(lambda n: f"_orig_mod.{n}"), r"_orig_mod\.model\.\S+ is not in the files"),
    "adapter's base": (
        renamed(lambda n: n.replace("q_proj.", "q_proj.base_layer.")),
        r"q_proj\.base_layer\.weight is not in the files",
    ),
    "fused": (fused, r"mlp\.gate_up_proj\.weight is not in the files"),
    "left out": (without(KEY), rf"{KEY} of the files is not published"),
    "another layer's": (
        renamed(lambda n: n.replace(".1.", ".2.")),
        rf"{SECOND.replace('1', '2')}\S+ is not in the files",
    ),
    "transposed": (changed(GATE, Tensor.t), rf"{GATE} has the shape \(32, 64\), and \(64, 32\)"),
    "transposed square": (changed(QUERY, Tensor.t), rf"{QUERY} has other values, from row 0 on"),
    "heads": (changed(QUERY, of_heads), rf"{QUERY} has other values, from row 1 on"),
    "swapped key and value": (swapped(KEY, VALUE), rf"{KEY} has other values"),
    "swapped layers": (swapped(GATE, GATE.replace("0", "1")), rf"{GATE} has other values"),
    "scaled": (changed(UP, lambda t: t * 1.01), rf"{UP} has other values"),
    "one bit": (changed(UP, with_one_bit), rf"{UP} has other values, from row 63 on"),
}


@pytest.fixture
async def learner(model_directory: Make, make_config: Make) -> ThreadedLearner:
    return await loaded(model_directory(tied=False), make_config)


async def loaded(directory: Path, make_config: Make, **settings: Any) -> ThreadedLearner:
    found = ThreadedLearner(make_config({"model.name": str(directory)} | settings), lambda: 28)
    await found.load()
    return found


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS)
async def test_what_differs_from_the_files_is_refused(
    fault: Callable[[Tensors], Tensors], said: str, learner: ThreadedLearner
) -> None:
    usual = threaded.named_weights

    def faulty(model: Any) -> Any:
        return iter(fault(dict(usual(model))).items())

    assert await learner.check_weights("float32") == len(dict(learner.iter_weights()))
    with replaced(threaded, "named_weights", faulty), pytest.raises(ConfigError, match=said):
        await learner.check_weights("float32")


async def test_an_error_names_three_differences_and_their_number(learner: ThreadedLearner) -> None:
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(1.0)
    with pytest.raises(ConfigError) as caught:
        await learner.check_weights("float32")
    number = len(dict(learner.iter_weights()))
    assert str(caught.value).count("has other values") == 3
    assert f"({number} in all)" in str(caught.value)
    assert await learner.check_weights(None) == number, "a resumed run has trained its values"


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
async def test_values_are_compared_in_the_published_type(
    kept: str, published: str, tied: bool, model_directory: Make, make_config: Make
) -> None:
    directory = model_directory(tied=tied)
    file = directory / "model.safetensors"
    tensors = {name: tensor.to(getattr(torch, kept)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
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
    file = directory / "model.safetensors"
    tensors = load_file(file)
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.up_proj.weight")
    save_file(tensors | {name: torch.ones(3) for name in more}, file, metadata={"format": "pt"})
    learner = await loaded(directory, make_config)
    assert await learner.check_weights("float32") == len(tensors)
    vision = {"visual.patch_embed.weight": torch.ones(3)}
    save_file(tensors | vision, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"visual\.patch_embed\.weight of the files is not publ"):
        await learner.check_weights("float32")


async def test_packed_tensors_are_refused(learner: ThreadedLearner) -> None:
    file = Path(learner._config.model.name) / "model.safetensors"
    tensors = load_file(file)
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
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
def test_each_rank_compares_its_rows(
    more: dict[str, Any], tmp_path: Path, ranks: RankGroup
) -> None:
    rank_cases.make_model(3).save_pretrained(tmp_path / "model")
    settings = {"model.name": str(tmp_path / "model")} | more
    for size in (2, 3):
        tensors = ranks.call(size, "on_ranks", "compare", settings)[0]
        assert tensors == len(load_file(tmp_path / "model" / "model.safetensors"))
    with pytest.raises(AssertionError, match=r"rank 1 of 2(.|\n)*has other values, from row 0 on"):
        ranks.call(2, "on_ranks", "compare", settings, planted="rows elsewhere")
