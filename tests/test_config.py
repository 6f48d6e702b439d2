"""The config tree: what is refused and how, and that the reference file tells the truth."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.config import Config, ConfigError, dump_config, known_keys, load_config, resolve_config
from laminar.config.foreign_keys import FOREIGN, UNSUPPORTED
from laminar.config.rules import slurm_seconds
from laminar.events.base import Settings
from tools.make import reference_toml

ROOT = Path(__file__).parents[1]
GOOD = ["model.name=m", "data.dataset=spell_backward"]
PPO = {"algorithm.adv_estimator": "gae"}
EMULATED = ["rollout.engine=emulated"]


def flatten(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    keys = known_keys()
    flat: dict[str, object] = {}
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and key not in keys:
            flat |= flatten(value, key + ".")
        else:
            flat[key] = value
    return flat


def test_the_reference_file_is_made_from_the_declarations() -> None:
    """What is on disk is what the program prints: each key with its default and its text."""
    text = (ROOT / "configs" / "reference.toml").read_text()
    assert text == reference_toml.text(), "make it: python -m tools.make.reference_toml"
    given = flatten(tomllib.loads(text))
    assert sorted(given) == sorted(known_keys())
    assert msgspec.json.encode(given, order="sorted") == msgspec.json.encode(
        flatten(msgspec.to_builtins(Config())), order="sorted"
    )
    assert not [key for key, declared in known_keys().items() if not declared.help]
    assert max(map(len, text.splitlines())) <= 100


OF_RUNS = [
    file
    for file in sorted((ROOT / "configs").glob("*.toml"))
    if file.name != "reference.toml" and not file.name.startswith("sim_")
]


def test_a_wheel_has_every_file_of_the_configs() -> None:
    """What a config names beside it is of no use where only the config is."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    shipped = {f for p in declared["package-data"]["laminar"] for f in (ROOT / "laminar").glob(p)}
    found = (ROOT / "laminar" / "configs").rglob("*")
    lacking = {f for f in found if f.is_file() and "__pycache__" not in f.parts} - shipped
    assert not lacking


@pytest.mark.parametrize("file", OF_RUNS, ids=lambda p: p.name)
def test_every_shipped_config_is_accepted(file: Path) -> None:
    load_config([file])


def test_later_files_and_overrides_win_and_the_resolved_file_reads_back(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('seed = 1\nmodel.name = "org/m"\n[data]\ndataset = "gcd"\nval_size = 5\n')
    second.write_text("[data]\nval_size = 6\n")
    config = load_config([first, second], ["seed=3", "optim.betas=[0.8, 0.9]", "run.name=x"])
    assert (config.seed, config.data.val_size, config.optim.betas) == (3, 6, (0.8, 0.9))
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_config(config))
    assert load_config([resolved]) == config


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("data.train_files=[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data.train_files=[ a.jsonl , b c.jsonl ]", ["a.jsonl", "b c.jsonl"]),
        ("data.train_files=['a,b.jsonl',\"it's.jsonl\",c]", ["a,b.jsonl", "it's.jsonl", "c"]),
        (r"data.train_files=['it\'s.jsonl',c]", ["it's.jsonl", "c"]),
        ("data.train_files=['[a].jsonl',c]", ["[a].jsonl", "c"]),
        ("data.train_files=[hf://datasets/o/n/a.b,/b]", ["hf://datasets/o/n/a.b", "/b"]),
        ("data.train_files=a.jsonl", ["a.jsonl"]),
        ("trainer.logger=[]", []),
        ("trainer.logger=[ ]", []),
        ("trainer.logger=[wandb]", ["wandb"]),
        ("optim.betas=[0.8,0.9]", (0.8, 0.9)),
        ("data.dataset_config={min_word_len:3,words:[a,'b c'],deep:{x:true}}",
         {"min_word_len": 3, "words": ["a", "b c"], "deep": {"x": True}}),
        ("data.dataset_config={}", {}),
        ("data.system_prompt=[INST] answer", "[INST] answer"),
        ("data.system_prompt={x}", "{x}"),
    ],
)  # fmt: skip
def test_a_list_of_the_command_line_needs_no_quotes(setting: str, value: object) -> None:
    """As Hydra takes it; what is TOML is taken as TOML."""
    base = ["rollout.engine=emulated"]
    node: Any = load_config([], [*base, setting])
    for part in setting.partition("=")[0].split("."):
        node = getattr(node, part)
    assert node == value


def test_functions_of_the_command_line_are_a_list_of_tables() -> None:
    setting = "reward.functions=[{path:a.py,name:f},{name:math,weight:0.5}]"
    functions = load_config([], [*GOOD, setting]).reward.functions
    assert [(f.path, f.name, f.weight) for f in functions] == [
        ("a.py", "f", 1.0),
        ("", "math", 0.5),
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "data.train_files=[a.jsonl",
        "data.train_files=[a.jsonl,,b]",
        "data.train_files=[a.jsonl]b",
        "data.train_files=['a.jsonl]",
        "data.dataset_config={a}",
    ],
)
def test_a_list_that_is_none_is_one_sentence(setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(setting))) as refused:
        load_config([], [*GOOD, setting])
    assert "\n" not in str(refused.value)


FILES = """
model.name = "base"
data.train_files = ["rows.jsonl", "hf://datasets/o/n/x.parquet"]
data.val_files = ["sub/held.jsonl"]
reward.functions = [{ path = "reward.py" }, { name = "math" }]
algorithm.batch_strategy = "order.py:choose"
"""


def test_paths_of_a_file_are_looked_for_beside_it_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "my", tmp_path / "here"
    for directory in (beside / "sub", beside / "base", here / "base", here / "sub"):
        directory.mkdir(parents=True)
    for file in (beside / "rows.jsonl", beside / "reward.py", here / "rows.jsonl"):
        file.touch()
    for file in (here / "sub" / "held.jsonl", here / "order.py"):
        file.touch()
    (beside / "run.toml").write_text(FILES)
    monkeypatch.chdir(here)
    config = load_config(["../my/run.toml"])
    assert config.model.name == str(beside / "base")
    assert config.data.train_files == [str(beside / "rows.jsonl"), "hf://datasets/o/n/x.parquet"]
    assert config.data.val_files == [str(here / "sub" / "held.jsonl")]
    assert [f.path for f in config.reward.functions] == [str(beside / "reward.py"), ""]
    assert config.algorithm.batch_strategy == f"{here / 'order.py'}:choose"
    assert config.run.output_dir == "runs"


def test_each_file_has_its_own_place_and_the_command_line_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").touch()
        (tmp_path / name / "reward.py").touch()
    (tmp_path / "a" / "x.toml").write_text(
        'model.name = "org/name"\ndata.train_files = ["rows.jsonl"]\n'
        'reward.custom_reward_function.path = "reward.py"\n'
    )
    (tmp_path / "b" / "y.toml").write_text('data.train_files = ["rows.jsonl"]\n')
    (tmp_path / "reward.py").touch()
    monkeypatch.chdir(tmp_path)
    files = ["a/x.toml", "b/y.toml"]
    config = load_config(files)
    assert config.data.train_files == [str(tmp_path / "b" / "rows.jsonl")]
    assert config.reward.custom_reward_function.path == str(tmp_path / "a" / "reward.py")
    config = load_config(
        files, ["reward.custom_reward_function.path=reward.py", "data.train_files=c"]
    )
    assert config.reward.custom_reward_function.path == str(tmp_path / "reward.py")
    assert config.data.train_files == ["c"]


def test_a_path_that_leads_nowhere_is_named_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my").mkdir()
    file = tmp_path / "my" / "run.toml"
    file.write_text('model.name = "org/name"\ndata.train_files = ["rows.jsonl"]\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load_config([file])
    said = str(refused.value)
    assert (
        f"data.train_files = 'rows.jsonl' is neither in {tmp_path / 'my'} nor in {tmp_path}" in said
    )
    monkeypatch.chdir(tmp_path / "my")
    with pytest.raises(ConfigError, match=rf"is not in {tmp_path / 'my'};"):
        load_config(["run.toml"])
    assert load_config([file], ["data.train_files=[]", "data.dataset=gcd"]).data.train_files == []


def test_a_directory_goes_before_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model.name = "org/name"\ndata.dataset = "gcd"\n')
    monkeypatch.chdir("/")
    assert load_config([file]).model.name == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load_config([file]).model.name == str(tmp_path / "org" / "name")


def test_what_a_run_has_written_is_taken_as_it_stands(tmp_path: Path) -> None:
    """A run that was moved, or whose model is gone, can be read."""
    (tmp_path / "rows.jsonl").touch()
    file = tmp_path / "config.toml"
    file.write_text('model.name = "m"\ndata.train_files = ["rows.jsonl"]\n')
    config = load_config([], resolved=file)
    assert (config.model.name, config.data.train_files) == ("m", ["rows.jsonl"])


def test_the_async_section_keeps_its_name() -> None:
    assert load_config([], [*GOOD, "async.max_staleness=0"]).async_.max_staleness == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.datset=gcd"], ["data.datset", "data.dataset"]),
        (["trainer.seed=1"], ["trainer.seed", "seed"]),
        (["rollout.n=4"], ["rollout.n", "rollout.group_size"]),
        (["optim.learning_rate=1"], ["optim.lr"]),
        (["lora_rank=8"], ["here it is lora.rank"]),
        (["actor_rollout_ref.model.lora_alpha=8"], ["here it is lora.alpha"]),
        (["peft_config.target_modules=all-linear"], ["here it is lora.target_modules"]),
        (["use_dora=true"], ["use_dora is not supported: adapters have lora.rank"]),
        (["gradient_checkpointing=true"], ["trainer.activation_checkpointing", "on or off"]),
        (
            ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
            ["trainer.activation_checkpointing"],
        ),
        (
            ["algorithm.filter_groups.metric=seq_reward"],
            ["algorithm.filter_groups.metric", "seq_reward", "score", "acc"],
        ),
        (
            ["algorithm.filter_groups.max_num_gen_batches=-1"],
            ["algorithm.filter_groups.max_num_gen_batches", "-1"],
        ),
        (
            [
                *GOOD,
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.max_num_gen_batches=0",
                "trainer.total_training_steps=5",
            ],
            ["max_num_gen_batches = 0", "trainer.total_training_steps = 5", "give a number"],
        ),
        (["trainer.resume_mode=auto"], ["resume_mode is not supported", "train --resume RUN"]),
        (["beta=0.04"], ["algorithm.kl_loss_coef", "algorithm.use_kl_loss = true"]),
        (
            ["per_device_train_batch_size=8"],
            ["data.train_batch_size", "counts prompts", "rollout.group_size"],
        ),
        (
            ["trainer.n_gpus_per_node=8"],
            ["rollout.replicas", "rollout.vllm.tensor_parallel_size", "the trainer trainer.ranks"],
        ),
        (["trainer.nnodes=2"], ["here it is trainer.nodes", "slurm.rollouts machines"]),
        (["actor_num_nodes=2"], ["here it is trainer.nodes"]),
        (["rollout.nnodes=2"], ["here it is slurm.rollouts"]),
        (["rollout.update=drain"], ["was renamed to rollout.weight_update"]),
        (["env.effects=pure"], ['renamed to env.call_semantics, with "at-most-once" for "once"']),
        (["zzz.qqq=1"], ["configs/reference.toml has all keys"]),
        (["seed=abc"], ["seed", "'abc'", "whole number"]),
        (["data.shuffle=3"], ["data.shuffle", "true or false"]),
        (["data=3"], ["data", "section"]),
        (["nonsense"], ["nonsense", "key=value"]),
        (["rollout.replicas=0"], ["rollout.replicas", "at least 1"]),
        (["emulation.replicas_per_process=0"], ["emulation.replicas_per_process", "at least 1"]),
        (["emulation.step_us=0"], ["emulation.step_us", "at least 1"]),
        (["emulation.train_s=-1"], ["emulation.train_s", "at least 0"]),
        (["emulation.weights_mb=0.5"], ["emulation.weights_mb", "whole number"]),
        ([*EMULATED, "data.max_response_length=65537"], ["data.max_response_length", "65536"]),
        ([*EMULATED, "data.max_prompt_length=70000"], ["data.max_prompt_length", "65536"]),
        ([*EMULATED, "data.dataset_size=128"], ["data.val_size = 128", "lower it"]),
        (["algorithm.loss_agg_mode=mean"], ["'mean'", "'token-mean'"]),
        ([*GOOD, "rollout.top_p=0.9"], ["rollout.top_p", "0.9"]),
        ([*GOOD, "rollout.temperature=0"], ["rollout.temperature"]),
        (["reward.overlong_buffer.len=-1"], ["reward.overlong_buffer.len", "at least 0"]),
        (["reward.overlong_buffer.penalty_factor=-1"], ["penalty_factor", "at least 0"]),
        (["reward.overlong_buffer.penalty_factor=inf"], ["penalty_factor", "inf"]),
        (
            [*GOOD, "data.max_response_length=64", "reward.overlong_buffer.len=64"],
            ["reward.overlong_buffer.len = 64", "data.max_response_length = 64", "lower one"],
        ),
        (["reward_model.overlong_buffer.len=8"], ["here it is reward.overlong_buffer.len"]),
        ([*GOOD, "rollout.val_kwargs.n=4"], ["rollout.val_kwargs.n = 4", "val_kwargs.temperature"]),
        ([*GOOD, "rollout.max_num_seqs=4"], ["rollout.max_num_seqs", "rollout.group_size"]),
        ([*GOOD, "rollout.group_size=1"], ["rollout.group_size", "2 siblings"]),
        ([*GOOD, "rollout.replicas_on_trainer_node=0"], ["any replica", "slurm.rollouts"]),
        ([*EMULATED, "trainer.ranks=2"], ["trainer.ranks = 2", '"emulated"', "give 1"]),
        ([*EMULATED, "trainer.nodes=2"], ["trainer.nodes = 2", '"emulated"', "give 1"]),
        ([*GOOD, "trainer.ranks=0"], ["trainer.ranks = 0", "from 1 to 64"]),
        ([*GOOD, "trainer.ranks=9", "slurm.gpus=8"], ["trainer.ranks = 9", "slurm.gpus = 8"]),
        ([*GOOD, "slurm.spares=1"], ["slurm.spares = 1", "slurm.rollouts = 0"]),
        ([*GOOD, "slurm.trainer_spares=1"], ["slurm.trainer_spares = 1", "trainer.nodes = 1"]),
        ([*GOOD, "slurm.time=tomorrow"], ["slurm.time = 'tomorrow'", "hours:minutes:seconds"]),
        ([*GOOD, "slurm.time=0:05:00"], ["'0:05:00'", "slurm.signal_before_s = 300"]),
        ([*GOOD, "slurm.extra=[qos]"], ["slurm.extra", "'qos'", "--qos=long"]),
        ([*GOOD, "slurm.account=a b"], ["slurm.account = 'a b'", "character"]),
        ([*GOOD, "algorithm.ppo_mini_batch_size=5"], ["ppo_mini_batch_size", "divide"]),
        (
            [*GOOD, "data.train_batch_size=32769", "rollout.group_size=16"],
            ["data.train_batch_size", "rollout.group_size", "524304", "at most 524288"],
        ),
        (
            [*GOOD, "rollout.group_size=4097", "rollout.max_num_seqs=4097"],
            ["rollout.group_size", "from 1 to 4096"],
        ),
        (
            [*GOOD, "data.train_batch_size=30000", "algorithm.batch_strategy=mine.py:choose"],
            ["algorithm.batch_strategy", "90000 groups", "async.max_staleness"],
        ),
        (
            [*GOOD, f"data.dataset_config={{ words = '{'x' * (1 << 20)}' }}"],
            ["the configuration has", "1048576", "data.dataset_config"],
        ),
        ([*GOOD, "algorithm.min_scored=9"], ["algorithm.min_scored", "9"]),
        ([*GOOD, "rollout.max_model_len=10"], ["rollout.max_model_len"]),
        ([*GOOD, "coordinator.lease_ms=1000"], ["coordinator.lease_ms", "three times"]),
        ([*GOOD, "coordinator.node_lease_ms=4000"], ["coordinator.node_lease_ms", "5000"]),
        ([*GOOD, "store.payload_gb=-1"], ["store.payload_gb", "at least 0"]),
        (
            [*GOOD, "store.payload_gb=2", "trainer.save_freq=0"],
            ["store.payload_gb = 2", "trainer.save_freq = 0"],
        ),
        ([*GOOD, "coordinator.log_keep_mb=-1"], ["coordinator.log_keep_mb", "at least 0"]),
        ([*GOOD, "reward.max_error_share=50"], ["reward.max_error_share", "50", "from 0 to 1"]),
        ([*GOOD, "reward.kind=custom"], ["reward.custom_reward_function.path"]),
        ([*GOOD, "run.name=a/b"], ["run.name", "'a/b'", "run.output_dir"]),
        *(
            ([*GOOD, f"run.name={name}"], ["run.name", "directory name"])
            for name in ("", ".", "..", "-x", "/", " ", "a\nb", "x" * 256)
        ),
        ([*GOOD, "run.output_dir=~/runs"], ["run.output_dir", "'~/runs'"]),
        ([*GOOD, "run.nodes=255"], ["run.nodes", "from 1 to 254"]),
        ([*GOOD, "trainer.logger=mlflow"], ["trainer.logger", "'mlflow'", "tensorboard"]),
        (
            [*GOOD, "trainer.logger=['tensorboard', 'console']"],
            ["trainer.logger", "'console'", "tensorboard"],
        ),
        ([*GOOD, "optim.lr=nan"], ["optim.lr", "finite"]),
        ([*GOOD, "reward.timeout_s=inf"], ["reward.timeout_s", "finite"]),
        ([*GOOD, "optim.betas=[0.9, nan]"], ["optim.betas", "finite"]),
        ([*GOOD, "optim.betas=[0.9, 1.0]"], ["optim.betas", "below 1"]),
        ([*GOOD, "optim.betas=[0.9]"], ["optim.betas", "list of 2 numbers"]),
        ([*GOOD, "optim.eps=-1.0"], ["optim.eps", "at least 0"]),
        ([*GOOD, f"seed={1 << 63}"], ["seed", "9223372036854775807"]),
        ([*GOOD, "coordinator.port=70000"], ["coordinator.port", "from 0 to 65535"]),
        ([*GOOD, "coordinator.start_timeout_s=-5"], ["coordinator.start_timeout_s"]),
        (["repack.policy=true"], ["repack.policy = 'true'", "'best-fit', 'gain' or 'off'"]),
        (["repack.interval_ms=-1"], ["repack.interval_ms = -1", "at least 1"]),
        (["repack.interval_ms=1.5"], ["repack.interval_ms = 1.5", "must be a whole number"]),
        (["repack.release_timeout_ms=0"], ["repack.release_timeout_ms = 0", "at least 1"]),
        (
            ["repack.release_timeout_ms=soon"],
            ["repack.release_timeout_ms = 'soon'", "must be a whole number"],
        ),
        (["repack.prefill_tokens_per_step=0"], ["repack.prefill_tokens_per_step", "at least 1"]),
        (["rollout.max_batch=-1"], ["rollout.max_batch = -1", "at least 1 or 'auto'"]),
        (["rollout.max_batch=many"], ["'many'", "must be a whole number of at least 1 or 'auto'"]),
        (["rollout.max_batch=true"], ["True", "must be a whole number of at least 1 or 'auto'"]),
        (["rollout.decode_budget_ms=-20"], ["-20", "at least 1 or 'none'"]),
        (
            ["rollout.decode_budget_ms=2.5"],
            ["2.5", "must be a whole number of at least 1 or 'none'"],
        ),
        (["model.name=m"], ["data.dataset", "data.train_files"]),
        ([*GOOD, "data.train_files=x.jsonl"], ["exactly one"]),
        (["data.dataset=gcd"], ["model.name"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_key_and_value(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_config([tmp_path / "nowhere.toml"])
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load_config([tmp_path])
    with pytest.raises(ConfigError, match=r"/dev/null/x\.toml.*Not a directory"):
        load_config(["/dev/null/x.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config([broken])
    switched = tmp_path / "switched.toml"
    switched.write_text("[repack]\npolicy = false\n")
    with pytest.raises(ConfigError, match=r"policy = False .*'best-fit', 'gain' or 'off'$"):
        load_config([switched])
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("[rollout]\nreplica = 3\n")
    with pytest.raises(ConfigError, match=r"unknown\.toml.*rollout\.replicas"):
        load_config([unknown])


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_key_of_another_system_is_answered_with_ours(foreign: str) -> None:
    """By the table, whose answers exist and whose questions are no keys of ours."""
    assert foreign not in known_keys()
    for key in (foreign, foreign.replace("_", "-")):
        with pytest.raises(ConfigError, match=r"^unknown key \S+; here it is ") as refused:
            load_config([], [f"{key}=8"])
        ours = str(refused.value).split("; ")[1].removeprefix("here it is ")
        assert ours in known_keys()


@pytest.mark.parametrize("part", UNSUPPORTED)
def test_a_feature_that_is_missing_is_called_not_supported(part: str) -> None:
    for key in (part, f"actor_rollout_ref.actor.{part}", f"{part.replace('_', '-')}.enable"):
        with pytest.raises(ConfigError, match=rf"; {part} is not supported(: .+)?$") as refused:
            load_config([], [f"{key}=8"])
        for word in re.findall(r"\b[a-z]+\.[a-z_.]+\b", str(refused.value).partition(": ")[2]):
            assert word in known_keys(), "what is to be used instead exists"


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("rollout.num_generations", "rollout.group_size"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
        ("actor_rollout_ref.actor.strategy.adv_estimator", "algorithm.adv_estimator"),
        ("slime.tis_clip", "algorithm.rollout_correction.rollout_is_threshold"),
        ("grpo.environment-factory", "env.path"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "env.max_turns"),
        ("multi_turn.tokenization_sanity_check_mode", "env.path"),
        ("custom_reward_function.reward_kwargs.bonus", "reward.custom_reward_function.path"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "trainer.offload"),
        ("slime.actor-num-gpus-per-node", "trainer.ranks"),
    ],
)
def test_keys_that_users_of_other_systems_type_first(foreign: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf" {re.escape(ours)}(;|$)"):
        load_config([], [f"{foreign}=8"])


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("24:00:00", 86_400), ("2-12", 216_000), ("1-0:0:9", 86_409)],
)
def test_a_time_of_slurm_is_understood(time: str, seconds: int) -> None:
    assert slurm_seconds(time) == seconds


def test_the_machine_of_the_trainer_may_have_other_replicas() -> None:
    config = load_config([], [*GOOD, "run.nodes=3", "rollout.replicas=4"])
    assert (config.replicas_on(0), config.replicas_on(2), config.total_replicas) == (4, 4, 12)
    config = load_config([], [*GOOD, "run.nodes=3", "rollout.replicas_on_trainer_node=0"])
    assert (config.replicas_on(0), config.replicas_on(2), config.total_replicas) == (0, 2, 4)


def test_defaults_count_where_nothing_else_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("rollout.replicas = 3\n")
    defaults = {"rollout.replicas": 7, "rollout.group_size": 4, "seed": 5}
    config = load_config([file], [*GOOD, "seed=6"], defaults=defaults)
    assert (config.rollout.replicas, config.rollout.group_size, config.seed) == (3, 4, 6)


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        (
            {"algorithm.policy_loss.loss_mode": "gsop"},
            "loss_mode = 'gsop' is neither one of vanilla, gspo",
        ),
        ({"algorithm.adv_estimator": "gae2"}, "adv_estimator = 'gae2' is neither one of grpo"),
        ({"rollout.group_size": 1}, 'at least 2 siblings, and algorithm.adv_estimator = "gae" one'),
        (
            {"trainer.critic_warmup": 3},
            "trainer.critic_warmup is for a critic, and algorithm.adv_estimator = 'grpo' has none",
        ),
        ({"critic.model.name": "x"}, "critic.model.name is for a critic"),
        ({"algorithm.lam": 0.9}, "algorithm.lam is for a critic"),
        ({"algorithm.gamma": 0.9}, "algorithm.gamma is for a critic"),
        ({**PPO, "trainer.critic_warmup": -1}, "trainer.critic_warmup = -1"),
        (
            {**PPO, "trainer.critic_warmup": 9, "trainer.total_training_steps": 9},
            "trainer.critic_warmup = 9 leaves no step of trainer.total_training_steps = 9",
        ),
        ({**PPO, "algorithm.lam": 1.01}, "algorithm.lam = 1.01"),
        ({**PPO, "algorithm.lam": "adaptiv"}, "algorithm.lam = 'adaptiv'"),
        ({**PPO, "algorithm.gamma": -0.1}, "algorithm.gamma = -0.1"),
        ({**PPO, "critic.lam": 2}, "critic.lam = 2"),
        ({**PPO, "critic.cliprange_value": 0}, "critic.cliprange_value = 0"),
        ({**PPO, "critic.lr": -1}, "critic.lr = -1"),
        (
            {"algorithm.policy_loss.options": {"tau": 1.0}},
            "has 'tau', but loss_mode = 'vanilla' takes none; remove it",
        ),
        ({"algorithm.policy_loss.loss_mode": "dro"}, "= 'dro' needs dro_beta: give algorithm"),
        (
            {
                "algorithm.policy_loss.loss_mode": "dro",
                "algorithm.policy_loss.options": {"dro_beta": 0},
            },
            "dro_beta = 0: give a number above 0",
        ),
    ],
)
def test_names_and_options_of_an_algorithm(flat: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_config({"model.name": "m", "data.dataset": "d"} | flat)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (['rollout.weight_update="in-fligt"'], "rollout.weight_update"),
        (['repack.policy="gain"'], 'set repack.policy = "off"'),
        (["rollout.groups_per_version=4"], "give rollout.groups_per_version = 0"),
        (['rollout.kv_on_update="drop"'], "rollout.kv_on_update"),
    ],
)
def test_weights_in_flight_beside_what_makes_no_sense(settings: list[str], words: str) -> None:
    flying = ['rollout.engine="emulated"', 'rollout.weight_update="in-flight"']
    assert load_config([], flying).rollout.in_flight
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config([], [*flying, *settings])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["env.path="], "env.path is empty"),
        (["env.tool_timeout_s=120"], "120 must be shorter than env.turn_timeout_s = 120"),
        (["env.turn_timeout_s=301"], "301 must be shorter than env.trajectory_timeout_s = 300"),
        (
            ["trainer.batch_timeout_s=9"],
            "env.trajectory_timeout_s = 300 must be shorter than trainer.b",
        ),
        (["agents.max_sessions=3"], "agents.max_sessions = 3 on 1 hosts is less than rollout.grou"),
        (["agents.hosts=2"], "agents.hosts = 2 is more than run.nodes = 1"),
        (["data.apply_chat_template=false"], "data.apply_chat_template = false"),
        (['reward.scope="group"'], "siblings end their turns one by one"),
        (['rollout.engine="emulated"'], "emulated tokens call no tool"),
        (['env.call_semantics="twice"'], "env.call_semantics"),
    ],
)
def test_an_environment_beside_what_makes_no_sense(settings: list[str], words: str) -> None:
    given = [*GOOD, "env.path=tools.py", "env.max_turns=4"]
    assert load_config([], given).env.path.endswith("tools.py")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config([], [*given, *settings])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["env.path=tools.py"], "both name what has the turns"),
        (["agents.run=solve"], "agents.run = 'solve' is not of the form path.py:function"),
        (["data.system_prompt=Be."], "data.system_prompt has no effect with agents.run"),
        (["env.turn_timeout_s=301"], "301 must be shorter than env.trajectory_timeout_s = 300"),
        (['rollout.engine="emulated"'], "emulated tokens call no tool"),
    ],
)
def test_an_agent_beside_what_makes_no_sense(settings: list[str], words: str) -> None:
    given = [*GOOD, "agents.run=mine.py:solve"]
    made = Settings.from_config(load_config([], given), ())
    assert made.has_environment and made.turn_timeout_ms == 120_000
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config([], [*given, *settings])


def test_with_a_critic_a_group_may_be_of_one() -> None:
    alone = [*GOOD, "algorithm.adv_estimator=gae", "rollout.group_size=1"]
    config = load_config([], [*alone, "algorithm.lam=adaptive"])
    assert (config.min_scored, config.algorithm.lam) == (1, "adaptive")
    assert (config.critic_name, config.has_critic) == (config.model.name, True)
    assert load_config([], [*alone, "algorithm.lam=1"]).algorithm.lam == 1.0
    assert load_config([], [*GOOD, "algorithm.adv_estimator=gae"]).min_scored == 4


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ([], "gain"),
        (["rollout.replicas=1"], "off"),
        (["rollout.replicas=1", "run.nodes=2"], "gain"),
        (["rollout.weight_update=in-flight"], "off"),
        (["repack.policy=off"], "off"),
        (["repack.policy=best-fit", "rollout.replicas=1"], "best-fit"),
    ],
)
def test_replicas_that_have_others_repack(settings: list[str], policy: str) -> None:
    config = load_config([], [*GOOD, *settings])
    assert config.repack.policy == policy and f'policy = "{policy}"' in dump_config(config)
