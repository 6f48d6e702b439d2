"""Keys of other systems and of earlier versions, and the keys here for the same settings.

Gives   RENAMED; explain_foreign_key: our key for one of verl, TRL, slime, AReaL or prime-rl, or
        that it is unsupported and what to use instead; empty for any other key

The table is needed because spelling misleads: the key nearest to `num_generations` by its letters
has another meaning. Keys whose last part is the same as in ours are found without them. A key may
be written with dashes or underscores, and below its system's section.
"""

from __future__ import annotations

_RECOMPUTE = "trainer.activation_checkpointing; it is auto, on or off"
_RANKS = "trainer.ranks; the model is divided among as many GPUs (FSDP2)"
_OFFLOAD = "trainer.offload; all keeps parameters, gradients and optimizer in host memory"
_IS = "algorithm.rollout_correction.rollout_is"
_ENV = "env.path; a Python file with a class, whose methods are the tools"
_FILTER = "algorithm.filter_groups.enable"
_GPUS = (
    "rollout.replicas; each takes rollout.vllm.tensor_parallel_size GPUs, and the trainer "
    "trainer.ranks"
)
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

#: Our key, after a semicolon a remark if there is one -> its names elsewhere: in verl, TRL, slime,
#: SkyRL, NeMo-RL, AReaL and prime-rl.
NAMES_ELSEWHERE = {
    "model.name": "model.path model_name_or_path hf_checkpoint actor.path",
    "data.train_batch_size": "data.batch_size rollout_batch_size train_dataset.batch_size",
    "data.val_size": "data.val_batch_size",
    "data.dataset_size": "data.train_max_samples",
    "rollout.group_size": "rollout.n num_generations n_samples_per_prompt gconfig.n_samples",
    "rollout.val_kwargs.n": (
        "actor_rollout_ref.rollout.val_kwargs.n num_generations_eval n_samples_per_eval_prompt"
    ),
    "rollout.val_kwargs.temperature": (
        "actor_rollout_ref.rollout.val_kwargs.temperature eval_temperature"
    ),
    "rollout.engine": "rollout.name use_vllm",
    "rollout.vllm.tensor_parallel_size": (
        "rollout.tensor_model_parallel_size vllm_tensor_parallel_size"
    ),
    "data.max_response_length": (
        "actor_rollout_ref.rollout.response_length max_completion_length "
        "rollout_max_response_len gconfig.max_new_tokens"
    ),
    "data.max_prompt_length": "actor_rollout_ref.rollout.prompt_length",
    _RECOMPUTE: "enable_gradient_checkpointing gradient_checkpointing",
    "optim.lr": "actor_rollout_ref.actor.optim.lr learning_rate",
    "optim.clip_grad": "actor_rollout_ref.actor.grad_clip max_grad_norm",
    "algorithm.clip_ratio_low": "actor_rollout_ref.actor.clip_ratio epsilon eps_clip",
    "trainer.micro_batch_tokens": (
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu "
        "forward_max_token_len_per_gpu gradient_accumulation_steps"
    ),
    "algorithm.policy_loss.options": "tau_pos tau_neg dro_beta",
    "lora.rank": "actor_rollout_ref.model.lora.rank lora_rank lora_r peft_config peft_config.r",
    "lora.alpha": "actor_rollout_ref.model.lora.alpha lora_alpha",
    "lora.target_modules": "target_modules lora_target_modules",
    "algorithm.adv_estimator; gae (PPO) has a critic": "critic.enable",
    "critic.model.name": "critic.model.path value_model_path critic_load",
    "model.name; the critic reads the policy's ids": "critic.model.tokenizer_path",
    "critic.lr": "critic.optim.lr critic_lr",
    "optim.lr_warmup_steps; it holds for the critic, too": "critic.optim.lr_warmup_steps",
    "optim.weight_decay; it holds for the critic, too": "critic.optim.weight_decay",
    "optim.clip_grad; it holds for the critic, too": "critic.grad_clip",
    "algorithm.loss_agg_mode; it holds for the critic, too": "critic.loss_agg_mode",
    "algorithm.ppo_mini_batch_size; it holds for the critic, too": "critic.ppo_mini_batch_size",
    "reward.custom_reward_function.path": "custom_reward_function.path",
    "reward.custom_reward_function.name": "custom_reward_function.name",
    "reward.overlong_buffer.len; 0 turns it off": (
        "reward_model.overlong_buffer.enable reward.reward_kwargs.overlong_buffer_cfg.enable "
        "overlong_buffer.enable"
    ),
    "reward.overlong_buffer.len": (
        "reward_model.overlong_buffer.len reward.reward_kwargs.overlong_buffer_cfg.len"
    ),
    "reward.overlong_buffer.penalty_factor": (
        "reward_model.overlong_buffer.penalty_factor "
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor"
    ),
    _ENV: "multi_turn.enable multi_turn.tool_config_path environment_factory tools",
    "env.max_turns": "multi_turn.max_assistant_turns multi_turn.max_user_turns max_turns",
    "async.max_staleness": (
        "async_training.staleness_threshold async.staleness_threshold "
        "rollout.max_head_offpolicyness max_off_policy_steps max_async_level max_staleness"
    ),
    _RANKS: "fsdp_size fsdp fsdp_config",
    _OFFLOAD: (
        "param_offload optimizer_offload offload_policy optimizer_cpu_offload optim_cpu_offload"
    ),
    _GPUS: "trainer.n_gpus_per_node",
    "run.name": "trainer.experiment_name run_name",
    "run.output_dir": "trainer.default_local_dir output_dir",
    "seed": "trainer.seed",
    "data.train_files": "dataset_name train_dataset prompt_data train_dataset.path",
    "data.val_files": "eval_dataset",
    f"data.train_batch_size{_COMPLETIONS}": "per_device_train_batch_size generation_batch_size",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.lr_warmup_steps": "warmup_steps",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.total_training_steps": "max_steps",
    "trainer.test_freq": "eval_steps eval_interval",
    "trainer.save_freq": "save_steps save_interval ckpt.interval",
    "trainer.max_ckpt_to_keep": "save_total_limit ckpt.keep_last",
    "trainer.logger": "report_to",
    "algorithm.kl_loss_coef; it needs algorithm.use_kl_loss = true": "beta",
    "algorithm.clip_ratio_high": "epsilon_high eps_clip_high",
    "algorithm.clip_ratio_c": "delta eps_clip_c",
    "algorithm.loss_agg_mode; cispo and sapo are an algorithm.policy_loss.loss_mode": "loss_type",
    'algorithm.policy_loss.loss_mode; "gspo" is the one of sequences': "importance_sampling_level",
    _IS: "vllm_importance_sampling_correction use_tis",
    f"{_IS}_threshold": "vllm_importance_sampling_cap tis_clip",
    "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
    "algorithm.truncated": "mask_truncated_completions",
    "trainer.dtype": "bf16",
    "rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.max_model_len": "vllm_max_model_length",
    "lora.rank; 0 trains all weights": "use_peft",
    "reward.functions": "reward_funcs reward_weights",
    "env.max_turns; the turn after the last call counts, too": "max_tool_calling_iterations",
    "critic.lr; the critic has a separate optimizer": "vf_coef",
    "critic.cliprange_value": "cliprange_value value_clip",
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "algorithm.adv_estimator": "advantage_estimator",
    "trainer.critic_warmup": "num_critic_only_steps",
    "algorithm.lam": "lambd",
    "trainer.ranks": "actor_num_gpus_per_node",
    "trainer.nodes; each has trainer.ranks, and slurm.rollouts machines have replicas": (
        "nnodes actor_num_nodes policy_num_nodes num_nodes n_nodes"
    ),
    "slurm.rollouts; machines in addition to those of the trainer": (
        "rollout.nnodes rollout_num_nodes"
    ),
    _FILTER: "dynamic_sampling_filter_path dynamic_sampling.type use_dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": (
        "dynamic_sampling.max_sample_batches dynamic_sampling_max_gen_batches"
    ),
    "rollout.max_num_seqs": "rollout.max_concurrent_rollouts",
}
FOREIGN = {name: ours for ours, names in NAMES_ELSEWHERE.items() for name in names.split()}

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
    if ways[0] in FOREIGN:
        return f"here it is {FOREIGN[ways[0]]}"
    for part in parts:
        if part in UNSUPPORTED:
            instead = UNSUPPORTED[part]
            return f"{part} is not supported" + (f": {instead}" if instead else "")
    known = next((FOREIGN[way] for way in ways[1:] if way in FOREIGN), "")
    known = known or next((SECTIONS[part] for part in parts if part in SECTIONS), "")
    return f"here it is {known}" if known else ""
