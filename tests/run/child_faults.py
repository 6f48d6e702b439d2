"""What a child process of a test does to itself."""

import os
import signal
import stat
import subprocess
import time

WORDS = ("work", "killed", "stopped", "memory", "garbage", "hang", "daemon")


def act(word):
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "memory":
        bytearray(1 << 46)
    if word == "daemon":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if word in ("hang", "daemon"):
        time.sleep(1000)
    if word == "garbage":
        for fd in range(3, 4096):  # its parent may have many open
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, b"\xc1" * 64)
            except OSError:
                pass
    return 1.0
