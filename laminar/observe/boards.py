"""Destinations of a run's figures other than metrics.jsonl and status.json: `trainer.logger`.

Reads   the config
Gives   Boards: the outlets that metrics and status put their figures into

Each board has a separate thread, so that a server that does not respond delays nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laminar.config import Config
from laminar.observe.board import Board, Scalars
from laminar.observe.prometheus import Prometheus
from laminar.observe.telemetry import Outlet, Telemetry
from laminar.observe.wandb_run import WandbRun

LAST_FIGURES_S = 40.0
"""Time limit for the last figures of an ended run; W&B may have to begin its run first."""


class Boards:
    """The boards that the configuration names."""

    def __init__(self, config: Config, run_dir: Path, telemetry: Telemetry, log: Any) -> None:
        self.scalars: list[Outlet[Scalars]] = []
        self.status: list[Outlet[dict[str, Any]]] = []
        self._log = log
        self._wandb: WandbRun | None = None
        self._threads = {name: telemetry.start_sibling() for name in config.trainer.logger}
        if thread := self._threads.get("tensorboard"):
            self.scalars.append(thread.add_outlet("tensorboard", Board(run_dir).write))
        if thread := self._threads.get("wandb"):
            self._wandb = WandbRun(config, run_dir, log)
            self.scalars.append(thread.add_outlet("wandb", self._wandb.write))
        if thread := self._threads.get("prometheus"):
            self._serve_prometheus(config, run_dir, thread)

    def _serve_prometheus(self, config: Config, run_dir: Path, thread: Telemetry) -> None:
        host, port = config.coordinator.host, config.coordinator.prometheus_port
        try:
            page = Prometheus(run_dir, config.run.name, host, port)
        except OSError as error:  # the port was free when the run was checked
            self._log.error("prometheus-not-served", address=f"{host}:{port}", reason=str(error))
            return
        self._log.info("prometheus-served", address=page.address)
        self.scalars.append(thread.add_outlet("prometheus", page.show_step))
        self.status.append(thread.add_outlet("prometheus-status", page.show_status, kept=1))

    def close(self) -> None:
        """Wait for the last figures, within a limit; figures beyond it are lost."""
        for thread in self._threads.values():
            thread.wait_drained(LAST_FIGURES_S)
        if self._wandb is not None:
            self._wandb.close()
