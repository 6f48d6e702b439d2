"""An asyncio event loop in virtual time, one for each boot of a simulated process.

Reads   the scheduler's clock
Gives   SimLoop: tasks, futures and timers of asyncio, run by calls of the scheduler

Whatever becomes ready at an instant runs within one call of the scheduler, in the order in which it
became ready. The loop belongs to one boot: it stops while the process is paused, and callbacks of
an ended boot never run. Tasks of ended boots are kept until the seed has ended, because the garbage
collector would run their `finally` blocks at arbitrary times.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from tools.simulator.runtime.violation import Violation

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CALLBACKS_MAX = 200_000
"""Maximum callbacks at one instant; beyond it, a task yields endlessly without waiting."""
WAITS_MAX = 1_000  #: maximum number of awaits of a coroutine while it is being closed
TASKS_KEPT = 64
"""Number of tasks at which finished ones are removed; later, at twice the tasks left plus this."""

After = Callable[..., None]  #: (delay in nanoseconds, action, *arguments)
Told = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


def _close(coroutine: Any) -> None:
    """Close a coroutine completely, including awaits in its `finally` blocks."""
    for _ in range(WAITS_MAX):
        with contextlib.suppress(BaseException):
            coroutine.close()
        if coroutine.cr_frame is None:
            return
    raise Violation("progress", f"{coroutine.__qualname__} cannot be ended")


class Ready(asyncio.Handle):
    """A callback that runs at this instant."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._callback, self._args, self._context = callback, args, context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one boot of one process."""

    def __init__(self, now_ns: Callable[[], int], after: After, turned: Callable[[], None]) -> None:
        """Create a loop without tasks.

        `after` schedules a call if this boot is still alive then. `turned` is called when
        nothing else is ready."""
        self.closed = False  #: whether the process has ended
        self.tasks: list[asyncio.Task[Any]] = []  #: all unfinished tasks, and some finished ones
        self._now_ns, self._after, self._turned = now_ns, after, turned
        self._ready: deque[Ready] = deque()
        self._entered = False
        self._due = False
        self._told: Told | None = None
        self._kept_max = TASKS_KEPT

    # --- running ------------------------------------------------------------------------------

    def enter(self, action: Callable[..., object], *args: Any) -> None:
        """Call `action` in this loop, then everything that it made ready."""
        if self._entered:
            action(*args)
            return
        before = events._get_running_loop()
        self._entered = True
        events._set_running_loop(self)
        try:
            action(*args)
            self._drain()
        finally:
            events._set_running_loop(before)
            self._entered = False
        if not self.closed:
            self._turned()

    def _drain(self) -> None:
        ready, left = self._ready, CALLBACKS_MAX
        while ready and not self.closed:
            self._call(ready.popleft())
            left -= 1
            if not left:
                raise Violation("progress", f"{CALLBACKS_MAX} callbacks at one instant")

    def _call(self, handle: Any) -> None:
        if handle._cancelled:
            return
        context: Context | None = handle._context
        try:
            if context is None:
                handle._callback(*handle._args)
            else:
                context.run(handle._callback, *handle._args)
        except (Violation, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler(
                {"message": "a callback raised", "exception": error, "handle": handle}
            )

    def _wake(self) -> None:
        self._due = False
        if self._ready:
            self.enter(self._drain)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = Ready(callback, args, context)
        self._ready.append(handle)
        if not self._entered and not self._due and not self.closed:
            self._due = True
            self._after(0, self._wake)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._timer(max(0, round(delay * 1e9)), callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        delay_ns = max(0, round(when * 1e9) - self._now_ns())
        return self._timer(delay_ns, callback, args, context)

    def _timer(
        self,
        delay_ns: int,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> asyncio.TimerHandle:
        when = (self._now_ns() + delay_ns) / 1e9
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.closed:
            self._after(delay_ns, self._ring, handle)
        return handle

    def _ring(self, handle: asyncio.TimerHandle) -> None:
        if not handle._cancelled:
            self.enter(self._call, handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer stays in the scheduler and calls nothing."""

    def discard(self) -> None:
        """End the coroutines of a dead process now, not whenever they are collected.

        Runs within this loop because their `finally` blocks may create tasks, which are ended too.
        """
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while self.tasks:
                _close(self.tasks.pop().get_coro())
        finally:
            events._set_running_loop(before)
        self._ready.clear()

    # --- what asyncio asks of a loop ------------------------------------------------------------

    def time(self) -> float:
        return self._now_ns() / 1e9

    def is_running(self) -> bool:
        return self._entered

    def is_closed(self) -> bool:
        return False  # calls in a dead process are dropped and must not raise

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=str(name or ""), context=context)
        tasks = self.tasks
        tasks.append(task)
        if len(tasks) > self._kept_max:
            self.tasks = [kept for kept in tasks if not kept.done()]
            self._kept_max = TASKS_KEPT + 2 * len(self.tasks)
        return task

    def set_exception_handler(self, handler: Told | None) -> None:
        self._told = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._told is not None and not self.closed:
            self._told(self, context)
