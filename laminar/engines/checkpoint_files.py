"""The weight files of a model directory: are they there, and whole?

Reads   the headers of *.safetensors, model.safetensors.index.json
Raises  EngineError that names the file

Only headers are read, so that a model of any size is looked at in a moment. A download that was cut
short, and a file that Git LFS has left as a pointer, are found by their headers.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from laminar.engines.protocol import EngineError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_weight_files(directory: str | Path) -> None:
    """Every file that the model needs has a header that fits its length."""
    directory = Path(directory)
    for file in _files(directory):
        try:
            with safe_open(directory / file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"{directory / file} cannot be read as safetensors ({error}); download it again"
            ) from None


def _files(directory: Path) -> list[str]:
    if (directory / ONE_FILE).exists():
        return [ONE_FILE]
    index = directory / INDEX
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError:
        raise EngineError(
            f"{directory} has no weights: neither {ONE_FILE} nor {INDEX} is there"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{index} cannot be read ({error!r}); download it again") from None
