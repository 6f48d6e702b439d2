"""What a program prints under several hash seeds: nothing may depend on Python's string hashes.

Gives   printed_under
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def printed_under(hash_seeds: Iterable[str], program: str) -> set[str]:
    """The different outputs of a Python program that is run once per hash seed."""
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in hash_seeds
    }
