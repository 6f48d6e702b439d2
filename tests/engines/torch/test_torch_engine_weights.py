"""Loading weights: complete and exact or refused, copied, and effective at once."""

from __future__ import annotations

import pytest
import torch

from laminar.engines.protocol import EngineError
from laminar.engines.torch.engine import TorchEngine
from tests.engines.engine_models import build, engine_of, request, run_one

MODEL, OTHER = build("qwen2"), build("qwen2", seed=1)
ITEM = request("a", (5, 17, 3), limit=20)
Tensors = dict[str, torch.Tensor]


def parameters() -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in MODEL.named_parameters()}


def empty_engine() -> TorchEngine:
    return TorchEngine(
        MODEL.config.to_dict(), max_num_seqs=4, max_model_len=64, dtype=torch.float32, device="cpu"
    )


def test_a_reload_changes_the_output_to_the_new_models() -> None:
    engine = engine_of(MODEL)
    before = run_one(engine, ITEM)
    engine.load_weights(OTHER.named_parameters())
    after, expected = run_one(engine, ITEM), run_one(engine_of(OTHER), ITEM)
    assert after.tokens == expected.tokens
    assert after.logprobs == expected.logprobs
    assert after.tokens != before.tokens


def test_tensors_are_copied() -> None:
    tensors, engine = parameters(), empty_engine()
    engine.load_weights(tensors.items())
    expected = run_one(engine_of(MODEL), ITEM)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    assert run_one(engine, ITEM).tokens == expected.tokens


def test_every_single_tensor_matters() -> None:
    """A tensor that is loaded to the wrong place, or not used, would leave the scores alone."""
    engine, ids = engine_of(MODEL), list(range(40))
    expected = engine.compute_logprobs([ids])[0]
    for name in parameters():
        changed = parameters()
        changed[name] = torch.roll(changed[name], 1, 0)
        engine.load_weights(changed.items())
        difference = max(
            abs(a - b) for a, b in zip(engine.compute_logprobs([ids])[0], expected, strict=True)
        )
        assert difference > 1e-3, name


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.bias", "model.norm.weight"])
def test_a_missing_tensor_is_named_and_leaves_no_weights(name: str) -> None:
    engine, tensors = engine_of(MODEL), parameters()
    del tensors[name]
    with pytest.raises(EngineError, match=f"{name} is missing"):
        engine.load_weights(tensors.items())
    engine.add(ITEM)
    with pytest.raises(EngineError, match="no weights"):
        engine.step()
    engine.load_weights(parameters().items())
    assert engine.step()


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",  # tied: the embedding is the head
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_a_tensor_without_use_is_named(name: str) -> None:
    with pytest.raises(EngineError, match=f"{name} is not used"):
        empty_engine().load_weights((parameters() | {name: torch.zeros(97, 32)}).items())


def test_a_tensor_given_twice_is_named() -> None:
    tensors = list(parameters().items())
    with pytest.raises(EngineError, match=r"model\.norm\.weight is given twice"):
        empty_engine().load_weights([*tensors, ("model.norm.weight", torch.ones(32))])


@pytest.mark.parametrize("wrong", [torch.ones(31), torch.ones(1), torch.ones(32, dtype=torch.int8)])
def test_a_tensor_of_another_shape_or_kind_is_named(wrong: torch.Tensor) -> None:
    tensors = parameters() | {"model.norm.weight": wrong}
    with pytest.raises(EngineError, match=r"model\.norm\.weight is torch"):
        empty_engine().load_weights(tensors.items())


def test_no_load_while_a_sequence_runs_that_is_not_to_go_on() -> None:
    engine = engine_of(MODEL)
    engine.add(ITEM)
    engine.step()
    with pytest.raises(RuntimeError, match="cannot load weights while 1 sequences"):
        engine.load_weights(parameters().items())
    assert engine.step(), "a refused load must not disturb what runs"


def test_work_before_the_first_load_is_an_error() -> None:
    engine = empty_engine()
    assert engine.step() == []
    with pytest.raises(EngineError, match="no weights"):
        engine.compute_logprobs([[1, 2]])
    engine.add(ITEM)
    with pytest.raises(EngineError, match="no weights"):
        engine.step()


@pytest.mark.parametrize("probe", [True, False])
def test_broken_weights_are_an_error_and_do_not_outlive_their_reload(probe: bool) -> None:
    engine, broken = engine_of(MODEL), parameters()
    broken["model.layers.0.self_attn.v_proj.weight"].fill_(float("nan"))
    engine.load_weights(broken.items())
    if not probe:
        engine.add(ITEM)
    with pytest.raises(EngineError, match="non-finite"):
        engine.compute_logprobs([[1, 2, 3, 4, 5, 6]]) if probe else engine.step()
    assert engine.get_stats().running == 0
    engine.load_weights(parameters().items())
    assert run_one(engine, ITEM).tokens == run_one(engine_of(MODEL), ITEM).tokens


def test_bad_sequences_to_score_are_refused() -> None:
    engine = engine_of(MODEL)
    for sequences, message in (
        ([[1], []], "sequence 1 has no tokens"),
        ([[97]], "token id 97"),
        ([[1] * 161], "sequence 0 has 161 tokens"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.compute_logprobs(sequences)
    assert engine.compute_logprobs([]) == []
