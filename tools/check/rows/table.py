"""All rows of the scorecard, ordered by number."""

from __future__ import annotations

from tools.check.rows import (
    bad_weights,
    coverage,
    cuts,
    exposure,
    faults,
    golden,
    log_damage,
    planted,
    power_cuts,
    sandbox,
    simulation,
    strangers,
    untested,
    wedges,
    wire,
)
from tools.check.rows.base import Row

ROWS: tuple[Row, ...] = tuple(
    sorted(
        (
            *bad_weights.ROWS,
            *coverage.ROWS,
            *cuts.ROWS,
            *exposure.ROWS,
            *faults.ROWS,
            *golden.ROWS,
            *log_damage.ROWS,
            *planted.ROWS,
            *power_cuts.ROWS,
            *sandbox.ROWS,
            *simulation.ROWS,
            *strangers.ROWS,
            *untested.ROWS,
            *wedges.ROWS,
            *wire.ROWS,
        ),
        key=lambda row: row.number,
    )
)
