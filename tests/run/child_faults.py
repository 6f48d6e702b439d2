"""What a child process of a test does to itself."""

import os
import signal
import stat
import time


def act(word):
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "memory":
        bytearray(1 << 46)
    if word == "hang":
        time.sleep(1000)
    if word == "garbage":
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, b"\xc1" * 64)
            except OSError:
                pass
    return 1.0
