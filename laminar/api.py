"""Python API of Laminar: train a model, read the results of a run.

Reads   a run directory, running or ended
Starts  (train and start) what `laminar train` starts
Gives   open_run, Run; train; start, ActiveRun
Raises  ConfigError with the command's sentence; RunFailed with the reason of the run

The module is outside cli/ because users' programs depend on its names, which `import laminar` finds
here. The training code is imported by `train`, pyarrow by the properties and methods that return
tables.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.config import ConfigError
from laminar.names import exit_codes
from laminar.run.command_line import shell_command
from laminar.run.directory import METRICS_FILE

if TYPE_CHECKING:
    import pyarrow as pa

    from laminar.analysis.report.samples import Sample
    from laminar.launch.handle import RunThreads

__all__ = ["ActiveRun", "ConfigError", "Run", "RunFailed", "open_run", "start", "train"]

Config = str | Path | Mapping[str, Any]

WHOLE_NUMBERS = ("step", "event", "time_ns")  #: columns of `Run.metrics` with integer values
BY_ORIGIN = "by_origin/"
SAMPLE_COLUMNS = (
    "id", "group", "purpose", "step", "evaluation", "prompt", "response", "answer", "reward",
    "reason", "exception", "extras", "length", "truncated", "truncated_by",
    "version", "version_step", "replica", "spans", "status",
)  # fmt: skip
"""Columns of `Run.samples`, as in `laminar samples --jsonl`, present even without rows."""


class RunFailed(RuntimeError):
    """Raised when a run ends before its last step; `run` is its directory, opened for reading."""

    def __init__(self, reason: str, run: Run) -> None:
        super().__init__(f"{reason} ({run.directory})")
        self.reason, self.run = reason, run


class Run:
    """Run directory, opened for reading; each property is read again, as the run may be active."""

    def __init__(self, directory: str | Path) -> None:
        """Open the directory; raise ConfigError if it is not a run directory."""
        from laminar.run.directory import run_config

        self.directory = Path(directory)
        run_config(self.directory)

    def __repr__(self) -> str:
        return f"laminar.open_run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, as nested dicts; configs/reference.toml has documentation and defaults."""
        import msgspec

        from laminar.run.directory import run_config

        found: dict[str, Any] = msgspec.to_builtins(run_config(self.directory))
        return found

    @property
    def summary(self) -> dict[str, Any]:
        """Output of `laminar report --json`, computed from the log; see docs/metrics.md."""
        from laminar.analysis.report.summary import summary_of

        return summary_of(self.directory)

    @property
    def metrics(self) -> pa.Table:
        """Table with a row per line of metrics.jsonl and a column per figure, null if absent.

        The figures by replica and weight version are in `metrics_by_origin`.
        """
        return self._build_metrics(by_origin=False)

    @property
    def metrics_by_origin(self) -> pa.Table:
        """Table with the same rows, and a column per figure `by_origin/...`."""
        return self._build_metrics(by_origin=True)

    def samples(
        self,
        *,
        step: int | None = None,
        evaluation: int | None = None,
        id: str = "",
        search: str = "",
        worst: int = 0,
        best: int = 0,
        n: int | None = None,
    ) -> pa.Table:
        """Return the rows of `laminar samples --jsonl`: prompts, responses, scores.

        `step`: responses trained by the N-th step; `evaluation`: samples evaluated after N
        completed steps.
        """
        from laminar.analysis.report.samples import SampleFilter, find_samples
        from laminar.run.directory import run_config
        from laminar.tasks.data.decoding import make_decoder

        chosen = {"step": step, "evaluation": evaluation, "id": id}
        if sum(value not in (None, "") for value in chosen.values()) > 1 or (worst and best):
            raise ConfigError(
                "samples: give at most one of step, evaluation, id, and one of worst, best"
            )
        choice = SampleFilter(step, evaluation, id, search, worst, best)
        decode = make_decoder(self.directory, run_config(self.directory))
        return _build_table(islice(find_samples(self.directory, choice, decode), n))

    def sql(self, query: str) -> pa.Table:
        """Return the result of one SELECT over the facts of the run, as `laminar log sql`."""
        from laminar.analysis.facts.reader import load_facts
        from laminar.analysis.facts.sql import query_facts

        return query_facts([load_facts(self.directory)], query)

    def view(self) -> Any:
        """Return the page of `laminar view`, for a cell of a notebook; needs the extra `view`."""
        from laminar.view.run_data import open_runs

        runs = open_runs([self.directory])
        from laminar.view.page import make_page

        return make_page(runs)

    def _build_metrics(self, *, by_origin: bool) -> pa.Table:
        import pyarrow as pa

        from laminar.analysis.log.timeline import read_json_lines

        lines = read_json_lines(self.directory / METRICS_FILE)
        rows = [row for _, row in lines if isinstance(row, dict)]
        found = dict.fromkeys(name for row in rows for name in row if name not in WHOLE_NUMBERS)
        chosen = [name for name in found if name.startswith(BY_ORIGIN) == by_origin]
        whole, real = pa.int64(), pa.float64()
        kinds = dict.fromkeys(WHOLE_NUMBERS, whole) | dict.fromkeys(chosen, real)
        return pa.table(
            {name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()}
        )


def open_run(directory: str | Path) -> Run:
    """Open a running or ended run by its directory; raise ConfigError if there is none."""
    return Run(directory)


def train(
    config: Config | Sequence[Config] = (),
    *,
    reward_funcs: Any = None,
    reward_weights: Sequence[float] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    environment_factory: Any = None,
    agent: Any = None,
    loss: Any = None,
    advantage: Any = None,
    callbacks: Sequence[Any] | None = None,
    move_old: bool = False,
    quiet: bool = False,
) -> Run:
    """Train as `laminar train` does, and return the run when it has ended.

    `config`: settings, nested or dotted ({"optim": {"lr": 1e-6}} or {"optim.lr": 1e-6}), the path
    of a TOML file, or a list of these; the later win. docs/python.md has the other arguments.

    Raises ConfigError, with the command's message, for a mistake in the arguments, and RunFailed if
    the run began and failed. Ctrl-C ends the run gracefully, with its model exported; a second one
    raises KeyboardInterrupt. Outside the main thread signals are not handled, and
    `laminar stop RUN` ends the run.
    """
    return start(**locals()).wait()


def start(config: Config | Sequence[Config] = (), **arguments: Any) -> ActiveRun:
    """Start a run with the arguments of `train`; return at once, with a handle of the run."""
    from laminar.launch.handle import start_run

    sources = [config] if isinstance(config, str | Path | Mapping) else list(config)
    return ActiveRun(start_run(_to_plain(sources), **arguments))


class ActiveRun(Run):
    """Run that this program has started: a Run to read, with its progress, its stop and its end."""

    def __init__(self, threads: RunThreads) -> None:
        self._threads, self.directory = threads, threads.run_dir
        self.stop = threads.stop

    @property
    def progress(self) -> str:
        """Line of the terminal's progress: step, reward, evaluation score, time left."""
        return self._threads.progress

    def wait(self) -> Run:
        """Wait for the end and return the run, or raise as `train` does."""
        over = self._threads.join()
        reason = over.failure.sentence if over.failure else f"the run ended with code {over.code}"
        if over.code == exit_codes.PAUSED:
            resume = shell_command("train", "--resume", self.directory)
            reason = f"the run is paused; `{resume}` resumes it"
        if over.code == exit_codes.USER_ERROR:
            raise ConfigError(reason)
        if over.failure and over.failure.subject == signal.SIGINT.name:
            raise KeyboardInterrupt
        if over.code != exit_codes.COMPLETE:
            raise RunFailed(reason, self)
        return open_run(self.directory)


def _to_plain(value: Any) -> Any:
    """Convert paths to strings, as in a TOML file."""
    if isinstance(value, Mapping):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _build_table(samples: Iterable[Sample]) -> pa.Table:
    """Build columns of one type each, whatever types the data and reward functions use."""
    import pyarrow as pa

    text, whole = pa.string(), pa.int64()
    span = [("replica", text), ("weight_version", whole), ("version_step", whole)]
    kinds = {
        **dict.fromkeys(("step", "evaluation", "length", "version", "version_step"), whole),
        "reward": pa.float64(),
        "truncated": pa.bool_(),
        "extras": text,  # JSON
        "spans": pa.list_(pa.struct([*span, ("num_tokens", whole)])),
    }
    rows = []
    for sample in samples:
        fields = sample.to_dict()
        answer = fields["answer"]
        shown = answer if answer is None or isinstance(answer, str) else json.dumps(answer)
        rows.append(fields | {"answer": shown, "extras": json.dumps(fields["extras"])})
    return pa.table(
        {
            name: pa.array([row[name] for row in rows], kinds.get(name, text))
            for name in SAMPLE_COLUMNS
        }
    )
