"""An export is what from_pretrained loads, or it is not there."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar.actors.model_files import save_model
from laminar.tasks.data.tokenizer import end_ids, load_tokenizer
from laminar.training.learner import Learner, replace_weights
from laminar.training.model.policy import LoadedPolicy, load_policy
from laminar.training.ranks import SINGLE_RANK
from tools.kit.one_process import make_files

Make = Callable[..., Any]


async def export(model: Any, source: str, target: Path) -> None:
    policy = SimpleNamespace(model=model, base="")
    learner = SimpleNamespace(policy=policy, ranks=SINGLE_RANK)
    await save_model(make_files(learner, source), target)


@pytest.mark.parametrize("tied", [True, False])
async def test_trained_weights_come_back_byte_for_byte(
    tied: bool, tmp_path: Path, model_directory: Make, make_config: Make, make_samples: Make
) -> None:
    source = str(model_directory(tied=tied))
    policy = load_policy(source, "cpu", tokenizer_size=48)
    learner = Learner(make_config({"optim.lr": 0.01}), policy)
    learner.train_step(make_samples(), 0)
    target = tmp_path / "deep" / "export"
    await export(policy.model, source, target)

    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values())
    expected = policy.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert tensor.numpy().tobytes() == expected[name].numpy().tobytes()
    again = Learner(make_config(), load_policy(str(target), "cpu", tokenizer_size=48))
    assert again.compute_logprobs([[1, 2, 3, 4]]) == learner.compute_logprobs([[1, 2, 3, 4]])


def test_an_export_is_read_back_into_the_room_of_the_gradients(
    tmp_path: Path, model_directory: Make, make_config: Make, make_samples: Make
) -> None:
    """A second model beside them would be memory that no step takes."""
    source = str(model_directory())
    learner = Learner(
        make_config({"optim.lr": 0.01}), load_policy(source, "cpu", tokenizer_size=48)
    )
    learner.train_step(make_samples(), 0)
    parameters = list(learner.policy.model.parameters())
    assert any(parameter.grad is not None for parameter in parameters)

    def load() -> LoadedPolicy:
        assert all(parameter.grad is None for parameter in parameters)
        return load_policy(source, "cpu", tokenizer_size=48)

    replace_weights(learner, load)
    first = Learner(make_config(), load_policy(source, "cpu", tokenizer_size=48))
    assert learner.compute_logprobs([[1, 2, 3, 4]]) == first.compute_logprobs([[1, 2, 3, 4]])


async def test_everything_a_user_needs_lies_beside_the_weights(
    tmp_path: Path, model_directory: Make
) -> None:
    source = model_directory()
    target = tmp_path / "export"
    await export(load_policy(str(source), "cpu", tokenizer_size=28).model, str(source), target)
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(target)
    assert after.chat_template == before.chat_template
    assert after("hello<eos>").input_ids == before("hello<eos>").input_ids
    assert end_ids(str(target), load_tokenizer(str(target))) == {5, 27}
    generation = json.loads((target / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9)
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1
    with safe_open(target / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
    config = json.loads((target / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float32", ["Qwen2ForCausalLM"])


async def test_an_export_takes_the_place_of_the_one_of_a_trainer_that_died(
    tmp_path: Path, make_model: Make, model_directory: Make
) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / "old.txt").write_text("old")
    await export(make_model(), str(model_directory()), target)
    assert [p.name for p in tmp_path.glob("*export*")] == ["export"]
    assert (target / "model.safetensors").exists() and not (target / "old.txt").exists()


async def test_an_export_without_room_leaves_the_room_it_took(
    tmp_path: Path, make_model: Make, model_directory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "export"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("laminar.training.shared_safetensors.os.pwrite", full)
    with pytest.raises(OSError, match="No space left") as failed:
        await export(make_model(), str(model_directory()), target)
    assert failed.value.errno == errno.ENOSPC
    assert not list(target.parent.iterdir())


async def test_an_export_that_dies_leaves_nothing_under_the_name(
    tmp_path: Path, make_model: Make, model_directory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = str(model_directory()), tmp_path / "out" / "export"

    def die(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr("laminar.training.shared_safetensors.create_file", die)
        await export(make_model(), source, target)
    assert not target.exists()
    await export(make_model(), source, target)
    assert [p.name for p in target.parent.iterdir()] == ["export"]
