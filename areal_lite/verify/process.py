"""One verifier process seen from outside: start it, give it jobs, kill it with everything it started.

The process is a keeper with the worker below it (`child.py`), in sessions of their own, so that Ctrl-C does not reach
them.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.verify.codec import MAX_REPLY_BYTES, messages, pack
from areal_lite.verify.descendants import kill_trees
from areal_lite.verify.protocol import Reply, failed

_END_TIMEOUT_S = 5.0
_EXIT_CODE_S = 0.5
"""How long a process that hung up may take to exit by itself; its exit code then names the cause."""
_CANCEL_S = 0.5
"""How long after the deadline an event loop may take to cancel a job; one that takes longer is stuck."""
_WORN_SHARE = 0.8
"""A process that keeps more of its memory than this between calls is replaced before it fails one."""


class VerifierProcess:
    """A running `areal_lite.verify.child`; the caller that starts one must kill it."""

    def __init__(self, settings: VerifierSettings, *, environment: Mapping[str, str]) -> None:
        self._settings, self._environment = settings, environment
        self._jobs: dict[int, asyncio.Future[list[Reply]]] = {}
        """Jobs in flight. A single reply is for all calls of its job."""
        self._numbers = itertools.count()
        self._process: Any = None
        self._writer: Any = None
        self._listener: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[Reply] | None = None
        self._worn_above: float | None = None
        self._is_async = False
        self.num_served = 0
        """Jobs it has been given."""
        self.max_jobs = 1
        """How many jobs may be in flight: several where the function is async."""
        self.batch_size: int | None = None
        """How many calls one job may hold, for a `@batched` function; None = one, and not as a list."""
        self.over = asyncio.Event()
        """Set once it must get no more jobs: it has ended, or memory is short there."""

    async def start(self, *, timeout_s: float) -> None:
        """Start the process, and wait until it has loaded the function; a `VerifierError` with the reason otherwise."""
        function = self._settings.function
        options = self._settings.model_dump(include={"arguments", "memory_mb"}) | {"parent": os.getpid()}
        channel, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_unix_connection(sock=channel)
        command = [sys.executable, "-P", "-m", "areal_lite.verify.child", function, str(theirs.fileno())]
        command.append(json.dumps(options))
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **self._environment},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self._writer.close()
                raise VerifierError(f"a verifier process cannot be started: {error}") from error
        try:
            async with asyncio.timeout(timeout_s), contextlib.aclosing(messages(reader)) as first:
                problem, self.batch_size, self._is_async = await anext(first)
        except TimeoutError as error:
            raise VerifierError(f"the verifier {function!r} must load within {timeout_s} s, it did not") from error
        except (StopAsyncIteration, OSError) as error:
            ending = await self.kill(wait_s=_EXIT_CODE_S)
            raise VerifierError(f"loading the verifier {function!r} ended its process ({ending.detail})") from error
        if problem is not None:
            raise VerifierError(problem)
        self.max_jobs = self._settings.concurrency if self._is_async else 1
        self._listener = asyncio.create_task(self._listen(reader))

    async def call(self, calls: Sequence[bytes]) -> list[Reply]:
        """Have the function called, with a hard deadline of `timeout_s` for each of the calls.

        A job that is late costs the process, unless the process's event loop cancels this job alone.

        Args:
            calls: Packed; several only for a batch.

        Returns:
            A reply per call. Where the process ended, or a batch failed: how, if there was one call that can be the
            cause, else a failure `shared` for each that can.
        """
        number = next(self._numbers)
        answer = self._jobs[number] = asyncio.get_running_loop().create_future()
        self.num_served += 1
        if self._killing is not None:
            self._settle(failed("crashed", "it ended before the call"))
        try:
            timeout_s = self._settings.timeout_s * len(calls)
            late = failed("timeout", f"after {timeout_s} s")
            self._writer.write(pack([number, time.monotonic() + timeout_s, list(calls)]))
            done, _ = await asyncio.wait([answer], timeout=timeout_s + (_CANCEL_S if self._is_async else 0.0))
            if not done:
                await self.kill(late)
            replies = answer.result() or [late] * len(calls)
        finally:
            del self._jobs[number]
        if any(reply.failure == "memory" for reply in replies):
            self.over.set()
        if len(replies) == len(calls):
            return replies
        (reply,) = replies
        return [reply if reply.failure in ("unavailable", "shared") else _shared(reply)] * len(calls)

    async def kill(self, why: Reply | None = None, *, wait_s: float = 0.0) -> Reply:
        """Kill the process and everything it started, if it does not exit by itself in time; idempotent.

        Returns:
            What its jobs get as their reply: `why`, or else how the process ended.
        """
        self.over.set()
        if self._killing is None:
            self._killing = asyncio.create_task(self._end(why, wait_s))
        return await asyncio.shield(self._killing)

    async def _end(self, why: Reply | None, wait_s: float) -> Reply:
        if self._process is None:
            return failed("crashed", "it was never started")
        if why is not None:
            self._settle(why)  # an answer that still comes does not count
        exited = await self._exits_within(wait_s)
        if not exited:
            self._process.terminate()
            if not await self._exits_within(_END_TIMEOUT_S):
                # The keeper is stopped or starved; its process id is its own until it is waited for.
                await asyncio.to_thread(kill_trees, lambda: [self._process.pid])
                await self._exits_within(_END_TIMEOUT_S)
        self._writer.close()
        cause = f"exit code {self._process.returncode}" if exited else "it closed its channel"
        ending = why or failed("crashed", cause)
        self._settle(ending)
        return ending

    def _settle(self, ending: Reply) -> None:
        """Answer the jobs that still wait: a job that was alone in the process is the cause, of several any can be."""
        reply = ending if len(self._jobs) == 1 else _shared(ending)
        for answer in self._jobs.values():
            if not answer.done():
                answer.set_result([reply])

    async def _exits_within(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), wait_s)
        return self._process.returncode is not None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hand replies to the jobs that wait for them, until the process ends."""
        why: Reply | None = None
        try:
            max_bytes = 2 * MAX_REPLY_BYTES * (self.batch_size or 1)
            async for number, replies, used_share in messages(reader, max_bytes=max_bytes):
                # What is in use after the first call already, any other process would use as well.
                self._worn_above = self._worn_above or (math.inf if used_share > _WORN_SHARE else _WORN_SHARE)
                if used_share > self._worn_above:
                    self.over.set()
                answer = self._jobs.get(number)
                if answer is not None and not answer.done():
                    answer.set_result([Reply(*reply) for reply in replies])
        except OSError:
            pass
        except Exception:  # no reply, or one without end
            why = failed("reply_too_large", "or no reply at all: what arrived could not be read")
        await self.kill(why, wait_s=0.0 if why else _EXIT_CODE_S)


def _shared(reply: Reply) -> Reply:
    """Return the failure of calls that ran together, one of which caused this one."""
    return failed("shared", str(reply.failure))
