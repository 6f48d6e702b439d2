"""Pre-flight checks: find every mistake that can be found before anything starts.

Reads   the config; the model's directory, the data, the reward file; the hub, for its names
Gives   RunPlan: the config with paths for hub names and resolved "auto" settings, and the facts
        that a user wants to see first
Raises  ConfigError with one sentence that names the subject, the value and the fix
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.config import AlgorithmConfig, Config, ConfigError, replace_keys
from laminar.config.algorithm_rules import list_user_functions
from laminar.config.families import select_text_tensors
from laminar.coordinator.strategy import load_strategy
from laminar.core.steps.batching import STRATEGIES
from laminar.engines.check import (
    EMBEDDING_SUFFIX,
    check_embedding,
    check_engine,
    count_gpus,
    weight_shapes,
)
from laminar.engines.environment import (
    check_capability,
    check_driver,
    count_free_replicas,
    gpus_per_replica,
    list_gpus,
    visible_gpus,
)
from laminar.engines.hf_config import read_hf_config, refuse_packed_weights
from laminar.engines.protocol import EngineError
from laminar.launch.emulated_note import EMULATED
from laminar.launch.reward_check import ROWS, Sample, trial_calls
from laminar.net.addresses import ip_of
from laminar.net.descriptors import check_room
from laminar.observe.wandb_run import check_wandb
from laminar.run.child_process import call_isolated
from laminar.tasks.data.chat import Tools, check_prompts, encode_prompt, has_template, warn_turn_end
from laminar.tasks.data.decoding import make_response_decoder
from laminar.tasks.data.hub import localize_config
from laminar.tasks.data.prompts import PromptRow, PromptSet, load_prompts
from laminar.tasks.data.tokenizer import end_ids, get_tokenizer_size, load_tokenizer
from laminar.tasks.environments.renderer import Renderer
from laminar.tasks.environments.tool_calls import CallParser
from laminar.tasks.environments.user_class import decode_tools, load_declaration
from laminar.tasks.import_check import check_import
from laminar.tasks.rewards.results import RewardCall, RewardSpec
from laminar.tasks.rewards.reward_functions import check_rows, reward_spec
from laminar.tasks.row_checks import row_warnings
from laminar.training.model.lora_targets import check_lora

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIAL_S = 120.0  #: time limit of the trial of the user's loss and estimator
LONGEST_PROMPTS = 64
"""Number of longest texts tokenised here; the store checks all, with the same messages."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run."""

    config: Config
    num_train: int
    num_held_out: int
    overlap: int
    steps: int  #: 0 until the data is filtered
    first_prompt: str
    first_prompt_ids: list[int]
    is_wrapped: bool  #: whether the first prompt is a string in the chat template
    end_ids: list[int]
    reward: RewardSpec
    trial: list[RewardCall]  #: trial calls of the reward, before anything starts
    resets: list[PromptRow]  #: rows of the environment's trial
    data_digest: str  #: empty for emulated data
    warnings: dict[str, str]  #: by kind, for conditions that do not stop a run


def check_settings(config: Config, *, here: bool = True, alone: bool = False) -> Config:
    """Check everything that does not need the data; replace hub names by paths.

    Only the hub's files are written. `here`: the run will use this machine, so its resources are
    checked, too; `alone`: it has no other.
    """
    check_directory(config.run_dir)
    _check_loggers(config)
    if alone:
        _check_local_ranks(config)
    if here:
        check_machine(config)
    if not config.is_emulated:
        config = localize_config(config)
        check_model(config, here=here)
        check_critic(config)
        check_import(
            config.reward.custom_reward_function.path, "reward.custom_reward_function.path"
        )
        for path in dict.fromkeys(entry.path for entry in config.reward.functions):
            check_import(path, "reward.functions.path")
        check_import(config.agents.run.rpartition(":")[0], "agents.run")
        check_functions(config.algorithm)
    _check_strategy(config)
    return config


def check_machine(config: Config) -> None:
    """Check that this machine has the ports, open files and devices that the run needs."""
    _check_port(config, "coordinator.port", config.coordinator.port)
    if "prometheus" in config.trainer.logger:
        _check_port(config, "coordinator.prometheus_port", config.coordinator.prometheus_port)
    check_room(run_size(config))
    if not config.is_emulated:
        check_devices(config)


def look_at_data(config: Config, prompts: PromptSet | None = None) -> RunPlan:
    """Check all of the data, the tokenizer and the reward, without writing; return the plan.

    `prompts`: the data, if loaded.
    """
    if config.is_emulated:
        return emulated_plan(config)
    spec, tokenizer = reward_spec(config), load_tokenizer(config.model.name)
    from laminar.training.model.policy import check_files  # imports torch, as tokenizers do

    check_tokenizer(config.model.name, tokenizer)
    check_files(config)
    config, scores_itself = look_at_environment(config, spec, tokenizer)
    prompts = prompts or load_prompts(config.data, with_columns=config.has_sessions)
    tools = decode_tools(config.env)
    if not scores_itself:
        check_rows(spec, [*prompts.train, *prompts.held_out])
    _check_longest_prompts(config, tokenizer, prompts.train, tools)
    ids = encode_prompt(tokenizer, first := prompts.train[0], config.data, tools)
    config = replace_keys(config, {"reward.scope": spec.scope})
    ends = end_ids(config.model.name, tokenizer)
    return RunPlan(
        config=config,
        num_train=len(prompts.train),
        num_held_out=len(prompts.held_out),
        overlap=prompts.overlap,
        steps=planned_steps(config, len(prompts.train)),
        first_prompt=str(tokenizer.decode(ids)),
        first_prompt_ids=ids,
        is_wrapped=isinstance(first.prompt, str) and has_template(tokenizer, config.data),
        end_ids=sorted(ends),
        reward=spec,
        trial=trial_calls(
            spec,
            [] if scores_itself or spec.takes_environments else prompts.train,
            response_sampler(tokenizer, ends),
            config.rollout.group_size,
        ),
        resets=prompts.train[:ROWS] if config.has_sessions else [],
        data_digest=prompts.digest,
        warnings=row_warnings(tokenizer, prompts, spec, config.data)
        | warn_turn_end(tokenizer, config.data, sorted(ends)),
    )


def _check_longest_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow], tools: Tools
) -> None:
    if not config.data.filter_overlong_prompts:
        longest = sorted(rows, key=lambda row: -len(str(row.prompt)))[:LONGEST_PROMPTS]
        check_prompts(tokenizer, longest, config.data, tools)


def response_sampler(tokenizer: PreTrainedTokenizerBase, ends: Container[int]) -> Sample:
    """Return a function from a text to a response with it, as the run would read it."""
    decode = make_response_decoder(tokenizer, ends)

    def sample(text: str) -> tuple[str, list[int]]:
        ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        return decode(ids), ids

    return sample


def look_at_environment(
    config: Config, spec: RewardSpec, tokenizer: PreTrainedTokenizerBase
) -> tuple[Config, bool]:
    """Return the config with the environment's tools, and whether the environment scores.

    An agent may score, so that functions are checked only if the config names them.
    """
    if config.agents.label:
        reward = config.reward
        named = reward.kind != "auto" or reward.functions or reward.custom_reward_function.path
        return config, not (named or config.data.dataset)
    if not config.env.path:
        return config, False
    declared, has_reward = load_declaration(config.env)
    config = replace_keys(config, {"env.tools": declared})
    tools = decode_tools(config.env)
    ends = end_ids(config.model.name, tokenizer)
    Renderer(tokenizer, config.data, tools, ends).check_template(CallParser(tokenizer, tools))
    return config, has_reward


def emulated_plan(config: Config) -> RunPlan:
    """Return the plan of an emulated run, which needs no checks."""
    scope = "group" if config.reward.scope == "group" else "trajectory"
    num_train = config.data.dataset_size - config.data.val_size
    return RunPlan(
        config=replace_keys(config, {"reward.scope": scope}),
        num_train=num_train,
        num_held_out=config.data.val_size,
        overlap=0,
        steps=planned_steps(config, num_train),
        first_prompt="emulated",
        first_prompt_ids=[],
        is_wrapped=False,
        end_ids=[],
        reward=RewardSpec(scope, []),
        trial=[],
        resets=[],
        data_digest="",
        warnings={"emulated": EMULATED},
    )


def planned_steps(config: Config, num_train: int) -> int:
    """Return the number of steps if no group is dropped."""
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    groups = num_train * config.trainer.total_epochs
    per_step = config.data.train_batch_size
    return groups // per_step if config.data.drop_last else -(-groups // per_step)


def check_directory(run_dir: Path) -> None:
    """Check that the directory can be created in its nearest existing parent."""
    above = next(path for path in run_dir.absolute().parents if os.path.lexists(path))
    if not above.is_dir():
        problem = f"{above} is not a directory"
    elif not os.access(above, os.W_OK | os.X_OK):
        problem = f"{above} cannot be written"
    else:
        return
    raise ConfigError(
        f"run directory {run_dir} cannot be made: {problem}; choose another run.output_dir"
    )


def check_devices(config: Config) -> None:
    """Check that a requested CUDA device exists; "auto" takes whatever is available."""
    devices = {"trainer.device": config.trainer.device, "rollout.device": config.rollout.device}
    asked = [key for key, device in devices.items() if device == "cuda"]
    if asked:
        _check_cuda(asked)
    if set(devices.values()) != {"cpu"} and visible_gpus() and count_gpus():
        check_capability(config, list_gpus())
    ranks = config.trainer.ranks
    if config.trainer.device != "cpu" and ranks > 1 and 0 < (gpus := count_gpus()) < ranks:
        raise ConfigError(
            f"trainer.ranks = {ranks} exceeds the {gpus} GPUs available on this machine, and each "
            "rank needs one: give at most as many"
        )


def _check_local_ranks(config: Config) -> None:
    """Check that trainer nodes can share this machine, as all nodes of `laminar train` do."""
    nodes = config.trainer.nodes
    if nodes > 1 and config.trainer.device != "cpu" and visible_gpus():
        raise ConfigError(
            f"trainer.nodes = {nodes} on one machine with GPUs: NCCL needs a GPU for each rank, "
            "so each trainer node is a separate machine; use `laminar submit`, or "
            "trainer.device=cpu to try it here"
        )


def find_idle_gpus(config: Config) -> dict[str, str]:
    """Return a warning if the run leaves GPUs of this machine unused."""
    if config.is_emulated or config.rollout.device == "cpu" or not (gpus := len(visible_gpus())):
        return {}
    ranks, replicas, size = config.trainer.ranks, config.rollout.replicas, gpus_per_replica(config)
    if (more := count_free_replicas(gpus, ranks, size)) <= replicas:
        return {}
    return {
        "idle-gpus": f"{(more - replicas) * size} of the {gpus} GPUs of this machine stay "
        f"idle: the trainer has {ranks} and {replicas} replicas have the others; set "
        f"rollout.replicas to {more}, or hide the rest by CUDA_VISIBLE_DEVICES"
    }


def _check_cuda(asked: list[str]) -> None:
    import torch  # takes longer to load than all the rest

    if not torch.cuda.is_available():
        for gpu in list_gpus():
            check_driver(torch.version.cuda, gpu.driver)
        raise ConfigError(
            f"{asked[0]} = 'cuda', but PyTorch {torch.__version__} finds no CUDA GPU on this "
            "machine; use 'auto' or 'cpu', or install a PyTorch for its driver"
        )


def check_critic(config: Config) -> None:
    """Check that the critic's initial model fits the policy's tokenizer."""
    if (name := config.critic.model.name) in ("", config.model.name):
        return
    key = f"critic.model.name = {name!r}"
    if not Path(name).is_dir():
        raise ConfigError(
            f"{key} is not a directory; give the path of a Hugging Face model with the tokenizer "
            "of model.name, its name on the hub, ORG/NAME, or leave it out"
        )
    from transformers import CONFIG_MAPPING  # seconds to import, as in load_tokenizer

    of_policy = load_tokenizer(config.model.name)
    try:
        limits, shapes = read_hf_config(name), weight_shapes(name)
        refuse_packed_weights(limits)
        check_embedding(limits, shapes)
        same = load_tokenizer(name).get_vocab() == of_policy.get_vocab()
    except (ConfigError, EngineError) as error:
        raise ConfigError(f"{key} cannot be a critic: {error}") from None
    if not same:
        raise ConfigError(
            f"{key} has another tokenizer than model.name = {config.model.name!r}: the critic "
            "reads the policy's ids; give a model of the same family, or leave it out"
        )
    rows = next((s[0] for n, s in shapes.items() if n.endswith(EMBEDDING_SUFFIX)), 0)
    if not rows or limits.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError(
            f"{key} has the model_type {limits.get('model_type')!r}, and a critic is a decoder of "
            f"transformers with {EMBEDDING_SUFFIX}: give one such as Qwen3, or leave it out"
        )
    if rows < (ids := get_tokenizer_size(of_policy)):
        raise ConfigError(
            f"{key} has {rows} embeddings, and the tokenizer of model.name = "
            f"{config.model.name!r} has ids up to {ids - 1}; give a model that knows them all"
        )
    if (most := limits.get("max_position_embeddings") or 0) < config.max_model_len:
        raise ConfigError(
            f"{key} reads {most} tokens at most, and data.max_prompt_length + "
            f"data.max_response_length allow {config.max_model_len}; give a longer model"
        )


def check_functions(algorithm: AlgorithmConfig, limit_s: float = TRIAL_S) -> None:
    """Call the user's loss and estimator, if any, on made-up sequences, in another process."""
    named = list_user_functions(algorithm)
    if not named:
        return
    names = " or ".join(f"{key} = {reference!r}" for key, reference in named.items())
    call_isolated(
        "laminar.training.function_check",
        [],
        limit_s,
        algorithm,
        late=f"{names} takes longer than {limit_s:g} s for a few made-up sequences; correct it",
        ended=f"{names} ends the process that calls it",
        advice="a file of functions must not end its process",
    )


def check_model(config: Config, *, here: bool) -> None:
    name = config.model.name
    if not Path(name).is_dir():
        raise ConfigError(
            f"model.name = {name!r} is not a directory; give the path of a Hugging Face model "
            "(config.json, model.safetensors, tokenizer.json), or its name on the hub, ORG/NAME"
        )
    check_engine(config, here=here)
    if config.lora.rank:
        kind = read_hf_config(name).get("model_type")
        check_lora(config.lora, select_text_tensors(kind, weight_shapes(name)))


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the embedding has a row for every id of the tokenizer."""
    embedding = (s for n, s in weight_shapes(name).items() if n.endswith(EMBEDDING_SUFFIX))
    rows = next(embedding, (0,))[0]
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if rows and largest >= rows:
        raise ConfigError(
            f"model.name = {name!r}: its tokenizer gives {token!r} the id {largest}, but the "
            f"embedding in the weight files has {rows} rows; save the model again after "
            f"resize_token_embeddings({largest + 1}), or remove the token from tokenizer.json"
        )


def run_size(config: Config) -> int:
    """Return the number of processes that connect to the coordinator, nodes included."""
    names = config.node_names
    return sum(1 + sum(dict(config.processes_on(name)).values()) for name in names)


def _check_strategy(config: Config) -> None:
    if config.algorithm.batch_strategy not in STRATEGIES:
        check_import(config.algorithm.batch_strategy.rpartition(":")[0], "algorithm.batch_strategy")
        load_strategy(config.algorithm.batch_strategy)


def _check_loggers(config: Config) -> None:
    if "wandb" in config.trainer.logger:
        check_wandb()


def _check_port(config: Config, key: str, port: int) -> None:
    host = ip_of(config.coordinator.host, "coordinator.host")
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return  # the address of the machine where the coordinator will run
            raise ConfigError(
                f"{key} = {port} cannot be used on {host} ({error.strerror}); choose "
                "another, or 0 for any free one"
            ) from None
