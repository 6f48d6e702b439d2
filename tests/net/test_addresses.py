"""Which address of this machine is meant, and that nothing else listens."""

import json
import socket
from types import SimpleNamespace

import psutil
import pytest

from laminar.config import ConfigError
from laminar.net import client
from laminar.net.addresses import check_reachable, own_ip, route_to
from laminar.net.client import read_address, write_address
from laminar.net.transport import ServerSocket
from tools.kit.secrets import KEYS


def test_an_address_a_name_and_an_interface_are_taken():
    assert own_ip("127.0.0.3", "--host") == "127.0.0.3"
    assert own_ip("localhost", "--host") == "127.0.0.1"
    assert own_ip("lo", "--host") == "127.0.0.1"


def test_auto_is_the_name_that_slurm_or_this_machine_gives_itself(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    assert own_ip("auto", "coordinator.host") == "127.0.0.1"
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.4")
    assert own_ip("auto", "coordinator.host") == "127.0.0.4"


@pytest.mark.parametrize("host", ["0.0.0.0", "*"])
def test_all_interfaces_are_refused(host):
    with pytest.raises(ConfigError, match=r"--host = .* would listen on all interfaces"):
        own_ip(host, "--host")


@pytest.mark.parametrize("host", ["nowhere.invalid", "10.255.0.1"])
def test_what_is_no_address_of_this_machine_is_named(host):
    with pytest.raises(
        ConfigError, match=r"--host = .* is not an? (known )?address, name or interface"
    ):
        own_ip(host, "--host")


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "fe80::1%lo", "six", "node-six"])
def test_what_has_no_ipv4_address_is_refused_as_that(host, monkeypatch):
    """An interface and a name of IPv6 alone are not "unknown": they are there."""
    card = [SimpleNamespace(family=socket.AF_INET6)]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"six": card})
    asked = socket.getaddrinfo

    def resolved(name, port, family):
        return asked("fd00::2" if name == "node-six" else name, port, family)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(ConfigError, match=r"--host = '.*' has only an IPv6 address.*give an IPv4"):
        own_ip(host, "--host")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "lo"])
def test_a_server_listens_on_the_asked_address_only(host):
    before = listening()
    server = ServerSocket(host, 0, KEYS)
    port = int(server.address.rpartition(":")[2])
    asked = "127.0.0.1" if host == "lo" else host
    assert listening() - before == {(asked, port)}
    server.close()


def listening():
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_the_address_on_the_way_to_the_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert route_to(f"tcp://127.0.0.1:{server.getsockname()[1]}") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no route from here to the coordinator"):
        route_to("tcp://255.255.255.255:1")


def test_a_loopback_address_of_another_machine_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "coordinator.json"
    write_address(file, "tcp://127.0.1.1:5000")
    assert read_address(file) == "tcp://127.0.1.1:5000"
    monkeypatch.setattr(client, "MACHINE", "another")
    with pytest.raises(ConfigError, match=r"gives tcp://127\.0\.1\.1:5000, a loopback address"):
        read_address(file)
    file.write_text(json.dumps({"address": "tcp://10.0.0.1:5000", "machine": "m0"}))
    assert read_address(file) == "tcp://10.0.0.1:5000"


@pytest.mark.parametrize(
    ("own", "coordinator", "fine"),
    [
        ("127.0.0.2", "tcp://127.0.0.1:5000", True),
        ("10.0.0.2", "tcp://10.0.0.1:5000", True),
        ("10.0.0.2", "tcp://127.0.0.1:5000", True),
        ("127.0.1.1", "tcp://10.0.0.1:5000", False),
    ],
)
def test_a_node_on_loopback_in_a_run_of_several_machines_is_refused(own, coordinator, fine):
    if fine:
        check_reachable(own, coordinator)
    else:
        with pytest.raises(ConfigError, match=r"127\.0\.1\.1, a loopback address.*--host"):
            check_reachable(own, coordinator)
