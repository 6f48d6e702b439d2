"""The exit codes of the processes of a run.

Reads   nothing
Gives   one name per code; FINAL: those after which a coordinator is not started again

A supervisor decides by them alone, whether it is `laminar train`, a person or a batch system.
"""

from __future__ import annotations

COMPLETE = 0
FAILED = 1  #: the run or this actor, as the event log says; or the core raised on an event
USER_ERROR = 2  #: the same mistake would end it again
COORDINATOR_ABSENT = 3  #: an actor without a coordinator, or one that it refused
FENCED = 4  #: an actor that the coordinator has given up for its silence; a new one is welcome
CRASHED = 70  #: the program failed; a coordinator that is started again goes on from its log
LOG_UNWRITABLE = 75  #: the same, once the disk of the event log takes data again
PAUSED = 85  #: the run goes on when it is started again; a batch system is to do that
SIGNALLED = 128  #: plus the number of a signal that ended it, as a shell says it
STOPPED_EARLY = 130  #: by the user, before the run began, or at once; any command by Ctrl-C
PIPE_CLOSED = 141  #: a command whose output is no longer read
KILLED = -9  #: by SIGKILL, as a parent is told
TERMINATED = 143  #: an actor by SIGTERM or SIGHUP, which is not an order of the coordinator

FINAL = (COMPLETE, FAILED, USER_ERROR, PAUSED, STOPPED_EARLY)
