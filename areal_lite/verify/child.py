"""The process that runs a verify function, and the keeper that ends it with everything it started.

    python -m areal_lite.verify.child FUNCTION CHANNEL OPTIONS

CHANNEL is the descriptor of a socket, OPTIONS are JSON. The process forks. The child half, the worker, answers the jobs
that arrive on the socket (`codec.py`). The parent half, the keeper, runs none of the user's code: it waits until the
worker ends, or until it is terminated itself, and then kills everything below it. As a "child subreaper" it inherits
every descendant whose own parent has ended, daemons in sessions of their own included, so nothing can get away.
`process.py` enforces deadlines; an async worker also cancels its own late jobs.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

from areal_lite.config.plugins import find_function
from areal_lite.errors import ArealLiteError
from areal_lite.verify.codec import MAX_REPLY_BYTES, messages, pack, unpack, unpacker
from areal_lite.verify.descendants import adopt_orphans, die_with_parent, end_descendants
from areal_lite.verify.protocol import Reply, Verifier, failed


def main(function_name: str, channel: socket.socket, options: Mapping[str, Any]) -> int:
    """Split into keeper and worker; returns the exit code.

    Args:
        options: `arguments` of every call, `memory_mb`, and the process id of the `parent`.
    """
    # The processes of a run block these; a verifier must be able to end what it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    die_with_parent(options["parent"], signal.SIGTERM)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # a function that signals its own group must not hit the keeper
        die_with_parent(keeper, signal.SIGKILL)
        _work(channel, function_name, options)
        return 0
    channel.close()
    try:
        return _exit_code_of(worker)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()


def _exit_code_of(worker: int) -> int:
    """Wait for the worker, reaping orphans meanwhile; returns its exit code, or 128 + the signal that killed it."""
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _work(channel: socket.socket, function_name: str, options: Mapping[str, Any]) -> None:
    """Load the function and answer jobs until the parent hangs up."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what a verifier prints must not block it
        os.dup2(null, descriptor)
    try:
        verifier = Verifier(find_function(function_name, kind="verifier"), options["arguments"])
    except ArealLiteError as error:
        channel.sendall(pack([str(error), None, False]))
        return
    me = os.getpid()
    used_share = _limit_memory(options["memory_mb"] << 20)

    def packed(job: int, replies: list[Reply]) -> bytes:
        if os.getpid() != me:
            os._exit(0)  # the verifier forked, and both halves returned
        too_large = failed("reply_too_large", f"more than {MAX_REPLY_BYTES} bytes for one completion")
        fitting = [reply if len(pack(astuple(reply))) <= MAX_REPLY_BYTES else too_large for reply in replies]
        return pack([job, list(map(astuple, fitting)), used_share()])

    channel.sendall(pack([None, verifier.batch_size, verifier.is_async]))
    if verifier.is_async:
        asyncio.run(_serve_async(channel, verifier, packed))
        return
    for job, _, calls in unpacker(channel.makefile("rb", buffering=0)):
        channel.sendall(packed(job, verifier.answer(list(map(unpack, calls)))))


async def _serve_async(channel: socket.socket, verifier: Verifier, packed: Callable[[int, list[Reply]], bytes]) -> None:
    """Answer several jobs at a time until the parent hangs up; cancels those that are late."""
    reader, writer = await asyncio.open_unix_connection(sock=channel)

    async def serve(job: int, deadline: float, calls: list[bytes]) -> None:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                replies = await verifier.answer_async(list(map(unpack, calls)))
            is_late = limit.expired() or time.monotonic() > deadline  # a blocked loop notices no deadline
            answer = packed(job, [] if is_late else replies)
        except Exception:  # end, so that the other jobs run again: cancelled ones would answer
            traceback.print_exc()
            os._exit(1)
        writer.write(answer)

    async with asyncio.TaskGroup() as jobs:
        async for message in messages(reader):
            jobs.create_task(serve(*message))


def _limit_memory(memory_bytes: int) -> Callable[[], float]:
    """Make an allocation beyond this limit fail; returns a function that measures the share of it in use.

    The limit is on private writable memory, for this process and for each that it starts. A limit on address space
    would not do: some libraries reserve much more of it than they ever use.
    """
    data, resident = _memory_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + memory_bytes if hard == resource.RLIM_INFINITY else min(data + memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def used_share() -> float:
        data_now, resident_now = _memory_bytes()
        return max(data_now - data, resident_now - resident) / memory_bytes

    return used_share


def _memory_bytes() -> tuple[int, int]:
    """Return the private writable memory of this process, and its resident memory, shared pages included."""
    with open("/proc/self/statm") as file:
        pages = list(map(int, file.read().split()))
    return pages[5] * resource.getpagesize(), pages[1] * resource.getpagesize()


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]))
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads or exit handlers that a verifier left behind must not keep this process alive.
        os._exit(status)
