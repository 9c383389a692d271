"""Killable processes that run one verify function, with a hard deadline per call.

Used by `worker.py`, inside one event loop. Each process serves one call at a time; a call that outlives its
deadline costs its process, which is killed with everything it started and replaced, while the others go on. What a
verifier fails at becomes a `Score` with a reason, never a reward and never an exception.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from areal_lite.errors import VerifierError
from areal_lite.types import Prompt, Score
from areal_lite.verify.child import pack
from areal_lite.verify.process import VerifierProcess
from areal_lite.verify.protocol import Reply

__all__ = ["VerifierPool"]

_log = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_LATENCIES_KEPT = 1000


class _Call(NamedTuple):
    frame: bytes
    score: "asyncio.Future[Score]"


class VerifierPool:
    """Scores completions with a verify function that is not trusted to return."""

    def __init__(
        self,
        function: str,
        *,
        processes: int,
        timeout_s: float,
        start_timeout_s: float = 60.0,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepare a pool; nothing runs before `start`.

        Args:
            function: `module:function` or `path.py:function`.
            processes: Calls served at the same time.
            timeout_s: Hard deadline of one call, in seconds, counted from when a process begins it.
            start_timeout_s: Seconds that importing and preparing the function may take; no call is charged for it.
            arguments: Keyword arguments of every call, beside the data row's columns.
        """
        self._function, self._arguments = function, arguments
        self._num_processes = processes
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._pending: set[asyncio.Future[Score]] = set()
        self._processes: set[VerifierProcess] = set()
        self._servers: list[asyncio.Task[None]] = []
        self._unusable: VerifierError | None = VerifierError("the verifier pool must be started before it scores")
        self._num_calls = self._num_busy = self._num_restarts = 0
        self._failures: Counter[str] = Counter()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    async def start(self) -> None:
        """Start serving; returns once the first process has loaded the function, the others follow.

        Raises:
            VerifierError: The function cannot be loaded; the message holds the import error.
        """
        first = await self._launch()
        processes = [first, *[None] * (self._num_processes - 1)]
        self._servers = [asyncio.create_task(self._serve(process)) for process in processes]
        self._unusable = None

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Score]:
        """Score the completions of one prompt, spread over the free processes.

        Returns:
            One score per completion, in order. Failures are `timeout`, `crashed`, `exception:<type>`, `nan`, `inf`
            and `wrong_type:<type>`.

        Raises:
            VerifierError: The pool is not started, closed, or broken (its processes do not start any more).
        """
        if self._unusable is not None:
            raise self._unusable
        return list(await asyncio.gather(*(self._submit(prompt, completion) for completion in completions)))

    def gauges(self) -> dict[str, Any]:
        """Return calls finished, failures by reason, latency quantiles, restarts, calls running and waiting."""
        return {
            "calls": self._num_calls,
            "failures": dict(self._failures),
            "latency_p50_s": _quantile(self._latencies, 0.50),
            "latency_p95_s": _quantile(self._latencies, 0.95),
            "restarts": self._num_restarts,
            "busy": self._num_busy,
            "waiting": self._calls.qsize(),
        }

    async def close(self) -> None:
        """Kill the processes and wake everybody who waits for a score with a `VerifierError`; idempotent."""
        self._give_up(VerifierError("the verifier pool is closed"))
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        for process in list(self._processes):
            await self._kill(process)

    def _submit(self, prompt: Prompt, completion: str) -> "asyncio.Future[Score]":
        score: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._pending.add(score)
        score.add_done_callback(self._pending.discard)
        frame = pack([prompt.text, completion, prompt.answer, dict(prompt.row)])
        self._calls.put_nowait(_Call(frame, score))
        return score

    async def _serve(self, process: VerifierProcess | None) -> None:
        """Serve calls with one process at a time.

        Consumes `_calls`, produces their scores. Waits for a call (unblocked by `score`, or cancelled by `close`) and
        for the process (at most the deadline of a start or a call).
        """
        try:
            while True:
                process = process or await self._relaunch()
                call = await self._calls.get()
                if not call.score.done():  # its caller may have been cancelled meanwhile
                    process = await self._score(call, process)
        except Exception as error:  # whatever it is, nobody may wait for this server any longer
            self._give_up(error if isinstance(error, VerifierError) else VerifierError(f"verifier pool: {error!r}"))

    async def _score(self, call: _Call, process: VerifierProcess) -> VerifierProcess | None:
        """Answer one call; returns the process if it can serve another one."""
        began = time.monotonic()
        self._num_busy += 1
        survivor: VerifierProcess | None = process
        try:
            reply = await process.call(call.frame, timeout_s=self._timeout_s)
        except (EOFError, OSError) as error:
            survivor = None
            self._num_restarts += 1
            ending = await self._kill(process)
            late = isinstance(error, TimeoutError)
            reply = Reply(None, "timeout", f"after {self._timeout_s} s") if late else Reply(None, "crashed", ending)
        finally:
            self._num_busy -= 1
        self._latencies.append(time.monotonic() - began)
        self._finish(call, reply)
        return survivor

    def _finish(self, call: _Call, reply: Reply) -> None:
        self._num_calls += 1
        if reply.failure is not None:
            self._failures[reply.failure] += 1
            if self._failures[reply.failure] == 1:
                _log.warning("%s failed (%s), shown once per reason: %s", self._function, reply.failure, reply.detail)
        if not call.score.done():
            call.score.set_result(Score(reward=reply.reward, failure=reply.failure))

    async def _relaunch(self) -> VerifierProcess:
        for attempt in range(_START_ATTEMPTS):
            try:
                return await self._launch()
            except VerifierError as error:
                problem = error
                await asyncio.sleep(0.1 * 2**attempt)
        raise VerifierError(
            f"a verifier process did not start {_START_ATTEMPTS} times in a row: {problem}"
        ) from problem

    async def _launch(self) -> VerifierProcess:
        process = VerifierProcess(self._function, arguments=self._arguments)
        self._processes.add(process)
        try:
            await process.wait_until_ready(timeout_s=self._start_timeout_s)
        except BaseException:
            await self._kill(process)
            raise
        return process

    async def _kill(self, process: VerifierProcess) -> str:
        ending = await process.kill()
        self._processes.discard(process)
        return ending

    def _give_up(self, error: VerifierError) -> None:
        """Let every present and future caller of `score` know that no score will come."""
        self._unusable = error
        for score in list(self._pending):
            if not score.done():
                score.set_exception(error)


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of them do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
