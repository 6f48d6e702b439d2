"""The config tree: every setting of a run, its default, its check, and how files combine.

Reads   TOML files (left to right, the later wins) and `a.b=c` overrides
Gives   Config, a tree of frozen structs; ConfigError names the key, the value and the fix

An unknown key is an error that names the nearest key; a key of another system is answered with
ours. Nothing here touches torch or the network, so `--dry-run` and the coordinator stay light.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import tomli_w


class ConfigError(ValueError):
    """A mistake of the user: one sentence that names the key, the value and the fix."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keyword-only, strict."""


class RunConfig(Section, frozen=True, kw_only=True):
    name: str = "run"  #: directory below output_dir
    output_dir: str = "runs"  #: run directories are made here
    nodes: int = 1  #: machines that `laminar train` plays on this one, 127.0.0.1, 127.0.0.2, ...


class ModelConfig(Section, frozen=True, kw_only=True):
    name: str = ""  #: a Hugging Face model directory; also the KL reference of step 0


class DataConfig(Section, frozen=True, kw_only=True):
    dataset: str = ""  #: a reasoning-gym dataset by name (exclusive with train_files)
    dataset_config: dict[str, Any] = {}  #: the dataset's own settings
    dataset_size: int = 20_000  #: items generated from the reasoning-gym dataset
    dataset_seed: int = 42  #: of the items of the reasoning-gym dataset
    train_files: list[str] = []  #: .jsonl or .parquet
    val_files: list[str] = []  #: empty: val_size rows are held out of the training data
    val_size: int = 128  #: held-out prompts; 0 switches evaluation off
    prompt_key: str = "prompt"  #: column with a string or a list of chat messages
    answer_key: str = ""  #: empty: answer, label, ground_truth or reward_model.ground_truth
    system_prompt: str = ""  #: put in front of every prompt by the chat template
    apply_chat_template: bool = True  #: false: a prompt string is tokenised as it stands
    apply_chat_template_kwargs: dict[str, Any] = {}  #: e.g. { enable_thinking = false }
    max_prompt_length: int = 512  #: tokens
    max_response_length: int = 512  #: tokens
    filter_overlong_prompts: bool = False  #: false: an overlong prompt is an error at start
    train_batch_size: int = 16  #: prompts (groups) per step
    drop_last: bool = False  #: false: what is left when the data ends is one short batch
    shuffle: bool = True  #: a new order in every pass over the data


class RolloutConfig(Section, frozen=True, kw_only=True):
    engine: str = "torch"  #: the embedded engine: Qwen2, Qwen3 and Llama checkpoints
    replicas: int = 2  #: engines of each machine; each is a process
    group_size: int = 8  #: responses to one prompt
    max_num_seqs: int = 64  #: trajectories that one replica runs at a time
    max_model_len: int = 0  #: 0: max_prompt_length + max_response_length
    groups_per_version: int = 0  #: 0: max_num_seqs / group_size
    temperature: float = 1.0  #: of training responses; evaluation is greedy
    top_p: float = 1.0  #: only 1: the trainer could not mirror a filter
    top_k: int = 0  #: only 0, likewise
    min_p: float = 0.0  #: only 0, likewise
    repetition_penalty: float = 1.0  #: only 1, likewise
    progress_interval_ms: int = 500  #: between two reports; tokens are durable in this rhythm
    device: str = "auto"  #: auto | cpu | cuda
    dtype: str = "auto"  #: auto: weights.dtype
    threads: int = 1  #: torch threads of one replica on CPU


class AsyncConfig(Section, frozen=True, kw_only=True):
    max_staleness: int = 2  #: completed steps; 0 is on-policy


class RewardFunctionConfig(Section, frozen=True, kw_only=True):
    path: str = ""  #: a Python file; empty: the dataset's own scorer or math-verify
    name: str = ""  #: empty: compute_score, else the file's only public function


class RewardConfig(Section, frozen=True, kw_only=True):
    custom_reward_function: RewardFunctionConfig = RewardFunctionConfig()
    kind: str = "auto"  #: auto | dataset | math | exact | custom
    scope: str = "auto"  #: auto | trajectory | group
    workers: int = 1  #: worker processes per replica
    timeout_s: float = 30.0  #: of one call of the reward function
    error_score: float = 0.0  #: for a response on which the function raises or times out
    max_retries: int = 2  #: after a worker process died by itself


class RolloutCorrectionConfig(Section, frozen=True, kw_only=True):
    bypass_mode: bool = False  #: true: ratio to the behaviour policy, no second weight
    rollout_is: str = "token"  #: token | none
    rollout_is_threshold: float = 2.0  #: cap of the importance weight


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    adv_estimator: str = "grpo"  #: grpo | rloo
    norm_adv_by_std_in_grpo: bool = True  #: false: Dr.GRPO
    clip_ratio_low: float = 0.2  #: PPO clip below 1; acts only with several mini-batches
    clip_ratio_high: float = 0.28  #: PPO clip above 1, likewise (clip-higher)
    clip_ratio_c: float = 3.0  #: dual clip for negative advantages
    loss_agg_mode: str = "token-mean"  #: verl's names; see docs/training.md
    ppo_mini_batch_size: int = 0  #: prompts; 0: train_batch_size
    use_kl_loss: bool = False  #: penalty towards model.name
    kl_loss_coef: float = 0.001  #: weight of the KL penalty
    kl_loss_type: str = "low_var_kl"  #: low_var_kl (k3) | k2
    entropy_coeff: float = 0.0  #: weight of the entropy bonus
    truncated: str = "train"  #: train | mask
    min_scored: int = 0  #: 0: max(2, ceil(group_size / 2))
    batch_strategy: str = "deadline"  #: deadline | priority | a function as path.py:name
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


class OptimConfig(Section, frozen=True, kw_only=True):
    lr: float = 1e-6  #: of AdamW with float32 parameters and state
    weight_decay: float = 0.01  #: decoupled
    betas: tuple[float, float] = (0.9, 0.999)  #: of AdamW
    eps: float = 1e-8  #: of AdamW
    clip_grad: float = 1.0  #: largest gradient norm; 0: no clipping
    lr_scheduler_type: str = "constant"  #: constant | linear | cosine
    lr_warmup_steps: int = 0  #: training steps of linear warm-up


class TrainerConfig(Section, frozen=True, kw_only=True):
    total_training_steps: int = 0  #: 0: total_epochs passes over the data
    total_epochs: int = 1  #: passes over the data when total_training_steps is 0
    test_freq: int = 0  #: evaluate every so many steps; 0: only first and last
    save_freq: int = 0  #: write a checkpoint every so many steps; 0: none
    max_ckpt_to_keep: int = 0  #: the newest so many checkpoints; 0: all
    val_before_train: bool = True  #: evaluate version 0
    micro_batch_tokens: int = 16_384  #: padded tokens of one forward/backward
    batch_wait_s: float = 600.0  #: an idle trainer acts on the group that it waits for
    #: besides metrics.jsonl, which is always written
    logger: list[str] = msgspec.field(default_factory=lambda: ["tensorboard"])
    device: str = "auto"  #: auto | cpu | cuda
    dtype: str = "auto"  #: compute type: float32 on CPU, bfloat16 autocast on GPU
    threads: int = 1  #: torch threads on CPU


class WeightsConfig(Section, frozen=True, kw_only=True):
    dtype: str = "auto"  #: published type: float32 on CPU, bfloat16 on GPU
    slots: int = 3  #: versions that the relay has room for
    max_bytes: int = 0  #: limit of the relay's shared memory; 0: half of the machine's memory
    delta: bool = True  #: relays send what changed, where that is less than a whole version
    rate_mbit: int = 0  #: of one relay to the next, in Mbit/s at most; 0: no limit
    probe_tolerance: float = 0.0  #: 0: 1e-3 for float32, 0.25 for bfloat16


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  #: loopback only, until connections are authenticated
    port: int = 0  #: 0: any free port, written to the run directory
    heartbeat_ms: int = 1_000  #: of every process
    lease_ms: int = 5_000  #: silence after which a process counts as lost
    coordinator_absent_ms: int = 600_000  #: a process without a coordinator ends after this
    start_timeout_s: float = 300.0  #: until every actor has joined
    log_keep_mb: int = 0  #: of the event log; 0: all, as report and audit need it


class RecoveryConfig(Section, frozen=True, kw_only=True):
    resume_wait_ms: int = 10_000  #: lost work waits so long for its version, then starts over
    max_restarts: int = 3  #: of one actor, by its node
    coordinator_restart_ms: int = 1_000  #: pause before a coordinator that died is started again


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree. `async` is a Python keyword: key `async`, attribute `async_`."""

    seed: int = 0  #: of every random choice: prompts, sampling, batches
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    async_: AsyncConfig = msgspec.field(default=AsyncConfig(), name="async")
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @property
    def run_dir(self) -> Path:
        return Path(self.run.output_dir) / self.run.name

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together that an engine must hold."""
        return self.rollout.max_model_len or (
            self.data.max_prompt_length + self.data.max_response_length
        )

    @property
    def groups_per_version(self) -> int:
        return self.rollout.groups_per_version or (
            self.rollout.max_num_seqs // self.rollout.group_size
        )

    @property
    def min_scored(self) -> int:
        """Rewarded siblings below which a group is dropped ."""
        return self.algorithm.min_scored or max(2, -(-self.rollout.group_size // 2))

    @property
    def mini_batch_groups(self) -> int:
        return self.algorithm.ppo_mini_batch_size or self.data.train_batch_size


#: Keys that users of verl, TRL, slime and prime-rl type; the error names ours.
FOREIGN_KEYS = {
    "trainer.seed": "seed",
    "model.path": "model.name",
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "rollout.n": "rollout.group_size",
    "data.batch_size": "data.train_batch_size",
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "optim.learning_rate": "optim.lr",
    "learning_rate": "optim.lr",
    "max_steps": "trainer.total_training_steps",
    "num_generations": "rollout.group_size",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "async.staleness_threshold": "async.max_staleness",
    "max_staleness": "async.max_staleness",
    "trainer.output_dir": "run.output_dir",
}

CHOICES: dict[str, tuple[str, ...]] = {
    "rollout.engine": ("torch",),
    "rollout.device": ("auto", "cpu", "cuda"),
    "rollout.dtype": ("auto", "float32", "bfloat16"),
    "reward.kind": ("auto", "dataset", "math", "exact", "custom"),
    "reward.scope": ("auto", "trajectory", "group"),
    "algorithm.adv_estimator": ("grpo", "rloo"),
    "algorithm.loss_agg_mode": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "algorithm.kl_loss_type": ("low_var_kl", "k2"),
    "algorithm.truncated": ("train", "mask"),
    "algorithm.rollout_correction.rollout_is": ("token", "none"),
    "optim.lr_scheduler_type": ("constant", "linear", "cosine"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.dtype": ("auto", "float32", "bfloat16"),
    "weights.dtype": ("auto", "float32", "bfloat16"),
}

#: Smallest legal value of the numbers that have one.
MINIMA: dict[str, float] = {
    "seed": 0,
    "run.nodes": 1,
    "data.dataset_size": 1,
    "data.val_size": 0,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.train_batch_size": 1,
    "rollout.replicas": 1,
    "rollout.group_size": 1,
    "rollout.max_num_seqs": 1,
    "rollout.groups_per_version": 0,
    "rollout.progress_interval_ms": 10,
    "rollout.threads": 1,
    "async.max_staleness": 0,
    "reward.workers": 1,
    "reward.timeout_s": 0.01,
    "reward.max_retries": 0,
    "algorithm.ppo_mini_batch_size": 0,
    "algorithm.clip_ratio_low": 0,
    "algorithm.clip_ratio_high": 0,
    "algorithm.clip_ratio_c": 1,
    "optim.lr": 0,
    "optim.weight_decay": 0,
    "optim.clip_grad": 0,
    "optim.lr_warmup_steps": 0,
    "trainer.total_training_steps": 0,
    "trainer.total_epochs": 1,
    "trainer.test_freq": 0,
    "trainer.save_freq": 0,
    "trainer.max_ckpt_to_keep": 0,
    "trainer.micro_batch_tokens": 1,
    "trainer.batch_wait_s": 0.1,
    "trainer.threads": 1,
    "weights.slots": 3,
    "weights.max_bytes": 0,
    "weights.rate_mbit": 0,
    "coordinator.port": 0,
    "coordinator.heartbeat_ms": 50,
    "coordinator.lease_ms": 150,
    "coordinator.log_keep_mb": 0,
    "recovery.resume_wait_ms": 0,
    "recovery.max_restarts": 0,
    "recovery.coordinator_restart_ms": 0,
}


def known_keys() -> dict[str, Any]:
    """Every dotted key with its annotated type, in the order of the tree."""
    found: dict[str, Any] = {}

    def walk(struct: type[msgspec.Struct], prefix: str) -> None:
        hints = get_type_hints(struct)
        for field in msgspec.structs.fields(struct):
            key, kind = prefix + field.encode_name, hints[field.name]
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                walk(kind, key + ".")
            else:
                found[key] = kind

    walk(Config, "")
    return found


def load(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Config:
    """Read TOML files left to right, apply `key=value` overrides, check everything."""
    flat: dict[str, Any] = {}
    for file in files:
        flat.update(_flatten(_read_toml(Path(file)), str(file)))
    for text in overrides:
        key, value = _parse_override(text)
        flat[key] = value
    return resolve(flat)


def resolve(flat: Mapping[str, Any]) -> Config:
    """Build and check the tree from dotted keys; raises ConfigError."""
    keys = known_keys()
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if key not in keys:
            raise ConfigError(_unknown_key(key, keys))
        value = _checked(key, value, keys[key])
        node = tree
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    config = msgspec.convert(tree, Config)
    _check_together(config)
    return config


def dumps(config: Config) -> str:
    """The resolved tree as TOML; `load` of it gives the same Config."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; give the path of a TOML file to -c")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def _flatten(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Nested tables to dotted keys; tables below a dict-typed key stay values."""
    keys = known_keys()
    flat: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = prefix + name
            is_table = isinstance(value, Mapping) and key not in keys
            if is_table and any(k.startswith(key + ".") for k in keys):
                walk(value, key + ".")
            elif key not in keys:
                raise ConfigError(f"{source}: {_unknown_key(key, keys)}")
            else:
                flat[key] = value

    walk(tree, "")
    return flat


def _unknown_key(key: str, keys: Mapping[str, Any]) -> str:
    if any(k.startswith(key + ".") for k in keys):
        return f"{key} is a section, not a key; write {key}.NAME=VALUE"
    near = FOREIGN_KEYS.get(key)
    if near is None:
        leaf = key.rsplit(".", 1)[-1]
        same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
        close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
        near = (same_leaf or close or difflib.get_close_matches(key, keys, n=1, cutoff=0.0))[0]
    return f"unknown key {key}; the nearest key is {near}"


def _parse_override(text: str) -> tuple[str, Any]:
    text = text.removeprefix("--")
    key, sign, raw = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {text!r} is not of the form key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), raw


def _checked(key: str, value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # run.name=7 on a command line is a name
    if kind == list[str] and isinstance(value, str):
        value = [value]
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{key} = {value!r} has the wrong type: it must be {_type_name(kind)}"
        ) from None
    if key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(f"{key} = {value!r} is not one of {', '.join(CHOICES[key])}")
    if key in MINIMA and value < MINIMA[key]:
        raise ConfigError(f"{key} = {value!r} is too small: it must be at least {MINIMA[key]}")
    return value


def _type_name(kind: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
    }
    if get_origin(kind) is list:
        return "a list of strings"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    return names.get(kind, "a table")


def _check_together(c: Config) -> None:
    """Rules over several keys (each a sentence with the values and the fix)."""
    if bool(c.data.dataset) == bool(c.data.train_files):
        raise ConfigError(
            "give exactly one of data.dataset (a reasoning-gym name) and data.train_files"
        )
    if not c.model.name:
        raise ConfigError("model.name is empty; give the directory of a Hugging Face model")
    if c.rollout.max_num_seqs < c.rollout.group_size:
        raise ConfigError(
            f"rollout.max_num_seqs = {c.rollout.max_num_seqs} is smaller than "
            f"rollout.group_size = {c.rollout.group_size}; a replica must hold one whole group"
        )
    if c.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size = {c.rollout.group_size}: a group-relative advantage needs "
            "at least 2 siblings"
        )
    _check_sampling(c)
    _check_batches(c)
    if c.reward.kind == "custom" and not c.reward.custom_reward_function.path:
        raise ConfigError("reward.kind = 'custom' needs reward.custom_reward_function.path")
    if c.max_model_len < c.data.max_prompt_length + c.data.max_response_length:
        raise ConfigError(
            f"rollout.max_model_len = {c.rollout.max_model_len} is smaller than "
            f"data.max_prompt_length + data.max_response_length = "
            f"{c.data.max_prompt_length + c.data.max_response_length}"
        )
    if c.coordinator.lease_ms < 3 * c.coordinator.heartbeat_ms:
        raise ConfigError(
            f"coordinator.lease_ms = {c.coordinator.lease_ms} must be at least three times "
            f"coordinator.heartbeat_ms = {c.coordinator.heartbeat_ms}"
        )


def _check_sampling(c: Config) -> None:
    """Training refuses sampling filters that the trainer cannot mirror."""
    if c.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {c.rollout.temperature} must be above 0 for training; "
            "evaluation is greedy anyway"
        )
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for name, value in neutral.items():
        given = getattr(c.rollout, name)
        if given != value:
            raise ConfigError(
                f"rollout.{name} = {given} would make the recorded log-probs differ from the "
                f"trainer's; only {value} is allowed for training"
            )


def _check_batches(c: Config) -> None:
    groups, mini = c.data.train_batch_size, c.mini_batch_groups
    if mini > groups or groups % mini:
        raise ConfigError(
            f"algorithm.ppo_mini_batch_size = {mini} must divide "
            f"data.train_batch_size = {groups} (both count prompts)"
        )
    if not 2 <= c.min_scored <= c.rollout.group_size:
        raise ConfigError(
            f"algorithm.min_scored = {c.min_scored} must lie between 2 and "
            f"rollout.group_size = {c.rollout.group_size}"
        )
