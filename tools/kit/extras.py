"""Skip markers for tests that need an extra of Laminar; `make test` installs those of dev."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_peft = pytest.mark.skipif(
    find_spec("peft") is None, reason="needs peft, an extra: make setup"
)
