"""Entry of `python -m tools.simulator`."""

from __future__ import annotations

import sys

from tools.simulator.main import main

if __name__ == "__main__":
    sys.exit(main())
