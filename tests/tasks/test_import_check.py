"""A user's file that never comes back from its import, or takes its process with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.config import ConfigError, load_config
from laminar.launch.preflight import check_settings
from laminar.tasks.import_check import check_import
from tests.run.conftest import ROOT

FUNCTION = "def f(completion): return 1.0\n"
KEY = "reward.custom_reward_function.path"


@pytest.mark.parametrize("code", [0, 7])
def test_a_file_that_ends_its_process(tmp_path: Path, code: int) -> None:
    path = tmp_path / "reward.py"
    path.write_text(f"import os; os._exit({code})\n")
    with pytest.raises(ConfigError, match=f"^{KEY} = '{path}' ends .*exit code {code}"):
        check_import(str(path), KEY)


@pytest.mark.parametrize("source", [FUNCTION, "import no_such_module\n", "print('ended')\n"])
def test_a_file_that_comes_to_an_end_is_left_to_whoever_imports_it(
    tmp_path: Path, source: str
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(source)
    check_import(str(path), KEY)
    check_import(str(tmp_path / "none.py"), KEY)


@pytest.mark.parametrize(
    "setting",
    [
        "reward.custom_reward_function.path={}",
        'reward.functions=[{{name = "math"}}, {{path = "{}"}}]',
        "algorithm.batch_strategy={}:f",
        "algorithm.policy_loss.loss_mode={}:f",
        "algorithm.adv_estimator={}:f",
    ],
)
def test_a_start_imports_no_user_file_that_was_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import os; os._exit(3)\n")
    monkeypatch.chdir(ROOT)
    config = load_config(
        ["configs/recipes/words/run.toml"], [setting.format(path), f"run.output_dir={tmp_path}"]
    )
    with pytest.raises(ConfigError, match="exit code 3"):
        check_settings(config)
