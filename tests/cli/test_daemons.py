"""laminar-coord and laminar-node, started by hand: a mistake is one sentence, and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.cli import coord, node
from laminar.config import ConfigError, dump_config, load_config
from laminar.names import exit_codes
from laminar.run.secret import make_secret, read_secret


@pytest.mark.parametrize("daemon", [coord, node], ids=["laminar-coord", "laminar-node"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "RUN_DIR"),
        (["RUN", "another"], "another"),
        (["RUN", "--verbose"], "--verbose"),
        (["nowhere"], "nowhere does not exist"),
        (["FILE"], "is not a directory"),
        (["EMPTY"], "is not a run directory: it has no config.toml"),
        (["BROKEN"], "is not valid TOML"),
    ],
)
def test_mistakes_of_both(
    daemon: object,
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = {name: tmp_path / name for name in ("RUN", "FILE", "EMPTY", "BROKEN")}
    for name in ("RUN", "EMPTY", "BROKEN"):
        made[name].mkdir()
    made["FILE"].write_text("")
    made["BROKEN"].joinpath("config.toml").write_text("a = = 1")
    config = load_config([], ["model.name=m", "data.dataset=gcd"])
    made["RUN"].joinpath("config.toml").write_text(dump_config(config))
    assert said in _refused(
        daemon, [str(made.get(word, word)) for word in words], monkeypatch, capfd
    )


def test_a_configuration_that_nobody_has_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config([], ["model.name=m", "data.dataset=gcd"])
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert "laminar train --prepare" in _refused(coord, [str(tmp_path)], monkeypatch, capfd)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name"], "--name"),
        (["--name", "trainer-0"], "trainer-0"),
        (["--role", "relay"], "--role"),
        (["--roles", "relay,rolout"], "rolout"),
        (["--roles", "rollout:-1"], "rollout:-1"),
        (["--name", "node-1", "--roles", "trainer"], "node-0, with all of its trainer.ranks"),
        (["--roles", "trainer:2"], "trainer.ranks says how many"),
        (["--host", "10.1.2.3"], "10.1.2.3"),
        (["--host", "127.0.0.999"], "127.0.0.999"),
    ],
)
def test_mistakes_of_a_node(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.toml").write_text(
        dump_config(load_config([], ["model.name=m", "data.dataset=gcd"]))
    )
    assert said in _refused(node, [str(tmp_path), *words], monkeypatch, capfd)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.process
def test_a_node_that_other_machines_cannot_reach_ends_when_it_finds_that(tmp_path: Path) -> None:
    """`--host $(hostname)` is loopback on many machines, and the coordinator's is not."""
    (tmp_path / "config.toml").write_text(
        dump_config(load_config([], ["model.name=m", "data.dataset=gcd"]))
    )
    make_secret(tmp_path)
    file = tmp_path / "coordinator.json"
    file.write_text(json.dumps({"address": "tcp://192.0.2.1:5000", "machine": "another"}))
    command = [sys.executable, "-m", "laminar.cli.node", str(tmp_path), "--host", "127.0.1.1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == exit_codes.USER_ERROR
    assert "listen on 127.0.1.1, a loopback address" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_coordinator_that_goes_on_makes_the_secret_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without --resume it is refused. The log is missing here, too, so that it goes no further."""
    config = load_config([], ["model.name=m", "data.dataset=gcd", "reward.scope=trajectory"])
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert "secret is missing" in _refused(coord, [str(tmp_path)], monkeypatch, capfd)
    monkeypatch.setattr(coord, "RunLock", _NoLock)
    assert "no lock" in _refused(coord, [str(tmp_path), "--resume"], monkeypatch, capfd)
    read_secret(tmp_path)


class _NoLock:
    """Ends a coordinator after it has looked at the secret."""

    @staticmethod
    def inherit(*_: object) -> None:
        raise ConfigError("no lock")


def _refused(
    daemon: object,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> str:
    """The sentence of a daemon that does not start."""
    monkeypatch.setattr("sys.argv", ["laminar-daemon", *words])
    with pytest.raises(SystemExit) as ended:
        daemon.main()  # type: ignore[attr-defined]
    lines = capfd.readouterr().err.strip().splitlines()
    assert (ended.value.code, len(lines)) == (exit_codes.USER_ERROR, 1), lines
    return lines[0]
