"""Families whose tensors have other names in the files: what is loaded, published and refused.

A family of each kind; tools/bench/families.py tries all of them in whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from laminar.config import Config, ConfigError
from laminar.config.families import select_text_tensors
from laminar.engines.check import weight_shapes
from laminar.training.model.lora_targets import check_lora
from laminar.training.model.policy import check_files, load_critic, load_policy
from laminar.training.ranks import RankLayout
from laminar.training.steps import TrainSample
from tests.training.model.test_weight_files import check_refused
from tests.training.saved_checkpoint import load_checkpoint
from tests.training.test_distributed_learner import OneProcess
from tools.kit import family_models, rank_cases
from tools.kit.extras import needs_peft
from tools.kit.one_process import OneLearner, named_weights
from tools.kit.rank_group import RankGroup

Tensors = dict[str, Tensor]
Make = Callable[..., Any]
KINDS = ("gemma3", "qwen3_moe", "glm4_moe_lite", "qwen3_5")
VOCAB = rank_cases.VOCAB
IDS = [[5, 17, 3, 88, 41, 2, 9, 200, 101], [33, 7, 250, 12]]
CLOSE = 2e-5  #: nats: padded rows of one pass against a sequence in another


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp("families") / kind
            made[kind] = family_models.write_family_model(kind, path)
        return made[kind]

    return directory


def settings_of(kind: str, directory: Path, rank: int = 0) -> dict[str, Any]:
    settings: dict[str, Any] = {"model.name": str(directory), "optim.lr": 1e-2, "lora.rank": rank}
    if rank and kind in family_models.ATTENTION:
        settings["lora.target_modules"] = family_models.ATTENTION[kind]
    return settings


async def load(config: Config) -> OneLearner:
    learner = OneLearner(config, VOCAB)
    await learner.load()
    return learner


def saved_text(kind: str, directory: Path) -> Tensors:
    """The tensors of the files that a run trains."""
    return select_text_tensors(kind, load_file(directory / "model.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_published_has_the_names_and_values_of_the_files(
    kind: str, directories: Callable[[str], Path]
) -> None:
    directory = directories(kind)
    config = rank_cases.make_config(settings_of(kind, directory))
    learner = await load(config)
    expected = saved_text(kind, directory)
    found = learner.get_weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert await learner.check_weights("float32") == len(expected)
    check_files(config)
    scores = await learner.compute_logprobs(IDS)
    assert torch.allclose(torch.tensor(scores[0]), score_whole(directory), atol=CLOSE)


def score_whole(directory: Path) -> Tensor:
    """The log-probs of the whole checkpoint as transformers loads it."""
    auto: Any = AutoModelForCausalLM
    if (directory / "config.json").read_text().count("vision_config"):
        auto = AutoModelForImageTextToText
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor(IDS[:1])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1, :VOCAB]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


@needs_peft
@pytest.mark.parametrize("kind", KINDS)
async def test_adapters_are_in_the_language_model_and_in_no_expert(
    kind: str, directories: Callable[[str], Path]
) -> None:
    directory = directories(kind)
    config = rank_cases.make_config(settings_of(kind, directory, rank=2))
    check_lora(config.lora, select_text_tensors(kind, weight_shapes(directory)))
    learner = await load(config)
    assert await learner.check_weights("float32") == len(saved_text(kind, directory))
    await learner.train_step(rank_cases.make_samples(), 0)
    parameters = learner.model.named_parameters()
    trained = {name.partition(".lora_")[0] for name, p in parameters if p.grad is not None}
    assert trained and all(".layers." in name for name in trained)
    assert not any("experts" in name or "vision" in name for name in trained)
    changed = learner.get_weights()
    expected = saved_text(kind, directory)
    assert changed.keys() == expected.keys()
    moved = {name for name in expected if not torch.equal(changed[name], expected[name])}
    assert moved and not any(".experts." in name for name in moved)


@needs_peft
@pytest.mark.parametrize("named", [["all-linear"], ["q_proj", "gate_proj"]])
def test_adapters_of_experts_are_refused(
    named: list[str], directories: Callable[[str], Path]
) -> None:
    directory = directories("qwen3_moe")
    config = rank_cases.make_config(
        {"model.name": str(directory), "lora.rank": 2, "lora.target_modules": named}
    )
    with pytest.raises(ConfigError, match=r"k_proj\W+o_proj\W+q_proj\W+v_proj"):
        check_lora(config.lora, weight_shapes(directory))
    with pytest.raises(ConfigError, match=r"k_proj\W+o_proj\W+q_proj\W+v_proj"):
        load_policy(str(directory), "cpu", tokenizer_size=VOCAB, adapt=config)


def expert(number: int, part: str, layer: int = 0) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"


def swap(tensors: Tensors, one: str, other: str) -> Tensors:
    return tensors | {one: tensors[other], other: tensors[one]}


FAULTS: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "swapped experts": (
        "qwen3_moe",
        lambda t: swap(t, expert(0, "down"), expert(1, "down")),
        r"experts\.0\.down_proj\.weight has other values, from row 0",
    ),
    "gate and up": (
        "qwen3_moe",
        lambda t: swap(t, expert(2, "gate"), expert(2, "up")),
        r"experts\.2\.gate_proj\.weight has other values",
    ),
    "missing expert": (
        "qwen3_moe",
        lambda t: {k: v for k, v in t.items() if k != expert(3, "up", 1)},
        r"layers\.1\.mlp\.experts\.3\.up_proj\.weight of the files is not published",
    ),
    "fused experts": (
        "qwen3_moe",
        lambda t: t | {"model.layers.0.mlp.experts.gate_up_proj": torch.stack(
            [torch.cat([t.pop(expert(n, "gate")), t.pop(expert(n, "up"))]) for n in range(4)])},
        r"experts\.gate_up_proj is not in the files",
    ),
    "swapped shared expert": (
        "glm4_moe_lite",
        lambda t: swap(t, expert(0, "up", 1), "model.layers.1.mlp.shared_experts.up_proj.weight"),
        r"experts\.0\.up_proj\.weight has other values",
    ),
    "base layer": (
        "glm4_moe_lite",
        lambda t: {k.replace(".experts.", ".experts.base_layer."): v for k, v in t.items()},
        r"experts\.base_layer\.\S+ is not in the files",
    ),
    "no multimodal prefix": (
        "gemma3",
        lambda t: {k.replace("language_model.model.", "model."): v for k, v in t.items()},
        r"model\.\S+ is not in the files",
    ),
    "other multimodal prefix": (
        "qwen3_5",
        lambda t: {k.replace("model.language_model.", "language_model.model."): v
                   for k, v in t.items()},
        r"language_model\.model\.\S+ is not in the files",
    ),
    "transposed square": (
        "qwen3_5",
        lambda t: t | {k: v.t() for k, v in t.items() if k.endswith("self_attn.o_proj.weight")},
        r"self_attn\.o_proj\.weight has other values",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "fault", "said"), FAULTS.values(), ids=FAULTS)
async def test_tensors_that_differ_are_refused_before_the_first_step(
    kind: str, fault: Callable[[Tensors], Tensors], said: str, directories: Callable[[str], Path]
) -> None:
    learner = await load(rank_cases.make_config(settings_of(kind, directories(kind))))
    await check_refused(learner, fault, said)


@pytest.mark.parametrize("change", ["lost", "of another shape", "one more"])
def test_files_whose_experts_do_not_fill_the_model_are_refused(
    change: str, directories: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(directories("qwen3_moe"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    if change == "lost":
        del tensors[expert(3, "up", 1)]
        said = r"lacks tensors of the model: model\.layers\.1\.mlp\.experts\.3\.up_proj"
    elif change == "one more":
        tensors[expert(4, "up", 1)] = tensors[expert(3, "up", 1)].clone()
        said = r"that the model does not use: model\.layers\.1\.mlp\.experts\.4\.up_proj"
    else:
        tensors[expert(3, "up", 1)] = torch.ones(64, 32)
        said = r"experts\.3\.up_proj\.weight' is F32 \(64, 32\), not F32 of shape \(64, 64\)"
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=said):
        load_policy(str(tmp_path / "model"), "cpu", tokenizer_size=VOCAB)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=needs_peft)])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3"])
async def test_ranks_have_the_tensors_of_one_process(
    kind: str, rank: int, directories: Callable[[str], Path], ranks: RankGroup, tmp_path: Path
) -> None:
    """Log-probs at load, to the bit; the digest after a checkpoint of one process is restored."""
    settings = settings_of(kind, directories(kind), rank)
    one = OneProcess(directories(kind), settings)
    expected = one.learner.compute_logprobs(rank_cases.PROBE)
    one.train(0)
    saved, tensors = await one.save(tmp_path / "saved"), dict(one.weights())
    load_checkpoint(saved, one.learner)
    assert all(torch.equal(found, tensors[name]) for name, found in one.weights())
    slots = []
    for size in (1, 2, 3, RankLayout(2, 2, "node"), RankLayout(2, 2, "all")):
        assert ranks.call(size, "on_ranks", "compare", settings)[0] == len(tensors)
        args = (settings, str(tmp_path / "slot"), rank_cases.make_samples())
        assert ranks.call(size, "on_ranks", "publish", *args)[0][1] == expected
        slots.append(np.fromfile(tmp_path / "slot", np.float32))
        assert slots[-1] == pytest.approx(slots[0], abs=1e-3)
        target = tmp_path / f"of {size}"
        args = (settings, str(saved), str(target))
        assert ranks.call(size, "on_ranks", "save_again", *args)[0] == one.digest()
        copied = load_file(target / "model.safetensors")
        assert copied.keys() == tensors.keys()
        assert all(torch.equal(copied[name], tensors[name]) for name in tensors)


async def test_the_load_of_the_experts_is_that_of_the_scored_tokens(
    directories: Callable[[str], Path], ranks: RankGroup, tmp_path: Path
) -> None:
    settings = settings_of("qwen3_moe", directories("qwen3_moe"))
    settings |= {"trainer.micro_batch_tokens": 40, "algorithm.ppo_mini_batch_size": 1}
    settings |= {
        "data.train_batch_size": 3,
        "trainer.activation_checkpointing": "on",
        "optim.lr": 0.0,
    }
    learner = await load(rank_cases.make_config(settings))
    samples = rank_cases.make_samples()
    expected = count_tokens(str(directories("qwen3_moe")), samples)
    for size in (0, 1, 3):
        if size:
            args = (settings, str(tmp_path / "slot"), samples)
            found = ranks.call(size, "on_ranks", "publish", *args)[0][0].metrics
        else:
            found = (await learner.train_step(samples, 0)).metrics
        assert found["actor/router_load/max"] == pytest.approx(expected[0])
        assert found["actor/router_load/dead"] == expected[1]


def count_tokens(directory: str, samples: list[TrainSample]) -> tuple[float, float]:
    """The largest load of an expert, and the experts without tokens: one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    counts = torch.zeros(2, 4, dtype=torch.float64)
    for sample in samples:
        ids = np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None], output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):
            chosen = scores[len(sample.prompt_ids) - 1 : -1].topk(2).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=4)
    return float((counts * 4 / counts.sum(1, keepdim=True)).max()), float((counts == 0).sum())


@needs_peft
async def test_experts_of_a_base_have_its_type(directories: Callable[[str], Path]) -> None:
    settings = settings_of("qwen3_moe", directories("qwen3_moe"), rank=2)
    settings |= {"trainer.dtype": "bfloat16", "weights.dtype": "bfloat16"}
    learner = await load(rank_cases.make_config(settings))
    types = {n: p.dtype for n, p in learner.model.named_parameters() if ".experts." in n}
    assert types and set(types.values()) == {torch.bfloat16}
    assert await learner.check_weights("bfloat16")
    metrics = (await learner.train_step(rank_cases.make_samples(), 0)).metrics
    assert 0 < metrics["actor/grad_norm"] < 100


def test_critics_have_the_layers_of_each_family(directories: Callable[[str], Path]) -> None:
    for kind in ("gemma3", "qwen3_moe", "qwen3_5"):
        critic = load_critic(str(directories(kind)), "cpu", tokenizer_size=VOCAB)
        found, expected = dict(named_weights(critic.model)), saved_text(kind, directories(kind))
        assert found.keys() - expected.keys() == {"score.weight"} | ({"score.bias"} & found.keys())
        assert expected.keys() - found.keys() <= {"lm_head.weight"}
        assert all(torch.equal(found[n], expected[n]) for n in found.keys() & expected.keys())
    with pytest.raises(ConfigError, match="cannot be a critic: a Glm4MoeLiteForCausalLM has no"):
        load_critic(str(directories("glm4_moe_lite")), "cpu", tokenizer_size=VOCAB)
