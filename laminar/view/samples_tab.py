"""Samples: what the model wrote, to search and sort.

Reads   RUN/store.sqlite, only when asked
Gives   SamplesTab; render_sample, which escapes the model's text
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
from laminar.view.html import format_cell
from laminar.view.run_data import RunData

SHOWN = 20
ORDERS = ("latest", "worst reward", "best reward")
KINDS = ("training", "step", "evaluation", "id")


class SamplesTab:
    """List of samples, with a form to choose them."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._decode: Callable[[list[int]], str] | None = None
        self._loaded = False
        self._kind = pn.widgets.Select(name="of", options=list(KINDS), width=130)
        self._value = pn.widgets.TextInput(name="number or id", width=130)
        self._search = pn.widgets.TextInput(
            name="text in prompt or response", width=260, placeholder="ignores case"
        )
        self._order = pn.widgets.Select(name="order", options=list(ORDERS), width=150)
        self._list = pn.pane.HTML("", sizing_mode="stretch_width")
        button = pn.widgets.Button(name="Show", align="end", button_type="primary")
        button.on_click(lambda _: self._start())
        for widget in (self._kind, self._value, self._search, self._order):
            widget.param.watch(lambda _: self._start(), "value")
        self.view = pn.Column(
            pn.Row(self._kind, self._value, self._search, self._order, button),
            self._list,
            sizing_mode="stretch_width",
        )

    def refresh(self) -> None:
        """Load the first samples; later ones come when the form changes."""
        if not self._loaded:
            self._loaded = True
            self._start()

    def _start(self) -> None:
        self._list.object = "<p class='faint'>Reading the store ...</p>"
        pn.state.execute(self._load, schedule=True)

    async def _load(self) -> None:
        try:
            choice = choose_samples(
                self._kind.value, self._value.value.strip(), self._search.value, self._order.value
            )
            samples = await asyncio.to_thread(self._find, choice)
        except ConfigError as error:
            self._list.object = f"<p class='trouble'>{escape(str(error))}</p>"
            return
        self._list.object = "".join(map(render_sample, samples)) or (
            "<p class='faint'>No sample matches.</p>"
        )

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
    fields = sample.to_dict()
    reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
    use = (
        f"step {fields['step']}"
        if fields["step"]
        else f"evaluation after {fields['evaluation']} steps"
        if fields["evaluation"] is not None
        else fields["status"]
    )
    extras = "".join(f", {name} {format_cell(value)}" for name, value in sample.extras.items())
    cut = f", truncated ({fields['truncated_by']})" if sample.truncated else ""
    head = (
        f"<b>{escape(fields['id'])}</b> <span class='faint'>{escape(str(use))}</span> reward "
        f"<b>{reward}</b>{escape(extras)}, {fields['length']:,} tokens{escape(cut)}, by "
        f"{escape(sample.sampled_by)} on {escape(sample.sampled_on)}"
    )
    failed = fields["reason"] not in (None, "", "ok")
    trouble = f"<div class='trouble'>{escape(str(fields['reason']))}</div>" if failed else ""
    parts = [("prompt", sample.prompt), ("response", sample.response)]
    if sample.answer not in (None, ""):
        parts.append(("correct answer", str(sample.answer)))
    body = "".join(
        f"<div class='faint'>{name}</div><pre>{escape(text)}</pre>" for name, text in parts
    )
    return f"<div class='sample'>{head}{trouble}{body}</div>"
