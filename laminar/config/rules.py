"""Rules over several keys, and checks beyond the declaration of a single key.

Reads   the whole tree
Raises  ConfigError, which names the keys, their values and the fix
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

from laminar.config.algorithm_rules import check_algorithm, is_users
from laminar.config.keys import ConfigError
from laminar.config.tree import Config

STEP_TRAJECTORIES_MAX = 1 << 19
"""The maximum trajectories of one batch, sent in one message: at most 30 bytes each of 15 MiB."""
QUESTION_BYTES_MAX = 14 << 20
"""The maximum bytes of a request to a user's batch strategy, which is one message, too."""
BUILT_IN_STRATEGIES = ("deadline", "priority")  #: values of algorithm.batch_strategy
EMULATED_TOKENS_MAX = 1 << 16
"""The maximum tokens of a prompt or response: emulated tokens repeat after this many."""
MACHINES_MAX = 253  #: the maximum machines of a run without the first: the highest number of a node
CONFIG_CHARS_MAX = 1 << 20
"""The maximum characters of the configuration, which every coordinator writes to the event log."""


def check_together(c: Config) -> None:
    """Check the rules over several keys (each error has the values and the fix)."""
    if c.is_emulated:
        _check_emulated(c)
    elif bool(c.data.dataset) == bool(c.data.train_files):
        raise ConfigError(
            "give exactly one of data.dataset (a reasoning-gym name) and data.train_files"
        )
    _check_place(c)
    if not (c.model.name or c.is_emulated):
        raise ConfigError("model.name is empty; give the directory of a Hugging Face model")
    _check_group(c)
    _check_update(c)
    _check_sampling(c)
    _check_batches(c)
    _check_sizes(c)
    _check_reward(c)
    _check_environment(c)
    check_algorithm(c)
    _check_critic(c)
    if c.store.payload_gb and not c.trainer.save_freq:
        raise ConfigError(
            f"store.payload_gb = {c.store.payload_gb:g} with trainer.save_freq = 0: only what a "
            "checkpoint covers can go; give trainer.save_freq, or store.payload_gb = 0"
        )
    context = c.env.max_context_tokens if c.has_sessions else 0
    longest = c.data.max_prompt_length + c.data.max_response_length + context
    if c.max_model_len < longest:
        of_tools = " + env.max_context_tokens" if context else ""
        raise ConfigError(
            f"rollout.max_model_len = {c.rollout.max_model_len} is smaller than "
            f"data.max_prompt_length + data.max_response_length{of_tools} = {longest}"
        )
    _check_leases(c)
    _check_machines(c)
    _check_slurm(c)


def _check_group(c: Config) -> None:
    if c.rollout.max_num_seqs < c.rollout.group_size:
        raise ConfigError(
            f"rollout.max_num_seqs = {c.rollout.max_num_seqs} is smaller than "
            f"rollout.group_size = {c.rollout.group_size}; a replica must hold one whole group"
        )
    if c.rollout.group_size < c.least_siblings:
        raise ConfigError(
            f"rollout.group_size = {c.rollout.group_size}: a group-relative advantage needs "
            'at least 2 siblings, and algorithm.adv_estimator = "gae" one'
        )


def _check_critic(c: Config) -> None:
    """Check that critic settings have a critic, and that the policy is trained at some time."""
    warmup, total = c.trainer.critic_warmup, c.trainer.total_training_steps
    if 0 < total <= warmup:
        raise ConfigError(
            f"trainer.critic_warmup = {warmup} leaves no step of trainer.total_training_steps = "
            f"{total} to the policy: lower one or raise the other"
        )
    if c.has_critic:
        return
    given = {"critic.model.name": c.critic.model.name, "trainer.critic_warmup": warmup}
    if not is_users(c.algorithm.adv_estimator):  # a function of the user may read them
        given |= {"algorithm.gamma": c.algorithm.gamma != 1, "algorithm.lam": c.algorithm.lam != 1}
    if key := next((key for key, value in given.items() if value), ""):
        raise ConfigError(
            f"{key} is for a critic, and algorithm.adv_estimator = "
            f"{c.algorithm.adv_estimator!r} has none: set it to gae (PPO), or remove {key}"
        )


def _check_update(c: Config) -> None:
    """Check the loading of weights against settings that exclude it."""
    rollout = c.rollout
    if rollout.load == "stream" and rollout.engine == "vllm":
        raise ConfigError(
            'rollout.load = "stream" with rollout.engine = "vllm", which loads whole versions '
            'only; give rollout.load = "whole" or "auto", or rollout.engine = "torch"'
        )
    if not rollout.in_flight:
        return
    if c.repack.policy != "off":
        raise ConfigError(
            f'rollout.weight_update = "in-flight" with repack.policy = {c.repack.policy!r}: '
            "weight updates in flight empty no replica, so there is nothing to repack; set "
            'repack.policy = "off" or rollout.weight_update = "drain"'
        )
    if rollout.groups_per_version:
        raise ConfigError(
            f'rollout.weight_update = "in-flight" with rollout.groups_per_version = '
            f"{rollout.groups_per_version}: in flight a replica takes as many prompts as the "
            "staleness bound and its slots allow; give rollout.groups_per_version = 0"
        )


def _check_leases(c: Config) -> None:
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


def _check_machines(c: Config) -> None:
    """Check that some machine has replicas, and that Slurm's are not too many."""
    asked = c.slurm
    if not (c.total_replicas or asked.rollouts):
        raise ConfigError(
            "rollout.replicas_on_trainer_node = 0 leaves this run without any replica: give "
            "machines that have some, by run.nodes or slurm.rollouts"
        )
    if asked.spares and not asked.rollouts:
        raise ConfigError(
            f"slurm.spares = {asked.spares}, but slurm.rollouts = 0: spares replace rollout "
            "machines; give some, or no spares"
        )
    if asked.trainer_spares and c.trainer.nodes == 1:
        raise ConfigError(
            f"slurm.trainer_spares = {asked.trainer_spares}, but trainer.nodes = 1: these spares "
            "replace trainer nodes after the first; give some, or no spares"
        )
    if 0 < asked.gpus < c.trainer.ranks:
        raise ConfigError(
            f"trainer.ranks = {c.trainer.ranks} exceeds slurm.gpus = {asked.gpus}, and all ranks "
            "of a trainer node are on one machine, each with its GPU: raise one, or lower the "
            "other and give more trainer.nodes"
        )
    if (tasks := asked.rollouts + asked.spares) > MACHINES_MAX:
        raise ConfigError(
            f"slurm.rollouts + slurm.spares = {tasks}, and a run has at most {MACHINES_MAX} "
            "machines after the first: lower one of them"
        )


def _check_slurm(c: Config) -> None:
    """Check that the Slurm settings can be passed to Slurm."""
    asked = c.slurm
    limit_s = slurm_seconds(asked.time) if asked.time else math.inf
    if limit_s is None:
        raise ConfigError(
            f"slurm.time = {asked.time!r} is not a time of Slurm: write hours:minutes:seconds, or "
            "days-hours:minutes:seconds"
        )
    if limit_s <= asked.signal_before_s:
        raise ConfigError(
            f"slurm.time = {asked.time!r} is not longer than slurm.signal_before_s = "
            f"{asked.signal_before_s}, the seconds that a run has to pause before it: "
            "raise one or lower the other"
        )
    for option in asked.extra:
        if not option.startswith("-") or not option.isprintable():
            raise ConfigError(
                f"slurm.extra has {option!r}, which sbatch does not accept: write --qos=long"
            )
    for key in ("partition", "account", "mem"):
        if not re.fullmatch(r"[\w.,@+-]*", value := getattr(asked, key)):
            raise ConfigError(f"slurm.{key} = {value!r} has a character that Slurm does not accept")


def slurm_seconds(time: str) -> int | None:
    """Return the seconds of a Slurm time, such as 90 (minutes), 1:30:00, 2-12:00; else None."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:  # hours follow the days
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_emulated(c: Config) -> None:
    """Check for settings that an emulated run cannot have."""
    for key in ("ranks", "nodes"):
        if (count := getattr(c.trainer, key)) > 1:
            raise ConfigError(
                f'trainer.{key} = {count} with rollout.engine = "emulated": an emulated trainer '
                "has no model to divide; give 1"
            )
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
    """Check that the run can be one directory in run.output_dir."""
    name = c.run.name
    usable = name.strip() not in ("", ".", "..") and name.isprintable() and len(name) <= 200
    if not usable or "/" in name or name.startswith("-"):
        raise ConfigError(
            f"run.name = {name!r:.100} is not a directory name; use letters, digits, '_', '.' and "
            "'-', and set its place with run.output_dir"
        )
    if c.run.output_dir.startswith("~"):
        raise ConfigError(
            f"run.output_dir = {c.run.output_dir!r}: a ~ is not expanded here; write the whole path"
        )


def _check_sampling(c: Config) -> None:
    """Check for sampling filters, which the trainer cannot mirror in training."""
    if c.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {c.rollout.temperature} must be above 0 for training; "
            "rollout.val_kwargs.temperature = 0 makes evaluation greedy"
        )
    val = c.rollout.val_kwargs
    if val.n > 1 and val.temperature <= 0:
        raise ConfigError(
            f"rollout.val_kwargs.n = {val.n} greedy responses to a prompt would all be the same: "
            "set rollout.val_kwargs.temperature above 0, or n = 1"
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
            f"reward.functions has the weights {weights}: each must be a finite number, and at "
            "least one not 0"
        )
    if c.reward.kind == "custom" and not c.reward.custom_reward_function.path:
        raise ConfigError("reward.kind = 'custom' needs reward.custom_reward_function.path")
    longest = c.data.max_response_length
    if (tokens := c.reward.overlong_buffer.len) >= longest:
        raise ConfigError(
            f"reward.overlong_buffer.len = {tokens} is not below data.max_response_length = "
            f"{longest}, so every response would lose reward: lower one or raise the other"
        )


def _check_environment(c: Config) -> None:
    """Check an environment's or agent's settings, and that no call waits longer than its batch."""
    env = c.env
    if not c.has_sessions:
        if env != type(env)():
            raise ConfigError("[env] has settings, but env.path is empty: name the file of a class")
        return
    named = f"env.path = {env.path!r}" if env.path else c.agents.label
    if c.is_emulated:
        raise ConfigError(
            f'{named} with rollout.engine = "emulated": emulated tokens call no tool; remove one '
            "of them"
        )
    if not c.data.apply_chat_template:
        raise ConfigError(
            f"{named} with data.apply_chat_template = false: the chat template writes tools and "
            "their results; set it to true"
        )
    if c.reward.scope == "group":
        raise ConfigError(
            f'{named} with reward.scope = "group": siblings end their turns one by one; give "auto"'
        )
    if c.agents.label:
        _check_agent(c)
    _check_nesting(c)
    hosts = sum(map(c.has_host, range(c.run.nodes)))
    if c.agents.hosts > c.run.nodes:
        raise ConfigError(
            f"agents.hosts = {c.agents.hosts} is more than run.nodes = {c.run.nodes}: lower it, or "
            "give 0"
        )
    if c.max_sessions * hosts < c.rollout.group_size:
        raise ConfigError(
            f"agents.max_sessions = {c.agents.max_sessions} on {hosts} hosts is less than "
            f"rollout.group_size = {c.rollout.group_size}: no group can start; raise it, or give 0"
        )


def _check_agent(c: Config) -> None:
    """Check that nothing else names sessions, or writes the messages of an agent."""
    if c.env.path or c.env.name:
        raise ConfigError(
            f"env.path = {c.env.path!r} and {c.agents.label} both name what has the turns: remove "
            "one of them"
        )
    if c.agents.run and c.agents.command:
        raise ConfigError(
            f"agents.run = {c.agents.run!r} and {c.agents.label} both name the agent: remove one"
        )
    if c.agents.run and not all(c.agents.run.rpartition(":")[::2]):
        raise ConfigError(f"agents.run = {c.agents.run!r} is not of the form path.py:function")
    if c.data.system_prompt:
        raise ConfigError(
            f"data.system_prompt has no effect with {c.agents.label}, as an agent writes its "
            "messages: remove it"
        )


def _check_nesting(c: Config) -> None:
    """Check that a call ends before its turn, its trajectory, and the wait for a batch."""
    limits = [
        ("env.tool_timeout_s", c.env.tool_timeout_s),
        ("env.turn_timeout_s", c.env.turn_timeout_s),
        ("env.trajectory_timeout_s", c.env.trajectory_timeout_s),
        ("trainer.batch_timeout_s", c.trainer.batch_timeout_s),
    ]
    for (inner, shorter), (outer, longer) in pairwise(limits[1:] if c.agents.label else limits):
        if shorter >= longer:
            raise ConfigError(
                f"{inner} = {shorter:g} must be shorter than {outer} = {longer:g}, which includes "
                "it: lower one or raise the other"
            )


def _check_batches(c: Config) -> None:
    groups, mini = c.data.train_batch_size, c.mini_batch_groups
    if mini > groups or groups % mini:
        raise ConfigError(
            f"algorithm.ppo_mini_batch_size = {mini} must divide "
            f"data.train_batch_size = {groups} (both count prompts)"
        )
    if not c.least_siblings <= c.min_scored <= c.rollout.group_size:
        raise ConfigError(
            f"algorithm.min_scored = {c.min_scored} must lie between {c.least_siblings} and "
            f"rollout.group_size = {c.rollout.group_size}"
        )


def _check_sizes(c: Config) -> None:
    """Check what one message to the trainer, the store or a user's strategy can hold."""
    groups, size = c.data.train_batch_size, c.rollout.group_size
    if groups * size > STEP_TRAJECTORIES_MAX:
        raise ConfigError(
            f"data.train_batch_size * rollout.group_size = {groups} * {size} = {groups * size} "
            f"trajectories are too many for one step: give at most {STEP_TRAJECTORIES_MAX}"
        )
    waiting = groups * (c.async_.max_staleness + 1)
    question = waiting * (120 + 9 * size)  # bytes; a strategy's data of each group
    if c.algorithm.batch_strategy in BUILT_IN_STRATEGIES or question <= QUESTION_BYTES_MAX:
        return
    raise ConfigError(
        f"algorithm.batch_strategy = {c.algorithm.batch_strategy!r} would be asked about as many "
        f"as {waiting} groups at once (data.train_batch_size * (async.max_staleness + 1)), "
        f"{question} bytes where {QUESTION_BYTES_MAX} are allowed: use one of "
        f"{', '.join(BUILT_IN_STRATEGIES)}, or make one of the three smaller"
    )
