"""Authentication between the processes of a run, by the run's secret.

Reads   the secret of a run
Gives   RunKeys: CURVE on a server's or client's socket; next_event, of a socket's monitor;
        why_refused, an error message

CURVE authenticates both ends and encrypts the traffic. All servers of a run share one key pair, all
clients another, both derived from its secret. A server without a ZAP handler admits any key, so
each process with a server runs one in a thread. The domain is enforced, so that connections are
refused if the handler is missing or has died. The thread starts with the first server, which is
after a process was forked.
"""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

from laminar.run.secret import Secret

CURVE_BYTES = 33  #: bytes that encryption adds to a message on the wire
_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_GATE_LOCK = threading.Lock()


class RunKeys:
    """The keys of one run's sockets; hidden when printed."""

    def __init__(self, secret: Secret) -> None:
        self._domain = secret.run_id.encode()
        self._server = z85.encode(secret.derive_key("curve-server"))
        self._client = z85.encode(secret.derive_key("curve-client"))
        self._server_public = zmq.curve_public(self._server)
        self._client_public = zmq.curve_public(self._client)

    def __repr__(self) -> str:
        return "RunKeys(***)"

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Have this unbound server accept clients of its run only."""
        _get_gate().admit_clients(self._domain, z85.decode(self._client_public))
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._server)
        socket.set(zmq.ZAP_DOMAIN, self._domain)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Have this unconnected client talk to servers of its run only."""
        socket.set(zmq.CURVE_SERVERKEY, self._server_public)
        socket.set(zmq.CURVE_PUBLICKEY, self._client_public)
        socket.set(zmq.CURVE_SECRETKEY, self._client)


class _Gate:
    """The ZAP handler of a process: decides for libzmq which client keys to admit."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self._admitted: dict[bytes, bytes] = {}  #: public key of the clients, by domain
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP)
        threading.Thread(target=self._serve_requests, name="zap", daemon=True).start()

    def admit_clients(self, domain: bytes, client: bytes) -> None:
        self._admitted[domain] = client

    def _serve_requests(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer_request(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)  # closed, it makes libzmq refuse clients at once

    def _answer_request(self, request: list[bytes]) -> list[bytes]:
        number, domain, mechanism, key = request[1], request[2], request[5], b"".join(request[6:])
        known = mechanism == b"CURVE" and key == self._admitted.get(domain)
        answer = (b"200", b"OK") if known else (b"400", b"not of this run")
        return [_VERSION, number, *answer, b"", b""]


_gates: list[_Gate] = []


def _get_gate() -> _Gate:
    """Return the gate of this process's context; a fork has a separate context."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with _GATE_LOCK:
        if not _gates or _gates[-1].context is not context:
            _gates[:] = [_Gate(context)]
        return _gates[-1]


FINAL_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Monitor events of a final refusal: a client gives up, or a server refused a stranger."""
REFUSALS = FINAL_REFUSALS | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Monitor events of a client that was refused; without a detail the server may have died."""
CONNECTIONS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""Monitor events of a client's connections: established, and ended."""


def next_event(monitor: zmq.Socket[bytes]) -> int:
    """Return the next event of a socket's monitor; 0 if there is none."""
    try:
        return int.from_bytes(monitor.recv_multipart(zmq.NOBLOCK)[0][:2], "little")
    except zmq.Again:
        return 0


def why_refused(address: str, event: int) -> str:
    """Explain a refused handshake and its likely cause."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        what = "refused the secret of this process"
    elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        what = "speaks another protocol: it does not belong to a run with a secret"
    else:
        what = "does not have the secret of this run: it probably belongs to another run"
    return f"the server at {address} {what}; RUN/secret must be the same file for all processes"
