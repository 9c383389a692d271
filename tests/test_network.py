"""Addresses and ports of this machine: by subnet, interface or route, and what no other node reaches is refused."""

import os
import socket
import threading
from collections import namedtuple
from collections.abc import Mapping

import psutil
import pytest

from areal_lite import network
from areal_lite.errors import ConfigError
from areal_lite.network import (
    address_towards,
    interface_of,
    listen,
    local_address,
    port_range,
    require_free,
    use_interface_of,
)

Entry = namedtuple("Entry", ["family", "address"])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with two networks, docker's bridge and a link-local address; every route starts at the first network."""
    addresses: Mapping[str, str] = {
        "lo": "127.0.0.1",
        "eth0": "10.0.0.7",
        "ib0": "192.168.5.7",
        "docker0": "172.17.0.1",
        "eth9": "169.254.3.4",
    }
    found = {name: [Entry(socket.AF_INET6, "fe80::1"), Entry(socket.AF_INET, at)] for name, at in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(network, "address_towards", lambda peer: "172.17.0.1" if peer == "172.17.0.2" else "10.0.0.7")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("chosen", "address"),
    [(None, "127.0.0.1"), ("192.168.0.0/16", "192.168.5.7"), ("ib0", "192.168.5.7"), ("10.0.0.1", "10.0.0.7")],
)
def test_an_address_is_chosen_by_subnet_interface_or_route(chosen: str | None, address: str) -> None:
    """Seen failing with the route alone."""
    assert local_address(chosen) == address


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("chosen", ["docker0", "172.17.0.0/16", "172.17.0.2", "169.254.0.0/16", "eth9", "10.9.0.0/24"])
def test_what_no_other_machine_reaches_is_refused_with_what_there_is(chosen: str) -> None:
    """Nor a network that a node is not in. Seen failing without the check: the run would wait in vain."""
    words = "no other machine reaches: set run.network to another of lo .*, eth0 [(]10.0.0.7[)]"
    if chosen == "10.9.0.0/24":
        words = "run.network=10.9.0.0/24 must be a network of every node, .*, eth0 [(]"
    with pytest.raises(ConfigError, match=words):
        local_address(chosen)


def test_the_way_to_a_machine_starts_at_a_local_address_with_an_interface() -> None:
    """A machine's way to itself stays inside. Seen failing with the address of the host name, which may be another."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.1.1") == interface_of("127.0.0.1")
    with pytest.raises(ConfigError, match="must have a route to 300"):
        address_towards("300.0.0.1")


def test_gloo_and_nccl_are_told_the_interface_and_a_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib7"


def test_a_port_is_bound_when_it_is_chosen_so_two_runs_share_a_range() -> None:
    """Two ports, three who want one. Seen failing with a port that is looked up and closed again."""
    with listen("127.0.0.1", range(20000, 22000)) as first, listen("127.0.0.1", range(20000, 22000)) as second:
        taken = [first.getsockname()[1], second.getsockname()[1]]
        assert len(set(taken)) == 2
        with pytest.raises(ConfigError, match=rf"run\.ports={taken[0]}-{taken[0]} must be free on 127\.0\.0\.1"):
            listen("127.0.0.1", range(taken[0], taken[0] + 1))


def test_a_range_of_ports_has_both_its_ends() -> None:
    assert port_range("20000-20001") == range(20000, 20002)


@pytest.mark.parametrize("text", ["20000", "80-90", "30000-20000", "20000-40000", "a-b", ""])
def test_ports_that_the_system_hands_out_itself_are_refused(text: str) -> None:
    """Seen failing with an end at 65535: another program may get the port first."""
    with pytest.raises(ValueError, match="two numbers from 1024 to 32767"):
        port_range(text)


def test_a_port_that_stays_taken_is_named_and_one_that_gets_free_is_awaited() -> None:
    """Seen failing with one look: what a killed attempt left holds its port for a moment."""
    taken = listen("127.0.0.1", range(21000, 29000))
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"port {port} must be free on {socket.gethostname()}, .* `ss -ltnp sport"):
        require_free(range(port, port + 1), timeout_s=0.1)
    threading.Timer(0.5, taken.close).start()
    require_free(range(port, port + 1), timeout_s=60.0)
