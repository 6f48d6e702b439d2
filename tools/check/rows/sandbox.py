"""Row 24: programs that attack the machine from the sandbox for model-written code.

Reads   the real sandbox of this machine (laminar/tasks/sandbox/sandbox.py)
Gives   ROWS; attacks, broken, aims and survivors, for tests; BROKE_OUT, the output of a program
        whose attack succeeded

A program is contained if its attack failed, its target process and the files around it are
unchanged, it ended in time, and no process of its namespace is left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median

import psutil

from laminar.tasks.sandbox.sandbox import CodeSession, Sandbox
from tools.check.rows.base import Figure, Gate, Row

BROKE_OUT = "BROKE OUT"
LIMIT_S, LATE_S = 1.0, 0.5
MANY, STARTS = 64, 40
REPEATS = {"pr": 1, "release": 20}


def attacks(folder: Path, port: int) -> Mapping[str, str]:
    """Return the programs that attack `folder` of the host, with its secret, and a local `port`."""
    out, secret = f"print({BROKE_OUT!r})", str(folder / "secret")
    places = ("/usr", "/lib", "/", str(folder))
    return {
        "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "1 GiB": f"held = bytearray(1 << 30)\n{out}",
        "endless loop": "while True: pass",
        "1 GB of output": f"for _ in range(10**6): print('x' * 1000)\n{out}",
        "network": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n{out}",
        "a secret": f"open({secret!r}).read()\n{out}",
        "a file outside": f"import os\nfor place in {places}:\n"
        "    try: open(os.path.join(place, 'written'), 'w').close()\n"
        f"    except OSError: continue\n    {out}",
        "its parents": f"import os\nfor one in ({os.getpid()}, os.getppid(), -1):\n"
        "    try: os.kill(one, 9)\n    except OSError: pass\n",
        "a double fork": "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\n",
        "a link": f"import os\nos.symlink({secret!r}, '/work/link')\n"
        f"open('/work/link').read()\n{out}",
        "ptrace": "import ctypes, os\n"
        f"if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: {out}",
        "/proc": f"import os\nopen(f'/proc/{{os.getppid()}}/environ', 'rb').read()\n{out}",
    }


def namespace(session: CodeSession) -> str:
    """Return the name of a session's process namespace."""
    (first,) = psutil.Process(session.pid).children()
    return os.readlink(f"/proc/{first.pid}/ns/pid")


def survivors(spaces: set[str]) -> list[int]:
    """Return the processes in these namespaces."""
    found = []
    for pid in psutil.pids():
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") in spaces:
                found.append(pid)
        except OSError:
            pass  # it ended meanwhile
    return found


def broken(sandbox: Sandbox, program: str, folder: Path) -> list[str]:
    """Run a program in the sandbox and return the ways in which it was not contained."""
    with sandbox.session() as session:
        space, began = namespace(session), time.monotonic()
        ran = session.run(program)
        session.close()
        seconds = time.monotonic() - began
    found = ["it broke out"] if BROKE_OUT in ran.output else []
    found += ["it wrote a file"] if any(path.name == "written" for path in folder.iterdir()) else []
    found += [f"processes {left} are left"] if (left := survivors({space})) else []
    late = seconds > sandbox.seconds + LATE_S
    return [*found, *([f"it ended after {seconds:.1f} s"] if late else [])]


@contextmanager
def aims() -> Iterator[tuple[Path, int]]:
    """Create the targets: a folder with a secret, and a port with a listening socket."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        (Path(folder) / "secret").write_text("secret")
        Path(folder).chmod(0o777)
        yield Path(folder), server.getsockname()[1]


# --- the row -----------------------------------------------------------------------------------


def contained(gate: Gate) -> Figure:
    sandbox, wrong, repeats = Sandbox(seconds=LIMIT_S), [], REPEATS[gate]
    with aims() as (folder, port):
        programs = attacks(folder, port)
        for repeat, (name, program) in product(range(repeats), programs.items()):
            wrong += [f"{name}, {repeat}: {it}" for it in broken(sandbox, program, folder)]
        left = _many(sandbox, programs["a double fork"])
    starts = sorted(_start_ms(sandbox) for _ in range(STARTS))
    floor = sorted(_start_ms(sandbox, bare=True) for _ in range(STARTS))
    reached = (
        f"{len(programs) * repeats - len(wrong)} of {len(programs)} x {repeats} contained; {MANY} "
        f"at once, {left} processes left; p50 of a start {median(starts):.0f} ms, of Python "
        f"alone {median(floor):.0f} ms"
    )
    return Figure(reached, not wrong and not left, "\n".join(wrong))


def _many(sandbox: Sandbox, program: str) -> int:
    """Run many sandboxes concurrently and count the processes that are left."""
    with ExitStack() as all_of_them, ThreadPoolExecutor(MANY) as threads:
        sessions = list(threads.map(lambda _: sandbox.session(), range(MANY)))
        for session in sessions:
            all_of_them.enter_context(session)
        spaces = set(map(namespace, sessions))
        assert len(spaces) == MANY
        list(threads.map(lambda session: session.run(program), sessions))
        list(threads.map(lambda session: session.close(), sessions))
    return len(survivors(spaces))


def _start_ms(sandbox: Sandbox, *, bare: bool = False) -> float:
    began = time.perf_counter()
    if bare:
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
        return (time.perf_counter() - began) * 1e3
    with sandbox.session():
        return (time.perf_counter() - began) * 1e3


ROWS = (Row(24, "code sandbox", "12 of 12 contained", "the same 20 times", contained),)
