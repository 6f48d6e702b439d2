"""The two machines of tools/bench/pipeline.py: weights that come, layers, rows, stages.

Reads   a file of weights; what it is told (way, work, rate)
Gives   Pair, which runs them; Found for each; write_weights, new_model, prompts

A file of its own: here is what runs, in pipeline.py what is asked and how it compares.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing as mp
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from laminar.engines.hf_config import parse_hf_config
from laminar.engines.spans import Span, round_up
from laminar.engines.torch.model import DecoderModel
from tools.bench import weights_net as net

SPEC = parse_hf_config(
    {
        "model_type": "qwen2",
        "vocab_size": 4_096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
)
HALF = SPEC.num_layers // 2
LAYER_S, TOKEN_S = 0.030, 0.0005
"""What the emulated device takes for a layer and for each token in it: more than the processor does
for this model, so that other work on the machine does not decide."""
BURST_BYTES = 64 << 10
DEADLINE_S = 120.0
HOLDERS, MACHINES = (0, 1), (2, 3)  #: of the emulated network
NETWORK = len(HOLDERS) + len(MACHINES)

Places = dict[str, tuple[int, int]]  #: offset and bytes of each tensor in the file


class Work(NamedTuple):
    """Of one machine."""

    rows: int = 4
    prompt: int = 64
    tokens: int = 12


UP = struct.Struct("<3id")
"""Batch from 1, tokens of a row, first position, when it is all there; number 0 is the end."""
DOWN = struct.Struct("<id")
"""Whether the upper stage has all weights; when it had the tokens."""


class Found(NamedTuple):
    """What one machine says of one run."""

    tokens: NDArray[np.int64]  #: [rows, tokens]
    logprobs: NDArray[np.float32]  #: [rows, tokens]
    times: list[float]  #: of each token of the rows, seconds from the order
    together: int  #: tokens that were sampled in the pipeline
    here_s: float  #: when all weights were here


# --- weights --------------------------------------------------------------------------------------


def layer_of(name: str) -> int:
    """-1: what is before and behind the layers."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def new_model(rows: int, positions: int) -> DecoderModel:
    return DecoderModel(
        SPEC,
        slots=rows,
        max_len=positions,
        vocab_limit=SPEC.vocab_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def write_weights(path: Path) -> Places:
    """Drawn from a seed."""
    torch.manual_seed(1)
    places, offset = {}, 0
    with path.open("wb") as file:
        for name, tensor in new_model(1, 1).weights.targets.items():
            drawn = torch.ones(tensor.shape)
            if "norm" not in name:
                drawn = torch.randn(tensor.shape) * 0.05
            content = drawn.numpy().tobytes()
            places[name] = (offset, len(content))
            file.write(content)
            offset += len(content)
    return places


def prompts(work: Work) -> Tensor:
    """[2 machines, rows, prompt]."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, work.rows, work.prompt)
    return torch.randint(0, SPEC.vocab_size, shape, generator=generator)


def halves(places: Places) -> tuple[int, int]:
    """Bytes of everything, and of the embedding with half of the layers."""
    sizes = {name: size for name, (_, size) in places.items()}
    lower = sum(size for name, size in sizes.items() if layer_of(name) < HALF)
    upper = sum(size for name, size in sizes.items() if not 0 <= layer_of(name) < HALF)
    return sum(sizes.values()), max(lower, upper)


def hold(index: int, path: Path, listener: socket.socket) -> None:
    """A holder: sends the ranges that it is asked for, in that order."""
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    while True:
        sock, _ = listener.accept()
        with sock:
            (count,) = struct.unpack("<i", take(sock, 4))
            asked = struct.iter_unpack("<qq", take(sock, 16 * count))
            for offset, size in list(asked):
                sock.sendall(content[offset : offset + size])


def take(sock: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    fill(sock, memoryview(content))
    return content


def fill(sock: socket.socket, part: memoryview) -> None:
    while part.nbytes:
        count = sock.recv_into(part)
        if not count:
            raise ConnectionError("the other side is gone")
        part = part[count:]


Wait = Callable[[Sequence[int]], float]  #: until layers are here; gives when they were


class Loading:
    """Weights that come layer by layer, in a thread."""

    def __init__(self, model: DecoderModel, order: Sequence[int], places: Places) -> None:
        self.targets = model.weights.targets
        self.order, self.places = order, places
        self.here = {layer: threading.Event() for layer in order}
        self.arrived = dict.fromkeys(order, math.inf)
        self.ended_s = math.inf

    def start(self, sock: socket.socket, begun: float) -> None:
        threading.Thread(target=self._load, args=(sock, begun), daemon=True).start()

    def wait(self, layers: Sequence[int]) -> float:
        """Until they are here; gives when the last of them was, on the clock."""
        for layer in layers:
            if not self.here[layer].wait(DEADLINE_S):
                raise TimeoutError(f"layer {layer} has not come within {DEADLINE_S:.0f} s")
        return max(self.arrived[layer] for layer in layers)

    @property
    def whole(self) -> bool:
        return all(event.is_set() for event in self.here.values())

    def _load(self, sock: socket.socket, begun: float) -> None:
        names = sorted(self.targets, key=lambda name: self.order.index(layer_of(name)))
        ranges = [self.places[name] for name in names]
        asked = b"".join(struct.pack("<qq", *place) for place in ranges)
        sock.sendall(struct.pack("<i", len(ranges)) + asked)
        for name, following in zip(names, [*names[1:], None], strict=True):
            fill(sock, memoryview(self.targets[name].detach().numpy()).cast("B"))
            if following is None or layer_of(following) != layer_of(name):
                self.arrived[layer_of(name)] = time.monotonic()
                self.here[layer_of(name)].set()
        self.ended_s = time.monotonic() - begun
        sock.close()


# --- one machine ----------------------------------------------------------------------------------


class Device:
    """The emulated one. The processor that runs the model may be late in a step and make up for it
    in the next: a real device is given its work ahead, too."""

    def __init__(self) -> None:
        self.free_at = 0.0  #: on the clock


class Rows:
    """Some rows on some slots of a model, run through some of its layers."""

    def __init__(self, model: DecoderModel, device: Device, first: int, rows: int) -> None:
        self.model, self.device, self.first, self.rows = model, device, first, rows

    def through(
        self, x: Tensor, start: int, layers: range, ready: float, wait: Wait | None = None
    ) -> Tensor:
        """Hidden states [rows, L, H] at positions start ...; `wait` until a layer is here.

        Takes as long as the device, which begins when it is free, its input was `ready` and the
        layer is here.
        """
        model, length, device = self.model, x.shape[1], self.device
        device.free_at = max(device.free_at, ready)
        positions = torch.arange(start, start + length)[None]
        span = Span(self.first, self.first + self.rows, round_up(start + length))
        slots = torch.arange(span.first, span.stop)[:, None]
        cos, sin = model.cos[positions][:, :, None], model.sin[positions][:, :, None]
        masks = [model._mask(positions, span.kv_len)]
        for index in layers:
            if wait is not None:
                device.free_at = max(device.free_at, wait([index]))
            device.free_at += LAYER_S + TOKEN_S * self.rows * length
            layer = model.weights.layers[index]
            q, k, v = model._qkv(layer, model._norm(x, layer.input_norm), cos, sin)
            keys, values = model.cache.k[index], model.cache.v[index]
            keys[slots, :, positions] = k
            values[slots, :, positions] = v
            x = x + F.linear(model._attend(q, keys, values, [span], masks), layer.o)
            gate, up = F.linear(model._norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        time.sleep(max(0.0, device.free_at - time.monotonic()))
        return x

    def embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.model.weights.embed)

    def sampled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens [rows] and their log-probs after the last position."""
        logits = self.model.logits(self.model._norm(x[:, -1], self.model.weights.norm))
        best, ids = torch.log_softmax(logits, -1).max(-1)
        return ids, best


class Machine:
    """One process: its rows, alone or as a stage of two."""

    def __init__(self, stage: int, places: Places, work: Work, rate: float) -> None:
        """`rate`: bytes/s of its card."""
        self.stage, self.places, self.work, self.rate = stage, places, work, rate
        self.device = Device()
        # Slots of both machines' rows: in a pipeline each stage keeps the cache of all of them.
        self.model = new_model(2 * work.rows, work.prompt + work.tokens)
        self.batches = [Rows(self.model, self.device, n * work.rows, work.rows) for n in (0, 1)]
        self.prompts = prompts(work)

    def run(self, way: str, holder: socket.socket, other: socket.socket) -> Found:
        begun = time.monotonic()
        lower, upper = list(range(HALF)), list(range(HALF, SPEC.num_layers))
        order = [-1, *upper, *lower] if way == "pipeline" and self.stage else [-1, *lower, *upper]
        loading = Loading(self.model, order, self.places)
        loading.start(holder, begun)
        sampled: list[tuple[Tensor, Tensor]] = []
        times: list[float] = []
        if way == "pipeline":
            self.device.free_at = loading.wait([-1, *(upper if self.stage else lower)])
            stage = self._upper if self.stage else self._lower
            stage(other, loading, sampled, lambda: times.append(time.monotonic() - begun))
        elif way == "whole":
            self.device.free_at = loading.wait(order)
        together = len(sampled)
        wait = loading.wait if way == "stream" else None
        self._alone(sampled, lambda: times.append(time.monotonic() - begun), wait)
        loading.wait(order)
        tokens, logprobs = (torch.stack(part, 1).numpy() for part in zip(*sampled, strict=True))
        return Found(tokens, logprobs, times, together, loading.ended_s)

    def _alone(
        self,
        sampled: list[tuple[Tensor, Tensor]],
        mark: Callable[[], None],
        wait: Wait | None,
    ) -> None:
        """The rest of the machine's own rows, from a prefill of what they have."""
        rows, start = self.batches[self.stage], 0
        ids = torch.cat([self.prompts[self.stage], *(t[:, None] for t, _ in sampled)], 1)
        while len(sampled) < self.work.tokens:
            ready = 0.0 if wait is None else wait([-1])
            x = rows.through(rows.embedded(ids), start, range(SPEC.num_layers), ready, wait)
            sampled.append(rows.sampled(x))
            mark()
            start, ids = start + ids.shape[1], sampled[-1][0][:, None]

    def _lower(
        self,
        upper: socket.socket,
        loading: Loading,
        sampled: list[tuple[Tensor, Tensor]],
        mark: Callable[[], None],
    ) -> None:
        """Both batches in turn: a batch is here while the other one is above."""
        ids, start = list(self.prompts), 0
        for batch in (0, 1):
            self._up(upper, batch, ids[batch], start, 0.0)
        for step in range(1, self.work.tokens + 1):
            start = self.work.prompt + step - 1
            last = False
            for batch in (0, 1):
                above_whole, ready, tokens, logprobs = self._down(upper)
                if batch == 0:
                    sampled.append((tokens, logprobs))
                    mark()
                    last = step == self.work.tokens or (above_whole and loading.whole)
                if not last:
                    self._up(upper, batch, tokens[:, None], start, ready)
            if last:
                upper.sendall(UP.pack(0, 0, 0, 0.0))
                return

    def _up(self, upper: socket.socket, batch: int, ids: Tensor, start: int, ready: float) -> None:
        rows = self.batches[batch]
        x = rows.through(rows.embedded(ids), start, range(HALF), ready)
        content = x.contiguous().numpy().tobytes()
        there = self.device.free_at + len(content) / self.rate
        upper.sendall(UP.pack(1 + batch, ids.shape[1], start, there) + content)

    def _down(self, upper: socket.socket) -> tuple[bool, float, Tensor, Tensor]:
        whole, ready = DOWN.unpack(take(upper, DOWN.size))
        tokens = torch.frombuffer(take(upper, 8 * self.work.rows), dtype=torch.int64)
        logprobs = torch.frombuffer(take(upper, 4 * self.work.rows), dtype=torch.float32)
        return bool(whole), ready, tokens, logprobs

    def _upper(
        self,
        lower: socket.socket,
        loading: Loading,
        sampled: list[tuple[Tensor, Tensor]],
        mark: Callable[[], None],
    ) -> None:
        """What comes, until the lower stage says that it was the last."""
        while True:
            number, length, start, ready = UP.unpack(take(lower, UP.size))
            if number == 0:
                return
            rows, hidden = self.batches[number - 1], SPEC.hidden_size
            content = take(lower, 4 * self.work.rows * length * hidden)
            x = torch.frombuffer(content, dtype=torch.float32).view(-1, length, hidden)
            tokens, logprobs = rows.sampled(
                rows.through(x, start, range(HALF, SPEC.num_layers), ready)
            )
            answer = DOWN.pack(loading.whole, self.device.free_at) + tokens.numpy().tobytes()
            lower.sendall(answer + logprobs.numpy().tobytes())
            if number == 2:
                sampled.append((tokens, logprobs))
                mark()


def be_machine(stage: int, orders: Any, places: Any, addresses: Sequence[Any]) -> None:
    """A process: runs what it is told, (way, work, bytes/s), until it is told nothing."""
    torch.set_num_threads(1)
    here = (net.host(MACHINES[stage]), 0)
    listener = socket.create_server(here)
    orders.send(listener.getsockname())
    sibling = orders.recv()
    if stage:
        other, _ = listener.accept()
    else:
        other = socket.create_connection(sibling, DEADLINE_S, source_address=here)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    other.settimeout(DEADLINE_S)
    with torch.inference_mode(False), torch.no_grad():
        while (told := orders.recv()) is not None:
            way, work, rate = told
            machine = Machine(stage, places, work, rate)
            holder = socket.create_connection(addresses[stage], DEADLINE_S, source_address=here)
            holder.settimeout(DEADLINE_S)
            orders.send(None)  # ready
            orders.recv()
            orders.send(machine.run(way, holder, other))


class Pair:
    """Two machines with a holder each."""

    def __init__(self, path: Path, places: Places) -> None:
        context = mp.get_context("fork")
        torch.set_num_threads(1)
        listeners = [socket.create_server((net.host(n), 0)) for n in HOLDERS]
        addresses = [listener.getsockname() for listener in listeners]
        self.processes = [
            context.Process(target=hold, args=(n, path, listener), daemon=True)
            for n, listener in enumerate(listeners)
        ]
        self.orders = []
        for stage in (0, 1):
            mine, theirs = context.Pipe()
            args = (stage, theirs, places, addresses)
            self.processes.append(context.Process(target=be_machine, args=args, daemon=True))
            self.orders.append(mine)
        for process in self.processes:
            process.start()
        addresses_of_machines = self._heard()
        self._tell(addresses_of_machines[::-1])

    def run(self, way: str, work: Work, mb_s: int) -> list[Found]:
        """With cards of that rate."""
        net.limit(NETWORK, 8 * mb_s, BURST_BYTES)
        self._tell([(way, work, mb_s * 1e6)] * 2)
        self._heard()  # both are ready
        self._tell(["go"] * 2)
        return self._heard()

    def _tell(self, words: list[Any]) -> None:
        for order, word in zip(self.orders, words, strict=True):
            order.send(word)

    def _heard(self) -> list[Any]:
        for stage, order in enumerate(self.orders):
            if not order.poll(2 * DEADLINE_S):
                raise TimeoutError(f"machine {stage} has said nothing for {2 * DEADLINE_S:.0f} s")
        return [order.recv() for order in self.orders]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
