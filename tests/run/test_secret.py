"""RUN/secret: who makes it, who takes it, and that it is nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from zmq.utils import z85

from laminar.config import ConfigError
from laminar.run import secret as secret_module
from laminar.run.directory import SECRET_FILE
from laminar.run.secret import SECRET_BYTES, make_secret, read_secret
from tests.run.conftest import Finished


def refused(run_dir: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_secret(run_dir)
    assert str(run_dir / SECRET_FILE) in str(error.value)
    return str(error.value)


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_secret(tmp_path)
    finally:
        os.umask(before)
    file = tmp_path / SECRET_FILE
    content = file.read_bytes()
    assert (file.stat().st_mode & 0o777, len(content)) == (0o600, SECRET_BYTES)
    with pytest.raises(FileExistsError):
        make_secret(tmp_path)
    assert file.read_bytes() == content
    (tmp_path / "other").mkdir()
    make_secret(tmp_path / "other")
    assert read_secret(tmp_path).run_id != read_secret(tmp_path / "other").run_id


def test_keys_of_two_uses_differ_and_none_is_shown(tmp_path: Path) -> None:
    make_secret(tmp_path)
    found = read_secret(tmp_path)
    assert (
        len({found.derive_key(use) for use in ("curve-server", "curve-client", "bulk", "run")}) == 4
    )
    assert f"{found} {found!r}" == "Secret(***) Secret(***)"


def test_a_secret_that_is_missing_or_open_or_not_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is missing" in refused(tmp_path)
    make_secret(tmp_path)
    file = tmp_path / SECRET_FILE
    for mode in (0o644, 0o640, 0o604):
        file.chmod(mode)
        assert f"open to other users (mode {mode:04o})" in refused(tmp_path)
    file.chmod(0o600)
    read_secret(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(secret_module.os, "geteuid", lambda: os.getuid() + 1)
        assert "start all processes of a run as the user who made" in refused(tmp_path)
    file.write_bytes(b"short")
    assert "has 5 bytes instead of 32" in refused(tmp_path)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in refused(tmp_path)


@pytest.mark.process
def test_the_secret_of_a_run_is_in_no_other_file_of_it(finished: Finished) -> None:
    """Neither it nor a key that lets anybody in, in the forms in which they might be written."""
    content = (finished.directory / SECRET_FILE).read_bytes()
    found = read_secret(finished.directory)
    hidden = [content, *(found.derive_key(use) for use in ("curve-server", "curve-client", "bulk"))]
    forms = [form for each in hidden for form in (each, each.hex().encode(), z85.encode(each))]
    files = [path for path in finished.directory.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        if path.name != SECRET_FILE:
            assert not any(form in path.read_bytes() for form in forms), path
