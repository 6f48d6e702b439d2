"""Requests that run in a vLLM, from prompt to end, with the load behind each token.

Reads   GenerateRequests; the outputs of AsyncLLM.generate
Gives   deltas to `on_deltas` on the loop, all of an iteration of the loop at once

Outputs arrive late and merged, so their arrival does not tell whose weights sampled the tokens. The
core tells it: it labels the result of each step, and the label changes only in a pause.

With a kept cache, prompts that come after a load must not find blocks of the weights before it.
Requests find only blocks of the same salt. A request has the salt of the load before its first
token: a request without a token when a load begins is restarted, and a request that arrives during
a load waits for its end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from laminar.engines.protocol import LENGTH, STOP, GenerateRequest, TokenDelta

FINISH_REASONS = {"stop": STOP, "length": LENGTH}
NOT_FINITE = "the model computes non-finite log-probs: the loaded weights are broken"


@dataclass
class _Running:
    request: GenerateRequest
    task: asyncio.Task[None]
    taken: int = 0  #: tokens received


class ActiveRequests:
    """Requests that were added and have not ended."""

    def __init__(
        self,
        llm: AsyncLLM,
        on_deltas: Callable[[list[TokenDelta]], None],
        on_failure: Callable[[str, Exception | str], None],
    ) -> None:
        """Set up; `on_failure` takes a request and the reason why all requests end."""
        self._llm, self._on_deltas, self._on_failure = llm, on_deltas, on_failure
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Running] = {}
        self._undelivered: list[TokenDelta] = []
        self._salt = ""
        self._no_load = asyncio.Event()
        self._no_load.set()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def add(self, request: GenerateRequest) -> None:
        """Start a request, after the current load."""
        task = self._loop.create_task(self._generate_response(request))
        self._running[request.request_id] = _Running(request, task)

    async def abort_request(self, request_id: str) -> bool:
        """Drop a request; no delta of it follows. False: unknown, or ended."""
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self._deliver_deltas()
        running.task.cancel()  # vLLM treats a cancelled consumer as an abort
        await asyncio.wait([running.task])
        return True

    def drop_all(self) -> None:
        """Drop all requests."""
        for running in self._running.values():
            running.task.cancel()
        self._running.clear()

    # --- loads --------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether a load is under way: nothing begins, and nothing is sampled."""
        return not self._no_load.is_set()

    def pause_sampling(self) -> None:
        self._no_load.clear()

    def resume_sampling(self) -> None:
        self._no_load.set()

    async def change_salt(self, salt: str) -> None:
        """Give requests without a token, and later ones, a new salt: older blocks are not found.

        Only while paused, and the core too."""
        self._salt = salt
        begun_again = [running for running in self._running.values() if not running.taken]
        for running in begun_again:
            running.task.cancel()
        if begun_again:
            await asyncio.wait([running.task for running in begun_again])
        for running in begun_again:
            if self._running.get(running.request.request_id) is running:
                self.add(running.request)

    # --- tokens -------------------------------------------------------------------------------

    async def _generate_response(self, request: GenerateRequest) -> None:
        """Run a request from its prompt to its end or abort."""
        await self._no_load.wait()
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_new_tokens - len(request.done_ids),
            stop_token_ids=sorted(request.stop_ids),
            ignore_eos=True,  # only stop_ids end a response
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.prompt_ids, *request.done_ids]}
        if self._salt:
            prompt["cache_salt"] = self._salt
        try:
            async for output in self._llm.generate(prompt, params, request.request_id):
                self._take_tokens(request.request_id, output.outputs[0])
        except Exception as error:
            self._on_failure(request.request_id, error)

    def _take_tokens(self, request_id: str, completion: Any) -> None:
        """Take new tokens of a request that was not dropped."""
        running = self._running.get(request_id)
        if running is None:
            return
        tokens = list(completion.token_ids)
        scores = completion.logprobs or ()
        logprobs = [row[token].logprob for row, token in zip(scores, tokens, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            return self._on_failure(request_id, NOT_FINITE)
        first = running.taken
        running.taken += len(tokens)
        parts = parts_of(self._get_load_starts(request_id, completion), first, running.taken)
        reason = FINISH_REASONS.get(completion.finish_reason)
        if reason is not None:
            del self._running[request_id]
        if not self._undelivered:
            self._loop.call_soon(self._deliver_deltas)
        for load, start, end in parts:
            part = slice(start - first, end - first)
            last = reason if end == running.taken else None
            delta = TokenDelta(request_id, tokens[part], logprobs[part], last, load)
            self._undelivered.append(delta)

    def _get_load_starts(self, request_id: str, completion: Any) -> list[tuple[str, int]]:
        """Return the labels of a response's tokens so far, each with its first token.

        vLLM returns them with the last token; before that they are in its own records."""
        if completion.weight_versions is not None:
            return [(span.version, span.start) for span in completion.weight_versions]
        processor = self._llm.output_processor
        (internal,) = processor.external_req_ids[request_id]
        starts: list[tuple[str, int]] = processor.request_states[internal].weight_version_starts
        return starts

    def _deliver_deltas(self) -> None:
        """Deliver all deltas of this iteration of the loop, in order."""
        deltas, self._undelivered = self._undelivered, []
        if deltas:
            self._on_deltas(deltas)


def parts_of(starts: list[tuple[str, int]], first: int, end: int) -> list[tuple[int, int, int]]:
    """Split tokens first .. end - 1 of a response by load: (load, first, end) of each, in order.

    `starts`: label and first token of each load so far. No tokens are one part of the last load.
    """
    spans = pairwise([*((int(label), start) for label, start in starts), (0, end)])
    parts = [(load, max(start, first), stop) for (load, start), (_, stop) in spans]
    return [part for part in parts if part[1] < part[2]] or [(int(starts[-1][0]), first, end)]
