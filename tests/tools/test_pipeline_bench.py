"""The bench of machines that share a model: it computes what the engine does, its formula holds."""

from __future__ import annotations

import pytest
import torch

from laminar.engines.spans import Span
from tools.bench.pipeline import Measured, crossing
from tools.bench.pipeline_machine import HALF, SPEC, Device, Rows, Work, new_model


@torch.no_grad()
def test_layers_in_two_halves_give_the_hidden_states_of_the_engine() -> None:
    torch.manual_seed(2)
    model = new_model(4, 64)
    for tensor in model.weights.targets.values():
        tensor.copy_(0.05 * torch.randn(tensor.shape))
    ids = torch.randint(0, SPEC.vocab_size, (2, 8))
    rows = Rows(model, Device(), 2, 2)
    lower = rows.through(rows.embedded(ids), 0, range(HALF), 0.0)
    upper = rows.through(lower, 0, range(HALF, SPEC.num_layers), 0.0)
    engine = model.forward(ids, torch.arange(8)[None], [Span(2, 4, 64)])
    assert torch.equal(model._norm(upper, model.weights.norm), engine)


def test_the_rate_at_which_two_ways_are_equal_is_found_between_measurements() -> None:
    gains = [1 / rate - 1 / 10 for rate in (4, 8, 16)]  # linear in 1 / rate
    assert crossing([4, 8, 16], gains) == pytest.approx(10)
    assert crossing([4, 8], gains[:2]) is None


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8])
def test_by_formula_a_pipeline_has_no_token_before_a_half_and_streaming_is_never_later(
    rate: float,
) -> None:
    known, work = Measured(40_000_000, 22_000_000, prefill_s=1.0, step_s=0.2), Work()
    first = {way: known.seconds(way, rate, work)[0] for way in ("whole", "stream", "pipeline")}
    assert first["pipeline"] >= 22e6 / rate + 1.0
    assert first["stream"] < first["whole"]
