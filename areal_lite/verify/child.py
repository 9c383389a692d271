"""Main of the process that runs a verify function, and that may be killed at any moment, and of its guardian.

`process.py` starts `python -m areal_lite.verify.child FUNCTION PARENT_PID OPTIONS` with one end of a socket pair as
standard input and a pipe as standard output; OPTIONS are JSON. It forks: the parent half becomes the guardian
(`guardian.py`), which writes how it all ended on the pipe; the child half, the worker, loads the function and answers
the jobs that come in on the socket (`frames.py`). Neither knows a deadline: the process that started them does.
"""

import asyncio
import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from areal_lite.config.plugins import find_function
from areal_lite.errors import ArealLiteError
from areal_lite.verify.fork_gate import ask_before_forks
from areal_lite.verify.frames import LENGTH, MAX_REPLY_BYTES, pack, unpack
from areal_lite.verify.guardian import WAKING_SIGNALS, Guardian, end_all
from areal_lite.verify.protocol import (
    Reply,
    VerifyFunction,
    answer,
    answer_async,
    batch_size,
    is_async,
    prepare_verifier,
)
from areal_lite.verify.tree import adopt_orphans, descendants, resident_bytes

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_WORN_SHARE = 0.8


def main(function_name: str, parent_pid: int, options: Mapping[str, Any]) -> None:
    """Split into guardian and worker.

    Args:
        function_name: For `find_function`.
        parent_pid: Who started this process; nobody below outlives it.
        options: `arguments` of every call, and `memory_mb`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKING_SIGNALS)
    adopt_orphans()
    _die_with(parent_pid, signal.SIGTERM)
    channel = _take_channel()
    reports, guardians_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
    me = os.getpid()
    worker = os.fork()
    if worker == 0:
        guardians_end.close()
        os.setsid()  # whoever signals its own group must not hit the guardian
        _die_with(me, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKING_SIGNALS)
        _work(channel, function_name, options, reports)
        return
    channel.close()
    reports.close()
    try:
        ending = Guardian(worker, reports=guardians_end, memory_bytes=options["memory_mb"] << 20).watch()
    finally:
        end_all()
    os.write(1, pack(list(ending)))


def _work(channel: socket.socket, function_name: str, options: Mapping[str, Any], reports: socket.socket) -> None:
    """Load the function and answer jobs until the parent hangs up."""
    _silence()
    if (listener := ask_before_forks()) is not None:
        socket.send_fds(reports, [b"forks"], [listener])
        os.close(listener)
    arguments = options["arguments"]
    try:
        function = find_function(function_name, kind="verifier")
        prepare_verifier(function, arguments)
    except ArealLiteError as error:
        _send(channel, pack([str(error), None, False]))
        return
    is_worn = _limit_memory(options["memory_mb"] << 20, reports)
    _send(channel, pack([None, batch_size(function), is_async(function)]))
    if is_async(function):
        asyncio.run(_serve_async(channel, function, arguments, is_worn))
    else:
        _serve(channel, function, arguments, is_worn)


def _serve(
    channel: socket.socket, function: VerifyFunction, arguments: Mapping[str, Any], is_worn: Callable[[], bool]
) -> None:
    me = os.getpid()
    while body := _receive(channel):
        job, calls = unpack(body)
        _send(channel, pack([job, None, False]))
        replies = answer(function, [unpack(call) for call in calls], arguments=arguments)
        if os.getpid() != me:
            os._exit(0)  # the verifier forked, and both halves returned
        _send(channel, _packed(job, replies, is_worn()))


async def _serve_async(
    channel: socket.socket, function: VerifyFunction, arguments: Mapping[str, Any], is_worn: Callable[[], bool]
) -> None:
    """Answer several jobs at a time.

    Consumes jobs, produces replies; waits for the parent; unblocked when it hangs up.
    """
    me = os.getpid()
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    running: dict[int, asyncio.Task[None]] = {}

    async def serve(job: int, calls: list[bytes]) -> None:
        replies = await answer_async(function, [unpack(call) for call in calls], arguments=arguments)
        if os.getpid() != me:
            os._exit(0)
        body = _packed(job, replies, is_worn())
        writer.write(LENGTH.pack(len(body)) + body)
        running.pop(job, None)

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            job, calls = unpack(await reader.readexactly(size))
            if calls is not None:
                body = pack([job, None, False])
                writer.write(LENGTH.pack(len(body)) + body)
                running[job] = asyncio.create_task(serve(job, calls))
            elif job in running:
                running[job].cancel()


def _packed(job: int, replies: list[Reply], is_worn: bool) -> bytes:
    checked = []
    for reply in replies:
        if len(pack(reply)) > MAX_REPLY_BYTES:
            reply = Reply(None, "reply_too_large", f"more than {MAX_REPLY_BYTES} bytes for one completion")
        checked.append(reply)
    return pack([job, checked, is_worn])


def _limit_memory(memory_bytes: int, reports: socket.socket) -> Callable[[], bool]:
    """Have one large allocation fail at once, and tell the guardian what was taken before the first call.

    The limit is on private writable memory: address space alone says little, as some libraries reserve a lot of it.

    Returns:
        What tells, between calls, whether so much is kept that the process should be replaced. Never so where that was
        kept after the first call already: a fresh process would be no better.
    """
    reports.send(str(resident_bytes([os.getpid(), *descendants(os.getpid())])).encode())
    reports.close()
    data = _data_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + memory_bytes if hard == resource.RLIM_INFINITY else min(data + memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    full = data + _WORN_SHARE * memory_bytes
    worn_above: float | None = None

    def is_worn() -> bool:
        nonlocal worn_above
        kept = _data_bytes()
        if worn_above is None:
            worn_above = math.inf if kept > full else full
        return kept > worn_above

    return is_worn


def _data_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _die_with(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send a signal when the parent is gone, even while a verifier holds the interpreter."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise RuntimeError("the parent ended before its verifier process was ready")


def _take_channel() -> socket.socket:
    """Move the socket away from file descriptor 0, where a verifier could touch it by mistake."""
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return channel


def _silence() -> None:
    """Make standard output and error the null device: what a verifier prints can neither block nor be mistaken."""
    for descriptor in (1, 2):
        os.dup2(0, descriptor)


def _send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket) -> bytes:
    """Return the next body; empty when the parent hung up."""
    header = _read(channel, size=LENGTH.size)
    return _read(channel, size=LENGTH.unpack(header)[0]) if header else b""


def _read(channel: socket.socket, *, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads or exit handlers that a verifier left behind must not keep this process alive.
        os._exit(status)
