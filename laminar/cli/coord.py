"""laminar-coord: the coordinator process of a run.

    laminar-coord RUN_DIR

RUN_DIR holds config.toml, as `laminar train` writes it. Started again on the same directory it
comes back to the state that its log describes. Exit codes: 0 the run is complete, 1 it failed, 2 a
mistake of the user, 130 it was stopped before it began; after 70 (it crashed) and 75 (the log could
not be written: start it when the disk has room) it is to be started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from laminar import exit_codes
from laminar.config import Config, load
from laminar.coordinator.ending import exit_code_of, sentence_of
from laminar.coordinator.loop import Coordinator
from laminar.core.state import State
from laminar.events.base import Command, Stamped
from laminar.observe.logs import configure, get_logger
from laminar.observe.metrics import MetricsWriter
from laminar.observe.status import StatusWriter
from laminar.rundir import CONFIG_FILE


def main() -> None:
    parser = argparse.ArgumentParser(prog="laminar-coord", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    try:
        code = uvloop.run(_run(run_dir))
    except Exception as error:
        code = exit_code_of(error)
        print(f"laminar-coord: {sentence_of(error)}", file=sys.stderr)
    sys.exit(code)


async def _run(run_dir: Path) -> int:
    config = load([run_dir / CONFIG_FILE])
    configure(run_dir, config.run.name, "coordinator")
    try:
        return await _serve(config, run_dir)
    except Exception as error:
        code = exit_code_of(error)
        trace = error if code == exit_codes.CRASHED else None
        get_logger().error("ended", exit_code=code, reason=sentence_of(error), exc_info=trace)
        raise


async def _serve(config: Config, run_dir: Path) -> int:
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
