"""The training step: from consumed trajectories to new weights.

Reads   TrainSamples in the order of their split into mini-batches, and the step's index
Gives   StepResult; changes the policy's weights and the optimizer's state in place

A step is one consumed batch: advantages over all of it, one or more mini-batches of whole groups,
one optimizer update each. Gradients are summed over micro-batches with coefficients of the whole
mini-batch, so the memory budget decides only how a batch is split. An update without signal, or
with a gradient that is not finite, is skipped: AdamW would still decay the weights and follow its
old momentum. Before the first update the rows are compared with what their engine recorded; rows of
an engine with other weights (engine_mismatch.py) are removed, and the step is made as if they had
never been in the batch. Rows whose advantage is exactly 0 are read only if another term gives them
a gradient. With a critic (critic.py) advantages come from its values before the step; its update
follows the policy's, on which it does not depend, and in the first trainer.critic_warmup steps it
is the only one. The step is a function of samples, weights, optimizer state and earlier steps; on a
CPU with one thread a repeated step gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from laminar.config import AlgorithmConfig, Config, ConfigError
from laminar.run.user_code import UserFunction
from laminar.training.algorithms.advantages import Estimator, with_penalties
from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.critic import Critic
from laminar.training.engine_mismatch import (
    MismatchLimits,
    count_siblings,
    gather_scores,
    get_rounding,
    measure_movement,
    movement_rows,
)
from laminar.training.metrics import (
    TokenFigures,
    batch_metrics,
    by_origin,
    count_skipped,
    memory_metrics,
    reward_by_version,
    token_metrics,
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
    select_unmasked,
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
from laminar.training.steps import (
    CRITIC_WARMUP,
    MISMATCH,
    NO_SIGNAL,
    StepResult,
    TrainSample,
    Update,
    ids_digest,
    sampled_by,
    select_one_per_origin,
)
from laminar.training.trainer_state import LearnerFacts, check_same


def no_point(name: str) -> None:
    """Ignore a failpoint: the default of `reached`."""


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    sample_ids: tuple[str, ...]
    counts: BatchCounts  #: of all sequences, read or not
    trained: list[TrainSample]  #: samples with a gradient
    scored: list[TrainSample]  #: samples without gradient, read to check their engines
    skipped: int  #: sequences without gradient that are not read
    micros: list[MicroBatch]  #: passes of this rank: first those of `trained`
    with_gradient: int  #: number of passes with a gradient

    @property
    def read(self) -> list[TrainSample]:
        return self.trained + self.scored


@dataclass(frozen=True, slots=True)
class _Batch:
    """Mini-batches, and all that is known of them before the first update."""

    minis: list[_MiniBatch]
    proximal: list[list[Tensor]]  #: the scores of each pass with the weights before the step
    figures: TokenFigures  #: complete with one mini-batch, else only the mismatch
    losses: tuple[float, float | None] | None  #: of a single mini-batch whose gradient is computed
    trains: bool  #: whether the policy is to be updated


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
        samples = with_penalties(_checked(samples, self.policy.vocab_limit), self.config)
        warm_up = self.config.trainer.critic_warmup
        rate = learning_rate(self.config.optim, max(0, step - warm_up), self.total_steps - warm_up)
        set_rate(self.optimizer, rate)
        if self.critic is not None:
            samples = self.critic.assign_values(samples)
        ready = self._estimator.assign_advantages(samples)
        batch = self._batch(ready, trains=step >= warm_up)
        mismatch = batch.figures.compute_mismatch()
        made = _oldest_behind(samples)
        suspects = self._limits.find_suspects(mismatch, made, count_siblings(samples), step)
        left_out = sampled_by(samples, suspects)
        trained = ready
        if left_out:
            ready = self._estimator.assign_advantages(samples, left_out)
            trained = [s for s in ready if s.sample_id not in left_out]
            batch = self._batch(trained, trains=step >= warm_up)
        updates, figures = self._updates(batch, step)
        of_critic = self._train_critic(trained, step)
        return StepResult(
            step=step,
            updates=updates,
            metrics=batch_metrics(ready, step)
            | token_metrics(figures)
            | _update_metrics(updates, self.policy.vocab_limit)
            | of_critic
            | {
                "actor/skipped_rows": float(sum(mini.skipped for mini in batch.minis)),
                "actor/lr": rate,
                "mismatch/left_out": float(len(left_out)),
                "mismatch/moved": self._limits.get_movement(step),
            }
            | by_origin(mismatch, batch.figures.went_on(), reward_by_version(samples)),
            mismatch=mismatch,
            suspects=suspects,
            left_out=left_out,
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
            _check_ids(f"sequence {i}", ids, self.policy.vocab_limit)
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

    def _prepare(self, samples: list[TrainSample]) -> _MiniBatch:
        truncated = self.config.algorithm.truncated
        return _mini_batch(samples, truncated, self._reads_all, self._passes)

    def _passes(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Build this rank's passes."""
        return build_passes(
            samples,
            self.config.trainer.micro_batch_tokens,
            self.policy.device,
            prompts_once=self.policy.reads_prompts_once(self.compute),
            ranks=self.ranks,
        )

    def _train_critic(self, samples: Sequence[TrainSample], step: int) -> dict[str, float]:
        """Train the critic, independent of the policy's update; `samples`: rows that count."""
        if self.critic is None or not samples:
            return {}
        self.reached("critic-update")
        self.optimizer.zero_grad(set_to_none=True)  # one model has gradients at a time
        return self.critic.train_step(samples, step)

    def _batch(self, ready: Sequence[TrainSample], *, trains: bool) -> _Batch:
        """Prepare everything before the first update; a single mini-batch includes its gradient.

        `ready`: samples with their advantages. `trains`: whether updates follow. With several
        mini-batches, the scores at the start of the step are taken; on the same micro-batches as in
        training, so that the ratio of the first mini-batch is exactly 1."""
        minis = [self._prepare(m) for m in mini_batches(ready, self.config.mini_batch_groups)]
        figures = TokenFigures()
        if len(minis) == 1 and trains:  # the current score is the one at the start of the step
            losses, scores = self._accumulate(minis[0], None, figures)
            proximal = [scores]
        else:
            proximal = [[self._proximal(micro, figures) for micro in mini.micros] for mini in minis]
            losses = None
        figures.join(self.ranks, [s for mini in minis for s in mini.read])
        return _Batch(minis, proximal, figures, losses, trains)

    def _proximal(self, micro: MicroBatch, figures: TokenFigures) -> Tensor:
        scores = score_micro_batch(self.policy, micro, self.compute)
        figures.add(micro, engine_mismatch(scores, micro.behaviour))
        return scores

    def _updates(self, batch: _Batch, step: int) -> tuple[tuple[Update, ...], TokenFigures]:
        """Make the updates and measure how far they move the policy."""
        self.reached("policy-update")
        if not batch.minis:
            self._limits.record_movement(step, 0.0)
            return (Update((), MISMATCH, 0.0, 0.0, None),), batch.figures
        if not batch.trains:
            self._limits.record_movement(step, 0.0)
            left = (Update(m.sample_ids, CRITIC_WARMUP, 0.0, 0.0, None) for m in batch.minis)
            return tuple(left), batch.figures
        trained = [s for mini in batch.minis for s in mini.trained]
        parts = movement_rows(trained, self.config.trainer.micro_batch_tokens)
        few = [s for part in parts for s in part]
        exact = self.compute.dtype == torch.float32  # else rounding depends on the other rows
        scored = _scored_passes(batch) if exact else self._scored(few)
        before = gather_scores(few, scored, self.ranks)
        figures = batch.figures if batch.losses else TokenFigures()
        updates = tuple(
            self._update(mini, batch.losses or self._accumulate(mini, scores, figures)[0])
            for mini, scores in zip(batch.minis, batch.proximal, strict=True)
        )
        if not batch.losses:
            figures.join(self.ranks, [s for mini in batch.minis for s in mini.read])
        distance = 0.0
        if any(u.skipped_reason is None for u in updates):
            distance = measure_movement(
                parts, before, gather_scores(few, self._scored(few), self.ranks)
            )
        self._limits.record_movement(step, distance)
        return updates, figures

    def _scored(self, samples: Sequence[TrainSample]) -> list[tuple[MicroBatch, Tensor]]:
        """Score these samples alone with the current weights; return passes and scores."""
        return [(m, score_micro_batch(self.policy, m, self.compute)) for m in self._passes(samples)]

    def _update(self, mini: _MiniBatch, losses: tuple[float, float | None]) -> Update:
        """Apply the accumulated gradient of one mini-batch, unless it is skipped."""
        reason: str | None = NO_SIGNAL
        norm = 0.0
        if mini.trained:
            norm, reason = apply_gradient(
                self.optimizer, self.policy.model, self.config.optim.clip_grad
            )
        return Update(mini.sample_ids, reason, norm, *losses)

    def _accumulate(
        self, mini: _MiniBatch, proximal: list[Tensor] | None, figures: TokenFigures
    ) -> tuple[tuple[float, float | None], list[Tensor]]:
        """Run forward and, with a gradient, backward over all passes; return losses and scores."""
        self.optimizer.zero_grad(set_to_none=True)
        pg_loss, kl_loss, found = 0.0, None if self.reference is None else 0.0, []
        for i, micro in enumerate(mini.micros):
            scores = proximal[i] if proximal is not None else None
            with torch.set_grad_enabled(i < mini.with_gradient):
                part = compute_objective(
                    self.policy, self.reference, micro, scores, mini.counts, self._objective
                )
            if i < mini.with_gradient:
                torch.autograd.backward(part.loss)
            found.append(part.scores)
            figures.add(micro, part.figures)
            pg_loss += float(part.pg_loss)
            if kl_loss is not None and part.kl_loss is not None:
                kl_loss += float(part.kl_loss)
        sums = torch.tensor([pg_loss, kl_loss or 0.0], dtype=torch.float64)
        pg_loss, kl_sum = self.ranks.all_reduce(sums).tolist()
        return (pg_loss, None if kl_loss is None else kl_sum), found


def _mini_batch(
    samples: list[TrainSample],
    truncated: str,
    reads_all: bool,
    passes_of: Callable[[Sequence[TrainSample]], list[MicroBatch]],
) -> _MiniBatch:
    """Count all samples, then select those that are read.

    A masked sequence stays in the counts and in its group's baseline, without a gradient. So does
    a sequence without advantage, if only the advantage gives a gradient: of these, one for each
    replica and version is scored, so that every engine is checked.
    """
    found = select_unmasked(samples, truncated)
    trained = [s for s in found if reads_all or np.any(s.advantage)]
    flat = [s for s in found if not (reads_all or np.any(s.advantage))]
    scored = select_one_per_origin(flat)
    passes_of_trained = passes_of(trained)
    return _MiniBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        counts=BatchCounts.from_samples(samples),
        trained=trained,
        scored=scored,
        skipped=len(flat) - len(scored),
        micros=passes_of_trained + passes_of(scored),
        with_gradient=len(passes_of_trained),
    )


def _reads_all(algorithm: AlgorithmConfig, policy_loss: PolicyLoss) -> bool:
    """Return whether a term other than its advantage may give a row a gradient."""
    other_terms = algorithm.use_kl_loss or algorithm.entropy_coeff != 0
    return other_terms or not policy_loss.needs_advantage


def _scored_passes(batch: _Batch) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Yield all passes with their scores before the updates."""
    for mini, scores in zip(batch.minis, batch.proximal, strict=True):
        yield from zip(mini.micros, scores, strict=True)


def _check_loaded(
    config: Config, reference: LoadedPolicy | BasePolicy | None, critic: LoadedPolicy | None
) -> None:
    if config.algorithm.use_kl_loss and reference is None:
        raise ConfigError("algorithm.use_kl_loss = true needs the reference model to be loaded")
    if config.has_critic != (critic is not None):
        raise ConfigError('a critic is loaded if and only if algorithm.adv_estimator = "gae"')


def _oldest_behind(samples: Sequence[TrainSample]) -> dict[int, int]:
    """Return by version the steps behind the oldest weights that its tokens depend on.

    A response that continued in flight may use a cache of those weights."""
    made: dict[int, int] = {}
    for sample in samples:
        for version in {span.weight_version for span in sample.spans}:
            made[version] = min(made.get(version, sample.version_step), sample.version_step)
    return made


def _checked(samples: Sequence[TrainSample], vocab_limit: int) -> Sequence[TrainSample]:
    if not samples:
        raise ValueError("the batch is empty; a training step needs at least one sample")
    if len({s.sample_id for s in samples}) != len(samples):
        raise ValueError("the batch has a sample id twice; sample ids must be unique")
    for sample in samples:
        _check_ids(f"the prompt of sample {sample.sample_id}", sample.prompt_ids, vocab_limit)
        _check_ids(f"the response of sample {sample.sample_id}", sample.read_ids, vocab_limit)
    return samples


def _check_ids(what: str, ids: np.ndarray, vocab_limit: int) -> None:
    if not len(ids):
        raise ValueError(f"{what} is empty")
    if ids.min() < 0 or ids.max() >= vocab_limit:
        raise ValueError(
            f"{what} has an id outside 0..{vocab_limit - 1}; engine and trainer must use one "
            "tokenizer"
        )


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


def _update_metrics(updates: Sequence[Update], vocab_limit: int) -> dict[str, float]:
    """Average over the step's mini-batches; the losses are already sums over their tokens."""
    found = {
        "actor/pg_loss": float(np.mean([u.pg_loss for u in updates])),
        "actor/grad_norm": float(np.mean([u.grad_norm for u in updates])),
        "actor/max_entropy": math.log(vocab_limit),
        **count_skipped("actor", [u.skipped_reason for u in updates]),
    }
    kl_losses = [u.kl_loss for u in updates if u.kl_loss is not None]
    return found | ({"actor/kl_loss": float(np.mean(kl_losses))} if kl_losses else {})


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
