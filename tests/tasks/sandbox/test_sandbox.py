"""Programs in a sandbox: those that attack, those that are useful, and a machine without one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.config import ConfigError
from laminar.tasks.sandbox.sandbox import Sandbox
from tools.check.rows.sandbox import BROKE_OUT, aims, attacks, broken, namespace, survivors

pytestmark = pytest.mark.process
LIMIT_S = 20.0
NAMES = tuple(attacks(Path(), 0))
#: of three folders of the host: where Python is below /root, what leads to it
SHOWN = str(["/root"] if os.path.realpath(sys.base_prefix).startswith("/root/") else [])


@pytest.fixture(scope="module")
def sandbox():
    try:
        return Sandbox(seconds=LIMIT_S)
    except ConfigError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def short(sandbox):
    """For programs that do not end."""
    return Sandbox(seconds=0.3)


@pytest.fixture(scope="module")
def aim():
    with aims() as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_contained(name, sandbox, short, aim):
    used = short if name in ("fork bomb", "endless loop") else sandbox
    found = broken(used, attacks(*aim)[name], aim[0])
    assert not [it for it in found if "it ended after" not in it]  # row 24 looks at the time


@pytest.mark.parametrize("name", ["network", "a secret", "/proc"])
def test_the_attacks_succeed_without_a_sandbox(name, aim):
    program = [sys.executable, "-I", "-S", "-c", attacks(*aim)[name]]
    assert BROKE_OUT in subprocess.run(program, capture_output=True, text=True).stdout


def test_code_has_no_privilege_no_host_and_no_network(sandbox):
    seen = sandbox.run(
        "import os, socket\n"
        "print(os.getuid(), os.getgroups(), sorted(os.environ), sorted(os.listdir('/dev')))\n"
        "print([c for c in range(64) if __import__('ctypes').CDLL(None).prctl(23, c) > 0])\n"
        "print([name for name in ('/etc', '/proc', '/root') if os.path.exists(name)])\n"
        "for family in (16, 17, 40):\n"
        "    try: socket.socket(family, socket.SOCK_DGRAM)\n"
        "    except PermissionError: print('refused')\n"
    )
    assert seen.output.splitlines() == [
        "1000 [] ['HOME', 'LANG', 'PATH'] ['null', 'urandom', 'zero']",
        "[]",
        SHOWN,
        *["refused"] * 3,
    ]


@pytest.mark.parametrize(
    "call", ["unshare(0x10000000)", "mount(b'none', b'/work', b'tmpfs', 0, None)", "setuid(0)"]
)
def test_code_gets_nothing_back(call, sandbox):
    program = f"import ctypes; ctypes.CDLL(None, use_errno=True).{call}"
    assert sandbox.run(program).output == "-1\n"


def test_a_session_keeps_names_and_shows_the_value_of_the_last_line(sandbox):
    with sandbox.session() as session:
        assert session.run("a = 40\ndef twice(x): return 2 * x") == ("", None)
        assert session.run("print('first')\ntwice(a)") == ("first\n80\n", None)
        failed = session.run("a / 0")
        assert failed.output.splitlines()[-1] == "ZeroDivisionError: division by zero"
        assert "sandbox_process" not in failed.output
        assert session.run("def f(:").output.splitlines()[-1] == "SyntaxError: invalid syntax"
        assert session.run("a").text == "40\n"


@pytest.mark.parametrize(
    ("program", "stopped"),
    [
        ("import os; os._exit(3)", "the program ended its process: exit code 3"),
        ("raise SystemExit", "the program ended its process: exit code 0"),
        ("import os; os.kill(os.getpid(), 11)", "the program ended its process: killed by SIGSEGV"),
        ("import os; os.close(1); os.close(2)\nwhile True: pass", "stopped after 0.3 s"),
        ("print('x' * 10**6)", "stopped after 65536 bytes of output"),
    ],
)
def test_a_session_that_has_ended_says_why(program, stopped, sandbox, short):
    with (short if "while" in program else sandbox).session() as session:
        assert session.run(program).stop_reason == stopped
        assert session.run("1").text == f"[{stopped}]"


def test_files_and_memory_are_limited(sandbox):
    full = sandbox.run("f = open('/work/f', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    assert "OSError" in full.output
    assert "MemoryError" in sandbox.run("x = bytearray(300 << 20)").output


def test_it_ends_when_its_outer_process_is_killed(sandbox):
    with sandbox.session() as session:
        space = namespace(session)
        os.kill(session.pid, signal.SIGKILL)
        end = time.monotonic() + LIMIT_S
        while survivors({space}):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert session.run("1").stop_reason == "the program ended its process: killed by SIGKILL"


# --- a machine that does not give a part of it --------------------------------------------------

USE = (
    "from laminar.tasks.sandbox.sandbox import ConfigError, Sandbox, permit_unsafe\n"
    "{permission}\n"
    "try: print(Sandbox().run({program!r}).output)\n"
    "except ConfigError as error: print(error)\n"
)


def used_where(command, permission="", program="6 * 7", before=()):
    """What is said where a shell has made `command` true, in a process of its own."""
    program = USE.format(permission=permission, program=program)
    return subprocess.run(
        [*before, "sh", "-c", f'{command}; exec "$@"', "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def without_user_namespaces(permission):
    command = "echo 0 > /proc/sys/user/max_user_namespaces"
    return used_where(command, permission, before=("unshare", "--user", "--map-root-user"))


def test_a_lower_limit_of_the_machine_stays(sandbox):
    program = "import resource; resource.getrlimit(resource.RLIMIT_NOFILE)"
    assert used_where("ulimit -n 48", program=program).stdout == "(48, 48)\n\n"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no command unshare")
def test_where_a_part_is_missing_it_refuses_unless_that_is_allowed(sandbox):
    refused = (
        "model-written code cannot be isolated on this machine, which does not provide user "
        "namespaces (No space left on device); use a machine or container that does"
    )
    assert without_user_namespaces("").stdout == f"{refused}\n"
    said = without_user_namespaces("permit_unsafe(False)").stdout
    assert said == (
        f"{refused}, or set env.unsafe_local_code = true to run it with the permissions of this "
        "run\n"
    )
    allowed = without_user_namespaces("permit_unsafe(True)")
    assert allowed.stdout == "42\n\n"
    assert allowed.stderr == (
        "model-written code is not isolated: no user namespaces (No space left on device)\n"
    )
