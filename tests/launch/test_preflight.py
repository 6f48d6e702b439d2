"""What `laminar train` finds before it starts a process, and `--dry-run` without starting one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from laminar.cli.commands import run_command
from laminar.config import Config, ConfigError, load_config
from laminar.engines.check import weight_shapes
from laminar.engines.environment import Gpu
from laminar.launch import preflight, train
from laminar.launch.preflight import check_settings, look_at_data
from laminar.names import exit_codes
from laminar.observe.warnings import first_look
from laminar.tasks.data.prompts import load_prompts
from laminar.tasks.environments.user_class import decode_tools

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/recipes/words/run.toml")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart names its model from there."""
    monkeypatch.chdir(ROOT)


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_config([QUICKSTART], [f"run.output_dir={tmp_path / 'runs'}", *overrides])


def check(config: Config) -> None:
    look_at_data(check_settings(config))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.device=cuda"], ["trainer.device", "'cuda'", "no CUDA"]),
        (["rollout.device=cuda"], ["rollout.device", "'cuda'", "no CUDA"]),
        (["coordinator.host=0.0.0.0"], ["coordinator.host", "0.0.0.0", "all interfaces"]),
        (
            ["coordinator.host=no.invalid"],
            ["coordinator.host", "no.invalid", "not a known address"],
        ),
    ],
)
def test_a_run_that_this_machine_cannot_have(
    overrides: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        check(config(tmp_path, *overrides))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "device", "refused"),
    [
        (2, "auto", True),
        (2, "cuda", True),
        (3, "cuda", False),
        (0, "auto", False),
        (2, "cpu", False),
    ],
)
def test_each_rank_of_the_trainer_has_a_gpu(
    gpus: int, device: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, ranks are processes, as many as one likes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(preflight, "count_gpus", lambda: gpus)
    asked = config(tmp_path, "trainer.ranks=3", f"trainer.device={device}")
    if not refused:
        return preflight.check_devices(asked)
    with pytest.raises(ConfigError, match=r"trainer.ranks = 3 exceeds the 2 GPUs"):
        preflight.check_devices(asked)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *found: Gpu) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: [gpu.number for gpu in found])
    monkeypatch.setattr(preflight, "count_gpus", lambda: len(found))
    monkeypatch.setattr(preflight, "list_gpus", lambda: [*found])


def test_a_gpu_that_cannot_train_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, Gpu("0", "GPU-9d1c", "Tesla T4", (7, 5), "580.95.05"))
    with pytest.raises(ConfigError, match=r"a Tesla T4 of compute capability 7\.5"):
        preflight.check_devices(config(tmp_path))
    preflight.check_devices(config(tmp_path, "trainer.device=cpu", "rollout.device=cpu"))


def test_idle_gpus_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("0", "GPU-9d1c", "NVIDIA H100 80GB HBM3", (9, 0), "580.95.05")
    pretend_gpus(monkeypatch, *[card] * 8)
    asked = config(tmp_path, "trainer.ranks=4", "rollout.replicas=2")
    found = preflight.find_idle_gpus(asked)["idle-gpus"]
    assert found.startswith("2 of the 8 GPUs") and "set rollout.replicas to 4" in found
    assert not preflight.find_idle_gpus(config(tmp_path, "trainer.ranks=4", "rollout.replicas=4"))


def test_a_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"runs/quickstart cannot be made.*runs is not a dir"):
        check(config(tmp_path))


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the answer is made up."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be made.*{tmp_path} cannot be written"):
        check(config(tmp_path))


def test_trainer_nodes_on_one_machine_compute_on_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda: ["0", "1"])
    words = ["train", "-c", QUICKSTART, f"run.output_dir={tmp_path}", "trainer.nodes=2"]
    assert run_command(words) == exit_codes.USER_ERROR
    said = capsys.readouterr().err
    assert "trainer.nodes = 2 on one machine with GPUs" in said and "`laminar submit`" in said
    assert not list(tmp_path.iterdir())
    check_settings(config(tmp_path, "trainer.nodes=2", "trainer.device=cpu"), alone=True)


def test_a_run_directory_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is checked that takes long, nothing is started, and a dangling link is in the way."""
    monkeypatch.setattr(
        train, "check_settings", lambda config, **options: pytest.fail("it was refused too late")
    )
    (tmp_path / "quickstart").symlink_to(tmp_path / "nowhere")
    words = ["train", "-c", QUICKSTART, f"run.output_dir={tmp_path}"]
    assert run_command(words) == exit_codes.USER_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "quickstart exists" in said and "--move-old" in said


def test_what_a_run_is_warned_of_before_it_starts(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run says it; a run leaves it to the coordinator, in a file that is else not there."""
    template = "{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = [{"prompt": f"Q: say {n}\nA:", "answer": f"{n}"} for n in range(20)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.train_files={data}", "data.dataset=", "data.val_size=4", "reward.kind=exact"]
    words.append(f"model.name={model}")
    words.append(f"run.output_dir={tmp_path / 'runs'}")
    plan = look_at_data(check_settings(config(tmp_path, *words)))
    assert list(plan.warnings) == ["template"] and "16 of the first 16" in plan.warnings["template"]
    assert run_command(["train", "-c", QUICKSTART, "--dry-run", *words]) == 0
    assert "WARNING: 16 of the first 16 prompts" in capsys.readouterr().out
    for name, found in (("warned", plan.warnings), ("well", {})):
        train.prepare_directory(plan.config, tmp_path / name, found).close()
        assert first_look(tmp_path / name) == found
        assert (tmp_path / name / "first_look.json").exists() == bool(found)


# --- an environment ------------------------------------------------------------------------------


def of_calculator(tmp_path: Path, *overrides: str) -> Config:
    small = ["data.dataset_size=300", "data.val_size=8", f"run.output_dir={tmp_path / 'runs'}"]
    return load_config([str(ROOT / "configs/recipes/calculator/run.toml")], [*small, *overrides])


def test_the_tools_of_an_environment_are_known_before_a_run(tmp_path: Path) -> None:
    plan = look_at_data(check_settings(of_calculator(tmp_path)))
    (tool,) = decode_tools(plan.config.env)
    assert tool["function"]["name"] == "add"
    assert plan.first_prompt.startswith("add(a, b)\n") and plan.trial


def test_games_of_one_prompt_are_told_apart_by_their_columns(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"game {n % 9}", "answer": f"{n}"} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.train_files={data}", "data.dataset=", "data.dataset_config={}"]
    checked = check_settings(of_calculator(tmp_path, *words, "data.val_size=4"))
    plan = look_at_data(checked)
    assert (plan.num_train, plan.num_held_out, plan.overlap) == (16, 4, 0)
    assert len(load_prompts(checked.data).train) < 16


def test_an_environment_that_gives_the_reward_needs_no_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "data.jsonl", tmp_path / "own.py"
    data.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    file.write_text(
        "class Own:\n    def reset(self, **row): pass\n"
        "    def go(self):\n        'Go.'\n    def get_reward(self): return 1.0\n"
    )
    words = [f"data.train_files={data}", "data.dataset=", "data.dataset_config={}"]
    words += [f"env.path={file}", "env.name=Own", f"run.output_dir={tmp_path / 'runs'}"]
    words = [
        "-c",
        str(ROOT / "configs/recipes/calculator/run.toml"),
        "--dry-run",
        *words,
        "data.val_size=4",
    ]
    assert run_command(["train", *words]) == 0
    assert "reward     " not in capsys.readouterr().out


def test_functions_over_lists_and_environments_score_one_response_per_call(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    key = "reward.custom_reward_function.path"
    file.write_text("def f(completions, **columns): return [1.0 for _ in completions]")
    plan = look_at_data(check_settings(of_calculator(tmp_path, f"{key}={file}")))
    assert plan.reward.scope == plan.config.reward.scope == "trajectory" and plan.trial
    file.write_text("def f(environments, **columns): return [e.total for e in environments]")
    plan = look_at_data(check_settings(of_calculator(tmp_path, f"{key}={file}")))
    assert plan.reward.takes_environments and not plan.trial
    with pytest.raises(ConfigError, match=r"f of .* takes environments, but env.path is empty"):
        check(config(tmp_path, f"{key}={file}"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["env.path=nowhere.py"], ["'nowhere.py'", "env.path"]),
        (["env.name=Abacus"], ["env.name = 'Abacus'", "Calculator"]),
        (["model.name=configs/models/spell-0.6m"], ["tool calls can be parsed"]),
    ],
)
def test_what_an_environment_cannot_do_without(
    settings: list[str], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(of_calculator(tmp_path, *settings))
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- the model's directory -----------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the shipped model, to be damaged."""
    copy = tmp_path / "model"
    shutil.copytree(ROOT / "configs" / "models" / "spell-0.6m", copy)
    return copy


def refused(model: Path, tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config(tmp_path, f"model.name={model}", "data.dataset_size=300", "data.val_size=8"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_without_its_tokenizer(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer: " in refused(model, tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"\xff\xff"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", b'"x"'),
    ],
)
def test_a_damaged_tokenizer(file: str, content: bytes, model: Path, tmp_path: Path) -> None:
    (model / file).write_bytes(content)
    assert f"tokenizer of model '{model}' cannot be loaded" in refused(model, tmp_path)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2512345\n"


@pytest.mark.parametrize("keep", [0, 100, 10_000])
def test_weights_that_were_cut_short(keep: int, model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert f"{weights} cannot be read" in refused(model, tmp_path)


def test_weights_that_are_not_there(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(LFS_POINTER)
    assert f"{weights} cannot be read" in refused(model, tmp_path)
    weights.unlink()
    assert "has no weights" in refused(model, tmp_path)
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}')
    assert "one.safetensors cannot be read" in refused(model, tmp_path)
    index.write_text("[]")
    assert f"{index} cannot be read" in refused(model, tmp_path)


def test_a_vocabulary_that_is_not_that_of_the_weights(model: Path, tmp_path: Path) -> None:
    config_file = model / "config.json"
    found = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(found | {"vocab_size": 100}))
    said = refused(model, tmp_path)
    assert "vocab_size = 100, but model.embed_tokens.weight" in said
    assert f"has {found['vocab_size']} rows" in said


def rewritten(file: Path, **changed: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def other_ids(model: Path) -> None:
    file = model / "tokenizer.json"
    found = json.loads(file.read_text())
    ids = found["model"]["vocab"]
    first, second = list(ids)[:2]
    ids[first], ids[second] = ids[second], ids[first]
    file.write_text(json.dumps(found))


def as_bert(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 4096}')
    names = {"bert.embeddings.word_embeddings.weight": np.zeros((260, 4), np.float32)}
    save_file(names, model / "model.safetensors")


CRITICS: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda model: model.rename(model.parent / "elsewhere"), "is not a directory; give"),
    "empty": (lambda model: (model / "config.json").unlink(), "config.json cannot be read"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer: "),
    "other tokenizer": (other_ids, "has another tokenizer than model.name"),
    "width": (
        lambda model: rewritten(model / "config.json", hidden_size=64),
        "hidden_size = 64, but model.embed_tokens.weight in the weight files has 128 columns",
    ),
    "layers": (
        lambda model: rewritten(model / "config.json", num_hidden_layers=2),
        "must be equal",
    ),
    "positions": (
        lambda model: rewritten(model / "config.json", max_position_embeddings=64),
        "reads 64 tokens at most",
    ),
    "no decoder": (as_bert, "has the model_type 'bert', and a critic is a decoder"),
    "unknown": (
        lambda model: rewritten(model / "config.json", model_type="other"),
        "has the model_type 'other', and a critic is a decoder",
    ),
}


@pytest.mark.parametrize(("damage", "said"), CRITICS.values(), ids=CRITICS)
def test_a_model_that_cannot_be_a_critic(
    damage: Callable[[Path], object], said: str, model: Path, tmp_path: Path
) -> None:
    damage(model)
    ppo = config(tmp_path, "algorithm.adv_estimator=gae", f"critic.model.name={model}")
    with pytest.raises(ConfigError) as caught:
        preflight.check_critic(ppo)
    found = str(caught.value)
    assert found.startswith(f"critic.model.name = {str(model)!r}")
    assert said in found and "\n" not in found


def add_tensors(file: Path, change: Callable[[dict[str, np.ndarray]], dict[str, Any]]) -> None:
    tensors = load_file(file)
    save_file(tensors | change(tensors), file, metadata={"format": "pt"})


def add_token(model: Path) -> None:
    file = model / "tokenizer.json"
    found = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    found["added_tokens"].append({"id": 260, "content": "<search>", **flags})
    file.write_text(json.dumps(found))


EMBEDDING = "model.embed_tokens.weight"
MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "token": (add_token, "gives '<search>' the id 260, but the embedding in the weight files has"),
    "other head": (
        lambda model: add_tensors(
            model / "model.safetensors", lambda t: {"lm_head.weight": t[EMBEDDING] + 1}
        ),
        "ties lm_head.weight to model.embed_tokens.weight (tie_word_embeddings), but",
    ),
    "larger head": (
        lambda model: add_tensors(
            model / "model.safetensors",
            lambda t: {"lm_head.weight": np.concatenate([t[EMBEDDING]] * 2)},
        ),
        "set tie_word_embeddings to false, or remove lm_head.weight",
    ),
    "value head": (
        lambda model: add_tensors(
            model / "model.safetensors",
            lambda t: {"v_head.summary.weight": np.zeros((1, 128), np.float32)},
        ),
        "has tensors that the model does not use: v_head.summary.weight (1 in all)",
    ),
    "more layers": (
        lambda model: rewritten(model / "config.json", num_hidden_layers=9, layer_types=None),
        "its files lack tensors of these names and shapes: model.layers.",
    ),
}


@pytest.mark.parametrize(("damage", "said"), MISFITS.values(), ids=MISFITS)
def test_files_that_do_not_fit_together(
    damage: Callable[[Path], object], said: str, model: Path, tmp_path: Path
) -> None:
    damage(model)
    assert said in refused(model, tmp_path)


KIMI = {"model_type": "kimi", "auto_map": {"AutoModelForCausalLM": "modeling_kimi.Kimi"}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"output_router_logits": True}, "auxiliary loss over the routers.*set it to false"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'.*Mxfp4Config.dequantize"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'.*FineGrainedFP8Config"),
        (KIMI, "auto_map in config.json.*model_type = 'kimi'"),
    ],
)
def test_packed_weights_and_code_of_a_model_are_refused(
    changed: dict[str, object], said: str, model: Path, tmp_path: Path
) -> None:
    rewritten(model / "config.json", **changed)
    assert re.search(said, refused(model, tmp_path))


@pytest.mark.parametrize("damage", ["value head", "other head"])
def test_a_critic_has_no_value_head_left_over_and_needs_no_head(
    damage: str, model: Path, tmp_path: Path
) -> None:
    MISFITS[damage][0](model)
    ppo = config(tmp_path, "algorithm.adv_estimator=gae", f"critic.model.name={model}")
    if damage == "other head":
        return check(ppo)
    with pytest.raises(ConfigError, match=f"{model}.*does not use: v_head"):
        check(ppo)


def test_a_tied_model_may_have_its_head_twice_and_frequencies(model: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    file = model / "model.safetensors"
    add_tensors(file, lambda t: extra | {"lm_head.weight": t[EMBEDDING]})
    small = ["data.dataset_size=300", "data.val_size=8"]
    check(config(tmp_path, f"model.name={model}", *small))


def test_weights_in_several_files_are_accepted(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}')
    assert set(weight_shapes(model)) >= {"model.embed_tokens.weight", "model.norm.weight"}


@pytest.mark.parametrize("as_is", [False, True])
def test_a_string_prompt_in_the_chat_template_is_named(tmp_path: Path, as_is: bool) -> None:
    """TRL gives strings to the model as they are."""
    rows = [{"prompt": f"say {i}", "answer": "1"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = Path(__file__).parents[2] / "configs/models/calculator-0.6m"
    settings = {"model.name": str(model), "data.train_files": [str(tmp_path / "rows.jsonl")]}
    settings |= {"data.val_size": 2, "data.apply_chat_template": not as_is}
    lines = train.plan_lines(look_at_data(load_config([settings])))
    assert any("in the model's chat template (TRL: as it is)" in line for line in lines) != as_is
