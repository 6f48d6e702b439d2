"""Rows that hold a prompt once: loss and gradient of padded rows, with fewer tokens read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from laminar.config import Config
from laminar.storage.rules import TokenSpan
from laminar.training.algorithms.loss_terms import BatchCounts
from laminar.training.algorithms.policy_losses import PolicyLoss
from laminar.training.learner import Learner
from laminar.training.model import policy as policy_model
from laminar.training.model import shared_prefix_attention, shared_prefix_attention_cuda
from laminar.training.model.micro_batches import SequenceRun, SharedPrompt
from laminar.training.model.packing import build_passes
from laminar.training.model.policy import Compute, LoadedPolicy, load_policy
from laminar.training.model.shared_prefix_attention import find_padding_reason, read_prompts_once
from laminar.training.objective import ObjectiveConfig, compute_objective, score_micro_batch
from laminar.training.ranks import Ranks
from laminar.training.steps import TrainSample

Make = Callable[..., Any]
CPU = torch.device("cpu")
VOCAB = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
KINDS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "llama": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


def policy_of(kind: str, seed: int = 0) -> LoadedPolicy:
    torch.manual_seed(seed)
    eager = "eager"  # the default for experts lacks float64
    model = AutoModelForCausalLM.from_config(KINDS[kind], experts_implementation=eager)
    model = model.double().eval()
    read_prompts_once(model)
    return LoadedPolicy(model, VOCAB, prompts_once=True)


def ragged(seed: int) -> list[TrainSample]:
    """Groups and responses of one, prompts of one, equal lengths, several temperatures; some of two
    turns."""
    rng = np.random.default_rng(seed)
    found = []
    for g in range(rng.integers(1, 5)):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 30)).astype(np.int32)
        for k in range(rng.integers(1, 8)):
            length = int(rng.choice(np.array([1, 2, 7, rng.integers(1, 40)])))
            several = length > 2 and g % 2 == 0
            context = np.arange(5, 8 + k, dtype=np.int32)
            found.append(
                TrainSample(
                    sample_id=f"{g}.{k}",
                    group_id=str(g),
                    prompt_ids=prompt,
                    response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                    logprobs=-(rng.random(length) * 5).astype(np.float32),
                    reward=0.0,
                    temperature=float(rng.choice([0.7, 1.3])),
                    truncated=bool(k == 1),
                    spans=(TokenSpan("rollout-0", 0, 0, length),),
                    advantage=float(rng.normal()),
                    turns=(2, length - 2) if several else (),
                    contexts=(context,) if several else (),
                )
            )
    return found


@pytest.fixture
def float64_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax in float64, too: what differs is then the rows."""
    monkeypatch.setattr(
        policy_model,
        "log_softmax_at",
        lambda logits, temperature: torch.log_softmax(logits / temperature[:, None], -1),
    )


def gradient_of(
    policy: LoadedPolicy,
    reference: LoadedPolicy | None,
    samples: list[TrainSample],
    max_tokens: int,
    config: Config,
    *,
    prompts_once: bool,
) -> tuple[float, Tensor]:
    """Loss and gradient over all passes."""
    counts = BatchCounts(sum(len(s.response_ids) for s in samples), len(samples))
    policy.model.zero_grad()
    loss = 0.0
    policy_loss = PolicyLoss(config.algorithm)
    settings = ObjectiveConfig(config.algorithm, policy_loss, 40, Compute(torch.float32, 64))
    for micro in build_passes(samples, max_tokens, CPU, prompts_once=prompts_once):
        part = compute_objective(policy, reference, micro, None, counts, settings)
        torch.autograd.backward(part.loss)
        loss += float(part.loss.detach())
    return loss, torch.cat(
        [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    )


def apart(kind: str, seeds: range, make_config: Make) -> float:
    """The largest difference of a gradient, relative in norm; a quarter of the batches have a KL
    term and an entropy bonus, and two thirds have passes that a group does not fit into."""
    policy, reference = policy_of(kind), policy_of(kind, seed=1)
    plain = make_config({"algorithm.loss_agg_mode": "seq-mean-token-mean"})
    with_terms = make_config({"algorithm.use_kl_loss": True, "algorithm.entropy_coeff": 0.1})
    found = []
    for seed in seeds:
        samples = ragged(seed)
        anchor, config = (reference, with_terms) if seed % 4 == 0 else (None, plain)
        (loss, gradient), (padded_loss, padded) = (
            gradient_of(policy, anchor, samples, budget, config, prompts_once=once)
            for once, budget in ((True, (20, 64, 4096)[seed % 3]), (False, 4096))
        )
        assert loss == pytest.approx(padded_loss, rel=1e-12)
        found.append(float((gradient - padded).norm() / padded.norm()))
    return max(found)


@pytest.mark.usefixtures("float64_scores")
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_padded_rows(kind: str, make_config: Make) -> None:
    assert apart(kind, range(12), make_config) <= 2e-7


@pytest.mark.long
@pytest.mark.usefixtures("float64_scores")
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_over_300_batches(kind: str, make_config: Make) -> None:
    assert apart(kind, range(300), make_config) <= 2e-7


def test_a_step_is_that_of_padded_rows(
    make_model: Make, make_config: Make, make_samples: Make
) -> None:
    """Two mini-batches, so with proximal scores; movement, masks, chunks, layers computed again."""
    samples = make_samples(groups=4, siblings=5)
    found = []
    for once in (True, False):
        config = make_config(
            {
                "data.train_batch_size": 4,
                "algorithm.ppo_mini_batch_size": 2,
                "algorithm.truncated": "mask",
                "algorithm.use_kl_loss": True,
                "trainer.micro_batch_tokens": 60,
                "trainer.logit_chunk_tokens": 7,
                "trainer.activation_checkpointing": "on",
                "optim.lr": 0.01,
                "optim.eps": 0.1,
            }
        )
        models = make_model(0), make_model(1)
        for model in models if once else ():
            read_prompts_once(model)
        policy, reference = (LoadedPolicy(model, VOCAB, once) for model in models)
        learner = Learner(config, policy, reference=reference)
        results = [learner.train_step(samples, step) for step in range(2)]
        found.append([result.metrics for result in results])
        found[-1].append({n: p.sum().item() for n, p in models[0].named_parameters()})
        assert learner.collect_facts().prompts_once == once
    for once_figures, padded_figures in zip(*found, strict=True):
        assert once_figures == pytest.approx(padded_figures, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 30, 64, 4096])
def test_every_sample_is_in_one_pass_within_the_budget(max_tokens: int) -> None:
    samples = [s for seed in range(20) for s in ragged(seed)]
    samples = [replace(s, sample_id=str(i)) for i, s in enumerate(samples)]
    found = build_passes(samples, max_tokens, CPU, prompts_once=True)
    assert sorted(i for micro in found for i in micro.sample_ids) == sorted(
        map(str, range(len(samples)))
    )
    for micro in found:
        assert micro.rows.input_ids.numel() <= max_tokens or len(micro.sample_ids) == 1
        assert micro.rows.targets.tolist() == [
            int(token) for i in micro.sample_ids for token in samples[int(i)].response_ids
        ]
    apart = sum(s.length for s in samples)
    if max_tokens == 4096:
        assert sum(micro.rows.input_ids.numel() for micro in found) < 0.5 * apart


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_reads_whole_groups_unless_there_are_too_few(size: int, make_samples: Make) -> None:
    many = make_samples(groups=16, siblings=8)
    read = {}
    for count in (1, size):
        of_ranks = [
            build_passes(many, 4096, CPU, prompts_once=True, ranks=Ranks(rank, count))
            for rank in range(count)
        ]
        read[count] = [sum(m.rows.input_ids.numel() for m in own) for own in of_ranks]
    assert sum(read[size]) == sum(read[1])
    assert max(read[size]) <= 1.25 * sum(read[1]) / size
    few = many[:8]
    of_ranks = [
        build_passes(few, 4096, CPU, prompts_once=True, ranks=Ranks(rank, size))
        for rank in range(size)
    ]
    assert all(not micro.empty for own in of_ranks for micro in own)


def test_a_pass_is_one_row_with_positions_that_restart(make_samples: Make) -> None:
    (sample,) = make_samples(1, 1)
    responses = ([5, 6, 7], [8, 9, 10], [4], [1, 2])
    span = sample.spans[0]
    siblings = [
        replace(
            sample,
            sample_id=str(i),
            prompt_ids=np.array([40, 41], np.int32),
            response_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            spans=(span._replace(num_tokens=len(ids)),),
        )
        for i, ids in enumerate(responses)
    ]
    (micro,) = build_passes(siblings, 100, CPU, prompts_once=True)
    assert micro.sample_ids == ("2", "3", "1", "0")
    assert micro.rows.input_ids.tolist() == [[40, 41, 1, 8, 9, 5, 6]]
    assert micro.rows.positions is not None
    assert micro.rows.positions.tolist() == [[0, 1, 2, 2, 3, 2, 3]]
    assert micro.rows.index.tolist() == [1, 1, 2, 1, 3, 4, 1, 5, 6]
    assert micro.rows.targets.tolist() == [4, 1, 2, 8, 9, 10, 5, 6, 7]
    assert micro.rows.prompts == (
        SharedPrompt(SequenceRun(0, 2, 1), (SequenceRun(2, 3, 1), SequenceRun(3, 7, 2))),
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (KINDS["qwen2"], ""),
        (KINDS["qwen3"], ""),
        (KINDS["llama"], ""),
        (KINDS["mistral"], ""),
        (KINDS["qwen3_moe"], ""),
        (MistralConfig(**SIZES, sliding_window=8), "all layers have a window of 8 tokens"),
        (GraniteConfig(**SIZES), "of type granite, whose attention"),
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layers of sliding_attention",
        ),
    ],
    ids=["qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "windows", "granite", "sliding"],
)
def test_how_a_model_reads_is_chosen_when_it_is_loaded(
    config: PreTrainedConfig, why: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), "cpu", tokenizer_size=VOCAB)
    assert policy.prompts_once == (not why)
    assert why in (find_padding_reason(policy.model, policy.device) or "")


def test_a_model_with_attention_of_its_own_refuses_rows_with_shared_prompts(
    make_policy: Make, make_samples: Make
) -> None:
    (micro,) = build_passes(make_samples(1, 3), 100, CPU, prompts_once=True)
    with pytest.raises(ValueError, match="cannot read rows with shared prompts"):
        make_policy().log_probs(micro.rows, micro.temperature, Compute(torch.float32, 64))


def test_in_bfloat16_scores_are_as_close_as_those_of_padded_rows(
    make_model: Make, make_samples: Make
) -> None:
    model = make_model()
    read_prompts_once(model)
    policy = LoadedPolicy(model, VOCAB, prompts_once=True)
    samples = make_samples(3, 5)
    scores: dict[tuple[bool, torch.dtype], dict[str, Tensor]] = {}
    for once in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            found = scores.setdefault((once, dtype), {})
            for micro in build_passes(samples, 4096, CPU, prompts_once=once):
                values = score_micro_batch(policy, micro, Compute(dtype, 64)).split(
                    micro.rows.counts.tolist()
                )
                found |= zip(micro.sample_ids, values, strict=True)
    exact = scores[False, torch.float32]
    for sample, values in scores[True, torch.float32].items():
        torch.testing.assert_close(values, exact[sample], rtol=1e-5, atol=1e-5)

    def rounding(found: dict[str, Tensor]) -> float:
        return float(torch.cat([(found[s] - exact[s]).abs() for s in exact]).mean())

    padded = rounding(scores[False, torch.bfloat16])
    assert 1e-4 < rounding(scores[True, torch.bfloat16]) <= 1.5 * padded


def exact_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    key_longest: int,
    dropout: float,
    causal: bool,
    _debug: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The GPU's flash kernel over sequences behind each other, as its schema says; any type."""
    assert not dropout
    assert (int(starts.diff().max()), int(key_starts.diff().max())) == (longest, key_longest)
    outputs, sums = [], []
    for scores, _, values in pieces(query, key, value, starts, key_starts, causal, scale):
        sums.append(scores.logsumexp(-1))
        outputs.append(scores.softmax(-1) @ values)
    return torch.cat(outputs, 1).transpose(0, 1), torch.cat(sums, 1)


def exact_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    _longest: int,
    _key_longest: int,
    _dropout: float,
    causal: bool,
    _state: Tensor,
    _unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """Its backward call: probabilities are made again from the sums that it is given."""
    found: list[tuple[Tensor, ...]] = []
    cuts = starts.tolist()
    parts = pieces(query, key, value, starts, key_starts, causal, scale)
    for (scores, keys, values), begin, end in zip(parts, cuts, cuts[1:], strict=False):
        of_output = gradient[begin:end].transpose(0, 1)
        probabilities = (scores - sums[:, begin:end, None]).exp()
        rows = (of_output * output[begin:end].transpose(0, 1)).sum(-1, keepdim=True)
        of_scores = probabilities * (of_output @ values.mT - rows) * scale
        asked = query[begin:end].transpose(0, 1)
        per_key = (
            tensor.unflatten(0, (key.shape[1], -1)).sum(1)
            for tensor in (of_scores.mT @ asked, probabilities.mT @ of_output)
        )
        found.append((of_scores @ keys, *per_key))
    return tuple(torch.cat(part, 1).transpose(0, 1) for part in zip(*found, strict=True))


def pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each sequence the scores [heads, tokens, keys], its keys and values for each head."""
    repeats = query.shape[1] // key.shape[1]
    cuts, key_cuts = starts.tolist(), key_starts.tolist()
    for a, b, c, d in zip(cuts, cuts[1:], key_cuts, key_cuts[1:], strict=False):
        keys, values = (t[c:d].transpose(0, 1).repeat_interleave(repeats, 0) for t in (key, value))
        scores = query[a:b].transpose(0, 1) @ keys.mT * scale
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
        yield scores, keys, values


@pytest.mark.usefixtures("float64_scores")
@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_for_a_gpu_give_loss_and_gradient_of_padded_rows(
    kind: str, make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel of the GPU's schema in its place, which is exact in float64."""
    monkeypatch.setattr(
        shared_prefix_attention, "shared_prefix_attention_cpu", shared_prefix_attention_cuda
    )
    monkeypatch.setattr(shared_prefix_attention_cuda, "_forward", exact_forward)
    monkeypatch.setattr(shared_prefix_attention_cuda, "_backward", exact_backward)
    assert apart(kind, range(4), make_config) <= 2e-7


@pytest.mark.parametrize(
    ("device", "dtype", "size", "why"),
    [
        ("cuda", torch.bfloat16, 16, ""),
        ("cuda", torch.float32, 16, "needs bfloat16, not float32"),
        ("cuda", torch.bfloat16, 12, "multiples of 8 up to 256, not 12"),
        ("cpu", torch.float32, 12, ""),
        ("mps", torch.bfloat16, 16, "computes on mps"),
    ],
)
def test_a_gpu_reads_prompts_once_where_its_flash_kernel_can(
    device: str, dtype: torch.dtype, size: int, why: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"head_dim": size}))
    found = find_padding_reason(model, torch.device(device), dtype) or ""
    assert why in found
    assert bool(found) == bool(why)
