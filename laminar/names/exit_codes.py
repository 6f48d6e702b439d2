"""The exit codes of the processes of a run.

Reads   nothing
Gives   one name per code; FINAL: the codes after which a coordinator is not restarted

A supervisor (`laminar train`, a person or a batch system) decides by these codes alone.
"""

from __future__ import annotations

COMPLETE = 0
FAILED = 1  #: failure of this actor, or of the run as the event log says; or the core raised
USER_ERROR = 2  #: a mistake that would end the run again
COORDINATOR_ABSENT = 3  #: an actor without a coordinator, or one that it refused
FENCED = 4  #: an actor that the coordinator gave up for its silence; a new one is welcome
CRASHED = 70  #: crash of the program; a restarted coordinator continues from its log
LOG_UNWRITABLE = 75  #: disk of the run failed; restart once it takes data again
PAUSED = 85  #: paused run, which continues when it is restarted; a batch system is to do that
SIGNALLED = 128  #: plus the number of the signal that ended it, as a shell reports it
STOPPED_EARLY = 130  #: stopped by the user before the run began, or at once; a command after Ctrl-C
PIPE_CLOSED = 141  #: command whose output is no longer read
KILLED = -9  #: ended by SIGKILL, as the parent sees it
TERMINATED = 143  #: an actor ended by SIGTERM or SIGHUP, not ordered by the coordinator

FINAL = (COMPLETE, FAILED, USER_ERROR, PAUSED, STOPPED_EARLY)
