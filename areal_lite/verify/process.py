"""One verifier process seen from outside: start it, give it jobs, kill it with everything it started.

The process is a guardian with the worker below it (`child.py`), in sessions of their own, so that Ctrl-C does not reach
them.
"""

import asyncio
import contextlib
import itertools
import json
import math
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import VerifierError
from areal_lite.verify.descendants import adopt_orphans, end_adopted, kill_trees
from areal_lite.verify.frames import MAX_REPLY_BYTES, messages, pack, unpack
from areal_lite.verify.protocol import Reply, failed

_END_TIMEOUT_S = 5.0
_ACCOUNT_S = 0.5
"""How long a process that hung up may take to end by itself; its guardian then says how it did."""
_GIVE_UP_S = 0.5
"""How long an event loop may take to give up a job; one that takes longer is stuck."""
_WORN_SHARE = 0.8
"""A process that keeps more of its memory than this between calls is replaced before it fails one."""


@dataclass(slots=True)
class _Job:
    num_calls: int
    begun: bool = False
    replies: "asyncio.Future[list[Reply]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class VerifierProcess:
    """A running `areal_lite.verify.child`; whoever starts one kills it, whatever happens in between."""

    def __init__(self, settings: VerifierSettings, *, when_ended: Callable[[], None]) -> None:
        """Prepare; nothing runs before `start`. `when_ended` is called once it is gone, in the event loop."""
        self._settings, self._when_ended = settings, when_ended
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count()
        self._process: Any = None
        self._writer: Any = None
        self._listener: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[Reply] | None = None
        self._worn_above: float | None = None
        self._is_async = False
        self.num_jobs = self.num_served = 0
        """Jobs it has, and has had, as whoever gives them counts."""
        self.max_jobs = 1
        """How many jobs may be in flight: several where the function is async."""
        self.batch_size: int | None = None
        """How many calls one job may hold, as the function says; None = it takes one, and not as a list."""
        self.is_over = False
        """Whether it should get no more jobs: it has ended, or memory is short there."""

    async def start(self, *, timeout_s: float) -> None:
        """Start the process, and wait until it has loaded the function; a `VerifierError` where it has not, and why."""
        adopt_orphans()
        function = self._settings.function
        options = json.dumps(self._settings.model_dump(include={"arguments", "memory_mb"}), default=str)
        channel, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_unix_connection(sock=channel)
        command = [sys.executable, "-m", "areal_lite.verify.child", function, str(theirs.fileno()), options]
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, pass_fds=[theirs.fileno()], start_new_session=True
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
            ending = await self.kill(wait_s=_ACCOUNT_S)
            raise VerifierError(f"loading the verifier {function!r} ended its process ({ending.detail})") from error
        if problem is not None:
            raise VerifierError(problem)
        self.max_jobs = self._settings.concurrency if self._is_async else 1
        self._listener = asyncio.create_task(self._listen(reader))

    async def call(self, calls: Sequence[bytes]) -> list[Reply]:
        """Have the function called, with a hard deadline of `timeout_s` for each of the calls.

        What does not answer by then is killed, unless it is an event loop that lets go of this job alone.

        Args:
            calls: Packed; several only for a batch.

        Returns:
            A reply per call. Where the process ended: a failure `lost` if it had not begun, how it ended if it was the
            only call that had; and `shared` where it ended, or a batch failed, and any of several may be to blame.
        """
        number, job = next(self._numbers), _Job(len(calls))
        self._jobs[number] = job
        try:
            self._send([number, list(calls)])
            timeout_s = self._settings.timeout_s * len(calls)
            done, _ = await asyncio.wait([job.replies], timeout=timeout_s)
            replies = job.replies.result() if done else await self._too_late(number, job, timeout_s=timeout_s)
        finally:
            del self._jobs[number]
        self.is_over |= any(reply.failure == "memory" for reply in replies)
        if len(replies) == len(calls):
            return replies
        (reply,) = replies
        return [reply if reply.failure == "unavailable" else failed("shared", str(reply.failure))] * len(calls)

    async def _too_late(self, number: int, job: _Job, *, timeout_s: float) -> list[Reply]:
        late = failed("timeout", f"after {timeout_s} s")
        if self._is_async and job.begun:
            self._send([number, None])
            await asyncio.wait([job.replies], timeout=_GIVE_UP_S)
            if job.replies.done() and self._killing is None:
                return [late] * job.num_calls
        await self.kill(late)
        return job.replies.result()

    async def kill(self, why: Reply | None = None, *, wait_s: float = 0.0) -> Reply:
        """Kill the process and everything it started, if it does not end by itself in time; idempotent.

        What its jobs are told, and this returns, is `why`, or else how its guardian says that it ended.
        """
        self.is_over = True
        if self._killing is None:
            self._killing = asyncio.create_task(self._end(why, wait_s))
        return await asyncio.shield(self._killing)

    async def _end(self, why: Reply | None, wait_s: float) -> Reply:
        if self._process is None:
            return failed("killed", "before it was started")
        if why is not None:
            self._settle(why)  # an answer that still comes does not count
        if not await self._ends_within(wait_s):
            self._process.stdin.close()
            if not await self._ends_within(_END_TIMEOUT_S):
                # The guardian is stopped or starved; its number is its own until it is waited for.
                pid = self._process.pid
                await asyncio.to_thread(kill_trees, lambda: [pid])
                await self._ends_within(_END_TIMEOUT_S)
        self._process.stdin.close()
        self._writer.close()
        account = await self._process.stdout.read()
        if not account:
            await asyncio.to_thread(end_adopted)  # the guardian cannot have
        said = failed(*unpack(account)) if account else failed("crashed", f"exit code {self._process.returncode}")
        ending = why or said
        if ending.failure == "killed":
            ending = failed("crashed", "it closed its channel")
        self._settle(ending)
        self._when_ended()
        return ending

    def _settle(self, ending: Reply) -> None:
        """Tell the jobs that still wait what became of their process."""
        num_begun = sum(job.num_calls for job in self._jobs.values() if job.begun)
        for job in self._jobs.values():
            reply = ending if num_begun == 1 else failed("shared", str(ending.failure))
            if not job.replies.done():
                job.replies.set_result([reply if job.begun else failed("lost", ending.detail)] * job.num_calls)

    async def _ends_within(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), wait_s)
        return self._process.returncode is not None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Hand replies to those who wait for them, until the process ends."""
        why: Reply | None = None
        try:
            max_bytes = 2 * MAX_REPLY_BYTES * (self.batch_size or 1)
            async for number, replies, kept_share in messages(reader, max_bytes=max_bytes):
                if replies is not None:
                    # What is kept after the first call already, any other process would keep as well.
                    self._worn_above = self._worn_above or (math.inf if kept_share > _WORN_SHARE else _WORN_SHARE)
                    self.is_over |= kept_share > self._worn_above
                if job := self._jobs.get(number):
                    job.begun = True
                    if replies is not None and not job.replies.done():
                        job.replies.set_result([Reply(*reply) for reply in replies])
        except OSError:
            pass
        except Exception:  # not a reply, or one without end
            why = failed("reply_too_large", "or no reply at all: what came could not be read")
        await self.kill(why, wait_s=0.0 if why else _ACCOUNT_S)

    def _send(self, message: list[Any]) -> None:
        self._writer.write(pack(message))
