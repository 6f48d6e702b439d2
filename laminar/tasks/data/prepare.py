"""Files of a recipe's data, made from public ones: prepare.py of configs/recipes calls it.

Reads   .parquet or .jsonl files, local or on the hub (hf://datasets/ORG/NAME/FILE)
Writes  .jsonl files, all or none; never over an existing one
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.config import ConfigError
from laminar.names import exit_codes
from laminar.run.renames import write_whole
from laminar.tasks.data.hub import find_data_files
from laminar.tasks.data.prompts import read_records

Row = dict[str, Any]
Converter = Callable[[Row], Row]


def prepare_files(directory: Path, files: dict[str, list[str]], convert: Converter) -> int:
    """Write each file from its sources, every row converted; return the exit code of a program."""
    lines: dict[Path, list[str]] = {}
    try:
        for path, sources in ((directory / name, sources) for name, sources in files.items()):
            if path.exists():
                raise ConfigError(f"{path} exists; remove it to make it again")
            found = [Path(file) for source in sources for file in find_data_files(source)]
            rows = (convert(row) for file in found for _, row in read_records(file))
            lines[path] = [json.dumps(row) + "\n" for row in rows]
    except ConfigError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return exit_codes.USER_ERROR
    for path, text in lines.items():
        write_whole(path, "".join(text).encode(), durable=False)
        print(f"wrote {path} ({len(text)} rows)")
    return exit_codes.COMPLETE
