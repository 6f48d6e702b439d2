"""A run in Weights & Biases: the figures of each step under the names of metrics.jsonl.

Gives   WandbRun; check_wandb, for before a run
Reads   Scalars; WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY etc., as the wandb library does
Writes  RUN/wandb/, and the server through the library's own process; RUN/wandb/run_id
Raises  exceptions of the library: the outlet counts lost items

The run's id is kept in the run directory, so that a restarted coordinator continues the same run.
The writing thread imports the library and begins the run with the first figures.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil

from laminar.config import Config, ConfigError
from laminar.observe.board import Scalars
from laminar.run.command_line import with_extra

WANDB_DIR = "wandb"
LIBRARY_PROCESS = "wandb-core"
RUN_ID_FILE = "run_id"
OFFLINE = ("offline", "disabled")
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
BEGIN_S = 30.0  #: time limit for the server when a run begins; after it these figures are lost
FINISH_S = 30.0


class WandbRun:
    """A W&B run; `write` is for an outlet with a separate thread."""

    def __init__(self, config: Config, run_dir: Path, log: Any) -> None:
        self._config, self._run_dir, self._log = config, run_dir, log
        self._run: Any = None
        self._failed = False

    def write(self, items: list[Scalars]) -> None:
        if self._run is None:
            self._run = self._begin_or_log()
        for item in items:
            self._run.log(item.figures, step=item.step)

    def close(self) -> None:
        """Upload the remaining figures, within FINISH_S.

        Then the library's process is killed: without a network it would keep this one from
        ending.
        """
        if "wandb" not in sys.modules:
            return
        import wandb

        ending = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
        ending.start()
        ending.join(FINISH_S)
        for child in psutil.Process().children():
            if child.name().startswith(LIBRARY_PROCESS):
                child.kill()
                self._log.error("wandb-not-finished", after_s=FINISH_S)

    def _begin_or_log(self) -> Any:
        """Begin the run; log the first failure, and retry with the next figures."""
        try:
            return self._init_run()
        except Exception as error:
            if not self._failed:
                self._failed = True
                self._log.error("wandb-not-begun", reason=str(error))
            raise

    def _init_run(self) -> Any:
        import wandb  # more than a second to import

        return wandb.init(
            project=self._config.trainer.project_name,
            name=self._config.run.name,
            id=run_id(self._run_dir),
            resume="allow",
            dir=self._run_dir,
            config=msgspec.to_builtins(self._config),
            settings=wandb.Settings(
                console="off",  # the terminal belongs to the panel, the logs to the run directory
                silent=True,
                save_code=False,
                disable_git=True,
                init_timeout=BEGIN_S,
                finish_timeout=FINISH_S,
            ),
        )


def check_wandb() -> None:
    """Raise ConfigError if the library is missing, or has no key for a run that is online."""
    wrong = "trainer.logger names wandb, but "
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"{wrong}it is not installed: {with_extra('wandb')}")
    if not (
        os.environ.get("WANDB_MODE") in OFFLINE or any(map(os.environ.get, KEYS)) or _has_login()
    ):
        raise ConfigError(
            f"{wrong}it has no API key: call `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload the run later with `wandb sync`"
        )


def _has_login() -> bool:
    """Return whether `wandb login` was called, which leaves a login named "user" in .netrc.

    The library's own check starts its process, which never ends without a network.
    """
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return any(login == "user" for login, _, _ in netrc.netrc(file).hosts.values())
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(run_dir: Path) -> str:
    """Return the id of this run directory, created with the first call."""
    file = run_dir / WANDB_DIR / RUN_ID_FILE
    try:
        return file.read_text()
    except FileNotFoundError:
        file.parent.mkdir(exist_ok=True)
        file.write_text(secrets.token_hex(4))
        return file.read_text()
