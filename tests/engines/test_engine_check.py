"""What can be said about vLLM without vLLM: whether it is here, and has its GPUs."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from laminar.cli.commands import run_command
from laminar.config import ConfigError, load_config
from laminar.engines import check
from laminar.engines.check import check_vllm, probe_vllm

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/recipes/words/run.toml")


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_without_vllm_the_command_that_installs_it_is_named(
    dry: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is written."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    arguments = [f"run.output_dir={tmp_path / 'runs'}", "rollout.engine=vllm"]
    assert run_command(["train", "-c", QUICKSTART, *dry, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and 'pip install -e ".[vllm]"' in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("size", "gpus", "refused"), [(3, 2, True), (2, 2, False), (2, 0, False)])
def test_tensor_parallelism_takes_the_gpus_of_one_machine(
    size: int, gpus: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without GPUs, ranks are processes on the CPU, as many as one likes."""
    installed(monkeypatch)
    monkeypatch.setattr(check, "count_gpus", lambda: gpus)
    sizes = [f"rollout.vllm.tensor_parallel_size={size}", "rollout.engine=vllm"]
    config = load_config([QUICKSTART], sizes)
    if not refused:
        return check_vllm(config)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size} is more than the {gpus}"):
        check_vllm(config)


@pytest.mark.parametrize(
    "key", ["pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size", "nnodes"]
)
def test_parallelism_by_extra_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take GPUs that the node has given to others."""
    installed(monkeypatch)
    config = load_config([QUICKSTART], ["rollout.engine=vllm", f"rollout.vllm.extra={{{key}=2}}"])
    with pytest.raises(
        ConfigError, match=rf"rollout\.vllm\.extra\.{key} = 2: .*tensor_parallel_size"
    ):
        check_vllm(config)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="here vLLM starts")
def test_a_vllm_that_does_not_start_is_a_sentence() -> None:
    """The last line of what it said."""
    config = load_config([QUICKSTART], ["rollout.engine=vllm"])
    told = pytest.raises(ConfigError, match=r"vLLM does not start here: .*No module named 'vllm'$")
    with probe_vllm(config) as answered, told:
        answered()
