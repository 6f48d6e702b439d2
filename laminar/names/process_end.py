"""How a process ended, in words for people.

Reads   nothing
Gives   how_it_ended
"""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """The end of a process that has this `returncode`, which is -N after signal N."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in set(signal.Signals)  # those for real time have numbers only
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
