"""The settings of [algorithm]: how a step trains on a batch.

Gives   AlgorithmConfig; tree.py has all other sections
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from laminar.config.deciding import Decides
from laminar.config.declaring import Natural, NonNegative, Section, Share, doc, path_form

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class RolloutCorrectionConfig(Section, frozen=True, kw_only=True):
    bypass_mode: Annotated[
        bool, doc("true: the PPO ratio is to the behaviour policy, without importance weights")
    ] = False
    rollout_is: Annotated[
        Literal["token", "sequence", "none"], doc("importance weights from engine to trainer")
    ] = "token"
    rollout_is_threshold: Annotated[
        str, doc("cap of the weight; 0.5_5.0: a weight outside of these is 0 (IcePop)")
    ] = "2.0"
    rollout_rs: Annotated[
        str, doc("rules that mask tokens or sequences: seq_mean_k1,token_k2; see docs/training.md")
    ] = ""
    rollout_rs_threshold: Annotated[
        str, doc("bounds for each of rollout_rs, or for all: 0.99_1.01 for k1, else one number")
    ] = ""
    mismatch_limit: Annotated[
        NonNegative,
        doc(
            "samples of a replica and version are masked when their log-probs differ from the "
            "trainer's by more nats per token, staleness allowed for; 0: 1e-3 for float32, 0.15 "
            "for bfloat16; see docs/training.md"
        ),
    ] = 0.0


class PolicyLossConfig(Section, frozen=True, kw_only=True):
    loss_mode: Annotated[
        str,
        path_form("code:name"),
        doc(
            "vanilla (PPO), gspo, cispo, ... | your function as path.py:name; see docs/training.md"
        ),
    ] = "vanilla"
    options: Annotated[dict[str, Any], doc("loss parameters other than the clip ratios")] = {}


class FilterGroupsConfig(Section, frozen=True, kw_only=True):
    enable: Annotated[
        bool, doc("true: replace a prompt whose responses are all alike by another")
    ] = False
    metric: Annotated[
        Literal["score", "acc"],
        doc("compared values; acc: correctness"),
        Decides("filter_metric", absent=""),
    ] = "score"
    max_num_gen_batches: Annotated[
        Natural,
        doc("batches of such prompts in a row that end the run; 0: only the end of the data does"),
        Decides("filter_batches", absent=0),
    ] = 10

    @property
    def is_used(self) -> bool:
        return self.enable


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    adv_estimator: Annotated[
        str,
        path_form("code:name"),
        doc(
            "grpo, rloo, ..., gae (PPO, with a critic) | your function as path.py:name; see "
            "docs/training.md"
        ),
    ] = "grpo"
    norm_adv_by_std_in_grpo: Annotated[bool, doc("false: Dr. GRPO")] = True
    gamma: Annotated[Share, doc("with gae: discount factor per token")] = 1.0
    lam: Annotated[
        Share | Literal["adaptive"],
        doc("with gae: lambda of the advantages; adaptive: 1 - 20 / length, at least 0"),
    ] = 1.0
    clip_ratio_low: Annotated[
        NonNegative, doc("the PPO ratio is clipped below 1 - this; needs several mini-batches")
    ] = 0.2
    clip_ratio_high: Annotated[NonNegative, doc("the same above 1 + this (clip-higher)")] = 0.28
    clip_ratio_c: Annotated[float, Meta(ge=1), doc("dual clip for negative advantages")] = 3.0
    loss_agg_mode: Annotated[LossAggMode, doc("see docs/training.md")] = "token-mean"
    ppo_mini_batch_size: Annotated[Natural, doc("prompts; 0: train_batch_size")] = 0
    use_kl_loss: Annotated[bool, doc("true: a KL penalty towards model.name")] = False
    kl_loss_coef: Annotated[float, doc("weight of the KL penalty")] = 0.001
    kl_loss_type: Annotated[Literal["low_var_kl", "k2"], doc("low_var_kl is k3")] = "low_var_kl"
    entropy_coeff: Annotated[float, doc("weight of the entropy bonus")] = 0.0
    truncated: Annotated[
        Literal["train", "mask"], doc("treatment of responses cut off at the length limit")
    ] = "train"
    min_scored: Annotated[
        int,
        doc("scored responses below which a prompt is dropped; 0: half of group_size, at least 2"),
    ] = 0
    batch_strategy: Annotated[
        str,
        path_form("code:name"),
        doc(
            "deadline | priority | your function as path.py:name: which prompts make a batch; see "
            "docs/training.md"
        ),
        Decides(),
    ] = "deadline"
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
