"""One verifier process seen from outside: start it, ask it, kill it with everything it started.

Used by `pool.py`, inside one event loop. The process leads a session of its own, so that Ctrl-C does not reach it and
one signal reaches all that it forked. Knows nothing of scores or restarts.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from areal_lite.errors import VerifierError
from areal_lite.verify.child import LENGTH, unpack
from areal_lite.verify.protocol import Reply

__all__ = ["VerifierProcess"]

_REAP_TIMEOUT_S = 5.0
_REAP_POLL_S = 0.002


class VerifierProcess:
    """A running `areal_lite.verify.child`."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._killed = False

    @classmethod
    async def start(cls, function: str, *, timeout_s: float) -> Self:
        """Start a process and wait until it has loaded the function.

        Raises:
            VerifierError: The function cannot be loaded, or loading it takes too long or ends the process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "areal_lite.verify.child", function, str(os.getpid())]
            try:
                child = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                ours.close()
                raise VerifierError(f"a verifier process cannot be started: {error}") from error
        process = cls(child, *await asyncio.open_unix_connection(sock=ours))
        try:
            await process._wait_until_ready(function, timeout_s=timeout_s)
        except BaseException:
            await process.kill()
            raise
        return process

    async def _wait_until_ready(self, function: str, *, timeout_s: float) -> None:
        try:
            problem = await self._receive(timeout_s=timeout_s)
        except TimeoutError as error:
            raise VerifierError(f"the verifier {function!r} must import within {timeout_s} s, it did not") from error
        except (EOFError, OSError) as error:
            ending = await self.kill()
            raise VerifierError(f"importing the verifier {function!r} ended its process ({ending})") from error
        if problem is not None:
            raise VerifierError(problem)

    async def call(self, frame: bytes, *, timeout_s: float) -> Reply:
        """Send a call and wait for its reply.

        Raises:
            TimeoutError: No reply came in time; the process is of no further use.
            EOFError, OSError: The process ended.
        """
        self._writer.write(frame)
        return Reply(*await self._receive(timeout_s=timeout_s))

    async def _receive(self, *, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            await self._writer.drain()
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return unpack(await self._reader.readexactly(size))

    async def kill(self) -> str:
        """Kill the process and everything it started, and say how the process itself ended; idempotent."""
        if not self._killed:
            self._killed = True
            _kill_tree(self._process.pid)
            self._writer.close()
        deadline = asyncio.get_running_loop().time() + _REAP_TIMEOUT_S
        while self._process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_REAP_POLL_S)
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _kill_tree(leader: int) -> None:
    """Kill a session leader that has not been waited for, its group, and its descendants in other groups.

    An unreaped leader keeps its number, so that no stranger can be hit. The group is stopped first: what does not
    run cannot fork while the descendants are collected.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGSTOP)
    for pid in _descendants(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`; none where /proc does not tell."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found
