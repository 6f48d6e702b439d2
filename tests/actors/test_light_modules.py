"""What an actor decides can run without models, sockets and processes: it loads none of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "zmq", "psutil")
LOGIC = (
    "laminar.actors.checkpoint_writer",
    "laminar.actors.service_clients",
    "laminar.actors.model_files",
    "laminar.actors.protocol",
    "laminar.actors.trainer",
    "laminar.actors.weight_publisher",
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """By module: what of the heavy ones is there once it is imported."""
    program = (
        "import importlib, json, sys\n"
        "names, heavy = json.loads(sys.argv[1])\n"
        "found = {}\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "    found[name] = [h for h in heavy if h in sys.modules]\n"
        "print(json.dumps(found))"
    )
    words = [sys.executable, "-c", program, json.dumps([LOGIC, HEAVY])]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", LOGIC)
def test_an_actors_logic_loads_no_model_and_no_socket(
    module: str, loaded: dict[str, list[str]]
) -> None:
    assert loaded[module] == []
