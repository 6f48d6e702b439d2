"""Named places in the code of actors where a test, or the simulator, may have a process die.

Gives   POINTS, those of the trainer
"""

from __future__ import annotations

POINTS = (
    "trainer-fetch",
    "trainer-step",
    "trainer-optimizer",
    "trainer-copy",
    "trainer-book",
    "trainer-checkpoint",
    "trainer-checkpoint-named",
    "trainer-load",
    "trainer-redo",
    "trainer-export",
)
"""Before a batch is fetched; in a step; after it, before its weights are copied; after that; when
the step is in the book; before a checkpoint has its name, and after; before one is loaded; when a
step was done again; before the export."""
