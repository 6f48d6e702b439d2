"""Notes that mark every output of an emulated run.

Reads   the configuration of a run directory
Gives   EMULATED; list_notes, lines for the outputs of commands that read a run
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
    """Return the notes for the head of an output; none for a directory without configuration."""
    try:
        file = run_dir / CONFIG_FILE
        emulated = file.is_file() and load_config([], resolved=file).is_emulated
    except ConfigError:
        return []
    return [f"note: {EMULATED}"] if emulated else []
