"""The training step: from consumed trajectories to new weights.

Reads   TrainSamples in the order of their split into mini-batches, and the step's index
Gives   StepResult; changes the policy's weights and the optimizer's state in place

A step takes one StepBatch (step_batch.py) through six stages: advantages over all of it; a plan of
mini-batches of whole groups, each of one optimizer update; scores before the first update; their
comparison with what the engines recorded; updates; the report. The plan needs the advantages:
samples without one are read only if another term gives them a gradient. A single mini-batch is
scored by its own forward pass. Samples of an engine with other weights (engine_mismatch.py) are
left out, and the first three stages are repeated as if they had never been in the batch.

Gradients are summed over passes with coefficients of the whole mini-batch, so the memory budget
decides only how a batch is split. An update without signal, or with a gradient that is not finite,
is skipped: AdamW would still decay the weights and follow its old momentum. A critic (critic.py)
gives values before the step; its update follows the policy's, and in the first critic_warmup steps
it is the only one. The step is a function of samples, weights, optimizer state and earlier steps;
on a CPU with one thread a repeated step gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from laminar.config import Config, ConfigError
from laminar.training import engine_mismatch, metrics
from laminar.training.algorithms.advantages import Estimator, with_penalties
from laminar.training.critic import Critic
from laminar.training.metrics import TokenFigures
from laminar.training.model import footprint
from laminar.training.model.lora_targets import adapters_of
from laminar.training.model.micro_batches import (
    MicroBatch,
    micro_batches,
    mini_batches,
    pad_token_rows,
)
from laminar.training.model.packing import gather_tokens, make_pass_builder
from laminar.training.model.policy import (
    BasePolicy,
    Compute,
    LoadedPolicy,
    digest_base_weights,
    get_base_rows,
    recompute_layers,
)
from laminar.training.model.weight_files import VALUE_HEAD
from laminar.training.objective import (
    accumulate_gradient,
    compare_scores,
    make_objective_config,
    score_micro_batch,
)
from laminar.training.optimizer import apply_gradient, make_adamw, set_rate
from laminar.training.ranks import SINGLE_RANK, Ranks
from laminar.training.schedule import check_schedule, learning_rate
from laminar.training.step_batch import (
    MiniBatch,
    StepBatch,
    check_ids,
    check_samples,
    plan_mini_batch,
)
from laminar.training.steps import (
    NO_SIGNAL,
    StepResult,
    TrainSample,
    Update,
    ids_digest,
    sampled_by,
)
from laminar.training.trainer_state import LearnerFacts, check_same


def no_point(name: str) -> None:
    """Ignore a failpoint: the default of `reached`."""


class Learner:
    """Policy, optimizer, and depending on the settings reference (KL term) and critic (gae)."""

    reached: Callable[[str], None] = staticmethod(no_point)
    """Hook for failpoints (run/fail_points.py)."""

    def __init__(
        self,
        config: Config,
        policy: LoadedPolicy,
        *,
        reference: LoadedPolicy | BasePolicy | None = None,
        critic: LoadedPolicy | None = None,
        total_steps: int = 0,
        ranks: Ranks = SINGLE_RANK,
    ) -> None:
        """Set up; raises ConfigError. Only a decaying schedule needs the run's `total_steps`.

        `ranks`: this rank among several; each has the same config and rows of the same policy."""
        check_schedule(config.optim, total_steps - config.trainer.critic_warmup)
        _check_loaded(config, reference, critic)
        if policy.device.type == "cpu":
            torch.set_num_threads(config.trainer.threads)
        of_critic = _sizes(critic) if critic is not None else None
        way = footprint.way_of(config, gpu=policy.device.type == "cuda", critic=of_critic)
        if way.recomputes:
            for each in (policy, critic) if critic is not None else (policy,):
                recompute_layers(each.model)
        self.config, self.policy = config, policy
        self.reference = reference if config.algorithm.use_kl_loss else None
        self.total_steps, self.ranks = total_steps, ranks
        self._estimator = Estimator(config.algorithm)
        dtype = torch.bfloat16 if way.compute < footprint.FLOAT32 else torch.float32
        self.compute = Compute(dtype, way.chunk_tokens)
        self._objective = make_objective_config(config, self.compute, policy.model)
        self._build_passes = make_pass_builder(config, policy, self.compute, ranks)
        rounding = engine_mismatch.get_rounding(config, dtype)
        self._limits = engine_mismatch.MismatchLimits(rounding)
        self.optimizer = make_adamw(config.optim, policy.model)
        self.critic: Critic | None = None
        if critic is not None:
            self.critic = Critic(config, critic, self.compute, total_steps, ranks)
        needed = footprint.estimate_footprint(_sizes(policy), way)
        self.estimated_bytes = footprint.sum_bytes(needed.device)
        self.reference_digest = ""
        if self.reference is not None:
            self.reference_digest = _digest_of(self.reference)
            self.reference.cast_weights(self.compute.dtype)

    def train_step(self, samples: Sequence[TrainSample], step: int) -> StepResult:
        """Consume one batch as training step `step` (from 0).

        Groups are cut into mini-batches in the order given. Raises ValueError for an empty batch,
        a repeated sample id, a reward that is not finite or an id that is not in the tokenizer."""
        batch = self._open_batch(samples, step)
        self._assign_advantages(batch)
        self._plan_passes(batch)
        self._score_passes(batch)
        self._compare_engines(batch)
        if batch.left_out:
            self._assign_advantages(batch)
            self._plan_passes(batch)
            self._score_passes(batch)
        self._update_policy(batch)
        self._update_critic(batch)
        return self._report_step(batch)

    def _open_batch(self, samples: Sequence[TrainSample], step: int) -> StepBatch:
        """Check the samples and prepare them; set the learning rate."""
        check_samples(samples, self.policy.vocab_limit)
        samples = with_penalties(samples, self.config)
        warm_up = self.config.trainer.critic_warmup
        rate = learning_rate(self.config.optim, max(0, step - warm_up), self.total_steps - warm_up)
        set_rate(self.optimizer, rate)
        if self.critic is not None:
            samples = self.critic.assign_values(samples)
        return StepBatch(step, rate, trains_policy=step >= warm_up, samples=samples)

    def _assign_advantages(self, batch: StepBatch) -> None:
        """Stage 1: give each sample its advantage; 0 to those that are left out."""
        batch.samples = self._estimator.assign_advantages(batch.samples, batch.left_out)

    def _plan_passes(self, batch: StepBatch) -> None:
        """Stage 2: split the samples that are not left out into mini-batches and passes."""
        groups = self.config.mini_batch_groups
        batch.mini_batches = [self._plan_mini_batch(m) for m in mini_batches(batch.kept, groups)]

    def _plan_mini_batch(self, samples: list[TrainSample]) -> MiniBatch:
        truncated = self.config.algorithm.truncated
        return plan_mini_batch(samples, truncated, self._objective.reads_all, self._build_passes)

    def _score_passes(self, batch: StepBatch) -> None:
        """Stage 3: score all passes with the weights before the step.

        A single mini-batch gets its gradient with it. Several are scored on the same passes as in
        training, so that the ratio of the first one is exactly 1."""
        batch.figures, batch.losses = TokenFigures(), None
        if len(batch.mini_batches) == 1 and batch.trains_policy:
            batch.losses = self._accumulate(batch.mini_batches[0], batch.figures)
        else:
            for mini in batch.mini_batches:
                mini.proximal = [self._compare_pass(micro, batch.figures) for micro in mini.passes]
        batch.figures.join(self.ranks, batch.read)

    def _compare_engines(self, batch: StepBatch) -> None:
        """Stage 4: find the origins that differ too much from the trainer, and their samples."""
        batch.mismatch = batch.figures.compute_mismatch()
        batch.suspects = self._limits.find_suspects(
            batch.mismatch,
            engine_mismatch.find_oldest_steps(batch.samples),
            engine_mismatch.count_siblings(batch.samples),
            batch.step,
        )
        batch.left_out = sampled_by(batch.samples, batch.suspects)

    def _update_policy(self, batch: StepBatch) -> None:
        """Stage 5: make the updates and measure how far they move the policy."""
        self.reached("policy-update")
        batch.updates = batch.list_skipped_updates()
        moved = 0.0 if batch.updates else self._apply_updates(batch)
        self._limits.moved[batch.step] = moved

    def _update_critic(self, batch: StepBatch) -> None:
        """Stage 5, independent of the policy's update: train the critic."""
        if self.critic is None or not batch.mini_batches:
            return
        self.reached("critic-update")
        self.optimizer.zero_grad(set_to_none=True)  # one model has gradients at a time
        batch.critic_metrics = self.critic.train_step(batch.kept, batch.step)

    def _report_step(self, batch: StepBatch) -> StepResult:
        """Stage 6: return the metrics, and what became of each sample."""
        samples, continued = batch.samples, batch.figures.went_on()
        found = (
            metrics.batch_metrics(samples, batch.step)
            | metrics.token_metrics(batch.update_figures or batch.figures)
            | metrics.update_metrics(batch.updates, self.policy.vocab_limit)
            | self._objective.router_load.report_metrics(self.ranks)
            | batch.critic_metrics
            | {
                "actor/skipped_rows": float(sum(mini.skipped for mini in batch.mini_batches)),
                "actor/lr": batch.rate,
                "mismatch/left_out": float(len(batch.left_out)),
                "mismatch/moved": self._limits.moved[batch.step],
            }
            | metrics.by_origin(batch.mismatch, continued, metrics.reward_by_version(samples))
        )
        return StepResult(
            step=batch.step,
            updates=batch.updates,
            metrics=found,
            mismatch=batch.mismatch,
            suspects=batch.suspects,
            left_out=batch.left_out,
            num_tokens=sum(len(s.response_ids) for s in samples),
            digest=ids_digest(samples),
        )

    @torch.no_grad()
    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Return log-probs of tokens 1..L-1 per sequence; ValueError for empty or unknown ids."""
        arrays = [np.asarray(s, dtype=np.int32) for s in sequences]
        for i, ids in enumerate(arrays):
            check_ids(f"sequence {i}", ids, self.policy.vocab_limit)
        scores: list[list[float]] = [[] for _ in arrays]
        budget, device = self.config.trainer.micro_batch_tokens, self.policy.device
        for chosen in micro_batches([len(a) for a in arrays], budget):
            rows = pad_token_rows([arrays[i] for i in chosen], [1] * len(chosen), device)
            at = torch.full((len(rows.targets),), temperature, device=device)
            values = self.policy.log_probs(rows, at, self.compute).log_probs.cpu().numpy()
            for i, part in zip(chosen, np.split(values, np.cumsum(rows.counts)[:-1]), strict=True):
                scores[i] = part.tolist()
        return scores

    def collect_facts(self) -> LearnerFacts:
        """Collect the state that a checkpoint has in addition to parameters and optimizer."""
        functions = (self._objective.policy_loss.users, self._estimator.users)
        return LearnerFacts(
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            **self.ranks.layout._asdict(),
            micro_batch_tokens=self.config.trainer.micro_batch_tokens,
            logit_chunk_tokens=self.config.trainer.logit_chunk_tokens,
            prompts_once=self.policy.reads_prompts_once(self.compute),
            reference=self.reference_digest,
            critic=self.config.critic_name if self.critic is not None else "",
            functions={function.key: function.digest for function in functions if function},
            base=self.policy.base,
            adapters=adapters_of(self.config.lora),
            moved=dict(self._limits.moved),
        )

    def restore_facts(self, facts: LearnerFacts) -> None:
        """Restore that state from a checkpoint; raises ForeignError."""
        check_same(facts, self.collect_facts())
        self._limits.moved = dict(facts.moved)

    def _compare_pass(self, micro: MicroBatch, figures: TokenFigures) -> Tensor:
        """Score a pass, and add its difference from the engine to the figures."""
        scores = score_micro_batch(self.policy, micro, self.compute)
        figures.add(micro, compare_scores(scores, micro.behaviour))
        return scores

    def _accumulate(self, mini: MiniBatch, figures: TokenFigures) -> tuple[float, float | None]:
        """Compute the gradient of a mini-batch; return its losses, summed over all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = accumulate_gradient(self.policy, self.reference, mini, self._objective, figures)
        pg_loss, kl_loss = self.ranks.all_reduce(losses).tolist()
        return pg_loss, None if self.reference is None else kl_loss

    def _apply_updates(self, batch: StepBatch) -> float:
        """Update once for each mini-batch; return the movement of the policy, nats per doubt."""
        with_gradient = [s for mini in batch.mini_batches for s in mini.with_gradient]
        picks = engine_mismatch.movement_rows(with_gradient, self.config.trainer.micro_batch_tokens)
        picked = [s for pick in picks for s in pick]
        passes = [
            pair for m in batch.mini_batches for pair in zip(m.passes, m.proximal, strict=True)
        ]
        if self.compute.dtype != torch.float32:  # rounding depends on the other samples
            passes = self._score_alone(picked)
        before = gather_tokens(picked, passes, self.ranks)
        if batch.losses is not None:
            batch.updates = (self._apply_update(batch.mini_batches[0], batch.losses),)
        else:
            figures = batch.update_figures = TokenFigures()
            batch.updates = tuple(
                self._apply_update(mini, self._accumulate(mini, figures))
                for mini in batch.mini_batches
            )
            figures.join(self.ranks, batch.read)
        if all(u.skipped_reason for u in batch.updates):
            return 0.0
        after = gather_tokens(picked, self._score_alone(picked), self.ranks)
        return engine_mismatch.measure_movement(picks, before, after)

    def _score_alone(self, samples: Sequence[TrainSample]) -> list[tuple[MicroBatch, Tensor]]:
        """Score these samples with the current weights; return passes and scores."""
        passes = self._build_passes(samples)
        return [(micro, score_micro_batch(self.policy, micro, self.compute)) for micro in passes]

    def _apply_update(self, mini: MiniBatch, losses: tuple[float, float | None]) -> Update:
        """Apply the accumulated gradient of one mini-batch, unless it is skipped."""
        reason: str | None = NO_SIGNAL
        norm, clip = 0.0, self.config.optim.clip_grad
        if mini.with_gradient:
            norm, reason = apply_gradient(self.optimizer, self.policy.model, clip)
        return Update(mini.sample_ids, reason, norm, *losses)


def _check_loaded(
    config: Config, reference: LoadedPolicy | BasePolicy | None, critic: LoadedPolicy | None
) -> None:
    if config.algorithm.use_kl_loss and reference is None:
        raise ConfigError("algorithm.use_kl_loss = true needs the reference model to be loaded")
    if config.has_critic != (critic is not None):
        raise ConfigError('a critic is loaded if and only if algorithm.adv_estimator = "gae"')


def load_learner(
    config: Config,
    load: Callable[..., LoadedPolicy],
    load_critic: Callable[[str], LoadedPolicy],
    ranks: Ranks = SINGLE_RANK,
) -> Learner:
    """Load the models of a run; `load` takes a directory, and the run whose adapters it gets."""
    adapt = config if config.lora.rank else None
    policy = load(config.model.name, adapt=adapt)
    reference: LoadedPolicy | BasePolicy | None = None
    if config.algorithm.use_kl_loss:
        reference = load(config.model.name) if adapt is None else BasePolicy(policy)
    critic = load_critic(config.critic_name) if config.has_critic else None
    total = config.trainer.total_training_steps
    return Learner(
        config, policy, reference=reference, critic=critic, total_steps=total, ranks=ranks
    )


def run_measured_step(learner: Learner, samples: Sequence[TrainSample], step: int) -> StepResult:
    """Run a step and add memory metrics, which differ if the step is repeated."""
    result = learner.train_step(samples, step)
    memory = metrics.memory_metrics(learner.policy.device, learner.estimated_bytes)
    return replace(result, metrics=result.metrics | memory)


def replace_weights(learner: Learner, load: Callable[[], LoadedPolicy]) -> None:
    """Free the gradients and load weights of a model with the same tensors into their memory."""
    learner.optimizer.zero_grad(set_to_none=True)
    learner.policy.model.load_state_dict(load().model.state_dict())


def _digest_of(reference: LoadedPolicy | BasePolicy) -> str:
    return digest_base_weights(reference) if isinstance(reference, LoadedPolicy) else reference.base


def _sizes(policy: LoadedPolicy) -> footprint.ModelSizes:
    rows = get_base_rows(policy.model).items()
    shapes = {name: r.shape for name, r in rows if not name.startswith(VALUE_HEAD)}
    return footprint.sizes_of(policy.model.config.to_dict(), shapes)
