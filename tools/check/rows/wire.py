"""Rows 20 and 21: decoders that receive corrupted bytes, and sessions over a bad network.

Reads   wire_corpus (real messages), mutations, session_model
Gives   ROWS; `check_bytes` repeats one input: python -m tools.check.rows.wire "event" 81a474...

A decoder either returns a message or raises its one error, quickly and with little memory; the
message can be encoded again. Inputs are drawn from (seed, chunk), so each can be repeated; the one
that failed is printed as hex.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tools.check.rows.base import Figure, Gate, Row
from tools.check.rows.mutations import spoil
from tools.check.rows.session_model import LossyLink, LossyLinkWithoutRecord, run_model
from tools.check.rows.wire_corpus import Target, targets

SEED = 20
CHUNK_INPUTS = 10_000
WORKERS: dict[Gate, int] = {"pr": 1, "release": 2}
INPUTS: dict[Gate, int] = {"pr": 50_000, "release": 10_000_000}

SECONDS_MAX = 0.010
MEMORY_SPARE_BYTES = 64 << 10  #: fixed size of objects, which matters for short inputs
MEASURE_EVERY = 100  #: inputs per measurement of memory

MODEL_STEPS = 50
EXAMPLES: dict[Gate, int] = {"pr": 60, "release": 20_000}
EXAMPLES_PER_RUN: dict[Gate, int] = {"pr": 30, "release": 1_000}
MODELS = {model.__name__: model for model in (LossyLink, LossyLinkWithoutRecord)}


# --- row 20 -----------------------------------------------------------------------------------


class Tried(NamedTuple):
    """Result of one chunk of inputs."""

    inputs: int
    accepted: int  #: mutated inputs that are still a message
    seconds: float  #: longest time of one input
    problem: str  #: first problem, or empty


def fuzz(gate: Gate) -> Figure:
    chunks = range(INPUTS[gate] // CHUNK_INPUTS)
    began = time.monotonic()
    tried = list(_spread(try_chunk, chunks, WORKERS[gate]))
    inputs, accepted = sum(t.inputs for t in tried), sum(t.accepted for t in tried)
    problems = [t.problem for t in tried if t.problem]
    rate = inputs / (time.monotonic() - began)
    reached = (
        f"{inputs:,} inputs of {len(targets())} decoders ({accepted:,} still a message, "
        f"{rate:,.0f}/s), {len(problems)} problems, longest {max(t.seconds for t in tried):.4f} s"
    )
    return Figure(reached, not problems and inputs == INPUTS[gate], "\n".join(problems[:5]))


def try_chunk(chunk: int) -> Tried:
    """Try CHUNK_INPUTS inputs, which the chunk number determines, until the first problem."""
    chance = random.Random(f"{SEED}:{chunk}")
    found = targets()
    everything = tuple(message for target in found for message in target.messages)
    accepted, longest = 0, 0.0
    for number in range(CHUNK_INPUTS):
        target = found[int(chance.random() * len(found))]
        data = spoil(chance.choice(target.messages), everything, chance)
        problem, was_accepted, seconds = _try(target, data, measured=number % MEASURE_EVERY == 0)
        accepted, longest = accepted + was_accepted, max(longest, seconds)
        if problem:
            where = f"{target.name}, chunk {chunk} of seed {SEED}, input {number}: {data.hex()}"
            return Tried(number + 1, accepted, longest, f"{problem}: {where}")
    return Tried(CHUNK_INPUTS, accepted, longest, "")


def _try(target: Target, data: bytes, *, measured: bool) -> tuple[str, bool, float]:
    """Decode one input; return (problem, whether it is a message, seconds)."""
    began = time.perf_counter()
    try:
        message = target.decode(data)
    except target.error:
        message = None
    except BaseException as error:
        return f"{type(error).__name__} instead of {target.error.__name__}", False, 0.0
    seconds = time.perf_counter() - began
    if seconds > SECONDS_MAX:
        seconds = min(_seconds(target, data) for _ in range(5))  # the machine may have been busy
    problem = f"{seconds:.3f} s" if seconds > SECONDS_MAX else ""
    if measured:
        problem = problem or _memory_problem(target, data)
    if message is not None:
        problem = problem or _not_encoded(target, message)
    return problem, message is not None, seconds


def _seconds(target: Target, data: bytes) -> float:
    began = time.perf_counter()
    _decode(target, data)
    return time.perf_counter() - began


def _decode(target: Target, data: bytes) -> Any:
    try:
        return target.decode(data)
    except target.error:
        return None


def _memory_problem(target: Target, data: bytes) -> str:
    tracemalloc.start()
    kept = _decode(target, data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    too_much = peak > target.memory_factor * len(data) + MEMORY_SPARE_BYTES
    return f"{peak} bytes of memory for an input of {len(data)}" if too_much else ""


def _not_encoded(target: Target, message: Any) -> str:
    try:
        target.encode(message)
    except Exception as error:
        return f"decoded, but cannot be encoded again ({type(error).__name__}: {error})"
    return ""


def check_bytes(name: str, data: bytes) -> str:
    """Return the problem with one input of the named decoder, or an empty string."""
    target = next(target for target in targets() if target.name == name)
    return _try(target, data, measured=True)[0]


# --- row 21 -----------------------------------------------------------------------------------


class ModelRun(NamedTuple):
    """Examples of one model; the same number draws the same examples."""

    model: str
    examples: int
    number: int


def model(gate: Gate) -> Figure:
    per_run = EXAMPLES_PER_RUN[gate]
    count = EXAMPLES[gate] // per_run
    runs = [
        ModelRun(name, per_run, number)
        for number, name in zip(range(count), itertools.cycle(MODELS), strict=False)
    ]
    problems = [problem for problem in _spread(try_model, runs, WORKERS[gate]) if problem]
    examples = sum(run.examples for run in runs)
    reached = (
        f"{examples:,} examples of up to {MODEL_STEPS} steps, {len(problems)} problems "
        f"(seeds 0 to {count - 1})"
    )
    return Figure(reached, not problems and examples == EXAMPLES[gate], "\n".join(problems[:3]))


def try_model(run: ModelRun) -> str:
    """Return the problem with the shortest run that shows it, or an empty string."""
    try:
        run_model(MODELS[run.model], run.examples, MODEL_STEPS, run.number)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return f"{run}: {type(error).__name__}: {error}\n{notes}"
    return ""


# --- both -------------------------------------------------------------------------------------


def _spread(work: Callable[[Any], Any], parts: Iterable[Any], workers: int) -> Iterable[Any]:
    """Yield the results in order, with occasional progress on standard error."""
    parts = list(parts)
    if workers == 1:
        yield from map(work, parts)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, result in enumerate(pool.imap(work, parts), 1):
            if done % max(1, len(parts) // 10) == 0:
                print(f"  {done} of {len(parts)} parts", file=sys.stderr, flush=True)
            yield result


ROWS = (
    Row(
        number=20,
        promise="decoders map any bytes to a message or their one error, quickly and within bounds",
        pr="50,000 mutated inputs",
        release="10,000,000 mutated inputs: < 10 ms, memory < 8x size + 64 KiB (prompts 96x)",
        run=fuzz,
    ),
    Row(
        number=21,
        promise="sessions deliver in order, once, over a network that loses, repeats and reorders",
        pr="60 model examples of 50 steps",
        release="20,000 model examples of 50 steps",
        run=model,
    ),
)


def main() -> int:
    names = Counter(target.name for target in targets())
    if len(sys.argv) != 3 or sys.argv[1] not in names:
        print(f"usage: python -m tools.check.rows.wire DECODER HEX; decoders: {', '.join(names)}")
        return 2
    problem = check_bytes(sys.argv[1], bytes.fromhex(sys.argv[2]))
    print(problem or "no problem found")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
