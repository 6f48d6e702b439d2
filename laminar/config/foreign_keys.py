"""Keys that users of other systems type, and ours for the same thing.

Gives   ours: our key for one of verl, TRL, slime, AReaL or prime-rl; empty for any other key

By a table, because the spelling leads astray: the key nearest to `num_generations` by its letters
is about something else. Keys whose last part is the same as in ours are found without it. A key may
be written with dashes or underscores.
"""

from __future__ import annotations

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
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.actor.grad_clip": "optim.clip_grad",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_ratio_low",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "algorithm.use_kl_in_reward": "algorithm.use_kl_loss",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_loss_coef",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "async_training.staleness_threshold": "async.max_staleness",
    "async.staleness_threshold": "async.max_staleness",
    "trainer.n_gpus_per_node": "rollout.replicas",
    "trainer.nnodes": "run.nodes",
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
    "per_device_train_batch_size": "data.train_batch_size",
    "generation_batch_size": "data.train_batch_size",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
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
    "beta": "algorithm.kl_loss_coef",
    "epsilon": "algorithm.clip_ratio_low",
    "epsilon_high": "algorithm.clip_ratio_high",
    "delta": "algorithm.clip_ratio_c",
    "loss_type": "algorithm.loss_agg_mode",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "mask_truncated_completions": "algorithm.truncated",
    "use_vllm": "rollout.engine",
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "vllm_max_model_length": "rollout.max_model_len",
    "num_generations_eval": "rollout.val_kwargs.n",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
}

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
    "ckpt.interval": "trainer.save_freq",
    "ckpt.keep_last": "trainer.max_ckpt_to_keep",
}

_ALL = VERL | TRL | OTHERS


def ours(key: str) -> str:
    return _ALL.get(key.replace("-", "_"), "")
