"""Who is let in by a server of a run: clients with the run's secret, and nobody else."""

import asyncio
import re
import socket
import subprocess
import sys
import time

import pytest
import zmq

from laminar.net.auth import RunKeys
from laminar.net.client import write_address
from laminar.net.rejected_peers import RejectedPeers
from laminar.net.transport import ClientSocket, ServerSocket
from laminar.run.secret import Secret
from tests.net.test_net_client import Actor, Coordinator
from tests.net.test_net_client import until as until_async
from tools.kit.secrets import KEYS

DEADLINE_S = 60.0  #: only a hang reaches it; libzmq gives up a handshake after 30 s
OTHER = RunKeys(Secret(b"another run"))


@pytest.fixture
def server(opened):
    return opened(ServerSocket("127.0.0.1", 0, KEYS))


def until(look):
    """What `look` gives at last."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError("nothing came")


def connected(opened, keys, address):
    client = opened(ClientSocket(keys))
    client.connect(address)
    client.send(b"hello")
    return client


def still_serves(opened, server):
    """And what has come is only from a client of the run."""
    connected(opened, KEYS, server.address)
    assert [frame for _, frame in until(server.drain_frames)] == [b"hello"]


def test_a_client_of_another_run_is_refused_and_told(opened, server):
    stranger = connected(opened, OTHER, server.address)
    assert until(stranger.find_refusal_reason) == (
        f"the server at {server.address} does not have the secret of this run: it probably "
        "belongs to another run; RUN/secret must be the same file for all processes"
    )
    still_serves(opened, server)


def test_a_client_that_knows_the_server_but_has_another_key_is_refused(opened, server):
    """The public key of servers is no secret to who listens on the network."""
    keys = RunKeys(Secret(b"another run"))
    keys._server_public = KEYS._server_public
    stranger = connected(opened, keys, server.address)
    assert "refused the secret of this process" in until(stranger.find_refusal_reason)
    still_serves(opened, server)


def test_a_client_without_keys_is_refused(opened, server, monkeypatch):
    monkeypatch.setattr(RunKeys, "secure_client", lambda self, socket: None)
    stranger = connected(opened, KEYS, server.address)
    assert server.address in until(stranger.find_refusal_reason)
    monkeypatch.undo()
    still_serves(opened, server)


def test_a_server_without_keys_is_given_nothing(opened):
    with zmq.Context.instance().socket(zmq.ROUTER) as plain:
        plain.bind("tcp://127.0.0.1:*")
        address = plain.get_string(zmq.LAST_ENDPOINT)
        client = connected(opened, KEYS, address)
        assert f"the server at {address} speaks another protocol" in until(
            client.find_refusal_reason
        )
        with pytest.raises(zmq.Again):
            plain.recv(zmq.NOBLOCK)


def test_what_dies_while_it_greets_is_no_refusal(opened):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connected(opened, KEYS, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        listener.accept()[0].close()
        listener.accept()  # it tries again, and has counted the first
        assert client.find_refusal_reason() is None


@pytest.mark.parametrize("keys", [OTHER, "of a server that it knows", None])
async def test_a_server_tells_of_a_stranger(opened, monkeypatch, keys):
    """And not of a client that dies while it greets."""
    told = []
    server = opened(ServerSocket("127.0.0.1", 0, KEYS, on_rejected=told.append))
    server.attach_loop(asyncio.get_running_loop(), lambda: None)
    port = int(server.address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    if keys is None:
        monkeypatch.setattr(RunKeys, "secure_client", lambda self, socket: None)
    elif keys is not OTHER:
        keys = RunKeys(Secret(b"another run"))
        keys._server_public = KEYS._server_public
    connected(opened, keys or KEYS, server.address)
    await until_async(lambda: told)
    assert re.match(rf"refused \d+ connections? to {server.address} without the secret", told[0])


def test_strangers_are_told_of_at_once_and_then_once_a_minute():
    told = []
    strangers = RejectedPeers("here", told.append)
    for count, now_s in [(0, 1.0), (1, 5.0), (3, 6.0), (0, 64.9), (1, 65.0), (0, 500.0)]:
        strangers.record_rejected(count, now_s)
    assert [text.partition(" without")[0] for text in told] == [
        "refused 1 connection to here",
        "refused 4 connections to here",
    ]


def test_servers_of_two_runs_in_one_process_take_their_own_clients(opened, server):
    other = opened(ServerSocket("127.0.0.1", 0, OTHER))
    connected(opened, OTHER, other.address)
    assert [frame for _, frame in until(other.drain_frames)] == [b"hello"]
    still_serves(opened, server)


NO_HANDLER = """
import sys
import threading
from laminar.net import auth
from laminar.net.transport import ServerSocket
from tools.kit.secrets import KEYS
from tests.net.test_net_client import Actor, Coordinator
from tests.net.test_net_client import until as until_async

class NoHandler:
    def admit_clients(self, domain, client):
        pass


def dies(self, request):
    raise SystemExit


if sys.argv[1] == "none":
    auth._get_gate = NoHandler
else:
    auth._Gate._answer_request = dies
server = ServerSocket("127.0.0.1", 0, KEYS)
print(server.address, flush=True)
for thread in threading.enumerate():
    if thread.name == "zap":
        thread.join()
print("no handler", flush=True)
sys.stdin.read()
print(server.drain_frames(), flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("handler", ["none", "died"])
def test_a_server_without_its_handler_lets_nobody_in(opened, handler):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", NO_HANDLER, handler]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        address = process.stdout.readline().strip()
        if handler == "died":
            connected(opened, KEYS, address)  # at the question for it
        assert process.stdout.readline() == "no handler\n"
        client = connected(opened, KEYS, address)
        assert f"the server at {address} does not" in until(client.find_refusal_reason)
        said, _ = process.communicate("")
    assert said == "[]\n"


def test_a_frame_of_the_longest_size_fits_and_one_byte_more_does_not(opened):
    server = opened(ServerSocket("127.0.0.1", 0, KEYS, max_message=1000))
    connected(opened, KEYS, server.address).send(b"x" * 1001)
    connected(opened, KEYS, server.address).send(b"y" * 1000)
    frames = []
    while b"y" * 1000 not in frames:
        frames += [frame for _, frame in until(server.drain_frames)]
    assert b"x" * 1001 not in frames


def test_keys_are_not_shown():
    assert repr(KEYS) == "RunKeys(***)"
    assert repr(Secret(b"another run")) == "Secret(***)"


async def test_a_client_finds_its_run_where_another_run_was(tmp_path):
    """The address file was of a coordinator that had gone; another run had its port for a while."""
    file = tmp_path / "coordinator.json"
    strange = ServerSocket("127.0.0.1", 0, OTHER)
    port = int(strange.address.rpartition(":")[2])
    write_address(file, strange.address)
    actor = Actor(file)
    await actor.client.start()
    await until_async(lambda: actor.troubles)
    strange.close()
    server = Coordinator({}, file, "s1", port)
    await until_async(lambda: actor.welcomes)
    assert len(actor.troubles) == 1 and strange.address in actor.troubles[0]
    await actor.client.close()
    server.close()
