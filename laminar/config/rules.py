"""What is allowed: choices, smallest values, and rules over several keys.

Reads   one value, or the whole tree
Raises  ConfigError, which names the key, the value and the fix
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin

import msgspec

from laminar.config.tree import Config, WeightedFunctionConfig


class ConfigError(ValueError):
    """A mistake of the user: one sentence that names the key, the value and the fix."""


CHOICES: dict[str, tuple[str, ...]] = {
    "rollout.engine": ("torch", "vllm", "emulated"),
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
    "trainer.logger": ("tensorboard", "wandb", "prometheus"),
    "weights.dtype": ("auto", "float32", "bfloat16"),
    "repack.policy": ("gain", "best-fit", "off"),
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
    "rollout.start_timeout_s": 0.01,
    "rollout.decode_budget_ms": 1,
    "rollout.max_batch": 1,
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.temperature": 0,
    "rollout.vllm.tensor_parallel_size": 1,
    "rollout.vllm.kv_cache_bytes": 0,
    "rollout.vllm.gpu_memory_utilization": 0.01,
    "rollout.vllm.max_num_batched_tokens": 0,
    "async.max_staleness": 0,
    "reward.workers": 1,
    "reward.timeout_s": 0.01,
    "reward.max_retries": 0,
    "algorithm.ppo_mini_batch_size": 0,
    "algorithm.clip_ratio_low": 0,
    "algorithm.clip_ratio_high": 0,
    "algorithm.clip_ratio_c": 1,
    "algorithm.rollout_correction.mismatch_limit": 0,
    "optim.lr": 0,
    "optim.weight_decay": 0,
    "optim.clip_grad": 0,
    "optim.eps": 0,
    "optim.lr_warmup_steps": 0,
    "trainer.total_training_steps": 0,
    "trainer.total_epochs": 1,
    "trainer.test_freq": 0,
    "trainer.save_freq": 0,
    "trainer.max_ckpt_to_keep": 0,
    "trainer.micro_batch_tokens": 1,
    "trainer.batch_wait_s": 0.1,
    "trainer.threads": 1,
    "store.payload_gb": 0,
    "weights.slots": 3,
    "weights.max_bytes": 0,
    "weights.rate_mbit": 0,
    "coordinator.port": 0,
    "coordinator.prometheus_port": 0,
    "coordinator.heartbeat_ms": 50,
    "coordinator.lease_ms": 150,
    "coordinator.node_lease_ms": 150,
    "coordinator.start_timeout_s": 1,
    "coordinator.log_keep_mb": 0,
    "coordinator.disk_wait_s": 0,
    "repack.interval_ms": 1,
    "repack.release_ms": 1,
    "repack.prefill_tokens_per_step": 1,
    "recovery.resume_wait_ms": 0,
    "recovery.max_restarts": 0,
    "recovery.restart_window_s": 1,
    "recovery.coordinator_restart_ms": 0,
    "emulation.replicas_per_process": 1,
    "emulation.step_us": 1,
    "emulation.sequence_us": 0,
    "emulation.token_us": 0,
    "emulation.prefill_tokens_per_s": 1,
    "emulation.kv_capacity_tokens": 1,
    "emulation.median_response": 1,
    "emulation.train_s": 0,
    "emulation.weights_mb": 1,
}

#: Largest legal value, likewise.
MAXIMA: dict[str, float] = {
    "run.nodes": 254,  # of 127.0.0.1, 127.0.0.2, ...
    "rollout.val_kwargs.n": 1_024,
    "coordinator.port": 65_535,
    "coordinator.prometheus_port": 65_535,
}
INT_MAX = (1 << 63) - 1
"""Of every whole number: all encodings have room for it."""


STEP_TRAJECTORIES_MAX = 1 << 19
"""Of one batch, which goes to the trainer as one message: at most 30 bytes each of 15 MiB."""
GROUP_SIZE_MAX = 4_096
"""A group that is rewarded together is one request to the store."""
QUESTION_BYTES_MAX = 14 << 20
"""Of what a user's batch strategy is asked, which is one message, too."""
BUILT_IN_STRATEGIES = ("deadline", "priority")  #: of algorithm.batch_strategy
EMULATED_TOKENS_MAX = 1 << 16
"""Of a prompt or a response: so many are made up before they begin again."""
CONFIG_CHARS_MAX = 1 << 20
"""Of the whole configuration: every coordinator of a run writes it into the event log."""


def checked(key: str, value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # run.name=7 on a command line is a name
    if kind == list[str] and isinstance(value, str):
        value = [value] if value else []
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{key} = {value!r} has the wrong type: it must be {_wanted(key, kind)}"
        ) from None
    for part in value if isinstance(value, list | tuple) else [value]:
        _check_part(key, value, part, kind)
    return value


def _check_part(key: str, value: Any, part: Any, kind: Any) -> None:
    """One entry of a list, or the value itself."""
    if key in CHOICES and part not in CHOICES[key]:
        raise ConfigError(f"{key} = {part!r} is not one of {', '.join(CHOICES[key])}")
    if isinstance(part, bool) or not isinstance(part, int | float):
        return
    if not math.isfinite(part):
        raise ConfigError(f"{key} = {value!r} is not a finite number")
    if key in MINIMA and part < MINIMA[key]:
        least = " or ".join([f"at least {MINIMA[key]}", *_words(kind)])
        raise ConfigError(f"{key} = {value!r} is too small: it must be {least}")
    if part > (largest := MAXIMA.get(key, INT_MAX if isinstance(part, int) else math.inf)):
        raise ConfigError(f"{key} = {value!r} is too large: it must be at most {largest}")


def _wanted(key: str, kind: Any) -> str:
    choices = CHOICES.get(key, ()) if kind is str else ()
    return " or ".join(map(repr, choices)) or _type_name(kind)


def _type_name(kind: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
    }
    if kind == list[WeightedFunctionConfig]:
        return "a list of tables with path, name and weight"
    if get_origin(kind) is list:
        return "a list of strings"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if words := _words(kind):
        return " or ".join([names[get_args(kind)[0]], *words])
    return names.get(kind, "a table")


def _words(kind: Any) -> list[str]:
    """What may stand there instead of a number."""
    words = [get_args(part) for part in get_args(kind) if get_origin(part) is Literal]
    return [repr(word) for part in words for word in part]


def check_together(c: Config) -> None:
    """Rules over several keys (each a sentence with the values and the fix)."""
    if c.is_emulated:
        _check_emulated(c)
    elif bool(c.data.dataset) == bool(c.data.train_files):
        raise ConfigError(
            "give exactly one of data.dataset (a reasoning-gym name) and data.train_files"
        )
    _check_place(c)
    if not (c.model.name or c.is_emulated):
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
    if not all(0 <= beta < 1 for beta in c.optim.betas):
        raise ConfigError(f"optim.betas = {c.optim.betas}: each must be at least 0 and below 1")
    _check_sizes(c)
    _check_reward(c)
    if c.store.payload_gb and not c.trainer.save_freq:
        raise ConfigError(
            f"store.payload_gb = {c.store.payload_gb:g} with trainer.save_freq = 0: only what a "
            "checkpoint covers can go; give trainer.save_freq, or store.payload_gb = 0"
        )
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
    if c.coordinator.node_lease_ms < c.coordinator.lease_ms:
        raise ConfigError(
            f"coordinator.node_lease_ms = {c.coordinator.node_lease_ms} must be at least "
            f"coordinator.lease_ms = {c.coordinator.lease_ms}"
        )


def _check_emulated(c: Config) -> None:
    """What a real run may be told and an emulated one cannot do."""
    for key in ("max_prompt_length", "max_response_length"):
        if (tokens := getattr(c.data, key)) > EMULATED_TOKENS_MAX:
            raise ConfigError(
                f'data.{key} = {tokens} is too long for rollout.engine = "emulated": give at most '
                f"{EMULATED_TOKENS_MAX}"
            )
    if c.data.val_size >= c.data.dataset_size:
        raise ConfigError(
            f"data.val_size = {c.data.val_size} leaves none of the data.dataset_size = "
            f"{c.data.dataset_size} emulated prompts for training; lower it"
        )


def _check_place(c: Config) -> None:
    """A run is one directory in run.output_dir."""
    name = c.run.name
    usable = name.strip() not in ("", ".", "..") and name.isprintable() and len(name) <= 200
    if not usable or "/" in name or name.startswith("-"):
        raise ConfigError(
            f"run.name = {name!r:.100} cannot be the name of one directory; use letters, digits, "
            "'_', '.' and '-', and say where it is to be with run.output_dir"
        )
    if c.run.output_dir.startswith("~"):
        raise ConfigError(
            f"run.output_dir = {c.run.output_dir!r}: a ~ is not expanded here; write the whole path"
        )


def _check_sampling(c: Config) -> None:
    """Training refuses sampling filters that the trainer cannot mirror."""
    if c.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {c.rollout.temperature} must be above 0 for training; "
            "rollout.val_kwargs.temperature = 0 makes evaluation greedy"
        )
    val = c.rollout.val_kwargs
    if val.n > 1 and val.temperature <= 0:
        raise ConfigError(
            f"rollout.val_kwargs.n = {val.n} greedy answers to a prompt would all be the same: set "
            "rollout.val_kwargs.temperature above 0, or n = 1"
        )
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for name, value in neutral.items():
        given = getattr(c.rollout, name)
        if given != value:
            raise ConfigError(
                f"rollout.{name} = {given} would make the recorded log-probs differ from the "
                f"trainer's; only {value} is allowed for training"
            )


def _check_reward(c: Config) -> None:
    if c.reward.functions and (c.reward.kind != "auto" or c.reward.custom_reward_function.path):
        raise ConfigError(
            "reward.functions names all functions: remove reward.kind and "
            "reward.custom_reward_function, or put them into the list"
        )
    weights = [function.weight for function in c.reward.functions]
    if not all(map(math.isfinite, weights)) or (weights and not any(weights)):
        raise ConfigError(
            f"reward.functions has the weights {weights}: each must be a finite number, and one of "
            "them another than 0"
        )
    if c.reward.kind == "custom" and not c.reward.custom_reward_function.path:
        raise ConfigError("reward.kind = 'custom' needs reward.custom_reward_function.path")
    if not 0 <= c.reward.max_error_share <= 1:
        raise ConfigError(
            f"reward.max_error_share = {c.reward.max_error_share} is a share of attempts: it must "
            "lie between 0 and 1 (1: failing rewards never end the run)"
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


def _check_sizes(c: Config) -> None:
    """What one message to the trainer, the store or a user's strategy can hold."""
    groups, size = c.data.train_batch_size, c.rollout.group_size
    if size > GROUP_SIZE_MAX:
        raise ConfigError(
            f"rollout.group_size = {size} is too large: it may be at most {GROUP_SIZE_MAX}"
        )
    if groups * size > STEP_TRAJECTORIES_MAX:
        raise ConfigError(
            f"data.train_batch_size * rollout.group_size = {groups} * {size} = {groups * size} "
            f"trajectories are too many for one step: give at most {STEP_TRAJECTORIES_MAX}"
        )
    waiting = groups * (c.async_.max_staleness + 1)
    question = waiting * (120 + 9 * size)  # bytes; what a strategy gets of each group
    if c.algorithm.batch_strategy in BUILT_IN_STRATEGIES or question <= QUESTION_BYTES_MAX:
        return
    raise ConfigError(
        f"algorithm.batch_strategy = {c.algorithm.batch_strategy!r} would be asked about as many "
        f"as {waiting} groups at once (data.train_batch_size * (async.max_staleness + 1)), "
        f"{question} bytes where {QUESTION_BYTES_MAX} are allowed: use one of "
        f"{', '.join(BUILT_IN_STRATEGIES)}, or make one of the three smaller"
    )
