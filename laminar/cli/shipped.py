"""What comes with the package: the quickstart's config and its model.

Gives   their paths, in a checkout as in an installed wheel
"""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
"""A link to configs/ in a checkout; a copy of it in a wheel."""
REFERENCE_CONFIG = CONFIGS / "reference.toml"
QUICKSTART_CONFIG = CONFIGS / "quickstart.toml"
QUICKSTART_MODEL = CONFIGS / "models" / "spell-0.6m"
