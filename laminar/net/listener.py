"""The listening socket of a server: connections never take the descriptors that files need.

Reads   how a ZeroMQ server accepts and refuses, from its monitor; the descriptors in use
Gives   Listener: `bind_server`, the number of rejected connections
Raises  OSError for an address that is not available

ZeroMQ accepts until the process has no descriptor left; then it spins, and no file can be opened.
So the kernel keeps a connection until data arrives, as clients speak first, and a thread, as the
loop may be busy, looks after each accepted connection. When few descriptors are left, the kernel
drops attempts to connect, and those that wait are closed, until ZeroMQ has closed enough
connections that never completed the handshake.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from contextlib import suppress

import zmq

from laminar.net.auth import FINAL_REFUSALS, next_event
from laminar.net.descriptors import clients_allowed, connection_limit

HANDSHAKE_MS = 5_000  #: timeout of a connection that does not prove its membership of the run
SILENT_S = 1 << 20  #: time that the kernel keeps a silent connection; it caps it at hours
HELD = 32  #: descriptors that this process holds, to free them when few are left
RETRY_S = 0.25  #: interval of looking for free descriptors
LOOK_MS = 1_000  #: maximum time between two looks at the descriptors
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  #: BPF: return 0 bytes
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_DROP))


class Listener:
    """The listening socket of one ZeroMQ server, and the thread that guards it."""

    def __init__(self, ip: str, port: int, backlog: int) -> None:
        clients_allowed()  # raises the limit of open files
        self.rejected = 0
        self._limit = connection_limit()
        self._closed = threading.Event()
        self._held: list[int] = []
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
            self._sock.bind((ip, port))
            self._sock.listen(backlog)
        except OSError:
            self._sock.close()
            raise

    def bind_server(self, server: zmq.Socket[bytes]) -> None:
        """Have this server accept the connections."""
        place = f"inproc://listener-{id(self)}"
        events = FINAL_REFUSALS | zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED
        server.monitor(place, events)
        self._monitor: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # a full queue would stop all traffic of the process
        self._monitor.connect(place)
        server.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        server.set(zmq.USE_FD, os.dup(self._sock.fileno()))  # ZeroMQ closes it
        ip, port = self._sock.getsockname()
        server.bind(f"tcp://{ip}:{port}")
        threading.Thread(target=self._guard_descriptors, name="listener", daemon=True).start()

    def close(self, server: zmq.Socket[bytes]) -> None:
        self._closed.set()
        server.disable_monitor()  # before its reader is closed, or ZeroMQ's threads block on it
        self._sock.close()

    def _guard_descriptors(self) -> None:
        event = 0
        while event != zmq.EVENT_MONITOR_STOPPED:
            with suppress(OSError):  # closed meanwhile
                while len(self._held) < HELD:
                    self._held.append(os.open(os.devnull, os.O_RDONLY))
                self._keep_reserve()
            event = next_event(self._monitor) if self._monitor.poll(LOOK_MS) else 0
            self.rejected += bool(event & FINAL_REFUSALS)
        self._free_descriptors()
        self._sock.close()  # of a server that was dropped without `close`
        self._monitor.close(0)

    def _keep_reserve(self) -> None:
        if not self._is_short():
            return
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _DROP_ALL)
        self._close_waiting()
        self._free_descriptors()
        while not self._closed.wait(RETRY_S):
            if len(os.listdir("/proc/self/fd")) < self._limit - HELD:
                break
            self._close_waiting()
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def _is_short(self) -> bool:
        """Return whether the lowest free descriptor is beyond the limit."""
        try:
            free = os.dup(self._sock.fileno())
        except OSError:
            return True
        os.close(free)
        return free >= self._limit

    def _free_descriptors(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _close_waiting(self) -> None:
        while True:
            try:
                waiting, _ = self._sock.accept()
            except OSError:
                return  # none is left
            waiting.close()
            self.rejected += 1
