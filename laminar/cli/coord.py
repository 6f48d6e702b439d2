"""laminar-coord: the coordinator process of a run.

    laminar-coord RUN_DIR

RUN_DIR holds config.toml, as `laminar train` writes it. Started again on the same directory it
comes back to the state that its log describes. Exit codes: 0 the run is complete, 1 it failed, 2 a
mistake of the user, 75 the log could not be written, 130 it was stopped before it began.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from laminar.config import ConfigError, load
from laminar.coordinator.loop import Coordinator, ReplayDiffers
from laminar.core.state import State
from laminar.eventlog.record import LogCorrupt
from laminar.eventlog.writer import LogTaken
from laminar.events.base import Command, Stamped
from laminar.observe.logs import configure
from laminar.observe.metrics import MetricsWriter
from laminar.observe.status import StatusWriter
from laminar.ports import DiskError
from laminar.rundir import CONFIG_FILE

EXIT_USER_ERROR, EXIT_LOG_UNWRITABLE = 2, 75


def main() -> None:
    parser = argparse.ArgumentParser(prog="laminar-coord", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    try:
        sys.exit(uvloop.run(_run(run_dir)))
    except (ConfigError, LogCorrupt, LogTaken, ReplayDiffers) as error:
        print(f"laminar-coord: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except DiskError as error:
        print(f"laminar-coord: the event log cannot be written: {error}", file=sys.stderr)
        sys.exit(EXIT_LOG_UNWRITABLE)


async def _run(run_dir: Path) -> int:
    config = load([run_dir / CONFIG_FILE])
    configure(run_dir, config.run.name, "coordinator")
    metrics = MetricsWriter(run_dir, tensorboard="tensorboard" in config.trainer.logger)
    status = StatusWriter(run_dir)

    def observe(stamped: Stamped, commands: list[Command], state: State) -> None:
        metrics(stamped, commands, state)
        status(stamped, commands, state)

    return await Coordinator(
        config, run_dir, on_replayed=metrics, on_event=observe, replay_from=metrics.replay_from
    ).run()


if __name__ == "__main__":
    main()
