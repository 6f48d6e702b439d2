"""A run is taken up with the settings of its log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from laminar.config import ConfigError, load_config
from laminar.coordinator.takeover import decide_resume
from laminar.core.rules import NEW_RUN
from laminar.events.base import Settings
from tools.kit.bench import Bench, start_bench


def begun_with(settings: Settings) -> Bench:
    """A run all of whose processes are gone."""
    return start_bench(**{name: getattr(settings, name) for name in Settings.__struct_fields__})


def present() -> Settings:
    return Settings.from_config(load_config([], ["model.name=m", "data.dataset=gcd"]), NEW_RUN)


@pytest.mark.parametrize("changes", [{"seed": 5}, {"engine_start_ms": 1}])
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    bench = begun_with(present())
    now = msgspec.structs.replace(present(), **changes)
    with pytest.raises(ConfigError, match="restore that value"):
        decide_resume(tmp_path, bench.state, now, asked=False)
