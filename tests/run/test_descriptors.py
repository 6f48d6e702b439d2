"""A run of few descriptors, to whose servers a stranger opens more connections than it has."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from tests.run.conftest import Finished, begun, check_books, command
from tests.run.test_failing_disk import SETTINGS

LIMIT = 1_024
CONNECTIONS = 2_000


def open_connections(run: Path, server: str, greeting: bytes) -> list[socket.socket]:
    """Connect to a server of the run until it refuses."""
    address = json.loads((run / server).read_text())["address"]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    opened = []
    for _ in range(CONNECTIONS):
        try:
            opened.append(socket.create_connection((host, int(port)), timeout=0.5))
            opened[-1].sendall(greeting)
        except OSError:
            break
    return opened


@pytest.mark.process
def test_a_run_whose_servers_have_more_strangers_than_descriptors_completes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    train = command("train", f"run.output_dir={tmp_path}", "run.name=run", *SETTINGS)
    with begun(run, ["sh", "-c", f'ulimit -n {LIMIT} && exec "$@"', "sh", *train]) as process:
        strangers = open_connections(run, "coordinator.json", b"")
        assert len(strangers) == CONNECTIONS
        strangers += open_connections(run, "store-0.json", b"\xff")
        output, _ = process.communicate(timeout=150)
    for stranger in strangers:
        stranger.close()
    assert process.returncode == 0, output
    assert "steps            20 in" in output and "restarting" not in output
    check_books(Finished(run, 0, output))
