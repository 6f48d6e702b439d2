"""How a command ends: one sentence, an exit code, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.launch.exit_handling import exit_code
from laminar.names import exit_codes


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("seed = 'x' is wrong"), exit_codes.USER_ERROR, "laminar: seed = 'x' is wrong"),
        (KeyboardInterrupt(), exit_codes.STOPPED_EARLY, "laminar: interrupted"),
        (PermissionError(13, "Permission denied", "/a/b"), exit_codes.USER_ERROR,
         "laminar: /a/b: Permission denied"),
    ],
)  # fmt: skip
def test_what_is_ordinary_is_one_sentence(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert exit_code("laminar", command) == code
    assert capsys.readouterr().err == said + "\n"


def test_a_fault_of_the_program_is_not_hidden() -> None:
    def command() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    with pytest.raises(OSError, match="temporarily"):
        exit_code("laminar", command)


def ended(code: str, **options: object) -> subprocess.Popen[str]:
    """A process that runs this code as a command."""
    text = f"import sys\nfrom laminar.launch.exit_handling import exit_code\n{code}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", text], text=True, **pipes)  # type: ignore[call-overload, no-any-return]


MANY_LINES = """
def command():
    for number in range(100_000):
        print(number)
    return 0
sys.exit(exit_code("laminar", command))
"""
ONE_LINE = MANY_LINES.replace("100_000", "1")


@pytest.mark.parametrize("lines", [MANY_LINES, ONE_LINE])
def test_a_reader_that_has_seen_enough(lines: str) -> None:
    """Whether it goes while there is much to come, or before the first line leaves the buffer."""
    read, write = os.pipe()
    os.close(read)
    process = ended(lines, stdout=write)
    os.close(write)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (exit_codes.PIPE_CLOSED, "")


def test_ctrl_c_while_the_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "laminar.cli.main", "train"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "laminar: interrupted\n")
