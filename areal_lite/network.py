"""The addresses and ports of this machine that a run's sockets use; nothing here knows Ray.

A socket for other nodes listens at the machine's address in the run's network (`run.network`); a connection starts from
the address that the route to its peer starts from. So nothing depends on host names, which often mean 127.0.0.1.
"""

import ipaddress
import os
import random
import re
import socket
import time

import psutil

from areal_lite.errors import ConfigError

LOOPBACK = "127.0.0.1"
_EPHEMERAL = 32768
"""Linux gives ports from here on to programs that ask for any."""
_CONTAINERS = re.compile(r"docker\d+|br-[0-9a-f]{12}|virbr\d+|podman\d+|cni\d+|lxcbr\d+")
"""Bridges to a host's own containers and virtual machines: other nodes may have the same address there."""


def local_address(network: str | None) -> str:
    """Return this machine's IPv4 address in a network: a subnet, an interface, or where the route to an address starts.

    None = the run has one node, and needs loopback alone.

    Raises:
        ConfigError: There is none, or other nodes do not reach it.
    """
    if network is None:
        return LOOPBACK
    addresses = _addresses()
    if "/" in network:
        subnet = ipaddress.ip_network(network, strict=False)
        found = [address for address in addresses if ipaddress.ip_address(address) in subnet]
    elif network in psutil.net_if_addrs():
        found = [address for address, interface in addresses.items() if interface == network]
    else:
        found = [address_towards(network)]
    here, choices = socket.gethostname(), ", ".join(f"{name} ({address})" for address, name in addresses.items())
    if not found:
        raise ConfigError(
            f"run.network={network} must be a network of every node, got a node ({here}) that has only {choices}: "
            "correct it"
        )
    if ipaddress.ip_address(found[0]).is_link_local or _CONTAINERS.fullmatch(interface_of(found[0])):
        raise ConfigError(
            f"the nodes must reach each other, got {found[0]} ({interface_of(found[0])}) on {here}, an address that no "
            f"other machine reaches: set run.network to another of {choices}"
        )
    return found[0]


def address_towards(peer: str) -> str:
    """Return the local address that the route to another machine starts from; nothing is sent.

    Raises:
        ConfigError: There is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # on a datagram socket this only looks up the route
        except OSError as error:
            here = socket.gethostname()
            to_do = "correct that address, or set run.network to a subnet or interface that all nodes share"
            raise ConfigError(f"{here} must have a route to {peer}, got {error}: {to_do}") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address of this machine; any of 127.0.0.0/8 is the loopback's."""
    return _addresses()[LOOPBACK if address.startswith("127.") else address]


def use_interface_of(address: str) -> None:
    """Make gloo and NCCL, here and in child processes, use the interface of an address; a user's choice stays."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface_of(address))


def listen(address: str, ports: range) -> socket.socket:
    """Return a socket that listens on a free port of a range: bound, as a port that is only looked up may be taken.

    Raises:
        ConfigError: No port is free, or the address is not this machine's.
    """
    problem: OSError | None = None
    for port in random.Random().sample(ports, len(ports)):  # so that runs side by side seldom try the same one
        try:
            return socket.create_server((address, port))
        except OSError as error:
            problem = error
    raise ConfigError(
        f"one of run.ports={ports[0]}-{ports[-1]} must be free on {address}, got {problem}: choose others"
    )


def require_free(ports: range, *, timeout_s: float = 15.0) -> None:
    """Wait until nothing listens on any of these ports of this machine: what just ended may hold one a little longer.

    Raises:
        ConfigError: One stays taken.
    """
    deadline = time.monotonic() + timeout_s
    for port in ports:
        while not _is_free(port):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"port {port} must be free on {socket.gethostname()}, got one that another program listens on. "
                    f"Fix: choose other ports in the profile, or end that program: `ss -ltnp sport = :{port}` names it"
                )
            time.sleep(0.2)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def listens(address: str, *, timeout_s: float, as_grpc: bool = False) -> bool:
    """Return whether a server accepts connections at `host:port`; False as well if that is no address.

    Args:
        as_grpc: It must be a gRPC server without encryption, such as Ray's head.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as link:
            if not as_grpc:
                return True
            link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            return link.recv(9)[3:4] == b"\4"  # settings against settings: so each connection of HTTP/2 begins
    except (OSError, ValueError):
        return False


def port_range(text: str) -> range:
    """Read a range of ports such as `20000-21999`, both ends included.

    Raises:
        ValueError: It is no range, or reaches up to the ports that Linux gives away.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) < _EPHEMERAL):
        raise ValueError(f"a range must be two numbers from 1024 to {_EPHEMERAL - 1}, as in 20000-21999, got {text!r}")
    return range(int(first), int(last) + 1)


def _addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this machine."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
