"""laminar-coord and laminar-node, started by hand: a mistake is one sentence, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.cli import coord, node
from laminar.config import dumps, load
from laminar.names import exit_codes


@pytest.mark.parametrize("daemon", [coord, node], ids=["laminar-coord", "laminar-node"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "RUN_DIR"),
        (["RUN", "another"], "another"),
        (["RUN", "--verbose"], "--verbose"),
        (["nowhere"], "nowhere does not exist"),
        (["FILE"], "is not a directory"),
        (["EMPTY"], "is no run directory: it has no config.toml"),
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
    config = load([], ["model.name=m", "data.dataset=gcd"])
    made["RUN"].joinpath("config.toml").write_text(dumps(config))
    assert said in _refused(
        daemon, [str(made.get(word, word)) for word in words], monkeypatch, capfd
    )


def test_a_configuration_that_nobody_has_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load([], ["model.name=m", "data.dataset=gcd"])
    (tmp_path / "config.toml").write_text(dumps(config))
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
        (["--name", "node-1", "--roles", "trainer"], "node-0"),
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
    (tmp_path / "config.toml").write_text(dumps(load([], ["model.name=m", "data.dataset=gcd"])))
    assert said in _refused(node, [str(tmp_path), *words], monkeypatch, capfd)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


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
