"""One verifier process seen from outside: start it, give it jobs, kill it with everything it started.

Used by `pool.py`, inside one event loop. The process is a guardian with the worker below it (`child.py`), in sessions
of their own, so that Ctrl-C does not reach them. Knows nothing of scores, retries or restarts.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.verify.frames import LENGTH, MAX_REPLY_BYTES, pack, unpack
from areal_lite.verify.guardian import Ending
from areal_lite.verify.protocol import Reply
from areal_lite.verify.tree import adopt_orphans, end_adopted, stop_and_kill

__all__ = ["ProcessEnded", "VerifierProcess"]

_END_TIMEOUT_S = 5.0
_END_POLL_S = 0.002
_ACCOUNT_S = 0.5
"""How long a process that hung up may take to end by itself; its guardian then says how it did."""
_GIVE_UP_S = 0.5
"""How long an event loop may take to give up a job; one that takes longer is stuck."""


class ProcessEnded(Exception):
    """The process is no more, and with it a job."""

    def __init__(self, ending: Ending, *, begun: bool, alone: bool) -> None:
        """Say how it ended, whether it had begun this job, and whether this was the only call it had begun."""
        super().__init__(ending, begun, alone)
        self.ending, self.begun, self.alone = ending, begun, alone


@dataclass(slots=True)
class _Job:
    replies: "asyncio.Future[list[Reply]]"
    num_calls: int
    begun: bool = field(default=False)


class VerifierProcess:
    """A running `areal_lite.verify.child`; whoever makes one kills it, whatever happens in between."""

    def __init__(self, settings: VerifierSettings, *, when_ended: Callable[[], None] = lambda: None) -> None:
        """Start the process, without waiting for it.

        Args:
            settings: Function, arguments and memory limit; the rest is the pool's.
            when_ended: Called once it is gone, in the event loop.

        Raises:
            VerifierError: The machine gives no more processes.
        """
        self._function, self._when_ended = settings.function, when_ended
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[Ending] | None = None
        self.ended = False
        """Whether it takes no more jobs."""
        self.batch_size: int | None = None
        """How many calls one job may hold, as the function says; None = it takes one, and not as a list."""
        self.is_async = False
        """Whether several jobs may be in flight."""
        self.is_worn = False
        """Whether it should be replaced, as memory is short there."""
        self._channel, theirs = socket.socketpair()
        options = json.dumps({"arguments": settings.arguments, "memory_mb": settings.memory_mb}, default=str)
        command = [sys.executable, "-m", "areal_lite.verify.child", settings.function, str(os.getpid()), options]
        adopt_orphans()
        try:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.PIPE, start_new_session=True
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
            async with asyncio.timeout(timeout_s):
                problem, self.batch_size, self.is_async = await self._receive()
        except TimeoutError as error:
            raise VerifierError(
                f"the verifier {self._function!r} must load within {timeout_s} s, it did not"
            ) from error
        except (EOFError, OSError) as error:
            ending = await self.kill(wait_s=_ACCOUNT_S)
            raise VerifierError(
                f"loading the verifier {self._function!r} ended its process ({ending.detail})"
            ) from error
        if problem is not None:
            raise VerifierError(problem)
        self._listener = asyncio.create_task(self._listen())

    async def call(self, calls: Sequence[bytes], *, timeout_s: float) -> list[Reply]:
        """Have the function called.

        Args:
            calls: Packed; several only for a batch.
            timeout_s: Hard deadline. What does not answer by then is killed, unless it is an event loop that lets
                go of this job alone.

        Returns:
            A reply per call, or a single one that befell them all.

        Raises:
            ProcessEnded: No reply will come.
        """
        assert self._writer is not None, "a process must be ready before it is called"
        number = next(self._numbers)
        job = self._jobs[number] = _Job(asyncio.get_running_loop().create_future(), len(calls))
        try:
            self._send([number, list(calls)])
            done, _ = await asyncio.wait([job.replies], timeout=timeout_s)
            if not done:
                return [await self._too_late(number, job, timeout_s=timeout_s)]
            return job.replies.result()
        finally:
            self._jobs.pop(number, None)
            job.replies.cancel()

    async def _too_late(self, number: int, job: _Job, *, timeout_s: float) -> Reply:
        late = Ending("timeout", f"after {timeout_s} s")
        if self.is_async and job.begun:
            self._send([number, None])
            done, _ = await asyncio.wait([job.replies], timeout=_GIVE_UP_S)
            if done and job.replies.exception() is None:
                return Reply(None, *late)
        # Says of all jobs how it ended before it is killed, which ends them, too.
        self._fail_jobs(late)
        await self.kill()
        await job.replies
        raise AssertionError("a job that failed must not have replies")

    async def kill(self, *, wait_s: float = 0.0) -> Ending:
        """Kill the process and everything it started, and say how it ended; idempotent.

        Args:
            wait_s: Seconds it may take to end by itself.
        """
        self.ended = True
        if self._killing is None:
            self._killing = asyncio.create_task(self._end(wait_s))
        return await asyncio.shield(self._killing)

    async def _end(self, wait_s: float) -> Ending:
        if not await self._has_ended(wait_s):
            self._process.send_signal(signal.SIGTERM)
            if not await self._has_ended(_END_TIMEOUT_S):
                # The guardian is stopped or starved; its number is its own until it is waited for.
                await asyncio.to_thread(stop_and_kill, self._process.pid)
                self._process.kill()
                await self._has_ended(_END_TIMEOUT_S)
        (self._writer or self._channel).close()
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        with self._process.stdout as pipe:
            account = pipe.read()
        if not account:
            await asyncio.to_thread(end_adopted)  # the guardian cannot have
        self._when_ended()
        return Ending(*unpack(account)) if account else Ending("crashed", f"exit code {self._process.returncode}")

    async def _has_ended(self, wait_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + wait_s
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_END_POLL_S)
        return True

    async def _listen(self) -> None:
        """Hand replies to those who wait for them.

        Consumes replies, produces results of jobs; waits for the process; unblocked by its end.
        """
        oversized = False
        with contextlib.suppress(EOFError, OSError):
            try:
                while True:
                    number, replies, is_worn = await self._receive()
                    self.is_worn |= is_worn
                    if job := self._jobs.get(number):
                        job.begun = True
                        if replies is not None and not job.replies.done():
                            job.replies.set_result([_read(*reply) for reply in replies])
            except (ValueError, TypeError):  # not a reply, or one without end
                oversized = True
        self.ended = True
        ending = await self.kill(wait_s=0.0 if oversized else _ACCOUNT_S)
        if oversized:
            ending = Ending("reply_too_large", "or no reply at all: what came could not be read")
        elif ending.failure == "killed":
            ending = Ending("crashed", "it closed its channel")
        self._fail_jobs(ending)

    def _fail_jobs(self, ending: Ending) -> None:
        num_begun = sum(job.num_calls for job in self._jobs.values() if job.begun)
        for job in self._jobs.values():
            if not job.replies.done():
                job.replies.set_exception(ProcessEnded(ending, begun=job.begun, alone=num_begun == 1))

    def _send(self, message: list[Any]) -> None:
        assert self._writer is not None
        body = pack(message)
        self._writer.write(LENGTH.pack(len(body)) + body)

    async def _receive(self) -> Any:
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if size > 2 * MAX_REPLY_BYTES * (self.batch_size or 1):
            raise ValueError(f"a reply must have at most {MAX_REPLY_BYTES} bytes, got {size}")
        return unpack(await self._reader.readexactly(size))


def _read(*fields: Any) -> Reply:
    """Make a reply of what msgpack made of one: it knows no tuples."""
    reply = Reply(*fields)
    return reply._replace(step_rewards=tuple((end, value) for end, value in reply.step_rewards))
