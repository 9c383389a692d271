"""Main of the process that runs a verify function, and that may be killed at any moment, and of its guardian.

    python -m areal_lite.verify.child FUNCTION CHANNEL OPTIONS

CHANNEL is the descriptor of a socket, OPTIONS are JSON. It forks: the parent half becomes the guardian (`guardian.py`),
which ends when standard input does, and writes how it all ended on standard output; the child half, the worker, answers
the jobs that come in on the socket (`frames.py`). Neither knows a deadline: the process that started them does.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

from areal_lite.config.plugins import find_function
from areal_lite.errors import ArealLiteError
from areal_lite.verify.descendants import adopt_orphans, descendants, die_with_parent, end_descendants, resident_bytes
from areal_lite.verify.fork_gate import ask_before_forks
from areal_lite.verify.frames import MAX_REPLY_BYTES, messages, pack, unpack, unpacker
from areal_lite.verify.guardian import Guardian
from areal_lite.verify.protocol import Reply, Verifier, failed


def main(function_name: str, channel: socket.socket, options: Mapping[str, Any]) -> None:
    """Split into guardian and worker; `options` are `arguments` of every call, and `memory_mb`."""
    # The processes of a run hear none of these; what a verifier starts and wants to end must.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
    adopt_orphans()
    guardians_end, reports = socket.socketpair(type=socket.SOCK_SEQPACKET)
    me = os.getpid()
    worker = os.fork()
    if worker == 0:
        guardians_end.close()
        os.setsid()  # whoever signals its own group must not hit the guardian
        die_with_parent(me)
        _work(channel, function_name, options, reports)
        return
    channel.close()
    reports.close()
    try:
        ending = Guardian(worker, memory_bytes=options["memory_mb"] << 20).watch(lifeline=0, reports=guardians_end)
    finally:
        end_descendants()
    with contextlib.suppress(BrokenPipeError):  # whoever asked may be gone
        os.write(1, pack([ending.failure, ending.detail]))


def _work(channel: socket.socket, function_name: str, options: Mapping[str, Any], reports: socket.socket) -> None:
    """Load the function and answer jobs until the parent hangs up."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what a verifier prints can neither block nor be mistaken
        os.dup2(null, descriptor)
    if (listener := ask_before_forks()) is not None:
        socket.send_fds(reports, [b"forks"], [listener])
        os.close(listener)
    try:
        verifier = Verifier(find_function(function_name, kind="verifier"), options["arguments"])
    except ArealLiteError as error:
        channel.sendall(pack([str(error), None, False]))
        return
    me = os.getpid()
    reports.send(str(resident_bytes([me, *descendants(me)])).encode())
    reports.close()
    kept_share = _limit_memory(options["memory_mb"] << 20)

    def packed(job: int, replies: list[Reply]) -> bytes:
        if os.getpid() != me:
            os._exit(0)  # the verifier forked, and both halves returned
        too_large = failed("reply_too_large", f"more than {MAX_REPLY_BYTES} bytes for one completion")
        fitting = [reply if len(pack(astuple(reply))) <= MAX_REPLY_BYTES else too_large for reply in replies]
        return pack([job, list(map(astuple, fitting)), kept_share()])

    channel.sendall(pack([None, verifier.batch_size, verifier.is_async]))
    if verifier.is_async:
        asyncio.run(_serve_async(channel, verifier, packed))
        return
    for job, calls in unpacker(channel.makefile("rb", buffering=0)):
        channel.sendall(pack([job, None, 0.0]))
        channel.sendall(packed(job, verifier.answer(list(map(unpack, calls)))))


async def _serve_async(channel: socket.socket, verifier: Verifier, packed: Callable[[int, list[Reply]], bytes]) -> None:
    """Answer several jobs at a time until the parent hangs up."""
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    running: dict[int, asyncio.Task[None]] = {}

    async def serve(job: int, calls: list[bytes]) -> None:
        writer.write(packed(job, await verifier.answer_async(list(map(unpack, calls)))))
        running.pop(job, None)

    async for job, calls in messages(reader):
        if calls is not None:
            writer.write(pack([job, None, 0.0]))
            running[job] = asyncio.create_task(serve(job, calls))
        elif job in running:
            running[job].cancel()


def _limit_memory(memory_bytes: int) -> Callable[[], float]:
    """Have one large allocation fail at once; returns what tells which share of that memory is taken.

    The limit is on private writable memory: address space alone says little, as some libraries reserve a lot of it.
    """
    data = _data_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + memory_bytes if hard == resource.RLIM_INFINITY else min(data + memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return lambda: (_data_bytes() - data) / memory_bytes


def _data_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads or exit handlers that a verifier left behind must not keep this process alive.
        os._exit(status)
