"""What a run takes of memory, by the headers of its model alone, and what is refused for it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from laminar.cli.commands import run_command
from laminar.config import Config, ConfigError, resolve_config
from laminar.launch import memory_check
from laminar.launch.memory_check import MachineMemory, MemoryPlace, check_memory, memory_lines
from laminar.names import exit_codes
from laminar.run.memory_limit import memory_limit

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "configs" / "models" / "spell-0.6m"
GB = 10**9
LAYERS, HIDDEN, INNER, VOCAB, KV = 36, 4096, 12288, 151_936, 1024  # of Qwen3-8B


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model of 8.2 G parameters: config.json and headers, no weights (the file has a hole)."""
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, shape in (
            ("self_attn.q_proj", [HIDDEN, HIDDEN]), ("self_attn.k_proj", [KV, HIDDEN]),
            ("self_attn.v_proj", [KV, HIDDEN]), ("self_attn.o_proj", [HIDDEN, HIDDEN]),
            ("mlp.gate_proj", [INNER, HIDDEN]), ("mlp.up_proj", [INNER, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, INNER]),
        ):  # fmt: skip
            shapes[f"{name}.{part}.weight"] = shape
    model = tmp_path / "eight"
    shutil.copytree(SMALL, model)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": VOCAB, "tie_word_embeddings": False,
        "max_position_embeddings": 40_960, "layer_types": None,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return model


def config(model: Path, **settings: Any) -> Config:
    flat = {"model.name": str(model), "data.dataset": "spell_backward"}
    return resolve_config(flat | {key.replace("__", "."): value for key, value in settings.items()})


def host(memory_gb: float, **gpus: int) -> MachineMemory:
    found = {name.removeprefix("gpu"): size * GB for name, size in gpus.items()}
    return MachineMemory(int(memory_gb * GB), int(memory_gb * GB), found)


def refused(config: Config, machine: MachineMemory, machines: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        check_memory(config, machines, machine)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parts(places: list[MemoryPlace], name: str) -> dict[str, float]:
    """In GB."""
    found = next(place for place in places if place.name == name)
    return {what: round(size / GB, 1) for what, size in found.parts.items()}


def test_a_large_model_on_a_small_machine_by_the_command(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one sentence, no run directory; nothing of the weights is read."""
    monkeypatch.setattr(memory_check, "this_machine", lambda: host(23.6))
    words = ["train", "-c", str(ROOT / "configs/recipes/words/run.toml"), f"model.name={large}"]
    assert (
        run_command([*words, "--dry-run", f"run.output_dir={tmp_path / 'runs'}"])
        == exit_codes.USER_ERROR
    )
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "8.2 G parameters" in said.err
    assert " of 23.6 GB of this machine (parameters 32.8, gradients 32.8" in said.err
    assert "take a smaller model" in said.err and not (tmp_path / "runs").exists()


SMALL_PASS = {"trainer__micro_batch_tokens": 1024}


def test_every_part_is_counted(large: Path) -> None:
    asked = config(large, algorithm__use_kl_loss=True, **SMALL_PASS)
    places = check_memory(asked, 1, host(1000))
    assert parts(places, "this machine") == {
        "parameters": 32.8, "gradients": 32.8, "Adam's moments": 65.5, "reference model": 32.8,
        "activations": 12.5, "head and logits": 2.5, "checkpoint copies": 98.3,
        "a version for its digest": 32.8, "2 replicas' weights": 65.5, "3 weight slots": 98.3,
    }  # fmt: skip
    assert parts(places, "/dev/shm") == {"3 weight slots": 98.3}
    short = config(large, algorithm__use_kl_loss=True, trainer__dtype="bfloat16", **SMALL_PASS)
    found = parts(check_memory(short, 1, host(1000)), "this machine")
    assert (found["parameters"], found["reference model"]) == (32.8, 17.6)
    assert found["casts of the weights"] == 13.9


@pytest.mark.parametrize(("ranks", "copies"), [(1, 130.9), (4, 130.9), (6, 129.9)])
def test_pinned_copies_are_rounded_to_powers_of_two(large: Path, ranks: int, copies: float) -> None:
    """As torch does for each tensor of each rank; without a GPU nothing is pinned."""
    gpus = {f"gpu{index}": 192 for index in range(ranks + 1)}
    places = check_memory(config(large, trainer__ranks=ranks), 1, host(900, **gpus))
    assert parts(places, "this machine")["checkpoint copies"] == copies


def test_a_gpu_has_the_trainer_and_others_the_replicas(large: Path) -> None:
    machine = host(400, gpu0=192, gpu1=80, gpu2=80)
    places = check_memory(config(large, rollout__replicas=3), 1, machine)
    assert parts(places, "GPU 0") == {
        "parameters": 32.8, "gradients": 32.8, "Adam's moments": 65.5, "activations": 10.8,
        "head and logits": 7.5,
    }  # fmt: skip
    assert parts(places, "GPU 1") == {"2 replicas' weights": 32.8}
    assert parts(places, "GPU 2") == {"a replica's weights": 16.4}
    assert parts(places, "this machine") == {
        "checkpoint copies": 130.9, "a version for its digest": 16.4, "3 weight slots": 49.1,
    }  # fmt: skip
    said = refused(config(large), host(400, gpu0=80, gpu1=80))
    assert "149.3 of 80.0 GB of GPU 0 (parameters 32.8" in said and "smaller model" in said


def test_ranks_share_the_state_and_have_a_pass_each(large: Path) -> None:
    machine = host(400, **{f"gpu{index}": 80 for index in range(8)})
    asked = config(large, trainer__ranks=4, rollout__replicas=4, algorithm__use_kl_loss=True)
    places = check_memory(asked, 1, machine)
    assert len({tuple(parts(places, f"GPU {index}").items()) for index in range(4)}) == 1
    found = parts(places, "GPU 3")
    assert (found["parameters"], found["Adam's moments"]) == (8.2, 16.4)
    assert (found["reference model"], found["activations"]) == (8.2, 10.8)
    assert parts(places, "GPU 4") == {"a replica's weights": 16.4}
    on_cpu = check_memory(config(large, trainer__ranks=2, **SMALL_PASS), 1, host(1000))
    alone = check_memory(config(large, **SMALL_PASS), 1, host(1000))
    both, one = (parts(places, "this machine") for places in (on_cpu, alone))
    assert both["parameters"] == one["parameters"]
    assert both["activations"] == pytest.approx(2 * one["activations"], rel=0.01)


def test_offload_moves_the_state_into_memory_which_may_be_too_small(large: Path) -> None:
    asked = config(large, trainer__offload="all", algorithm__use_kl_loss=True)
    machine = host(400, gpu0=80, gpu1=80)
    places = check_memory(asked, 1, machine)
    assert parts(places, "GPU 0") == {
        "gathered layers": 12.3, "activations": 10.8, "head and logits": 7.5,
    }  # fmt: skip
    found = parts(places, "this machine")
    assert (found["parameters, offloaded"], found["Adam's moments, offloaded"]) == (32.8, 65.5)
    assert found["reference model, offloaded"] == 32.8
    said = refused(asked, host(250, gpu0=80, gpu1=80))
    assert " of 250.0 GB of this machine (parameters, offloaded 32.8, gradients, off" in said
    assert said.endswith("; set trainer.save_freq = 0, or take a smaller model")


def test_the_table_has_a_column_for_each_place(large: Path) -> None:
    """What is alike is one column; a column's sizes add up to what it takes."""
    machine = host(400, gpu0=192, gpu1=80, gpu2=80)
    lines = memory_lines(check_memory(config(large), 1, machine))
    words = [line.split("  ") for line in lines]
    assert [word.strip() for word in words[0] if word] == [
        "memory, 10^9 bytes", "GPU 0", "GPU 1,2", "this machine", "/dev/shm",
    ]  # fmt: skip
    assert "  Adam's moments             65.5" in lines
    assert lines[-3].split() == ["all", "149.3", "16.4", "196.4", "49.1"]
    assert lines[-2].split() == ["there", "is", "192.0", "80.0", "400.0", "400.0"]
    assert "come on top" in lines[-1]


@pytest.mark.parametrize(
    ("settings", "machine", "fix"),
    [
        ({}, {"gpu0": 145, "gpu1": 80}, "trainer.micro_batch_tokens = 8192"),
        ({}, {f"gpu{index}": 80 for index in range(8)}, "trainer.ranks = 4"),
        ({"rollout__device": "cpu", "rollout__replicas": 1}, {"gpu0": 80}, "trainer.offload = all"),
        (
            {"trainer__activation_checkpointing": "off"},
            {"gpu0": 192, "gpu1": 80},
            "trainer.activation_checkpointing = on",
        ),
        (
            {"rollout__engine": "vllm", "rollout__replicas": 1},
            {"gpu0": 192},
            "rollout.vllm.gpu_memory_utilization = 0.2",
        ),
    ],
)
def test_the_mildest_fix_for_a_gpu(
    settings: dict[str, Any], machine: dict[str, int], fix: str, large: Path
) -> None:
    said = refused(config(large, **settings), host(400, **machine))
    assert said.endswith(f"; set {fix}, or take a smaller model")
    key, value = fix.split(" = ")
    fixed = config(large, **settings | {key.replace(".", "__"): type_of(value)})
    assert check_memory(fixed, 1, host(400, **machine))


def type_of(value: str) -> Any:
    return value if value.isalpha() else json.loads(value)


def test_vllm_takes_its_share_of_a_gpu_or_what_its_cache_is_given(large: Path) -> None:
    """On the trainer's GPU where there is no other; on a CPU it has a cache of its own size."""
    vllm = {"rollout__engine": "vllm", "rollout__replicas": 1}
    said = refused(config(large, **vllm), host(400, gpu0=192))
    assert "312.5 of 192.0 GB of GPU 0" in said and "a vLLM replica 163.2" in said
    given = config(large, rollout__vllm__kv_cache_bytes=2 * GB, **vllm)
    found = parts(check_memory(given, 1, host(400, gpu0=192)), "GPU 0")
    assert found["a vLLM replica"] == 18.4
    on_cpu = check_memory(config(large, **vllm, **SMALL_PASS), 1, host(1000))
    assert parts(on_cpu, "this machine")["a vLLM replica"] == 33.8


def test_the_fix_is_named_where_settings_are_enough(large: Path) -> None:
    """No more of them than it takes, and none that changes nothing where it is too much."""
    settings = {"weights__slots": 5, "rollout__replicas": 4}
    said = refused(config(large, **settings), host(250))
    assert said.endswith(
        "; set trainer.micro_batch_tokens = 1024, rollout.replicas = 1, weights.dtype = bfloat16, "
        "trainer.save_freq = 0, or take a smaller model"
    )
    said = refused(config(large, **settings, **SMALL_PASS), host(550))
    assert said.endswith("; set weights.slots = 3, or take a smaller model")
    said = refused(config(large, **SMALL_PASS), MachineMemory(1000 * GB, 64 * GB, {}))
    assert said.endswith("; set weights.dtype = bfloat16, or take a smaller model")
    said = refused(config(large), host(150))
    assert said.endswith(
        "; no setting makes it fit: take a smaller model, or a machine with more memory"
    )
    least = {"weights__dtype": "bfloat16", "rollout__replicas": 1, "trainer__save_freq": 0}
    assert check_memory(config(large, **least, **SMALL_PASS), 1, host(250))


def test_slots_are_in_shared_memory(large: Path) -> None:
    machine = MachineMemory(1000 * GB, 64 * 10**6, {})
    assert "98.3 of 0.064 GB of /dev/shm (3 weight slots 98.3)" in refused(config(large), machine)
    said = refused(config(large, weights__max_bytes=50 * GB), host(1000))
    assert "weights.max_bytes = 50000000000 (50.0 GB) has no room for 3 versions of 32.8 GB" in said
    machine = MachineMemory(90 * GB, 90 * GB, {"0": 192 * GB, "1": 80 * GB})
    said = refused(config(large, trainer__save_freq=0), machine)
    assert (
        "weights.max_bytes = 0 (45.0 GB, half of the memory that this job may take) has no room"
        in said
    )


def test_several_machines_played_on_one(large: Path) -> None:
    places = check_memory(config(large, run__nodes=2, **SMALL_PASS), 2, host(1000))
    found = parts(places, "this machine")
    assert found["4 replicas' weights"] == 131.0
    assert found["3 weight slots on each of 2 machines"] == 196.6


def test_the_limit_of_a_control_group(tmp_path: Path) -> None:
    """Of version 2 the smallest one on the way up counts; "max" is none; version 1 has a hierarchy
    of its own."""
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    total = memory_limit(root, own)
    own.write_text("4:memory:/job\n0::/a/b\n")
    for path, text in (
        ("a/b/memory.max", "max"),
        ("a/memory.max", f"{total // 2}"),
        ("memory/job/memory.limit_in_bytes", "9223372036854771712"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    assert memory_limit(root, own) == total // 2
    (root / "memory/job/memory.limit_in_bytes").write_text(f"{total // 4}\n")
    assert memory_limit(root, own) == total // 4
