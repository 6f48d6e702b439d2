"""Adapters: what is published is their base with them, and nothing but them is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from laminar.actors.model_files import save_model
from laminar.actors.trainer import NO_PROBE
from laminar.cli.fork import _check_adapters
from laminar.config import Config, ConfigError
from laminar.run.directory import RESUME_FILE
from laminar.training.checkpoints import checkpoint
from laminar.training.checkpoints.checkpoint import iter_moments
from laminar.training.learner import Learner
from laminar.training.model import lora, lora_targets
from laminar.training.model.policy import (
    BasePolicy,
    LoadedPolicy,
    digest_base_weights,
    get_base_weights,
    load_policy,
)
from laminar.training.trainer_state import CheckpointError, ResumeState, encode
from laminar.weights.version import manifest as mf
from tests.training.saved_checkpoint import load_checkpoint
from tools.kit.extras import needs_peft
from tools.kit.one_process import build_tensor_manifest, make_files, named_weights

pytestmark = needs_peft
Make = Callable[..., Any]
VOCAB = 48
TEXTS = [[1, 2, 3, 4, 5, 6], [40, 7, 3, 9]]
SETTINGS = {"lora.rank": 4, "lora.alpha": 8, "optim.lr": 0.01, "optim.weight_decay": 0.1}
CLOSE = 1e-5
"""Nats: of one matrix that has the adapter added against base and adapter one after the other."""


@pytest.fixture
def source(model_directory: Make) -> Path:
    """A base with a negative zero, which a sum with nothing would turn into another one."""
    directory: Path = model_directory()
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = -0.0
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture
def make_learner(source: Path, make_config: Make) -> Make:
    def build(**more: Any) -> Learner:
        settings = SETTINGS | {name.replace("__", "."): value for name, value in more.items()}
        config = make_config(settings)
        policy = load(source, config)
        reference = BasePolicy(policy) if config.algorithm.use_kl_loss else None
        return Learner(config, policy, reference=reference)

    return build


def load(source: Path, config: Config | None = None) -> LoadedPolicy:
    return load_policy(str(source), "cpu", tokenizer_size=VOCAB, adapt=config)


def published(model: Any, dtype: str) -> str:
    """The digest of a version."""
    tensors = list(named_weights(model))
    specs = mf.make_layout([(name, tuple(t.shape)) for name, t in tensors], dtype)
    return build_tensor_manifest(
        version=0, step=0, specs=specs, tensors=tensors, probe=NO_PROBE
    ).digest


def apart(scores: list[list[float]], others: list[list[float]]) -> float:
    return float(np.abs(np.concatenate(scores) - np.concatenate(others)).max())


def merged_policy(learner: Learner, source: Path) -> LoadedPolicy:
    policy = load(source)
    policy.model.load_state_dict(dict(named_weights(learner.policy.model)), strict=False)
    return policy


def bytes_of(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in dict(tensors).items()}


# --- what is published ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_begins_with_the_version_of_its_base(
    dtype: str, source: Path, make_learner: Make
) -> None:
    learner = make_learner()
    assert published(learner.policy.model, dtype) == published(load(source).model, dtype)
    assert learner.policy.base == digest_base_weights(load(source))
    named = bytes_of(lora.list_adapter_parameters(learner.policy.model))
    first = [content for name, content in named.items() if ".lora_A." in name]
    assert len(set(first)) == len(first) == 14


def test_what_is_published_scores_as_base_and_adapters(
    source: Path, make_learner: Make, make_samples: Make, make_config: Make
) -> None:
    learner = make_learner()
    before = learner.compute_logprobs(TEXTS)
    for step in range(3):
        assert learner.train_step(make_samples(), step).changed
    after = learner.compute_logprobs(TEXTS)
    assert apart(before, after) > 0.1
    merged = Learner(make_config(), merged_policy(learner, source))
    assert apart(merged.compute_logprobs(TEXTS), after) <= CLOSE


@pytest.mark.parametrize(("rank", "alpha"), [(4, 8), (3, 1), (8, 12)])
def test_scale_and_start_are_those_of_peft(
    rank: int, alpha: float, source: Path, make_learner: Make, make_samples: Make
) -> None:
    """Scores, merged weights and the first gradient: of B only, since B begins as zeros."""
    from peft import LoraConfig, get_peft_model

    more = {"lora__rank": rank, "lora__alpha": alpha, "optim__lr": 0.0}
    learner = make_learner(**more)
    ours = dict(lora.list_adapter_parameters(learner.policy.model))
    for name, parameter in ours.items():
        if ".lora_A." in name:
            limit = parameter.shape[1] ** -0.5  # of a uniform distribution, as in nn.Linear
            assert 0.8 * limit < float(parameter.detach().abs().max()) <= limit
            assert abs(float(parameter.detach().mean())) < 0.3 * limit
            assert float(parameter.detach().std()) == pytest.approx(limit / 3**0.5, rel=0.2)
        else:
            assert not parameter.any()
    learner.train_step(make_samples(), 0)
    assert all(bool(p.grad.any()) == (".lora_B." in name) for name, p in ours.items())

    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    matrices = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    asked = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    theirs = get_peft_model(base, asked).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                own = ours[name.removeprefix(lora.PEFT_PREFIX)]
                own.add_(torch.randn_like(own) * 0.1)
                parameter.copy_(own)
        logits = theirs(input_ids=torch.tensor(TEXTS[:1])).logits.log_softmax(-1)[0, :-1]
    found = logits.gather(1, torch.tensor(TEXTS[0][1:])[:, None])[:, 0].tolist()
    assert apart([found], learner.compute_logprobs(TEXTS)[:1]) <= CLOSE
    expected, merged = theirs.merge_and_unload().state_dict(), named_weights(learner.policy.model)
    for name, tensor in merged:
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in ours:
            a, b = (ours[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            change = (alpha / rank * b.double() @ a.double()).float()
            torch.testing.assert_close(tensor - matrices[name], change, rtol=1e-3, atol=1e-6)


def test_adapters_of_a_seed_begin_alike_and_of_another_apart(
    source: Path, make_config: Make
) -> None:
    start = {
        (seed, again): bytes_of(
            lora.list_adapter_parameters(load(source, make_config(SETTINGS | {"seed": seed})).model)
        )
        for seed in (1, 2)
        for again in (False, True)
    }
    assert start[1, False] == start[1, True] and start[2, False] == start[2, True]
    same = {name for name, content in start[1, False].items() if content == start[2, False][name]}
    assert same == {name for name in start[1, False] if ".lora_B." in name}


def test_the_base_keeps_its_bytes(make_learner: Make, make_samples: Make) -> None:
    """However often it is published; a merge in place would add the adapter each time."""
    learner = make_learner()
    before = bytes_of(get_base_weights(learner.policy.model))
    learner.train_step(make_samples(), 0)
    assert len({published(learner.policy.model, "float32") for _ in range(2)}) == 1
    assert bytes_of(get_base_weights(learner.policy.model)) == before
    assert digest_base_weights(learner.policy) == learner.policy.base


# --- the reference ----------------------------------------------------------------------------


def test_without_its_adapters_a_policy_is_its_base_to_the_bit(
    source: Path, make_learner: Make, make_samples: Make, make_config: Make
) -> None:
    """The KL term compares with that: with the adapters on, it would always be 0."""
    learner = make_learner(algorithm__use_kl_loss=True)
    first, second = (learner.train_step(make_samples(), step) for step in range(2))
    assert first.metrics["actor/kl_loss"] == 0.0
    assert second.metrics["actor/kl_loss"] > 1e-4

    base = Learner(make_config(), load(source)).compute_logprobs(TEXTS)
    with lora.disable_adapters(learner.policy.model):
        assert learner.compute_logprobs(TEXTS) == base
    assert apart(learner.compute_logprobs(TEXTS), base) > 0.01
    assert (
        learner.collect_facts().reference
        == learner.collect_facts().base
        == digest_base_weights(load(source))
    )


def test_the_reference_has_the_gradient_of_a_second_model(
    source: Path, make_learner: Make, make_samples: Make, make_config: Make
) -> None:
    """With several micro-batches: the policy's pass and the reference's are through one model."""
    more = {"algorithm__use_kl_loss": True, "trainer__micro_batch_tokens": 40}
    own, other = make_learner(**more), make_learner(**more)
    other.reference = load(source)
    steps = [[each.train_step(make_samples(), s) for s in range(2)] for each in (own, other)]
    assert steps[0][1].metrics == pytest.approx(steps[1][1].metrics, rel=1e-6)
    assert published(own.policy.model, "float32") == published(other.policy.model, "float32")


# --- what is trained --------------------------------------------------------------------------


def test_optimizer_and_gradients_are_those_of_adapters_alone(
    make_learner: Make, make_samples: Make
) -> None:
    learner = make_learner()
    learner.train_step(make_samples(), 0)
    model = learner.policy.model
    names = {name for name, _ in lora.list_adapter_parameters(model)}
    assert len(names) == 2 * 7 * 2 and all(".lora_" in name for name in names)
    moments = {name.partition(".")[2] for name, _ in iter_moments(model, learner.optimizer)}
    assert moments == names
    assert {name for name, p in model.named_parameters() if p.grad is not None} == names
    assert {name for name, p in model.named_parameters() if p.requires_grad} == names


@pytest.mark.parametrize("modules", [["all-linear"], ["o_proj"], ["k_proj", "up_proj"], ["q_proj"]])
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_prompts_once_and_padded_rows_have_one_gradient(
    modules: list[str], recompute: str, make_learner: Make, make_samples: Make
) -> None:
    more = {
        "lora__target_modules": modules,
        "trainer__activation_checkpointing": recompute,
        "trainer__micro_batch_tokens": 60,
        "optim__lr": 0.0,
    }
    found = []
    for once in (True, False):
        learner = make_learner(**more)
        assert learner.policy.prompts_once
        object.__setattr__(learner.policy, "prompts_once", once)
        for name, parameter in lora.list_adapter_parameters(learner.policy.model):
            if ".lora_B." in name:
                torch.nn.init.constant_(parameter, 0.02)
        learner.train_step(make_samples(), 0)
        grads = [p.grad.flatten() for _, p in lora.list_adapter_parameters(learner.policy.model)]
        found.append(torch.cat(grads).double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) <= 1e-5
    assert float(found[1].norm()) > 0


def test_a_base_of_the_compute_type_has_its_adapters_in_float32(
    source: Path, make_learner: Make, make_samples: Make
) -> None:
    """bfloat16 where nothing that is published has room for more."""
    learner = make_learner(trainer__dtype="bfloat16", weights__dtype="bfloat16")
    model = learner.policy.model
    held = {name: tensor.dtype for name, tensor in get_base_weights(model).items()}
    assert held["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert held["model.norm.weight"] == held["model.embed_tokens.weight"] == torch.float32
    assert {p.dtype for _, p in lora.list_adapter_parameters(model)} == {torch.float32}
    assert {tensor.dtype for _, tensor in named_weights(model)} == {torch.float32}
    assert published(model, "bfloat16") == published(load(source).model, "bfloat16")
    assert learner.train_step(make_samples(), 0).changed
    wider = make_learner(trainer__dtype="bfloat16", weights__dtype="float32")
    assert {t.dtype for t in get_base_weights(wider.policy.model).values()} == {torch.float32}


# --- files ------------------------------------------------------------------------------------


async def test_an_export_is_merged_and_its_adapter_is_read_by_peft(
    tmp_path: Path, source: Path, make_learner: Make, make_samples: Make, make_config: Make
) -> None:
    from peft import PeftModel

    learner = make_learner(lora__target_modules=["q_proj", "down_proj"])
    learner.train_step(make_samples(), 0)
    target = tmp_path / "export"
    await save_model(make_files(learner, str(source)), target)
    expected = learner.compute_logprobs(TEXTS)
    merged = Learner(make_config(), load(target))
    assert apart(merged.compute_logprobs(TEXTS), expected) <= CLOSE
    assert published(merged.policy.model, "float32") == published(learner.policy.model, "float32")

    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    read = PeftModel.from_pretrained(base, target / lora_targets.ADAPTER_DIR).eval()
    with torch.no_grad():
        logits = read(input_ids=torch.tensor(TEXTS[:1])).logits.log_softmax(-1)[0, :-1]
    ids = torch.tensor(TEXTS[0][1:])
    found = logits.gather(1, ids[:, None])[:, 0].tolist()
    assert apart([found], expected[:1]) <= CLOSE
    settings = json.loads((target / lora_targets.ADAPTER_DIR / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(source)
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert sorted(settings["target_modules"]) == ["down_proj", "q_proj"]

    checkpoint.read_back(target, learner)
    learner.train_step(make_samples(), 1)
    with pytest.raises(CheckpointError, match="differs from what was written"):
        checkpoint.read_back(target, learner)


async def save(learner: Learner, source: Path, directory: Path) -> Path:
    files = make_files(learner, str(source))
    found = ResumeState(version=1, step=1, before="", batches=(), learner=learner.collect_facts())
    await save_model(files, directory, await files.copy(), {RESUME_FILE: encode(found)})
    return directory


async def test_training_goes_on_from_a_checkpoint_with_its_own_base_alone(
    tmp_path: Path, source: Path, make_learner: Make, make_samples: Make
) -> None:
    learner = make_learner()
    learner.train_step(make_samples(), 0)
    saved = await save(learner, source, tmp_path / "saved")
    version = published(learner.policy.model, "float32")
    learner.train_step(make_samples(), 1)
    expected = published(learner.policy.model, "float32")

    again = make_learner()
    load_checkpoint(saved, again)
    assert published(again.policy.model, "float32") == version
    again.train_step(make_samples(), 1)
    assert published(again.policy.model, "float32") == expected
    keys = load_file(saved / "optimizer.safetensors").keys()
    assert keys and all(".lora_" in key for key in keys)

    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"] += 0.01
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"belong to a base of digest .* model.name now has"):
        load_checkpoint(saved, make_learner())


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"lora__rank": 0}, "it has adapters of rank 4 and alpha 8 for all-linear, but this run"),
        ({"lora__alpha": 16}, "this run has adapters of rank 4 and alpha 16"),
        ({"lora__target_modules": ["q_proj"]}, "this run has adapters .* for q_proj"),
    ],
)
async def test_another_adapter_is_refused(
    other: dict[str, Any],
    text: str,
    tmp_path: Path,
    source: Path,
    make_learner: Make,
    make_config: Make,
    make_samples: Make,
) -> None:
    learner = make_learner()
    learner.train_step(make_samples(), 0)
    saved = await save(learner, source, tmp_path / "saved")
    if other == {"lora__rank": 0}:
        found = Learner(make_config(), load(source))
    else:
        found = make_learner(**other)
    with pytest.raises(ConfigError, match=text):
        load_checkpoint(saved, found)


async def test_a_damaged_adapter_is_seen(
    tmp_path: Path, source: Path, make_learner: Make, make_samples: Make
) -> None:
    learner = make_learner()
    learner.train_step(make_samples(), 0)
    saved = await save(learner, source, tmp_path / "saved")
    path = saved / lora_targets.ADAPTER_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is damaged"):
        load_checkpoint(saved, make_learner())
    path.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors"):
        load_checkpoint(saved, make_learner())


def test_a_fork_keeps_its_adapters(make_config: Make) -> None:
    before, run = make_config(SETTINGS), Path("runs/a")
    _check_adapters(before, make_config(SETTINGS | {"optim.lr": 1.0}), run)
    unused = make_config({"lora.rank": 0, "lora.alpha": 3})
    _check_adapters(make_config(), unused, run)
    for key, value in {"lora.rank": 0, "lora.alpha": 3, "lora.target_modules": ["q_proj"]}.items():
        with pytest.raises(ConfigError, match=rf"^{key} = .* differs from .* of runs/a, .*/export"):
            _check_adapters(before, make_config(SETTINGS | {key: value}), run)


# --- mistakes ---------------------------------------------------------------------------------


def test_each_mistake_has_its_sentence(
    make_config: Make, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {name: tuple(t.shape) for name, t in make_model().state_dict().items()}
    with pytest.raises(ConfigError, match=r"lora.rank = -1 is not allowed.*at least 0"):
        make_config({"lora.rank": -1})
    with pytest.raises(ConfigError, match=r"lora.alpha = 0 is not allowed"):
        make_config({"lora.alpha": 0})
    good = make_config({"lora.rank": 2}).lora
    lora_targets.check_lora(good, shapes)
    for unknown in ("lm_head", "embed_tokens", "input_layernorm", "qproj"):
        other = make_config({"lora.rank": 2, "lora.target_modules": [unknown]}).lora
        with pytest.raises(ConfigError, match=rf"has '{unknown}', but the layers .*q_proj"):
            lora_targets.check_lora(other, shapes)
    with pytest.raises(ConfigError, match="has no layers with linear matrices"):
        lora_targets.check_lora(good, {"transformer.h.0.attn.c_attn.weight": (4, 12)})
    monkeypatch.setattr(lora_targets, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs peft, which is not installed: pip install"):
        lora_targets.check_lora(good, shapes)
