"""A rank with a planted bug: it makes one pass fewer than the others in each mini-batch."""

from __future__ import annotations

import sys
from typing import Any

from laminar.actors.system import rank_process
from laminar.training.model import packing

_passes = packing.build_passes


def fewer(*args: Any, **kwargs: Any) -> Any:
    return _passes(*args, **kwargs)[:-1]


packing.build_passes = fewer

if __name__ == "__main__":
    rank_process.main(*sys.argv[1:])
