"""For all tests: signals have their defaults, however pytest was started.

A background job ignores SIGINT, and nohup makes SIGHUP ignored; processes inherit that, and ours
respect it. What they do without it is what the tests are about.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
