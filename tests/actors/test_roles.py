"""What a node's warm processes are to import, and which processes may share one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from laminar.actors.system.roles import collect_needs, get_process_kind
from laminar.config import Config, load_config
from laminar.names.roles import NODE_ROLES


def config(*settings: str) -> Config:
    return load_config([], ["model.name=m", "data.dataset=gcd", *settings])


@pytest.mark.parametrize("gpus", [True, False])
def test_vllm_has_imports_and_variables_of_its_own(gpus: bool) -> None:
    """Those of a vLLM on CPU would make the trainer slow, and another's make vLLM wrong."""
    found = collect_needs(NODE_ROLES, config("rollout.engine=vllm"), gpus=gpus)
    assert {*found} == {"torch", "vllm"}
    assert found["torch"].environment == {}
    assert ("OMP_NUM_THREADS" in found["vllm"].environment) == (not gpus)
    assert not any("vllm" in module for module in found["torch"].modules)


def test_an_emulated_run_has_one_kind_of_process_which_never_loads_a_model() -> None:
    emulated = load_config([], ["rollout.engine=emulated"])
    found = collect_needs(NODE_ROLES, emulated, gpus=False)
    assert {get_process_kind(role, emulated) for role in NODE_ROLES} == {*found} == {"emulated"}
    names = json.dumps(found["emulated"].modules)
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "assert not {'torch', 'transformers'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program, names], check=True)
