"""What `laminar train` prints ends nothing, whether somebody reads it or not."""

from __future__ import annotations

import os

import pytest

from laminar.names import exit_codes
from tests.launch.test_exit_handling import ended

PRINT = """
from laminar.launch.terminal import Terminal
def command():
    console = Terminal()
    console.print_lines(["first"] * 3)
    console.when_gone("nobody reads")
    console.print_lines(["more than a pipe holds" * 1000] * 100)
    console.flush_output()
    return 70
sys.exit(exit_code("laminar", command))
"""


@pytest.mark.parametrize("before", [0, 1], ids=["from the beginning", "after the first line"])
def test_a_run_goes_on_when_its_reader_goes_away(before: int) -> None:
    """It is said once, where somebody may see it, and the exit code is the run's."""
    read, write = os.pipe()
    if not before:
        os.close(read)
    process = ended(PRINT, stdout=write)
    os.close(write)
    if before:
        assert os.read(read, 5) == b"first"
        os.close(read)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (exit_codes.CRASHED, "laminar: nobody reads\n")


def test_a_full_disk_under_the_output_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        _, said = (process := ended(PRINT, stdout=full)).communicate(timeout=60)
    assert (process.returncode, said) == (exit_codes.CRASHED, "")


def test_a_full_disk_under_the_output_of_another_command_is_one_sentence() -> None:
    text = """
def command():
    print("x" * 100_000)
    return 0
sys.exit(exit_code("laminar", command))
"""
    with open("/dev/full", "w") as full:
        _, said = (process := ended(text, stdout=full)).communicate(timeout=60)
    assert process.returncode == exit_codes.FAILED
    assert said == "laminar: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", [PRINT, "sys.exit(exit_code('laminar', lambda: 70))"])
def test_an_output_that_was_closed_before_the_start(command: str) -> None:
    process = ended(command, stdout=None, preexec_fn=lambda: os.close(1))
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (exit_codes.CRASHED, "")


@pytest.mark.parametrize("wrapped", ["command()", "exit_code('laminar', command)"])
def test_a_terminal_that_is_not_utf_8_gets_escapes(wrapped: str) -> None:
    """From a command, and from a program that starts a run (laminar.api)."""
    text = f"""
from laminar.launch.terminal import Terminal
def command():
    Terminal().print_lines(["± 说 " + chr(0xd83d)])
    return 0
sys.exit({wrapped})
"""
    process = ended(text, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert process.communicate(timeout=60) == ("\\xb1 \\u8bf4 \\ud83d\n", "")
    assert process.returncode == exit_codes.COMPLETE
