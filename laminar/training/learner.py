"""The training step: from consumed trajectories to new weights.

Reads   TrainSamples in the order of their split into mini-batches, and the step's index
Gives   StepResult; changes the policy's weights and the optimizer's state in place

A step takes one StepBatch (step_batch.py) through six stages: advantages over all of it; a plan of
mini-batches of whole groups, each of one optimizer update; scores before the first update; their
comparison with what the engines recorded; updates; the report. The plan needs the advantages:
samples whose advantage is exactly 0 are read only if another term gives them a gradient. With a
single mini-batch, the scores are those of its own forward pass. Samples of an engine with other
weights (engine_mismatch.py) are left out, and the first three stages are repeated as if they had
never been in the batch.

Gradients are summed over passes with coefficients of the whole mini-batch, so the memory budget
decides only how a batch is split. An update without signal, or with a gradient that is not finite,
is skipped: AdamW would still decay the weights and follow its old momentum. With a critic
(critic.py) advantages come from its values before the step; its update follows the policy's, on
which it does not depend, and in the first trainer.critic_warmup steps it is the only one. The step
is a function of samples, weights, optimizer state and earlier steps; on a CPU with one thread a
repeated step gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from laminar.config import AlgorithmConfig, Config, ConfigError
from laminar.run.user_file import UserFunction
from laminar.training.algorithms.advantages import Estimator, with_penalties
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.critic import Critic
from laminar.training.engine_mismatch import (
    MismatchLimits,
    count_siblings,
    find_oldest_steps,
    gather_scores,
    get_rounding,
    measure_movement,
    movement_rows,
)
from laminar.training.metrics import (
    TokenFigures,
    batch_metrics,
    by_origin,
    memory_metrics,
    reward_by_version,
    token_metrics,
    update_metrics,
)
from laminar.training.model.footprint import (
    FLOAT32,
    ModelSizes,
    TrainingPlan,
    estimate_footprint,
    sizes_of,
    sum_bytes,
    way_of,
)
from laminar.training.model.lora_targets import adapters_of
from laminar.training.model.micro_batches import (
    MicroBatch,
    micro_batches,
    mini_batches,
    pad_token_rows,
)
from laminar.training.model.packing import build_passes
from laminar.training.model.policy import (
    VALUE_HEAD,
    BasePolicy,
    Compute,
    LoadedPolicy,
    digest_base_weights,
    get_base_weights,
    recompute_layers,
)
from laminar.training.objective import (
    ObjectiveConfig,
    compute_objective,
    engine_mismatch,
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
        way = _way(config, policy, critic)
        if way.recomputes:
            for trained in (policy, critic) if critic is not None else (policy,):
                recompute_layers(trained.model)
        self.config, self.policy = config, policy
        self.reference = reference if config.algorithm.use_kl_loss else None
        self.total_steps, self.ranks = total_steps, ranks
        self._estimator = Estimator(config.algorithm)
        loss, response_max = PolicyLoss(config.algorithm), config.data.max_response_length
        self._objective = ObjectiveConfig(config.algorithm, loss, response_max, _compute(way))
        self.compute = self._objective.compute
        self._reads_all = _reads_all(config.algorithm, self._objective.policy_loss)
        self._limits = MismatchLimits(get_rounding(config, self.compute.dtype))
        self.optimizer = make_adamw(config.optim, policy.model)
        self.critic: Critic | None = None
        if critic is not None:
            self.critic = Critic(config, critic, self.compute, total_steps, ranks)
        footprint = estimate_footprint(_sizes(policy), way)
        self.estimated_bytes = sum_bytes(footprint.device)
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
        return plan_mini_batch(samples, truncated, self._reads_all, self._build_passes)

    def _score_passes(self, batch: StepBatch) -> None:
        """Stage 3: score all passes with the weights before the step.

        A single mini-batch gets its gradient with it. Several are scored on the same passes as in
        training, so that the ratio of the first one is exactly 1."""
        batch.figures, batch.losses = TokenFigures(), None
        if len(batch.mini_batches) == 1 and batch.trains_policy:
            batch.losses = self._accumulate_gradient(batch.mini_batches[0], batch.figures)
        else:
            for mini in batch.mini_batches:
                mini.proximal = [self._compare_pass(micro, batch.figures) for micro in mini.passes]
        batch.figures.join(self.ranks, batch.read)

    def _compare_engines(self, batch: StepBatch) -> None:
        """Stage 4: find the origins that differ too much from the trainer, and their samples."""
        batch.mismatch = batch.figures.compute_mismatch()
        batch.suspects = self._limits.find_suspects(
            batch.mismatch,
            find_oldest_steps(batch.samples),
            count_siblings(batch.samples),
            batch.step,
        )
        batch.left_out = sampled_by(batch.samples, batch.suspects)

    def _update_policy(self, batch: StepBatch) -> None:
        """Stage 5: make the updates and measure how far they move the policy."""
        self.reached("policy-update")
        batch.updates = batch.list_skipped_updates()
        moved = 0.0 if batch.updates else self._apply_updates(batch)
        self._limits.record_movement(batch.step, moved)

    def _update_critic(self, batch: StepBatch) -> None:
        """Stage 5, independent of the policy's update: train the critic."""
        if self.critic is None or not batch.mini_batches:
            return
        self.reached("critic-update")
        self.optimizer.zero_grad(set_to_none=True)  # one model has gradients at a time
        batch.critic_metrics = self.critic.train_step(batch.kept, batch.step)

    def _report_step(self, batch: StepBatch) -> StepResult:
        """Stage 6."""
        samples, continued = batch.samples, batch.figures.went_on()
        metrics = (
            batch_metrics(samples, batch.step)
            | token_metrics(batch.update_figures or batch.figures)
            | update_metrics(batch.updates, self.policy.vocab_limit)
            | batch.critic_metrics
            | {
                "actor/skipped_rows": float(sum(mini.skipped for mini in batch.mini_batches)),
                "actor/lr": batch.rate,
                "mismatch/left_out": float(len(batch.left_out)),
                "mismatch/moved": self._limits.get_movement(batch.step),
            }
            | by_origin(batch.mismatch, continued, reward_by_version(samples))
        )
        return StepResult(
            step=batch.step,
            updates=batch.updates,
            metrics=metrics,
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
        budget = self.config.trainer.micro_batch_tokens
        for chosen in micro_batches([len(a) for a in arrays], budget):
            rows = pad_token_rows(
                [arrays[i] for i in chosen], [1] * len(chosen), self.policy.device
            )
            at = torch.full((len(rows.targets),), temperature, device=self.policy.device)
            values = self.policy.log_probs(rows, at, self.compute).log_probs.cpu().numpy()
            for i, part in zip(chosen, np.split(values, np.cumsum(rows.counts)[:-1]), strict=True):
                scores[i] = part.tolist()
        return scores

    def collect_facts(self) -> LearnerFacts:
        """Collect the state that a checkpoint has in addition to parameters and optimizer."""
        return LearnerFacts(
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            ranks=self.ranks.size,
            micro_batch_tokens=self.config.trainer.micro_batch_tokens,
            logit_chunk_tokens=self.config.trainer.logit_chunk_tokens,
            prompts_once=self.policy.reads_prompts_once(self.compute),
            reference=self.reference_digest,
            critic=self.config.critic_name if self.critic is not None else "",
            functions=_digests(self._objective.policy_loss.users, self._estimator.users),
            base=self.policy.base,
            adapters=adapters_of(self.config.lora),
            moved=self._limits.movements,
        )

    def restore_facts(self, facts: LearnerFacts) -> None:
        """Restore that state from a checkpoint; raises ForeignError."""
        check_same(facts, self.collect_facts())
        self._limits.restore_movements(facts.moved)

    def _build_passes(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Build this rank's passes."""
        return build_passes(
            samples,
            self.config.trainer.micro_batch_tokens,
            self.policy.device,
            prompts_once=self.policy.reads_prompts_once(self.compute),
            ranks=self.ranks,
        )

    def _compare_pass(self, micro: MicroBatch, figures: TokenFigures) -> Tensor:
        """Score a pass, and add its difference from the engine to the figures."""
        scores = score_micro_batch(self.policy, micro, self.compute)
        figures.add(micro, engine_mismatch(scores, micro.behaviour))
        return scores

    def _accumulate_gradient(
        self, mini: MiniBatch, figures: TokenFigures
    ) -> tuple[float, float | None]:
        """Run forward and, with a gradient, backward over all passes; return the losses.

        Without proximal scores, the passes' own become the mini-batch's."""
        self.optimizer.zero_grad(set_to_none=True)
        pg_loss, kl_loss, scores = 0.0, None if self.reference is None else 0.0, []
        for i, micro in enumerate(mini.passes):
            proximal = mini.proximal[i] if mini.proximal is not None else None
            with torch.set_grad_enabled(i < mini.gradient_passes):
                objective = compute_objective(
                    self.policy, self.reference, micro, proximal, mini.counts, self._objective
                )
            if i < mini.gradient_passes:
                torch.autograd.backward(objective.loss)
            scores.append(objective.scores)
            figures.add(micro, objective.figures)
            pg_loss += float(objective.pg_loss)
            if kl_loss is not None and objective.kl_loss is not None:
                kl_loss += float(objective.kl_loss)
        mini.proximal = scores
        sums = torch.tensor([pg_loss, kl_loss or 0.0], dtype=torch.float64)
        pg_loss, kl_sum = self.ranks.all_reduce(sums).tolist()
        return pg_loss, None if kl_loss is None else kl_sum

    def _apply_updates(self, batch: StepBatch) -> float:
        """Update once for each mini-batch; return the movement of the policy, nats per doubt."""
        picks = movement_rows(batch.with_gradient, self.config.trainer.micro_batch_tokens)
        picked = [s for pick in picks for s in pick]
        exact = self.compute.dtype == torch.float32  # else rounding depends on the other samples
        before = gather_scores(
            picked, batch.scored_passes if exact else self._score_alone(picked), self.ranks
        )
        if batch.losses is not None:
            batch.updates = (self._apply_update(batch.mini_batches[0], batch.losses),)
        else:
            figures = batch.update_figures = TokenFigures()
            batch.updates = tuple(
                self._apply_update(mini, self._accumulate_gradient(mini, figures))
                for mini in batch.mini_batches
            )
            figures.join(self.ranks, batch.read)
        if all(u.skipped_reason for u in batch.updates):
            return 0.0
        after = gather_scores(picked, self._score_alone(picked), self.ranks)
        return measure_movement(picks, before, after)

    def _score_alone(self, samples: Sequence[TrainSample]) -> list[tuple[MicroBatch, Tensor]]:
        """Score these samples with the current weights; return passes and scores."""
        passes = self._build_passes(samples)
        return [(micro, score_micro_batch(self.policy, micro, self.compute)) for micro in passes]

    def _apply_update(self, mini: MiniBatch, losses: tuple[float, float | None]) -> Update:
        """Apply the accumulated gradient of one mini-batch, unless it is skipped."""
        reason: str | None = NO_SIGNAL
        norm = 0.0
        if mini.with_gradient:
            norm, reason = apply_gradient(
                self.optimizer, self.policy.model, self.config.optim.clip_grad
            )
        return Update(mini.sample_ids, reason, norm, *losses)


def _reads_all(algorithm: AlgorithmConfig, policy_loss: PolicyLoss) -> bool:
    """Return whether a term other than its advantage may give a row a gradient."""
    other_terms = algorithm.use_kl_loss or algorithm.entropy_coeff != 0
    return other_terms or not policy_loss.needs_advantage


def _check_loaded(
    config: Config, reference: LoadedPolicy | BasePolicy | None, critic: LoadedPolicy | None
) -> None:
    if config.algorithm.use_kl_loss and reference is None:
        raise ConfigError("algorithm.use_kl_loss = true needs the reference model to be loaded")
    if config.has_critic != (critic is not None):
        raise ConfigError('a critic is loaded if and only if algorithm.adv_estimator = "gae"')


def run_measured_step(learner: Learner, samples: Sequence[TrainSample], step: int) -> StepResult:
    """Run a step and add memory metrics, which differ if the step is repeated."""
    result = learner.train_step(samples, step)
    memory = memory_metrics(learner.policy.device, learner.estimated_bytes)
    return replace(result, metrics=result.metrics | memory)


def _digests(*functions: UserFunction | None) -> dict[str, str]:
    """Return the digests of the user's files, by setting."""
    return {function.key: function.digest for function in functions if function is not None}


def replace_weights(learner: Learner, load: Callable[[], LoadedPolicy]) -> None:
    """Free the gradients and load weights of a model with the same tensors into their memory."""
    learner.optimizer.zero_grad(set_to_none=True)
    learner.policy.model.load_state_dict(load().model.state_dict())


def _digest_of(reference: LoadedPolicy | BasePolicy) -> str:
    return digest_base_weights(reference) if isinstance(reference, LoadedPolicy) else reference.base


def _way(config: Config, policy: LoadedPolicy, critic: LoadedPolicy | None) -> TrainingPlan:
    """Derive the training plan of the models on this device."""
    of_critic = _sizes(critic) if critic is not None else None
    return way_of(config, gpu=policy.device.type == "cuda", critic=of_critic)


def _compute(way: TrainingPlan) -> Compute:
    return Compute(torch.bfloat16 if way.compute < FLOAT32 else torch.float32, way.chunk_tokens)


def _sizes(policy: LoadedPolicy) -> ModelSizes:
    tensors = get_base_weights(policy.model).items()
    shapes = {name: tuple(t.shape) for name, t in tensors if not name.startswith(VALUE_HEAD)}
    return sizes_of(policy.model.config.to_dict(), shapes)
