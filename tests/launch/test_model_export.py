"""`laminar export`: the files load as the run's model, and nothing is written on a mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar.cli.commands import run_command
from laminar.config import dump_config, load_config
from laminar.launch import model_export
from laminar.names import exit_codes

BASE = Path(__file__).parents[2] / "configs" / "models" / "spell-0.6m"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return shutil.copytree(BASE, tmp_path / "base")


@pytest.fixture
def run(tmp_path: Path, base: Path) -> Path:
    """A finished run whose model has other weights than its base."""
    return make_run(tmp_path / "run", base)


def make_run(directory: Path, base: Path, *settings: str) -> Path:
    given = ["data.dataset=spell_backward", f"model.name={base}", "run.name=mine", *settings]
    directory.mkdir()
    (directory / "config.toml").write_text(dump_config(load_config([], given)))
    shutil.copytree(base, directory / "export")
    weights = directory / "export" / "model.safetensors"
    trained = {name: tensor + 0.5 for name, tensor in load_file(weights).items()}
    save_file(trained, weights, metadata={"format": "pt"})
    return directory


def export(run: Path, to: Path, *words: str) -> int:
    return run_command(["export", str(run), "--to", str(to), *words])


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_transformers_loads_the_trained_weights(
    run: Path, tmp_path: Path, word: str, dtype: torch.dtype
) -> None:
    assert export(run, tmp_path / "out", "--dtype", word) == exit_codes.COMPLETE
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = load_file(run / "export" / "model.safetensors")
    assert model.dtype == dtype
    for name, tensor in trained.items():
        assert torch.equal(model.state_dict()[name], tensor.to(dtype)), name
    written = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written.encode("nus") == AutoTokenizer.from_pretrained(BASE).encode("nus")


def test_a_large_model_is_split_and_indexed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "SHARD", "400KB")
    assert export(run, tmp_path / "out", "--dtype", "fp32") == exit_codes.COMPLETE
    parts = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(parts) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    trained = load_file(run / "export" / "model.safetensors")
    assert index["weight_map"].keys() == trained.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(model.state_dict()[name], trained[name]) for name in trained)


def test_tensors_that_the_run_left_out_come_from_the_base(
    run: Path, base: Path, tmp_path: Path
) -> None:
    weights = base / "model.safetensors"
    extra = {"mtp.head.weight": torch.ones(2, 3), "lm_head.weight": torch.zeros(260, 128)}
    save_file(load_file(weights) | extra, weights)
    assert export(run, tmp_path / "out") == exit_codes.COMPLETE
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["mtp.head.weight"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert "lm_head.weight" not in written, "the head is tied to the trained embedding"


def test_the_card_has_base_evaluations_and_settings(run: Path, tmp_path: Path) -> None:
    facts = {"step": 3, "correct": 2, "total": 4, "missing": 0, "share": 0.5, "share_se": None}
    facts |= {"score": 0.5, "answers_per_prompt": 1, "mean_length": None, "truncated_share": 0.0}
    summary = {"steps": 3, "evaluations": [facts]}
    (run / "summary.json").write_text(json.dumps(summary))
    export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- step 3: 2/4 correct = 0.500" in card and "3 steps" in card
    assert f"`{tmp_path / 'base'}`" in card and 'dataset = "spell_backward"' in card
    assert "base_model" not in card, "the base is no model of the hub"


def test_adapters_are_written_alone_or_merged(base: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "lora", base, "lora.rank=4")
    adapter = run / "export" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    assert export(run, tmp_path / "out") == exit_codes.COMPLETE
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert export(run, tmp_path / "whole", "--merge-adapters") == exit_codes.COMPLETE
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole").dtype == torch.bfloat16
    for name, library in (("out", "peft"), ("whole", "transformers")):
        assert f"library_name: {library}\n" in (tmp_path / name / "README.md").read_text()


def test_a_mistake_is_a_sentence_and_writes_nothing(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(reason: str, run: Path, to: str, *words: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        assert export(run, tmp_path / to, *words) == exit_codes.USER_ERROR
        assert reason in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before

    refused("exists and is left as it is", run, "base")
    refused("no checkpoint of step 7: it has none", run, "out", "--step", "7")
    (run / "checkpoints" / "step_20").mkdir(parents=True)
    refused("no checkpoint of step 7: it has checkpoints of step 20", run, "out", "--step", "7")
    refused("is damaged", run, "out", "--step", "20")
    (base / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refused("download it again", run, "out")
    shutil.rmtree(run / "export")
    refused("choose a checkpoint by --step N", run, "out")
    refused("is not a run directory", base, "out")
