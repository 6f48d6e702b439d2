"""A vLLM engine as a replica has it, small random models, and versions in shared memory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from laminar.config import Config, load_config
from laminar.engines.build import start_engine
from laminar.engines.protocol import (
    GenerateRequest,
    KvOnUpdate,
    TensorPlace,
    TokenDelta,
    WeightSource,
)
from laminar.engines.vllm.engine import VllmEngine

VOCAB = 128
LIMIT = 120  #: the tokenizer's ids; the model has room for more
PROMPT = (5, 17, 3, 88, 41, 2, 9)
WAIT_S = 60.0


def model_of(seed: int, *, tied: bool = True) -> Any:
    """Sharp enough that greedy decoding goes somewhere, in sizes that vLLM's CPU kernels take."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def config_of(directory: Path, model: Any, *overrides: str) -> Config:
    model.config.save_pretrained(directory)
    return load_config(
        [],
        [
            f"model.name={directory}",
            "data.dataset=spell_backward",
            "data.max_prompt_length=64",
            "data.max_response_length=128",
            "rollout.engine=vllm",
            "rollout.max_num_seqs=16",
            "rollout.group_size=4",
            "rollout.vllm.kv_cache_bytes=16777216",
            *overrides,
        ],
    )


def write_version(path: Path, tensors: dict[str, torch.Tensor]) -> WeightSource:
    """As a relay's slot holds it, behind something else."""
    data = bytearray(4096)
    places = []
    for name, tensor in tensors.items():
        places.append(TensorPlace(name, "float32", tuple(tensor.shape), len(data) - 4096))
        data += tensor.detach().contiguous().numpy().tobytes()
        data += bytes(-len(data) % 64)
    path.write_bytes(data)
    return WeightSource(str(path), 4096, len(data) - 4096, tuple(places))


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


class Replica:
    """An engine and what came out of it."""

    engine: VllmEngine

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.loads: dict[str, list[int]] = {}  #: of each token
        self.reasons: dict[str, str] = {}
        self._versions = 0
        self._news = asyncio.Event()

    @classmethod
    async def start(cls, directory: Path, config: Config) -> Replica:
        replica = cls(directory)
        replica.engine = await start_engine(config, LIMIT, 1, replica._take)  # type: ignore[assignment]
        return replica

    def _take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, "a delta after the end"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            loads = [delta.load] * len(delta.token_ids)
            self.loads.setdefault(delta.request_id, []).extend(loads)
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason
        self._news.set()

    async def load(
        self, tensors: dict[str, torch.Tensor], on_update: KvOnUpdate | None = None
    ) -> None:
        self._versions += 1
        source = write_version(self.directory / f"v{self._versions}", tensors)
        await self.engine.load(source, on_update)

    async def generate(
        self,
        name: str,
        *,
        done: tuple[int, ...] = (),
        prompt: tuple[int, ...] = PROMPT,
        limit: int = 100,
        temperature: float = 0.0,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        await self.engine.add(GenerateRequest(name, prompt, done, limit, temperature, 1, stop))

    async def until(self, name: str, count: int) -> None:
        """So many tokens have come, or its end."""
        while name not in self.reasons and len(self.tokens.get(name, ())) < count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), WAIT_S)

    async def ended(self, *names: str) -> None:
        for name in names:
            await self.until(name, 1 << 30)

    def core_pid(self) -> int:
        """Of the engine core, a child of this process."""
        return int(self.engine._llm.engine_core.resources.engine_manager.processes[0].pid)


def shared_memory(core: int) -> set[Path]:
    """What a core and its workers have mapped in /dev/shm, under the names that it had; without
    what this process has, of which the core is forked (a semaphore of a progress bar, say)."""
    workers = psutil.Process(core).children(recursive=True)
    mapped = {name for pid in (core, *(w.pid for w in workers)) for name in _mapped(pid)}
    return {Path(name) for name in mapped - _mapped(os.getpid()) if name.startswith("/dev/shm/")}


def _mapped(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line[73:].removesuffix(" (deleted)") for line in lines}


def greedy(model: Any, count: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """What transformers generates, ids above the tokenizer left out."""
    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=list(range(LIMIT, VOCAB)),
    )
    return made[0, len(prompt) :].tolist()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
