"""Every setting of a run, by section: its key, its type and bounds, its default, its meaning.

Gives   Config, a tree of frozen structs

A key that takes a few words has a Literal; a number has its bounds in a Meta; `doc` holds the text
for the key in configs/reference.toml, which `python -m tools.make.reference_toml` makes. keys.py
checks one value by these declarations; rules over several keys are in rules.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from laminar.config.algorithm import AlgorithmConfig
from laminar.config.deciding import Decides
from laminar.config.declaring import (
    Count,
    Device,
    Dtype,
    Natural,
    NonNegative,
    Seconds,
    Section,
    doc,
    path_form,
)
from laminar.config.rollout import RolloutConfig
from laminar.config.tasks import AgentsConfig, EnvConfig, RewardConfig
from laminar.config.training import CriticConfig, LoraConfig, OptimConfig
from laminar.names.ids import is_trainer_node, node_index, trainer_node
from laminar.names.roles import NODE_ROLES, ROLE_TABLE, Place, Role

Port = Annotated[int, Meta(ge=0, le=65_535)]
RepackPolicy = Literal["auto", "gain", "best-fit", "off"]


class RunConfig(Section, frozen=True, kw_only=True):
    """The run directory, output_dir/name."""

    name: Annotated[str, doc("the run directory's name")] = "run"
    output_dir: Annotated[str, doc("the directory of run directories")] = "runs"
    mode: Annotated[
        Literal["0700", "0750", "0755"], doc("of a new run directory: who else may read it")
    ] = "0700"
    #: 127.0.0.1, 127.0.0.2, ... 127.0.0.254
    nodes: Annotated[
        Count,
        Meta(le=254),
        doc("machines of the run: `laminar train` emulates them here; `laminar submit` sets it"),
    ] = 1
    planned_gpus: Annotated[
        str, doc("GPUs of each machine for `laminar plan`: 8x80, H100:8; empty: this machine's")
    ] = ""


class ModelConfig(Section, frozen=True, kw_only=True):
    name: Annotated[
        str, path_form("model"), doc("a Hugging Face directory, or ORG/NAME[@REVISION] on the hub")
    ] = ""


class DataConfig(Section, frozen=True, kw_only=True):
    """The data: either dataset or train_files must be given."""

    dataset: Annotated[str, doc("a reasoning-gym dataset by its name")] = ""
    dataset_config: Annotated[dict[str, Any], doc("that dataset's own settings")] = {}
    dataset_size: Annotated[Count, doc("items of that dataset, held-out ones included")] = 20_000
    dataset_seed: Annotated[int, doc("the seed of these items")] = 42
    train_files: Annotated[
        list[str],
        path_form("file"),
        doc("training data: .jsonl, .parquet, or hf://datasets/ORG/NAME/FILE"),
    ] = []
    val_files: Annotated[
        list[str],
        path_form("file"),
        doc("held-out data; empty: val_size rows of the training data are held out"),
    ] = []
    val_size: Annotated[Natural, doc("held-out prompts; 0: no evaluation")] = 128
    prompt_key: Annotated[
        str, doc("the column of the prompt: a string or a list of chat messages")
    ] = "prompt"
    answer_key: Annotated[
        str,
        doc(
            "the column of the correct answer; empty: answer, label, ground_truth or "
            "reward_model.ground_truth"
        ),
    ] = ""
    system_prompt: Annotated[str, doc("a system message in front of every prompt")] = ""
    apply_chat_template: Annotated[
        bool, doc("false: a prompt string is tokenised without the chat template")
    ] = True
    apply_chat_template_kwargs: Annotated[
        dict[str, Any], doc("arguments of the chat template, such as { enable_thinking = false }")
    ] = {}
    max_prompt_length: Annotated[Count, doc("tokens of a prompt, at most")] = 512
    max_response_length: Annotated[Count, doc("tokens of a response, at most")] = 512
    filter_overlong_prompts: Annotated[
        bool, doc("true: leave longer prompts out; false: the run does not start with one")
    ] = False
    train_batch_size: Annotated[
        Count, doc("prompts of a step, each with group_size responses"), Decides("groups_per_step")
    ] = 16
    drop_last: Annotated[
        bool, doc("false: prompts left over at the end are a last, smaller batch"), Decides()
    ] = False
    shuffle: Annotated[bool, doc("true: a new order in every epoch"), Decides()] = True


class AsyncConfig(Section, frozen=True, kw_only=True):
    max_staleness: Annotated[
        Natural, doc("steps by which a sample's weights may be behind; 0: on-policy"), Decides()
    ] = 2


class TrainerConfig(Section, frozen=True, kw_only=True):
    total_training_steps: Annotated[
        Natural, doc("0: total_epochs passes over the data"), Decides("total_steps")
    ] = 0
    total_epochs: Annotated[Count, doc("used when total_training_steps is 0"), Decides()] = 1
    test_freq: Annotated[
        Natural, doc("steps from one evaluation to the next; 0: only first and last"), Decides()
    ] = 0
    critic_warmup: Annotated[
        Natural, doc("first steps that train the critic alone, and leave the policy as it is")
    ] = 0
    save_freq: Annotated[Natural, doc("steps between checkpoints; 0: none"), Decides(absent=0)] = 20
    save_minutes: Annotated[
        NonNegative, doc("longest time from one checkpoint to the next; 0: save_freq alone counts")
    ] = 10.0
    max_ckpt_to_keep: Annotated[Natural, doc("newest checkpoints that are kept; 0: all")] = 2
    max_nonfinite_updates: Annotated[
        Natural, doc("non-finite updates in a row that end the run; 0: never"), Decides(absent=0)
    ] = 10
    val_before_train: Annotated[bool, doc("evaluate before the first step"), Decides()] = True
    micro_batch_tokens: Annotated[
        Count, doc("tokens of one forward and backward pass, padding included")
    ] = 16_384
    logit_chunk_tokens: Annotated[
        Count, doc("scored tokens of a pass whose logits are in memory at a time")
    ] = 1024
    activation_checkpointing: Annotated[
        Literal["auto", "on", "off"],
        doc("layers compute their activations again in the backward pass; auto: on a GPU"),
    ] = "auto"
    batch_timeout_s: Annotated[
        float,
        Meta(ge=0.1),
        doc(
            "longest wait for a batch: then the trajectory it lacks is resumed elsewhere, or "
            "given up"
        ),
        Decides(),
    ] = 600.0
    logger: Annotated[
        list[Literal["tensorboard", "wandb", "prometheus"]],
        doc("outputs in addition to metrics.jsonl; [] for none"),
    ] = msgspec.field(default_factory=lambda: ["tensorboard"])
    project_name: Annotated[str, doc("the project in Weights & Biases")] = "laminar"
    device: Annotated[Device, doc("where the trainer computes")] = "auto"
    dtype: Annotated[
        Dtype, doc("compute type; auto: float32 on a CPU, bfloat16 autocast on a GPU")
    ] = "auto"
    threads: Annotated[Count, doc("torch threads of one rank of the trainer on a CPU")] = 1
    ranks: Annotated[
        Count,
        Meta(le=64),
        doc("processes of each trainer node that train the model, each with a GPU if available"),
    ] = 1
    nodes: Annotated[Count, Meta(le=64), doc("machines with trainer.ranks ranks each")] = 1
    shard: Annotated[
        Literal["auto", "node", "all"],
        doc(
            "ranks that the model is divided among: node: those of a node, and each node has all "
            "of it; all: those of all nodes; auto: node if its memory suffices"
        ),
    ] = "auto"
    offload: Annotated[
        Literal["none", "all"],
        doc("all: parameters, gradients and optimizer are in host memory, and a layer on the GPU"),
    ] = "none"
    collective_timeout_s: Annotated[
        Seconds, doc("the trainer ends if a rank does not reach a collective within this time")
    ] = 600.0

    @property
    def total_ranks(self) -> int:
        return self.nodes * self.ranks


class StoreConfig(Section, frozen=True, kw_only=True):
    payload_gb: Annotated[
        NonNegative,
        doc(
            "10^9 bytes of tokens and log-probs kept on disk; beyond it, the oldest that all kept "
            "checkpoints cover are removed; 0: all are kept"
        ),
    ] = 0.0


class WeightsConfig(Section, frozen=True, kw_only=True):
    dtype: Annotated[Dtype, doc("published type; auto: float32 on CPUs, bfloat16 on GPUs")] = "auto"
    slots: Annotated[int, Meta(ge=3), doc("versions that a relay holds in memory")] = 3
    max_bytes: Annotated[
        Natural, doc("shared memory of a relay; 0: half of what the job may take")
    ] = 0
    delta: Annotated[bool, doc("true: relays send a version's delta where it is smaller")] = True
    rate_mbit: Annotated[Natural, doc("Mbit/s from one relay to another, at most; 0: no limit")] = 0
    probe_tolerance: Annotated[
        float,
        doc(
            "mean log-prob difference, in nats per token, beyond which a replica refuses loaded "
            "weights; 0: 1e-4 for float32, 0.25 for bfloat16"
        ),
    ] = 0.0


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    host: Annotated[
        str,
        doc(
            "an address, a name or an interface of its machine that the others reach; auto: the "
            "name of its machine"
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, doc("0: any free port, written to the run directory")] = 0
    prometheus_port: Annotated[
        Port, doc("for logger prometheus; 0: any free port, written to prometheus.json")
    ] = 0
    heartbeat_ms: Annotated[
        int, Meta(ge=50), doc("interval between the heartbeats of a process")
    ] = 1_000
    lease_ms: Annotated[
        int, Meta(ge=150), doc("silence after which a replica or relay counts as lost")
    ] = 5_000
    node_lease_ms: Annotated[
        int, Meta(ge=150), doc("the same for a node, the store and the trainer")
    ] = 30_000
    coordinator_timeout_ms: Annotated[
        int, doc("a process without a coordinator ends after this")
    ] = 600_000
    start_timeout_s: Annotated[
        float, Meta(ge=1), doc("the run ends if a process does not join in this time"), Decides()
    ] = 300.0
    stall_timeout_s: Annotated[
        float,
        Meta(ge=1),
        doc("work remains, but nothing moves: what holds it up is restarted, later the run ends"),
    ] = 300.0
    log_keep_mb: Annotated[
        Natural, doc("0: the whole event log, as audit, report, retrain, fork and log why need it")
    ] = 0
    disk_full_timeout_s: Annotated[
        NonNegative, doc("wait for a full or failing disk; then the run ends"), Decides(absent=0)
    ] = 300.0


class RepackConfig(Section, frozen=True, kw_only=True):
    """Repack: a few replicas take over the last responses of others, which load new weights."""

    policy: Annotated[
        RepackPolicy,
        doc(
            "gain: where it saves time; best-fit: wherever it fits; auto: gain with two replicas "
            "or more, unless in flight"
        ),
        Decides("repack_policy", absent=""),
    ] = "auto"
    interval_ms: Annotated[
        Count,
        doc("interval between plans; a plan is also made for each new version"),
        Decides("repack_interval_ms", absent=0),
    ] = 5_000
    release_timeout_ms: Annotated[
        Count,
        doc("a replica hands its trajectories over in this time, or they move from saved tokens"),
        Decides("repack_release_timeout_ms", absent=0),
    ] = 2_000
    prefill_tokens_per_step: Annotated[
        Count,
        doc("tokens prefilled in the time of one decode step"),
        Decides("repack_prefill_tokens", absent=0),
    ] = 512

    @property
    def is_used(self) -> bool:
        return self.policy != "off"


class RecoveryConfig(Section, frozen=True, kw_only=True):
    resume_timeout_ms: Annotated[
        Natural, doc("a lost trajectory waits so long for its version, then starts over"), Decides()
    ] = 10_000
    max_restarts: Annotated[Natural, doc("restarts of one process within restart_window_s")] = 3
    restart_window_s: Annotated[
        float,
        Meta(ge=1),
        doc("the first restart in it is immediate, the next wait 1, 2, 4 ... 60 s"),
    ] = 3_600.0
    coordinator_restart_ms: Annotated[
        Natural, doc("pause before a dead coordinator is restarted")
    ] = 0


class SlurmConfig(Section, frozen=True, kw_only=True):
    """Resources that the run requests from Slurm; see docs/cluster.md."""

    partition: Annotated[str, doc("empty: the cluster's default")] = ""
    account: Annotated[str, doc("empty: your default")] = ""
    time: Annotated[
        str, doc("limit of each job, as Slurm writes it: 24:00:00; empty: the partition's")
    ] = ""
    gpus: Annotated[
        Natural, doc("GPUs of each machine; with them rollout.replicas is one for each engine")
    ] = 0
    cpus: Annotated[Natural, doc("CPUs of each machine; 0: what Slurm gives")] = 0
    mem: Annotated[
        str, doc("memory of each machine: 200G; empty: all of an exclusive machine, else Slurm's")
    ] = ""
    exclusive: Annotated[
        Literal["auto", "yes", "no"],
        doc("whether the run has its machines to itself; auto: with GPUs"),
    ] = "auto"
    rollouts: Annotated[
        Natural, Meta(le=253), doc("machines in addition to those with store and trainer")
    ] = 0
    spares: Annotated[Natural, doc("queued machines that replace lost rollout machines")] = 0
    trainer_spares: Annotated[
        Natural, Meta(le=64), doc("queued machines that replace lost ones of trainer.nodes")
    ] = 0
    setup: Annotated[str, doc("shell lines before Laminar starts: modules, an environment")] = ""
    launch: Annotated[str, doc("a program that starts Laminar: apptainer exec --nv IMAGE")] = ""
    extra: Annotated[list[str], doc('further options of sbatch: ["--qos=long"]')] = []
    signal_before_s: Annotated[
        Count, doc("seconds before the time limit at which the run is told to pause")
    ] = 300
    max_requeues: Annotated[Natural, doc("how often a paused job is requeued")] = 20
    chain: Annotated[
        bool, doc("each service queues a successor in advance; for clusters without requeueing")
    ] = False


class EmulationConfig(Section, frozen=True, kw_only=True):
    """Emulated engine, with rollout.engine = "emulated": no model, only waits of these lengths."""

    replicas_per_process: Annotated[Count, doc("each has its own connections")] = 1
    step_us: Annotated[float, Meta(ge=1), doc("one decode step, for any batch")] = 8_000.0
    sequence_us: Annotated[NonNegative, doc("added to a step by each sequence in it")] = 60.0
    token_us: Annotated[NonNegative, doc("added to a step by each token in the cache")] = 0.0
    prefill_tokens_per_s: Annotated[
        float, Meta(ge=1), doc("speed of prefill, for which all sequences of a replica wait")
    ] = 20_000.0
    kv_capacity_tokens: Annotated[Count, doc("tokens in a replica's cache")] = 1_000_000
    median_response: Annotated[
        Count, doc("tokens of the median response; the 99th percentile is ten times that")
    ] = 100
    train_s: Annotated[NonNegative, doc("one training step")] = 3.0
    weights_mb: Annotated[Count, doc("MiB of one version, really published and read")] = 8


class Config(Section, frozen=True, kw_only=True):
    """The whole tree. `async` is a Python keyword: key `async`, attribute `async_`."""

    seed: Annotated[Natural, doc("seed of every choice: prompts, sampling, batches"), Decides()] = 0
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    async_: AsyncConfig = msgspec.field(default=AsyncConfig(), name="async")
    reward: RewardConfig = RewardConfig()
    env: EnvConfig = EnvConfig()
    agents: AgentsConfig = AgentsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    store: StoreConfig = StoreConfig()
    weights: WeightsConfig = WeightsConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    repack: RepackConfig = RepackConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    slurm: SlurmConfig = SlurmConfig()
    emulation: EmulationConfig = EmulationConfig()

    @property
    def is_emulated(self) -> bool:
        """Whether no model is loaded: engines, trainer, prompts and rewards are emulated."""
        return self.rollout.engine == "emulated"

    @property
    def has_sessions(self) -> bool:
        """Whether trajectories have sessions: those of an environment, or those of an agent."""
        return bool(self.env.path or self.agents.label)

    def uses(self, part: Section) -> bool:
        return self.has_sessions if part is self.env else part.is_used

    @property
    def run_dir(self) -> Path:
        return Path(self.run.output_dir) / self.run.name

    def replicas_on(self, machine: int) -> int:
        """Return the replicas of one machine; the store and the trainer are on machine 0."""
        beside = self.rollout.replicas_on_trainer_node
        return self.rollout.replicas if machine or beside == "auto" else beside

    @property
    def node_names(self) -> list[str]:
        """The names of the run's nodes; those of the trainer come last."""
        others = [trainer_node(number) for number in range(1, self.trainer.nodes)]
        return [f"node-{number}" for number in range(self.run.nodes)] + others

    def processes_on(self, node: str) -> list[tuple[str, int]]:
        """Return the roles of one node with their numbers of processes."""
        if is_trainer_node(node):
            return [(Role.RANKS, 1)]
        machine = node_index(node)
        has = {Place.FIRST: machine == 0, Place.CHOSEN: self.has_host(machine)}
        return [
            (role, self.replicas_on(machine) if ROLE_TABLE[role].place == Place.SEVERAL else 1)
            for role in NODE_ROLES
            if has.get(ROLE_TABLE[role].place, ROLE_TABLE[role].place != Place.TRAINER_NODES)
        ]

    def has_host(self, machine: int) -> bool:
        """Return whether a machine has a host of agents."""
        hosts = self.agents.hosts
        chosen = machine < hosts if hosts else self.replicas_on(machine) > 0
        return self.has_sessions and chosen

    @property
    def total_replicas(self) -> int:
        return sum(map(self.replicas_on, range(self.run.nodes)))

    @property
    def max_model_len(self) -> int:
        """The tokens of prompt, response and tool results together that an engine must hold."""
        context = self.env.max_context_tokens if self.has_sessions else 0
        return self.rollout.max_model_len or (
            self.data.max_prompt_length + self.data.max_response_length + context
        )

    @property
    def max_sessions(self) -> Annotated[int, Decides(absent=0)]:
        """The sessions of one host: more than replicas generate, as many wait for tools.

        A draining replica waits for all of its sessions, so it has fewer.
        """
        if not self.has_sessions:
            return 0
        hosts = sum(map(self.has_host, range(self.run.nodes)))
        share = 4 if self.rollout.in_flight else 2
        most = (self.rollout.max_num_seqs + self.rollout.group_size) * self.total_replicas
        return self.agents.max_sessions or -(-share * most // max(hosts, 1))

    @property
    def runs_agents_once(self) -> Annotated[bool, Decides(absent=False)]:
        """Whether an agent that has started is never run again."""
        return bool(self.agents.label) and self.env.call_semantics == "at-most-once"

    @property
    def groups_per_version(self) -> Annotated[int, Decides()]:
        """New groups that one replica takes before it prefers newer weights; 0: no limit."""
        if self.rollout.in_flight:
            return 0
        return self.rollout.groups_per_version or (
            self.rollout.max_num_seqs // self.rollout.group_size
        )

    @property
    def min_scored(self) -> Annotated[int, Decides()]:
        """The rewarded siblings below which a group is dropped."""
        return self.algorithm.min_scored or max(
            self.least_siblings, -(-self.rollout.group_size // 2)
        )

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from the values of a critic, which is trained with the policy."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def critic_name(self) -> str:
        """The model that the critic begins as."""
        return self.critic.model.name or self.model.name

    @property
    def least_siblings(self) -> int:
        """The minimum siblings of a group from which advantages can be made."""
        return 1 if self.has_critic else 2

    @property
    def mini_batch_groups(self) -> int:
        return self.algorithm.ppo_mini_batch_size or self.data.train_batch_size
