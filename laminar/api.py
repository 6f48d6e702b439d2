"""Laminar from Python: train a model, read what a run has written.

Reads   a run directory, at work or ended
Starts  (train only) what `laminar train` starts
Gives   open_run, Run; train
Raises  ConfigError with the command's sentence; RunFailed with the reason of the run

It stands beside cli/, not in it: these are the names that programs of users depend on, and
`import laminar` finds them here. What trains is imported by `train`, what makes tables by the
table that is asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.config import ConfigError, load_config
from laminar.names import exit_codes
from laminar.run.command_line import shell_command
from laminar.run.directory import METRICS_FILE

if TYPE_CHECKING:
    import pyarrow as pa

    from laminar.analysis.report.samples import Sample

__all__ = ["ConfigError", "Run", "RunFailed", "open_run", "train"]

WHOLE_NUMBERS = ("step", "event", "time_ns")
"""Columns of `Run.metrics` that are no figures."""
SAMPLE_COLUMNS = (
    "id", "group", "purpose", "step", "evaluation", "prompt", "response", "answer", "score",
    "reason", "exception", "extras", "length", "truncated", "version", "version_step", "replica",
    "spans", "status",
)  # fmt: skip
"""The columns of `Run.samples`, those of `laminar samples --jsonl`, also where there is no row."""


class RunFailed(RuntimeError):
    """A run that ended before its last step; `run` is what there is of it."""

    def __init__(self, reason: str, run: Run) -> None:
        super().__init__(f"{reason} ({run.directory})")
        self.reason, self.run = reason, run


class Run:
    """A run directory, opened for reading. Each property is read anew: the run may be at work."""

    def __init__(self, directory: str | Path) -> None:
        """ConfigError for a directory that is no run."""
        from laminar.run.directory import run_config

        self.directory = Path(directory)
        run_config(self.directory)

    def __repr__(self) -> str:
        return f"laminar.open_run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, as nested dicts; docs and defaults are in configs/reference.toml."""
        import msgspec

        from laminar.run.directory import run_config

        found: dict[str, Any] = msgspec.to_builtins(run_config(self.directory))
        return found

    @property
    def summary(self) -> dict[str, Any]:
        """What `laminar report --json` prints, worked out from the log; docs/metrics.md."""
        from laminar.analysis.report.summary import summary_of

        return summary_of(self.directory)

    @property
    def metrics(self) -> pa.Table:
        """A row per line of metrics.jsonl, a column per figure, null where a line lacks it."""
        import pyarrow as pa

        rows = [row for text in self._metrics_lines() if isinstance(row := _parse_line(text), dict)]
        names = dict.fromkeys([*WHOLE_NUMBERS, *(name for row in rows for name in row)])
        return pa.table(
            {
                name: pa.array(
                    [row.get(name) for row in rows],
                    pa.int64() if name in WHOLE_NUMBERS else pa.float64(),
                )
                for name in names
            }
        )

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
        """What `laminar samples --jsonl` prints, as rows: prompts, answers, scores. `step`: those
        that the N-th step trained; `evaluation`: held-out ones after N completed steps."""
        from laminar.analysis.report.samples import SampleFilter, find_samples
        from laminar.run.directory import run_config
        from laminar.tasks.data.decoding import make_decoder

        chosen = {"step": step, "evaluation": evaluation, "id": id}
        if sum(value not in (None, "") for value in chosen.values()) > 1 or (worst and best):
            raise ConfigError("samples: give one of step, evaluation, id, and one of worst, best")
        choice = SampleFilter(step, evaluation, id, search, worst, best)
        decode = make_decoder(self.directory, run_config(self.directory))
        return _build_table(islice(find_samples(self.directory, choice, decode), n))

    def _metrics_lines(self) -> list[str]:
        from laminar.analysis.log.timeline import whole_lines

        return [text for _, text in whole_lines(self.directory / METRICS_FILE)]


def open_run(directory: str | Path) -> Run:
    """A run by its directory, at work or ended; ConfigError where there is none."""
    return Run(directory)


def train(
    settings: Mapping[str, Any] | None = None,
    *,
    config: str | Path | Sequence[str | Path] = (),
    move_old: bool = False,
    quiet: bool = False,
) -> Run:
    """Train as `laminar train` does, and return the run when it has ended.

    `settings` are nested or dotted: {"optim": {"lr": 1e-6}} or {"optim.lr": 1e-6}; they win over
    the TOML files of `config`. `quiet` prints nothing.

    ConfigError: a mistake in the settings, with the command's sentence. RunFailed: the run began
    and failed. Ctrl-C ends the run gracefully, with its model exported; a second one raises
    KeyboardInterrupt. In another thread than the main one signals are left alone, and
    `laminar stop RUN` ends the run.
    """
    from laminar.launch.terminal import Terminal
    from laminar.launch.train import place_of, run_training

    files = [config] if isinstance(config, str | Path) else list(config)
    wanted = load_config(files, settings=_to_plain(settings or {}))
    run_dir = place_of(wanted, move_old)
    ways = argparse.Namespace(dry_run=False, prepare=False, resume=None, move_old=move_old)
    over = run_training(wanted, run_dir, ways, console=Terminal(quiet=quiet))
    reason = over.reason or f"the run ended with exit code {over.code}"
    if over.code == exit_codes.PAUSED:
        reason = (
            f"the run is paused; `{shell_command('train', '--resume', run_dir)}` goes on with it"
        )
    if over.code == exit_codes.USER_ERROR:
        raise ConfigError(reason)
    if over.code == exit_codes.STOPPED_EARLY and "SIGINT" in reason:
        raise KeyboardInterrupt
    if over.code != exit_codes.COMPLETE:
        raise RunFailed(reason, open_run(run_dir))
    return open_run(run_dir)


def _to_plain(value: Any) -> Any:
    """Paths as a TOML file has them: strings."""
    if isinstance(value, Mapping):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _build_table(samples: Iterable[Sample]) -> pa.Table:
    """Columns of one type each, whatever the data and the reward functions have in them."""
    import pyarrow as pa

    text, whole = pa.string(), pa.int64()
    span = [("replica", text), ("weight_version", whole), ("version_step", whole)]
    kinds = {
        **dict.fromkeys(("step", "evaluation", "length", "version", "version_step"), whole),
        "score": pa.float64(),
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


def _parse_line(text: str) -> Any:
    """None for a line that a crash cut short."""
    try:
        return json.loads(text)
    except ValueError:
        return None
