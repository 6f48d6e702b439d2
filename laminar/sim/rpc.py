"""Requests between processes in virtual time: numbered, repeated until answered, handled once.

Reads   requests of clients
Gives   replies to callbacks

It keeps what net/rpc.py promises (in order and once within one pair of boots, however often the
wire loses or repeats), without its bytes: a request is handed over as the object that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from laminar.sim.scheduler import MS

if TYPE_CHECKING:
    from laminar.sim.process import SimProcess

RETRY_NS = 400 * MS
"""Above a round trip, so that repeats are rare in good weather."""

Then = Callable[[Any], None]
Message = tuple[int, int, Any]  #: (number, lowest number that the client still waits for, request)


class Client:
    """All open requests of one boot of one process."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._boot = process.boot
        self._numbers: dict[str, int] = {}  #: last one by server
        self._open: dict[str, dict[int, tuple[Any, Then]]] = {}
        self._retrying: dict[str, bool] = {}

    def call(self, server: str, request: Any, then: Then) -> None:
        """Have `then(reply)` called, once, by whichever process of that name is there to answer."""
        number = self._numbers[server] = self._numbers.get(server, 0) + 1
        self._open.setdefault(server, {})[number] = (request, then)
        self._send(server, number, request)
        if not self._retrying.get(server):
            self._retrying[server] = True
            self._process.after(RETRY_NS, self._retry, server, number)

    def _send(self, server: str, number: int, request: Any) -> None:
        world = self._process.world
        first = next(iter(self._open[server]))
        link = world.network.link(self._process.name, server)
        receive = world.processes[server].server.receive
        deliver = partial(receive, self._process, self._boot)
        world.network.send(link, deliver, (number, first, request))

    def _retry(self, server: str, seen: int) -> None:
        """Ask again for what was open a while ago already."""
        waiting = self._open[server]
        if not waiting:
            self._retrying[server] = False
            return
        for number, (request, _) in list(waiting.items()):
            if number <= seen:
                self._send(server, number, request)
        self._process.after(RETRY_NS, self._retry, server, self._numbers[server])

    def waits(self, server: str, number: int) -> bool:
        """This request has no reply yet."""
        return number in self._open[server]

    def answered(self, server: str, boot: int, number: int, reply: Any) -> None:
        """A reply arrives; a repeat, or one for an earlier boot, is nobody's."""
        if boot != self._boot:
            return
        found = self._open[server].pop(number, None)
        if found is not None:
            found[1](reply)


class Server:
    """Handles requests of all clients, each client's in order."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._clients: dict[tuple[str, int], _Served] = {}

    def restarted(self) -> None:
        """A new process listens: what the one before had answered is asked again."""
        for served in self._clients.values():
            served.replies.clear()

    def receive(self, client: SimProcess, boot: int, message: Message) -> None:
        """A request arrives at the machine of this server."""
        self._process._due(self._process.boot, self._handle, (client, boot, message))

    def _handle(self, client: SimProcess, boot: int, message: Message) -> None:
        if not self._process.welcomed or not self._process.model.listens:
            return
        number, first, request = message
        served = self._clients.get((client.name, boot))
        if served is None:
            served = self._clients[client.name, boot] = _Served()
        unanswered = number <= served.last and number not in served.replies
        again = (
            unanswered and client.boot == boot and client.client.waits(self._process.name, number)
        )
        if number == served.last + 1 or again:
            served.last = max(served.last, number)
            served.replies[number] = self._process.model.answer(client.name, request)
            for old in [n for n in served.replies if n < first]:
                del served.replies[old]
        elif number > served.last:
            return  # one before it was lost; both come again
        if number in served.replies:
            network = self._process.world.network
            link = network.link(self._process.name, client.name)
            reply = served.replies[number]
            deliver = partial(_arrive, client, self._process.name, boot, number)
            network.send(link, deliver, reply)


class _Served:
    """What a server remembers of one client."""

    def __init__(self) -> None:
        self.last = 0
        self.replies: dict[int, Any] = {}


def _arrive(client: SimProcess, server: str, boot: int, number: int, reply: Any) -> None:
    client._due(boot, client.client.answered, (server, boot, number, reply))
