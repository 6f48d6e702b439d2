"""Samples: what the model wrote, to search and sort.

Reads   RUN/store.sqlite, only when asked
Gives   SamplesTab; choose_samples; render_sample, which escapes the model's text
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from html import escape
from itertools import islice
from typing import Any

import panel as pn

from laminar.analysis.report.samples import Sample, SampleFilter, find_samples
from laminar.config import ConfigError
from laminar.run.directory import run_config
from laminar.tasks.data.decoding import make_decoder
from laminar.view.run_data import RunData

SHOWN = 20
ORDERS = ("latest", "worst reward", "best reward")
KINDS = ("training", "step", "evaluation", "id")


class SamplesTab:
    """List of samples, with a form to choose them."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._decode: Callable[[list[int]], str] | None = None
        choose, write = pn.widgets.Select, pn.widgets.TextInput
        self._form = [
            choose(name="of", options=list(KINDS), width=130),
            write(name="number or id", width=130),
            write(name="text in prompt or response", width=260),
            choose(name="order", options=list(ORDERS), width=150),
        ]
        for widget in self._form:
            widget.param.watch(lambda _: self._start(), "value")
        self._list = pn.pane.HTML("", sizing_mode="stretch_width")
        self.view = pn.Column(pn.Row(*self._form), self._list, sizing_mode="stretch_width")

    def refresh(self) -> None:
        """Load the first samples; later ones come when the form changes."""
        if not self._list.object:
            self._start()

    def _start(self) -> None:
        self._list.object = "<p class='faint'>Reading the store ...</p>"
        pn.state.execute(self._load, schedule=True)

    async def _load(self) -> None:
        try:
            choice = choose_samples(*(widget.value.strip() for widget in self._form))
            samples = await asyncio.to_thread(self._find, choice)
            shown = "".join(map(render_sample, samples))
        except ConfigError as error:
            shown = f"<p class='trouble'>{escape(str(error))}</p>"
        self._list.object = shown or "<p class='faint'>No sample matches.</p>"

    def _find(self, choice: SampleFilter) -> list[Sample]:
        if self._decode is None:
            self._decode = make_decoder(self._run.directory, run_config(self._run.directory))
        return list(islice(find_samples(self._run.directory, choice, self._decode), SHOWN))


def choose_samples(kind: str, value: str, search: str, order: str) -> SampleFilter:
    """Return the filter of a filled form; raise ConfigError for a step that is not a number."""
    chosen: dict[str, Any] = {"search": search}
    if order != ORDERS[0]:
        chosen[order.partition(" ")[0]] = SHOWN
    if kind == "id":
        chosen["name"] = value
    elif kind != "training":
        if not value.isdecimal():
            raise ConfigError(f"{value!r} is not a number of completed steps")
        chosen[kind] = int(value)
    return SampleFilter(**chosen)


def render_sample(sample: Sample) -> str:
    """Return a sample as HTML; all that the model or the data wrote is escaped."""
    row = sample.row
    use = f"step {sample.step}" if sample.step else row.end or row.status
    if sample.evaluation is not None:
        use = f"evaluation after {sample.evaluation} steps"
    reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
    extras = "".join(f", {name} {value}" for name, value in sample.extras.items())
    cut = f", truncated ({sample.truncated_by})" if sample.truncated else ""
    failed = f", reward failed: {row.reward_reason}" if row.reward_reason not in ("", "ok") else ""
    rest = f"{extras}{failed}, {row.num_tokens:,} tokens{cut}"
    origin = f"by {sample.sampled_by} on {sample.sampled_on}"
    parts = [("prompt", sample.prompt), ("response", sample.response)]
    parts += [] if sample.answer in (None, "") else [("correct answer", str(sample.answer))]
    body = "".join(
        f"<div class='faint'>{name}</div><pre>{escape(text)}</pre>" for name, text in parts
    )
    return (
        f"<div class='sample'><b>{escape(row.id)}</b> <span class='faint'>{escape(use)}</span> "
        f"reward <b>{reward}</b>{escape(rest)}, {escape(origin)}{body}</div>"
    )
