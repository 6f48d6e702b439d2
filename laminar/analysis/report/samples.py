"""Samples of a run: the model's responses with prompts and scores, read from the store.

Reads   RUN/store.sqlite and its payload files
Gives   Sample; find_samples, an iterator that holds nothing open between two samples
Raises  ConfigError for a step, an evaluation or an id that does not exist

The database may be in use by a run. It is opened read-only, and each read transaction ends before
anything is returned: a transaction held open while a user reads a page of output would prevent the
store from restarting its write-ahead log, which would grow until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from laminar.config import ConfigError
from laminar.events.reasons import FinishReason
from laminar.names.ids import Purpose
from laminar.run.directory import STORE_FILE
from laminar.storage import books, rules
from laminar.storage import messages as m
from laminar.storage.branches import Parents, find_parent, list_paths
from laminar.storage.rows import DamageError, PromptKey
from laminar.storage.rules import Chunk, Row, TokenSpan
from laminar.storage.tables import ALL, Tables, TrajectoryFilter

ROWS, PAYLOADS = 1024, 32
"""Rows of one read transaction: rows alone, and rows with all their tokens."""

Decode = Callable[[list[int]], str]
Item = TypeVar("Item")


class SampleFilter(NamedTuple):
    """Selection of samples: of a step, an evaluation or a name, else all of training."""

    step: int | None = None  #: trained by this step, counted from 1
    evaluation: int | None = None  #: after this number of completed steps
    name: str = ""  #: a trajectory or a group
    search: str = ""  #: text in prompt or response, ignoring case
    worst: int = 0  #: number of samples, lowest score first
    best: int = 0  #: number of samples, highest score first


class Sample(NamedTuple):
    """Response of the model, with its prompt, score and origin."""

    row: Row
    prompt: str  #: as the model saw it, special tokens included; empty if it never did
    response: str  #: with special tokens; if the payload was removed, as the reward function saw it
    answer: Any  #: reference answer of the data
    extras: m.Extras  #: extra figures of the reward functions
    spans: tuple[TokenSpan, ...]  #: replica and version that sampled each part, in order

    @property
    def reward(self) -> float | None:
        return rules.decode_reward(self.row.reward_bits)

    @property
    def truncated_by(self) -> str | None:
        """Limit that ended it: length, or one of its environment (EndedBy)."""
        reason = self.row.finish_reason
        return None if reason == FinishReason.STOP else reason

    @property
    def truncated(self) -> bool:
        return self.truncated_by is not None

    @property
    def step(self) -> int | None:
        """Step that trained it, counted from 1."""
        index = self.row.end_step if self.row.end == "trained" else None
        return None if index is None else index + 1

    @property
    def evaluation(self) -> int | None:
        """Number of steps completed before an evaluation sample."""
        return self.row.version_step if self.row.purpose == Purpose.EVAL else None

    @property
    def sampled_on(self) -> str:
        """Replica; after a migration or a weight update, each part with its number of tokens."""
        if len(self.spans) < 2:
            return self.spans[0].replica if self.spans else self.row.replica or "-"
        several = len({span.weight_version for span in self.spans}) > 1
        return ", ".join(
            f"{span.replica}{f' v{span.weight_version}' if several else ''} ({span.num_tokens})"
            for span in self.spans
        )

    @property
    def sampled_by(self) -> str:
        """Version, or first and last version, with the steps that made them."""
        row, (last, last_step) = self.row, self.row.latest
        if last == row.weight_version:
            return f"version {row.weight_version} (made by {row.version_step} steps)"
        return (
            f"versions {row.weight_version} to {last} (made by {row.version_step} to {last_step} "
            "steps)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, under the names of docs/debugging.md."""
        row = self.row
        return {
            "id": row.id,
            "group": row.group_id,
            "purpose": row.purpose,
            "step": self.step,
            "evaluation": self.evaluation,
            "prompt": self.prompt,
            "response": self.response,
            "answer": self.answer,
            "reward": self.reward,
            "reason": row.reward_reason,
            "exception": row.reward_detail or None,
            "extras": self.extras,
            "length": row.num_tokens,
            "truncated": self.truncated,
            "truncated_by": self.truncated_by,
            "version": row.weight_version,
            "version_step": row.version_step,
            "replica": row.replica,
            "spans": [span._asdict() for span in self.spans],
            "status": row.end or row.status,
        }


def find_samples(run_dir: Path, choice: SampleFilter, decode: Decode) -> Iterator[Sample]:
    """Yield the latest first, siblings in order; or the worst or best of those with a score."""
    path = run_dir / STORE_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {STORE_FILE} yet: wait until its store has started")
    rows = _read_rows(path, _build_condition(path, choice))
    if choice.name:
        rows = iter(sorted(rows, key=lambda row: row.sibling))
    if not choice.search:
        yield from _load_samples(path, _select_extremes(rows, choice, _row_score), decode)
        return
    text = choice.search.casefold()
    found = (sample for sample in _load_samples(path, rows, decode) if _contains_text(sample, text))
    yield from _select_extremes(found, choice, lambda sample: sample.reward)


def _build_condition(path: Path, choice: SampleFilter) -> TrajectoryFilter:
    """Return the condition on rows; report a mistake before anything is read."""
    with books.open_tables(path) as tables:
        if choice.step is not None:
            _check_step(tables, choice.step)
            return TrajectoryFilter.trained_by(choice.step - 1)
        if choice.evaluation is not None:
            _check_evaluation(tables, choice.evaluation)
            return TrajectoryFilter.evaluated_after(choice.evaluation)
        if choice.name:
            wanted = TrajectoryFilter.with_name(choice.name)
            if not tables.find_newest(wanted, limit=1):
                raise ConfigError(
                    f"the store of {path.parent} has no trajectory or group {choice.name!r}: ids "
                    "look like 0.17.3 (pass 0, prompt 17, sibling 3), of an evaluation like e2.5.0"
                )
            return wanted
    return TrajectoryFilter.finished_for(Purpose.TRAIN)


def _check_step(tables: Tables, step: int) -> None:
    steps = [index + 1 for index in tables.trained_steps()]
    if step not in steps:
        there = f"there are {_format_steps(steps)}" if steps else "no step is complete yet"
        raise ConfigError(f"--step {step}: this step trained no responses; {there}")


def _check_evaluation(tables: Tables, step: int) -> None:
    steps = tables.evaluated_steps()
    if step not in steps:
        there = f"there are those after {_format_steps(steps)}" if steps else "there is none yet"
        raise ConfigError(f"--eval {step}: there is no evaluation after step {step}; {there}")


def _format_steps(steps: list[int]) -> str:
    """Return `steps 1 to 7`, or a list of the steps if some are missing."""
    if steps == list(range(steps[0], steps[-1] + 1)) and len(steps) > 2:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"


def _read_rows(path: Path, wanted: TrajectoryFilter) -> Iterator[Row]:
    before = ALL
    while True:
        with books.open_tables(path) as tables:
            page = tables.find_newest(wanted, before, ROWS)
        yield from (row for _, row in page)
        if len(page) < ROWS:
            return
        before = page[-1][0]


def _select_extremes(
    items: Iterable[Item], choice: SampleFilter, score: Callable[[Item], float | None]
) -> Iterable[Item]:
    if not (choice.worst or choice.best):
        return items
    scored = ((value, item) for item in items if (value := score(item)) is not None)
    if choice.worst:
        found = heapq.nsmallest(choice.worst, scored, key=lambda pair: pair[0])
    else:
        found = heapq.nlargest(choice.best, scored, key=lambda pair: pair[0])
    return [item for _, item in found]


def _row_score(row: Row) -> float | None:
    return rules.decode_reward(row.reward_bits)


def _contains_text(sample: Sample, text: str) -> bool:
    return text in sample.prompt.casefold() or text in sample.response.casefold()


def _load_samples(path: Path, rows: Iterable[Row], decode: Decode) -> Iterator[Sample]:
    """Yield samples in the order of the rows, a few per read transaction."""
    left = iter(rows)
    while batch := list(islice(left, PAYLOADS)):
        with books.open_tables(path) as tables:
            found = [_read_sample(tables, row, decode) for row in batch]
        yield from found


def _read_sample(tables: Tables, row: Row, decode: Decode) -> Sample:
    key = PromptKey(row.purpose, row.row_index)
    prompt = tables.get_prompt(key)
    removed = tables.is_removed(row.id)
    try:
        chunks = [] if removed else tables.load_chunks(row.id)
        contexts = {} if removed else tables.turns.get_contexts(row)
    except DamageError as error:
        raise ConfigError(f"trajectory {row.id} cannot be read: {error}") from error
    if prompt is None:
        raise ConfigError(f"trajectory {row.id} cannot be read: its prompt is not in the store")
    prompt_ids = contexts.pop(0, b"") or tables.get_prompt_ids(key, prompt)
    branches = _list_branches(row, chunks, contexts, tables.turns.get_parents(row))
    return Sample(
        row,
        decode(_decode_ids(prompt_ids)),
        "\n".join(head + decode(_decode_ids(tokens)) for head, tokens in branches)
        or (tables.get_text(row.id) if removed else ""),
        msgspec.to_builtins(m.decode_prompt(prompt).ground_truth),
        tables.get_extras(row.id),
        tables.get_spans(row),
    )


def _list_branches(
    row: Row, chunks: Iterable[Chunk], contexts: dict[int, bytes], parents: Parents
) -> Iterator[tuple[str, bytes]]:
    """Yield head and token ids of each branch, as far as no earlier branch has its turns.

    The ids, of turns and contexts, are in the order in which the model sampled and read them."""
    turns: dict[int, bytes] = {}
    for chunk in chunks:
        before = turns.get(chunk.segment) or contexts.get(chunk.segment, b"")
        turns[chunk.segment] = before + chunk.tokens
    for number, path in enumerate(list_paths(parents, len(turns)), start=1):
        new = [turn for turn in path if turn in turns]
        after = find_parent(parents, new[0]) + 1
        head = f"[{row.id}/{number}{f', after turn {after}' if after else ''}]\n"
        yield head if parents else "", b"".join(turns.pop(turn) for turn in new)


def _decode_ids(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return ids
