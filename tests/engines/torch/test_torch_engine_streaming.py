"""Weights that arrive tensor by tensor: what waits is prefilled behind them, and every bit is as if
the version had been loaded first; nothing is sampled before it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.engines.protocol import EngineError, TensorPlace, TokenDelta, WeightSource
from laminar.engines.runner import EngineRunner
from laminar.engines.torch.engine import TorchEngine
from tests.actors.parts import until
from tests.engines.engine_models import (
    FAMILIES,
    MAX_LEN,
    Output,
    build,
    collect,
    engine_of,
    request,
)

PROMPTS = [tuple((7 * i + 3 * j) % 90 + 1 for j in range(9 + 6 * i)) for i in range(3)]
#: two prompts with siblings, one of them goes on after earlier tokens
REQUESTS = [
    request(
        f"{i}.{sibling}", prompt, done=(4, 8) if i == 1 else (), seed=10 * i + sibling, limit=12
    )
    for i, prompt in enumerate(PROMPTS)
    for sibling in range(2)
]


def blank(model: Any, slots: int = 8) -> TorchEngine:
    """An engine that has no weights yet."""
    return TorchEngine(
        model.config.to_dict(),
        max_num_seqs=slots,
        max_model_len=MAX_LEN,
        dtype=torch.float32,
        device="cpu",
    )


def in_order(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Embedding, layers, norm, head."""
    return sorted(model.named_parameters(), key=_when)


def _when(pair: tuple[str, torch.Tensor]) -> int:
    name = pair[0]
    if name.startswith("model.embed"):
        return -1
    return int(name.split(".")[2]) if name.startswith("model.layers.") else 1_000


async def outputs_of(seen: list[TokenDelta]) -> dict[str, Output]:
    """What an engine with a thread of its own has sampled for all of REQUESTS, once that is all."""
    outputs: dict[str, Output] = {}

    def ended() -> bool:
        collect(outputs, seen[:])
        seen.clear()
        return len(outputs) == len(REQUESTS) and all(o.reason for o in outputs.values())

    await until(ended)
    return outputs


def finish(engine: TorchEngine) -> dict[str, Output]:
    outputs: dict[str, Output] = {}
    while deltas := engine.step():
        collect(outputs, deltas)
    return outputs


def whole(model: Any) -> tuple[TorchEngine, dict[str, Output]]:
    engine = engine_of(model)
    for item in REQUESTS:
        engine.add(item)
    return engine, finish(engine)


def cut(items: list[Any], sizes: Iterator[int]) -> Iterator[list[Any]]:
    while items:
        count = next(sizes)
        yield items[:count]
        items = items[count:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at_once", [1, 5, 1_000])
def test_every_token_is_as_after_a_load_of_the_whole(family: str, at_once: int) -> None:
    model = build(family)
    reference, expected = whole(model)
    engine = blank(model)
    engine.expect_weights()
    for item in REQUESTS:
        engine.add(item)
    tensors = in_order(model)
    parts = list(cut(tensors, iter(lambda: at_once, 0)))
    for part in parts:
        engine.load_partial(part, last=part is parts[-1])
    assert engine.get_stats().running == len(REQUESTS), "they were prefilled behind the weights"
    found = finish(engine)
    for name, output in expected.items():
        assert (found[name].tokens, found[name].logprobs) == (output.tokens, output.logprobs)
    rows, longest = len(REQUESTS), max(map(len, PROMPTS))
    for ours, theirs in (
        (engine._model.cache.k, reference._model.cache.k),
        (engine._model.cache.v, reference._model.cache.v),
    ):
        assert torch.equal(ours[:, :rows, :, :longest], theirs[:, :rows, :, :longest])


def test_what_comes_during_the_load_is_prefilled_from_the_first_layer_on() -> None:
    model = build("qwen2")
    expected = whole(model)[1]
    engine = blank(model)
    engine.expect_weights()
    tensors = in_order(model)
    for index, tensor in enumerate(tensors):
        if index % 6 == 0 and index // 6 < len(REQUESTS):
            engine.add(REQUESTS[index // 6])
        engine.load_partial([tensor], last=index == len(tensors) - 1)
    for item in REQUESTS[(len(tensors) - 1) // 6 + 1 :]:
        engine.add(item)
    found = finish(engine)
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in expected.items()}
    for name, output in expected.items():
        assert found[name].logprobs == pytest.approx(output.logprobs, abs=1e-5)


def test_what_is_taken_back_leaves_the_others_as_they_are() -> None:
    model = build("qwen2")
    expected = whole(model)[1]
    engine = blank(model)
    engine.expect_weights()
    for item in REQUESTS:
        engine.add(item)
    tensors = in_order(model)
    engine.load_partial(tensors[:15], last=False)
    assert (
        engine.abort_request("0.0")
        and engine.abort_request("1.1")
        and not engine.abort_request("0.0")
    )
    engine.load_partial(tensors[15:], last=True)
    found = finish(engine)
    assert found.keys() == expected.keys() - {"0.0", "1.1"}
    for name, output in found.items():
        assert output.tokens == expected[name].tokens


@pytest.mark.parametrize("at", [20, 1_000])
def test_what_is_not_finite_in_a_stream_does_not_outlive_it(at: int) -> None:
    """One damaged weight can fill the cache with NaNs; a masked NaN is a NaN."""
    model, broken = build("qwen2"), build("qwen2")
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight[:] = torch.nan
    expected = whole(model)[1]
    engine, tensors = blank(model), in_order(broken)
    engine.expect_weights()
    for item in REQUESTS:
        engine.add(item)
    engine.load_partial(tensors[:at], last=at > len(tensors))
    for item in REQUESTS:
        engine.abort_request(item.request_id)
    engine.load_weights(model.named_parameters())
    for item in REQUESTS:
        engine.add(item)
    assert {n: o.tokens for n, o in finish(engine).items()} == {
        n: o.tokens for n, o in expected.items()
    }


def test_what_does_not_belong_to_the_model_ends_the_load_and_all_requests() -> None:
    model = build("qwen2")
    tensors = in_order(model)
    wrong = [
        ([("lm_head.bias", tensors[0][1])], False, "not used by this model"),
        ([tensors[0], tensors[0]], False, "given twice"),
        (tensors[:-1], True, "is missing"),
    ]
    for part, last, said in wrong:
        engine = blank(model)
        engine.expect_weights()
        engine.add(REQUESTS[0])
        with pytest.raises(EngineError, match=said):
            engine.load_partial(part, last)
        stats = engine.get_stats()
        assert (stats.running, stats.waiting) == (0, 0)
        with pytest.raises(EngineError, match="no weights"):
            engine.compute_logprobs([[1, 2]])


# --- the thread ----------------------------------------------------------------------------------


def write(path: Path, model: Any) -> WeightSource:
    """A version as it lies in a slot, in the order of execution."""
    places, offset = [], 0
    with path.open("wb") as file:
        for name, tensor in in_order(model):
            file.seek(offset)
            file.write(tensor.detach().numpy().tobytes())
            places.append(TensorPlace(name, "float32", tuple(tensor.shape), offset))
            offset += -(-tensor.numel() * 4 // 64) * 64
        file.truncate(offset)
    return WeightSource(str(path), 0, offset, tuple(places))


async def test_nothing_is_sampled_before_the_weights_are_proved(tmp_path: Path) -> None:
    model = build("qwen2")
    expected = whole(model)[1]
    source, seen = write(tmp_path / "version", model), list[TokenDelta]()
    runner = EngineRunner(blank(model), seen.extend, asyncio.get_running_loop())
    await runner.expect_weights()
    for item in REQUESTS:
        await runner.add(item)
    for part in range(8):
        await runner.load_partial(source, source.nbytes * part // 8)
    await runner.load_partial(source, source.nbytes)
    scores = await runner.compute_logprobs([[1, 2, 3]])
    assert len(scores[0]) == 2 and not seen and not runner.drain_steps()
    assert runner.get_stats().running == len(REQUESTS)
    await runner.resume_sampling()
    outputs = await outputs_of(seen)
    assert {n: o.tokens for n, o in outputs.items()} == {n: o.tokens for n, o in expected.items()}
    await runner.close()


async def test_a_layer_is_not_used_before_its_last_byte_is_here(tmp_path: Path) -> None:
    """What lies in the file behind the first bytes is of another model."""
    model, other = build("qwen2"), build("qwen2", seed=1)
    source, late = write(tmp_path / "version", other), write(tmp_path / "late", model)
    expected = whole(model)[1]
    engine = blank(model)
    seen = list[TokenDelta]()
    runner = EngineRunner(engine, seen.extend, asyncio.get_running_loop())
    await runner.expect_weights()
    for item in REQUESTS:
        await runner.add(item)
    data = Path(late.path).read_bytes()
    with Path(source.path).open("r+b") as view:
        for end in (*range(0, source.nbytes, 1_000), source.nbytes):
            view.seek(max(end - 1_000, 0))
            view.write(data[max(end - 1_000, 0) : end])
            view.flush()
            await runner.load_partial(source, end)
    await runner.resume_sampling()
    outputs = await outputs_of(seen)
    assert {n: o.tokens for n, o in outputs.items()} == {n: o.tokens for n, o in expected.items()}
    await runner.close()
