"""Every setting of a run, by section: its key, its type, its default, and what it means.

Gives   Config, a tree of frozen structs

What values are allowed is in rules.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keyword-only, strict."""


class RunConfig(Section, frozen=True, kw_only=True):
    name: str = "run"  #: directory below output_dir
    output_dir: str = "runs"  #: run directories are made here
    nodes: int = 1  #: machines that `laminar train` plays on this one, 127.0.0.1, 127.0.0.2, ...


class ModelConfig(Section, frozen=True, kw_only=True):
    name: str = ""  #: a Hugging Face directory, or ORG/NAME[@REVISION] on the hub


class DataConfig(Section, frozen=True, kw_only=True):
    dataset: str = ""  #: a reasoning-gym dataset by name (exclusive with train_files)
    dataset_config: dict[str, Any] = {}  #: the dataset's own settings
    dataset_size: int = 20_000  #: items generated from the reasoning-gym dataset
    dataset_seed: int = 42  #: of the items of the reasoning-gym dataset
    train_files: list[str] = []  #: .jsonl or .parquet; hf://datasets/ORG/NAME/FILE of the hub
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
    train_batch_size: int = 16  #: prompts (groups) per step; with group_size at most 524288 answers
    drop_last: bool = False  #: false: what is left when the data ends is one short batch
    shuffle: bool = True  #: a new order in every pass over the data


class VllmConfig(Section, frozen=True, kw_only=True):
    """Only read when rollout.engine is "vllm"; docs/engines.md."""

    tensor_parallel_size: int = 1  #: GPUs of one replica, all on its machine
    kv_cache_bytes: int = 0  #: 0: what gpu_memory_utilization leaves; on CPU 1 GiB
    gpu_memory_utilization: float = 0.85  #: share of a GPU for weights, activations and cache
    enforce_eager: bool = False  #: true: no CUDA graphs, a faster start; on CPU always
    max_num_batched_tokens: int = 0  #: tokens of one step, prefill included; 0: vLLM's choice
    extra: dict[str, Any] = {}  #: further arguments of vLLM's engine by their own names


class ValKwargsConfig(Section, frozen=True, kw_only=True):
    """How held-out prompts are answered."""

    n: int = 1  #: answers to each held-out prompt
    temperature: float = 0.0  #: of their sampling; 0: greedy


class RolloutConfig(Section, frozen=True, kw_only=True):
    engine: str = (
        "torch"  #: torch: embedded, for Qwen2, Qwen3, Llama | vllm | emulated: docs/engines.md
    )
    replicas: int = 2  #: engines of each machine; each is a process
    group_size: int = 8  #: responses to one prompt
    max_num_seqs: int = 64  #: trajectories that one replica runs at a time
    max_model_len: int = 0  #: 0: max_prompt_length + max_response_length
    groups_per_version: int = 0  #: 0: max_num_seqs / group_size
    temperature: float = 1.0  #: of training responses
    top_p: float = 1.0  #: only 1: the trainer could not mirror a filter
    top_k: int = 0  #: only 0, likewise
    min_p: float = 0.0  #: only 0, likewise
    repetition_penalty: float = 1.0  #: only 1, likewise
    progress_interval_ms: int = 500  #: between two reports; tokens are durable in this rhythm
    device: str = "auto"  #: auto | cpu | cuda
    dtype: str = "auto"  #: auto: weights.dtype
    threads: int = 1  #: torch threads of one replica on CPU
    start_timeout_s: float = 900.0  #: for an engine to be ready once its process has joined
    #: of a decode step when work is packed; how many sequences that allows is measured
    decode_budget_ms: int | Literal["none"] = "none"
    #: sequences of a decode step when work is packed; auto: by decode_budget_ms, else max_num_seqs
    max_batch: int | Literal["auto"] = "auto"
    val_kwargs: ValKwargsConfig = ValKwargsConfig()
    vllm: VllmConfig = VllmConfig()


class AsyncConfig(Section, frozen=True, kw_only=True):
    max_staleness: int = 2  #: completed steps; 0 is on-policy


class RewardFunctionConfig(Section, frozen=True, kw_only=True):
    path: str = ""  #: a Python file; empty: the dataset's own scorer or math-verify
    name: str = ""  #: empty: compute_score, else the file's only public function


class WeightedFunctionConfig(Section, frozen=True, kw_only=True):
    """One entry of reward.functions."""

    path: str = ""  #: a Python file; empty: name is a scorer that comes with it
    name: str = ""  #: of the function, as above; or dataset, math, exact
    weight: float = 1.0  #: of its score in the sum; 0: only its metric


class RewardConfig(Section, frozen=True, kw_only=True):
    custom_reward_function: RewardFunctionConfig = RewardFunctionConfig()
    kind: str = "auto"  #: auto | dataset | math | exact | custom
    #: instead of these: several, each with path, name and weight; the reward is the weighted sum
    functions: list[WeightedFunctionConfig] = []
    scope: str = "auto"  #: auto | trajectory | group
    workers: int = 1  #: worker processes per replica
    timeout_s: float = 30.0  #: of one call of the reward function
    #: for a response on which the function raises, times out or gives no number
    error_score: float = 0.0
    max_retries: int = 2  #: after a worker process died by itself
    #: failed share of the last attempts to score, 4 x train_batch_size x group_size of them,
    #: above which the run ends; 1: never
    max_error_share: float = 0.5
    trial: bool = True  #: false: start without calling the reward on three rows first


class RolloutCorrectionConfig(Section, frozen=True, kw_only=True):
    bypass_mode: bool = False  #: true: ratio to the behaviour policy, no second weight
    rollout_is: str = "token"  #: token | none
    rollout_is_threshold: float = 2.0  #: cap of the importance weight
    #: nats per token at equal weights; rows of a replica and version whose log-probs differ from
    #: the trainer's by more, age allowed for, are left out; 0: 1e-3 for float32, 0.15 for bfloat16
    mismatch_limit: float = 0.0


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
    save_freq: int = 20  #: write a checkpoint every so many steps; 0: none
    max_ckpt_to_keep: int = 2  #: the newest so many checkpoints; 0: all
    val_before_train: bool = True  #: evaluate version 0
    micro_batch_tokens: int = 16_384  #: padded tokens of one forward/backward
    batch_wait_s: float = 600.0  #: an idle trainer acts on the group that it waits for
    #: besides metrics.jsonl, which is always written: tensorboard | wandb | prometheus
    logger: list[str] = msgspec.field(default_factory=lambda: ["tensorboard"])
    project_name: str = "laminar"  #: of the run in Weights & Biases
    device: str = "auto"  #: auto | cpu | cuda
    dtype: str = "auto"  #: compute type: float32 on CPU, bfloat16 autocast on GPU
    threads: int = 1  #: torch threads on CPU


class StoreConfig(Section, frozen=True, kw_only=True):
    #: of tokens and log-probs that are kept, in 10^9 bytes: beyond it the oldest go that every kept
    #: checkpoint covers; 0: all are kept
    payload_gb: float = 0.0


class WeightsConfig(Section, frozen=True, kw_only=True):
    dtype: str = "auto"  #: published type: float32 on CPU, bfloat16 on GPU
    slots: int = 3  #: versions that the relay has room for
    max_bytes: int = 0  #: limit of the relay's shared memory; 0: half of the machine's memory
    delta: bool = True  #: relays send what changed, where that is less than a whole version
    rate_mbit: int = 0  #: of one relay to the next, in Mbit/s at most; 0: no limit
    probe_tolerance: float = 0.0  #: nats per token on average; 0: 1e-4 float32, 0.25 bfloat16


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  #: loopback only, until connections are authenticated
    port: int = 0  #: 0: any free port, written to the run directory
    prometheus_port: int = 0  #: for logger "prometheus"; 0: any free one, see prometheus.json
    heartbeat_ms: int = 1_000  #: of every process
    lease_ms: int = 5_000  #: silence after which a replica or relay counts as lost
    node_lease_ms: int = 30_000  #: the same for a node, the store and the trainer
    coordinator_absent_ms: int = 600_000  #: a process without a coordinator ends after this
    start_timeout_s: float = 300.0  #: until every actor has joined
    log_keep_mb: int = 0  #: of the event log; 0: all, as report and audit need it
    disk_wait_s: float = 300.0  #: a run waits so long for room on a full disk, then it ends


class RepackConfig(Section, frozen=True, kw_only=True):
    """Stragglers of several replicas go on on few, the others take the newest weights."""

    policy: str = "off"  #: gain: where it pays | best-fit: wherever it fits | off
    interval_ms: int = 5_000  #: between two looks; besides, whenever weights are published
    release_ms: int = (
        2_000  #: to hand tokens over; after that a trajectory moves without the newest
    )
    prefill_tokens_per_step: int = 512  #: tokens prefilled in the time of one decode step


class EmulationConfig(Section, frozen=True, kw_only=True):
    """Only read when rollout.engine is "emulated": what takes how long there."""

    replicas_per_process: int = 1  #: each with its own sockets
    step_us: float = 8_000.0  #: of one decode step, whatever the batch
    sequence_us: float = 60.0  #: added to a step by each sequence in it
    token_us: float = 0.0  #: added to a step by each token in the cache
    prefill_tokens_per_s: float = 20_000.0  #: of prompts, and of what is resumed; all others wait
    kv_capacity_tokens: int = 1_000_000  #: of a replica's cache
    median_response: int = 100  #: tokens; the 99th percentile is ten times that
    train_s: float = 3.0  #: of one training step
    weights_mb: int = 8  #: MiB of one version, which are really published and read


class RecoveryConfig(Section, frozen=True, kw_only=True):
    resume_wait_ms: int = 10_000  #: lost work waits so long for its version, then starts over
    max_restarts: int = 3  #: of one process within restart_window_s, by who started it
    restart_window_s: float = 3_600.0
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
    store: StoreConfig = StoreConfig()
    weights: WeightsConfig = WeightsConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    repack: RepackConfig = RepackConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    emulation: EmulationConfig = EmulationConfig()

    @property
    def is_emulated(self) -> bool:
        """No model: engines, trainer, prompts and rewards take time and make up the rest."""
        return self.rollout.engine == "emulated"

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
        """Rewarded siblings below which a group is dropped."""
        return self.algorithm.min_scored or max(2, -(-self.rollout.group_size // 2))

    @property
    def mini_batch_groups(self) -> int:
        return self.algorithm.ppo_mini_batch_size or self.data.train_batch_size
