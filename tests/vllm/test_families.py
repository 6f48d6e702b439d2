"""Families that vLLM packs, renames or copies in its own ways: versions one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laminar.config import load_config
from laminar.training.learner import Learner
from laminar.training.model.policy import load_policy
from tests.vllm.replica import LIMIT, Replica
from tools.kit import family_models
from tools.kit.one_process import named_weights

pytestmark = pytest.mark.vllm

IDS = [[5, 17, 3, 88, 41, 2, 9, 100, 101, 33, 7, 50], list(range(40, 72))]
CLOSE = 1e-5


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("qwen3_moe", 1, marks=pytest.mark.vllm_ci),
        pytest.param("qwen3_moe", 2, marks=pytest.mark.long),
        ("gpt_oss", 1),
        ("gemma3", 1),
    ],
)
async def test_each_version_that_is_loaded_scores_as_the_trainer(
    kind: str, size: int, tmp_path: Path
) -> None:
    """Experts are packed again after each load; a swap of two of them shows in the scores."""
    model = family_models.write_family_model(kind, tmp_path / "model")
    given = {"model.name": str(model), "data.dataset": "spell_backward", "rollout.engine": "vllm"}
    given |= {"data.max_prompt_length": 64, "data.max_response_length": 64}
    given |= {"rollout.vllm.kv_cache_bytes": 1 << 24, "rollout.max_num_seqs": 16}
    config = load_config([given | {"rollout.vllm.tensor_parallel_size": size}])
    learner = Learner(config, load_policy(str(model), "cpu", tokenizer_size=LIMIT))
    replica = await Replica.start(tmp_path, config)
    try:
        for _ in range(3):
            versions = dict(named_weights(learner.policy.model))
            await replica.load(versions)
            assert await distance(replica, learner) < CLOSE
            with torch.no_grad():
                for parameter in learner.policy.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        if kind == "qwen3_moe":
            one, other = (f"model.layers.0.mlp.experts.{n}.down_proj.weight" for n in (0, 1))
            versions = dict(named_weights(learner.policy.model))
            await replica.load(versions | {one: versions[other], other: versions[one]})
            assert await distance(replica, learner) > 100 * CLOSE
    finally:
        await replica.engine.close()


async def distance(replica: Replica, learner: Learner) -> float:
    found = await replica.engine.compute_logprobs(IDS)
    expected = learner.compute_logprobs(IDS)
    return max(
        abs(one - other)
        for ours, theirs in zip(found, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
