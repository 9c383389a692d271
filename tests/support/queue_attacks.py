"""A sample queue in a process of its own, and one that attacks it: run as `queue_attacks.py NAME ENDPOINT KEYS`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from areal_lite.sample_queue.access import KeyPair, QueueAccess, QueueKeys, Role
from areal_lite.sample_queue.records import QueueStatus
from areal_lite.wire import encode


def rss_mb(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def attacking(attack: Callable[[Any], None], access: QueueAccess) -> Iterator[subprocess.Popen[bytes]]:
    """Run an attack until the block ends."""
    keys = [access.server_key, access.keys.public, access.keys.secret] if access.keys else []
    command = [sys.executable, __file__, attack.__name__, access.endpoint, *(key.decode() for key in keys if key)]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving_apart() -> Iterator[tuple[int, dict[Role, QueueAccess]]]:
    """Serve from a process of its own; yields its pid and every role's access."""
    with subprocess.Popen(
        [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin
            assert process.stdout
            endpoint, server_key, *keys = process.stdout.readline().split()
            pairs = [KeyPair(*(key.encode() for key in keys[place : place + 2])) for place in range(0, len(keys), 2)]
            yield (
                process.pid,
                {
                    role: QueueAccess(endpoint, server_key.encode(), pair)
                    for role, pair in zip(Role, pairs, strict=True)
                },
            )
        finally:
            process.kill()


def serve() -> None:
    """Open a queue with its own limits and say where it is."""
    from queue_builders import make_queue

    from areal_lite.config.sections import QueueConfig

    server = make_queue(
        keys=QueueKeys(),
        max_message_bytes=QueueConfig().max_message_mb * 2**20,
        clock=time.monotonic,
        lease_timeout_s=1.0,
        groups_per_step=64,
    )
    server.start()
    accesses = [server.access(role) for role in Role]
    keys = [key for access in accesses if access.keys for key in (access.keys.public, access.keys.secret)]
    words = [accesses[0].server_key or b"", *keys]
    print(accesses[0].endpoint, *(word.decode() for word in words), flush=True)
    sys.stdin.read()


def request(op: str, **fields: Any) -> bytes:
    return encode({"op": op, "fields": fields})


def never_reads(socket: Any) -> None:
    """Requests with long answers, none of which is read."""
    worker = "w" * 200
    for place in range(100):
        socket.send_multipart([b"id", request("heartbeat", worker=f"{place}{worker[4:]}", lease_ids=[], progress=0)])
    while True:
        socket.send_multipart([b"id", request("status")])


def floods(socket: Any) -> None:
    """Short requests as fast as it can, read as they come."""
    beat = request("heartbeat", worker="flood", lease_ids=[], progress=0)
    while True:
        for _ in range(100):
            socket.send_multipart([b"id", beat])
        while socket.poll(0):
            socket.recv_multipart()


ATTACKS: dict[Callable[[Any], None], Callable[[QueueStatus], bool]] = {
    never_reads: lambda status: "unread" in status["refused"],
    floods: lambda status: status["gauges"]["messages"] >= 5_000,
}
"""Each with the sign that it has met its limit."""


def attack(name: str, endpoint: str, *keys: str) -> None:
    """Attack until killed, behind other processes: an attacker has a machine of its own."""
    os.nice(3)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(100)
    if name.startswith("never_reads"):
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)
    if keys:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in keys)
    socket.connect(endpoint)
    next(attack for attack in ATTACKS if attack.__name__ == name)(socket)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else attack(*sys.argv[1:])
