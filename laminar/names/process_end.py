"""How a process ended, in words for people.

Reads   nothing
Gives   describe_exit
"""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """Describe how a process with this `returncode` ended; -N means signal N."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in set(signal.Signals)  # real-time signals have numbers only
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
