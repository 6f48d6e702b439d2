"""Keys of other systems and of earlier versions, and the keys here for the same settings.

Gives   RENAMED; explain_foreign_key: our key for one of verl, TRL, slime, AReaL or prime-rl, or
        that it is unsupported and what to use instead; empty for any other key

The tables are needed because spelling misleads: the key nearest to `num_generations` by its letters
has another meaning. Keys whose last part is the same as in ours are found without them. A key may
be written with dashes or underscores, and below its system's section.
"""

from __future__ import annotations

_RECOMPUTE = "trainer.activation_checkpointing; it is auto, on or off"
_RANKS = "trainer.ranks; the model is divided among as many GPUs (FSDP2)"
_OFFLOAD = "trainer.offload; all keeps parameters, gradients and optimizer in host memory"
_IS = "algorithm.rollout_correction.rollout_is"
_ENV = "env.path; a Python file with a class, whose methods are the tools"
_COMPLETIONS = "; it counts prompts, of which each has rollout.group_size completions"

RENAMED = {
    "recovery.resume_wait_ms": "recovery.resume_timeout_ms",
    "trainer.batch_wait_s": "trainer.batch_timeout_s",
    "coordinator.disk_wait_s": "coordinator.disk_full_timeout_s",
    "coordinator.coordinator_absent_ms": "coordinator.coordinator_timeout_ms",
    "repack.release_ms": "repack.release_timeout_ms",
    "rollout.update": "rollout.weight_update",
    "rollout.replicas_beside_trainer": "rollout.replicas_on_trainer_node",
    "slurm.notice_s": "slurm.signal_before_s",
    "env.effects": 'env.call_semantics, with "at-most-once" for "once" and "retryable" for "pure"',
}
"""Keys of earlier versions of Laminar, and what they are called now."""

#: A semicolon separates the key from a remark, if there is one.
VERL = {
    "actor_rollout_ref.model.path": "model.name",
    "model.path": "model.name",
    "data.batch_size": "data.train_batch_size",
    "data.val_batch_size": "data.val_size",
    "data.train_max_samples": "data.dataset_size",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.val_kwargs.n": "rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "rollout.val_kwargs.temperature",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.vllm.tensor_parallel_size",
    "rollout.tensor_model_parallel_size": "rollout.vllm.tensor_parallel_size",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "enable_gradient_checkpointing": _RECOMPUTE,
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.actor.grad_clip": "optim.clip_grad",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_ratio_low",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "log_prob_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "log_prob_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    **dict.fromkeys(("tau_pos", "tau_neg", "dro_beta"), "algorithm.policy_loss.options"),
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "actor_rollout_ref.model.target_modules": "lora.target_modules",
    "actor_rollout_ref.model.lora.rank": "lora.rank",
    "actor_rollout_ref.model.lora.alpha": "lora.alpha",
    "actor_rollout_ref.model.lora.target_modules": "lora.target_modules",
    "lora_rank": "lora.rank",
    "target_modules": "lora.target_modules",
    "critic.enable": "algorithm.adv_estimator; gae (PPO) has a critic",
    "critic.model.path": "critic.model.name",
    "critic.model.tokenizer_path": "model.name; the critic reads the policy's ids",
    "critic.optim.lr": "critic.lr",
    "critic.optim.lr_warmup_steps": "optim.lr_warmup_steps; it holds for the critic, too",
    "critic.optim.weight_decay": "optim.weight_decay; it holds for the critic, too",
    "critic.grad_clip": "optim.clip_grad; it holds for the critic, too",
    "critic.loss_agg_mode": "algorithm.loss_agg_mode; it holds for the critic, too",
    "critic.ppo_mini_batch_size": "algorithm.ppo_mini_batch_size; it holds for the critic, too",
    "critic.ppo_micro_batch_size": "trainer.micro_batch_tokens",
    "critic.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "critic.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "critic.forward_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    **{
        f"{section}.{verl}": f"reward.overlong_buffer.{ours}"
        for section in ("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg")
        for verl, ours in (
            ("enable", "len; 0 turns it off"),
            ("len", "len"),
            ("penalty_factor", "penalty_factor"),
        )
    },
    **dict.fromkeys(("multi_turn.enable", "multi_turn.tool_config_path"), _ENV),
    **dict.fromkeys(
        ("multi_turn.max_assistant_turns", "multi_turn.max_user_turns", "max_turns"),
        "env.max_turns",
    ),
    "overlong_buffer.enable": "reward.overlong_buffer.len; 0 turns it off",
    "async_training.staleness_threshold": "async.max_staleness",
    "async.staleness_threshold": "async.max_staleness",
    **dict.fromkeys(("fsdp_size", "fsdp_config.fsdp_size"), _RANKS),
    **dict.fromkeys(("param_offload", "optimizer_offload", "offload_policy"), _OFFLOAD),
    "trainer.n_gpus_per_node": "rollout.replicas; each takes rollout.vllm.tensor_parallel_size "
    "GPUs, and the trainer trainer.ranks",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.output_dir",
    "trainer.output_dir": "run.output_dir",
    "trainer.seed": "seed",
}

TRL = {
    "model_name_or_path": "model.name",
    "dataset_name": "data.train_files",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "num_generations": "rollout.group_size",
    "max_completion_length": "data.max_response_length",
    "per_device_train_batch_size": f"data.train_batch_size{_COMPLETIONS}",
    "generation_batch_size": f"data.train_batch_size{_COMPLETIONS}",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_checkpointing": _RECOMPUTE,
    "learning_rate": "optim.lr",
    "optim.learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_grad",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "warmup_steps": "optim.lr_warmup_steps",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "eval_steps": "trainer.test_freq",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "report_to": "trainer.logger",
    "output_dir": "run.output_dir",
    "run_name": "run.name",
    "beta": "algorithm.kl_loss_coef; it needs algorithm.use_kl_loss = true",
    "epsilon": "algorithm.clip_ratio_low",
    "epsilon_high": "algorithm.clip_ratio_high",
    "delta": "algorithm.clip_ratio_c",
    "loss_type": "algorithm.loss_agg_mode; cispo and sapo are an algorithm.policy_loss.loss_mode",
    "importance_sampling_level": 'algorithm.policy_loss.loss_mode; "gspo" is the one of sequences',
    "vllm_importance_sampling_correction": _IS,
    "vllm_importance_sampling_cap": f"{_IS}_threshold",
    **dict.fromkeys(("fsdp", "fsdp_config"), _RANKS),
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "mask_truncated_completions": "algorithm.truncated",
    "use_vllm": "rollout.engine",
    "bf16": "trainer.dtype",
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "vllm_max_model_length": "rollout.max_model_len",
    "num_generations_eval": "rollout.val_kwargs.n",
    "use_peft": "lora.rank; 0 trains all weights",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.target_modules",
    **dict.fromkeys(("peft_config", "peft_config.r"), "lora.rank"),
    "peft_config.lora_alpha": "lora.alpha",
    "peft_config.target_modules": "lora.target_modules",
    "reward_funcs": "reward.functions",
    **dict.fromkeys(("environment_factory", "tools"), _ENV),
    "max_tool_calling_iterations": "env.max_turns; the turn after the last call counts, too",
    "reward_weights": "reward.functions",
    "vf_coef": "critic.lr; the critic has a separate optimizer",
    "cliprange_value": "critic.cliprange_value",
    "value_model_path": "critic.model.name",
}

_FILTER = "algorithm.filter_groups.enable"

OTHERS = {
    # slime
    "hf_checkpoint": "model.name",
    "prompt_data": "data.train_files",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "rollout_batch_size": "data.train_batch_size",
    "rollout_max_response_len": "data.max_response_length",
    "n_samples_per_prompt": "rollout.group_size",
    "eps_clip": "algorithm.clip_ratio_low",
    "eps_clip_high": "algorithm.clip_ratio_high",
    "eps_clip_c": "algorithm.clip_ratio_c",
    "save_interval": "trainer.save_freq",
    "eval_interval": "trainer.test_freq",
    "n_samples_per_eval_prompt": "rollout.val_kwargs.n",
    "eval_temperature": "rollout.val_kwargs.temperature",
    "advantage_estimator": "algorithm.adv_estimator",
    "critic_load": "critic.model.name",
    "critic_lr": "critic.lr",
    "value_clip": "critic.cliprange_value",
    "num_critic_only_steps": "trainer.critic_warmup",
    "lambd": "algorithm.lam",
    "actor_num_gpus_per_node": "trainer.ranks",
    "use_tis": _IS,
    "tis_clip": f"{_IS}_threshold",
    "optimizer_cpu_offload": _OFFLOAD,
    "dynamic_sampling_filter_path": _FILTER,
    # SkyRL
    "dynamic_sampling.type": _FILTER,
    "dynamic_sampling.max_sample_batches": "algorithm.filter_groups.max_num_gen_batches",
    # NeMo-RL
    "use_dynamic_sampling": _FILTER,
    "dynamic_sampling_max_gen_batches": "algorithm.filter_groups.max_num_gen_batches",
    # AReaL
    "actor.path": "model.name",
    "gconfig.n_samples": "rollout.group_size",
    "gconfig.max_new_tokens": "data.max_response_length",
    "rollout.max_head_offpolicyness": "async.max_staleness",
    "rollout.max_concurrent_rollouts": "rollout.max_num_seqs",
    "train_dataset.path": "data.train_files",
    "train_dataset.batch_size": "data.train_batch_size",
    # prime-rl
    "max_off_policy_steps": "async.max_staleness",
    "max_async_level": "async.max_staleness",
    "max_staleness": "async.max_staleness",
    "optim_cpu_offload": _OFFLOAD,
    "ckpt.interval": "trainer.save_freq",
    "ckpt.keep_last": "trainer.max_ckpt_to_keep",
}

_ALL = VERL | TRL | OTHERS

_SHARDED = "trainer.ranks divides the model among GPUs, trainer.offload keeps it in host memory"
_WHOLE = "a rank computes whole layers of whole sequences; trainer.ranks divides what it keeps"
_RESUME = "resume a run with `laminar train --resume RUN`"
_LORA = "adapters have lora.rank, lora.alpha and lora.target_modules"

#: Sections of other systems, of which any further key has this answer.
SECTIONS = {
    "multi_turn": _ENV,
    "reward_kwargs": "reward.custom_reward_function.path; set them in that file, as defaults or by "
    "functools.partial",
}

#: Unsupported features, by a part of their keys in other systems.
UNSUPPORTED = {
    **dict.fromkeys(("lora_dropout", "use_rslora", "use_dora", "modules_to_save"), _LORA),
    **dict.fromkeys(("lora_adapter_path", "exclude_modules"), _LORA),
    **dict.fromkeys(("resume_mode", "resume_from_path", "resume_from_checkpoint"), _RESUME),
    **dict.fromkeys(("deepspeed", "megatron", "zero_stage"), _SHARDED),
    **dict.fromkeys(("ulysses_sequence_parallel_size", "context_parallel_size"), _WHOLE),
    "nnodes": "slurm.rollouts machines in addition to the first, by `laminar submit`",
    "reward_model": "your function may call one: reward.custom_reward_function.path",
    **dict.fromkeys(
        ("use_kl_in_reward", "kl_ctrl", "kl_penalty"),
        "the KL penalty is a term of the loss: algorithm.use_kl_loss",
    ),
    **dict.fromkeys(
        ("ppo_epochs", "num_iterations"),
        "a batch is trained once; algorithm.ppo_mini_batch_size parts it into several updates",
    ),
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps"), "the reference is model.name"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization"), "rollout.dtype, trainer.dtype"
    ),
    "fp16": "trainer.dtype may be bfloat16",
    **dict.fromkeys(("use_torch_compile", "torch_compile", "attn_implementation"), ""),
    "use_liger_kernel": "",
    "vllm_mode": "replicas are separate processes; rollout.engine",
    "push_to_hub": "the trained model is in RUN/export",
}


def explain_foreign_key(key: str) -> str:
    """Return the explanation that follows the name of an unknown key."""
    parts = key.replace("-", "_").split(".")
    ways = [".".join(parts[start:]) for start in range(len(parts))]
    if ways[0] in _ALL:
        return f"here it is {_ALL[ways[0]]}"
    for part in parts:
        if part in UNSUPPORTED:
            instead = UNSUPPORTED[part]
            return f"{part} is not supported" + (f": {instead}" if instead else "")
    known = next((_ALL[way] for way in ways[1:] if way in _ALL), "")
    known = known or next((SECTIONS[part] for part in parts if part in SECTIONS), "")
    return f"here it is {known}" if known else ""
