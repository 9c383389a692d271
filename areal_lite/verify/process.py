"""One verifier process seen from outside: start it, ask it, kill it with everything it started.

Used by `pool.py`, inside one event loop. The process leads a session of its own, so that Ctrl-C does not reach it and
one signal reaches all that it forked. Knows nothing of scores or restarts.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_lite.errors import VerifierError
from areal_lite.verify.child import LENGTH, unpack
from areal_lite.verify.protocol import Reply

__all__ = ["VerifierProcess"]

_REAP_TIMEOUT_S = 5.0
_REAP_POLL_S = 0.002


class VerifierProcess:
    """A running `areal_lite.verify.child`; whoever makes one kills it, whatever happens in between."""

    def __init__(self, function: str, *, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Start the process, without waiting for it.

        Args:
            function: `module:function` or `path.py:function`.
            arguments: Keyword arguments of every call, plain values.

        Raises:
            VerifierError: The machine gives no more processes.
        """
        self._function = function
        self._killed = False
        self._writer: asyncio.StreamWriter | None = None
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", "areal_lite.verify.child", function, str(os.getpid())]
        command.append(json.dumps(dict(arguments), default=str))
        try:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._channel.close()
            raise VerifierError(f"a verifier process cannot be started: {error}") from error
        finally:
            theirs.close()

    async def wait_until_ready(self, *, timeout_s: float) -> None:
        """Wait until the process has loaded the function.

        Raises:
            VerifierError: The function cannot be loaded, or loading it takes too long or ends the process.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)
        try:
            problem = await self._receive(timeout_s=timeout_s)
        except TimeoutError as error:
            raise VerifierError(
                f"the verifier {self._function!r} must load within {timeout_s} s, it did not"
            ) from error
        except (EOFError, OSError) as error:
            ending = await self.kill()
            raise VerifierError(f"loading the verifier {self._function!r} ended its process ({ending})") from error
        if problem is not None:
            raise VerifierError(problem)

    async def call(self, frame: bytes, *, timeout_s: float) -> Reply:
        """Send a call and wait for its reply.

        Raises:
            TimeoutError: No reply came in time; the process is of no further use.
            EOFError, OSError: The process ended.
        """
        assert self._writer is not None, "a process must be ready before it is called"
        self._writer.write(frame)
        return Reply(*await self._receive(timeout_s=timeout_s))

    async def _receive(self, *, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return unpack(await self._reader.readexactly(size))

    async def kill(self) -> str:
        """Kill the process and everything it started, and say how the process itself ended; idempotent."""
        if not self._killed:
            self._killed = True
            _kill_tree(self._process.pid)
            (self._writer or self._channel).close()
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
