"""Every output of an emulated run says that it is one.

Reads   the configuration of a run directory
Gives   EMULATED; notes, lines for the outputs of commands that read a run
"""

from __future__ import annotations

from pathlib import Path

from laminar.config import ConfigError, load_config
from laminar.run.directory import CONFIG_FILE

EMULATED = (
    "this run is emulated: engines, trainer, prompts and rewards only take time; coordinator, "
    "store, relays and connections are real, and no figure says anything about learning"
)


def list_notes(run_dir: Path) -> list[str]:
    """Notes for the first lines of an output; a directory without a configuration has none."""
    try:
        file = run_dir / CONFIG_FILE
        emulated = file.is_file() and load_config([], resolved=file).is_emulated
    except ConfigError:
        return []
    return [f"note: {EMULATED}"] if emulated else []
