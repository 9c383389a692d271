"""Killable processes that run one verify function, with a hard deadline per call.

Used by `verifier_set.py`, inside one event loop. A call that outlives its deadline costs its process, which is killed
with everything it started and replaced, while the others go on. What a verifier fails at becomes a `Reply` with a
reason, never a reward and never an exception; a verifier that does little but fail ends the run.

Who is tried again:
1. a call that its process had not begun, and one whose function raised `VerifierUnavailable`: up to `retries` times,
   after a growing pause, then it is `lost` or `unavailable`;
2. calls of which several were in one process, or in one batch, when it crashed or was killed: nobody knows whose fault
   it was, so each runs once more with a process to itself, and what happens then is its own;
3. nobody else: a call's own time-out, crash or exception would only happen again.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.errors import PluginError, VerifierError
from areal_lite.plugins import split_name
from areal_lite.sections import VerifierSettings
from areal_lite.types import Prompt
from areal_lite.verify.frames import pack
from areal_lite.verify.line import Line, Waiting
from areal_lite.verify.process import ProcessEnded, VerifierProcess
from areal_lite.verify.protocol import Reply
from areal_lite.verify.quarantine import Quarantine

__all__ = ["Messages", "VerifierPool", "quantile"]

_log = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_LATENCIES_KEPT = 1000
_FIRST_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 0.2, 4.0, 10.0
_NOT_FOR_VERIFIERS = ("verifier", "workflow")

Messages = Sequence[Mapping[str, str]]
"""The turns behind a prompt."""


class VerifierPool:
    """Scores completions with a verify function that is not trusted to return."""

    def __init__(self, settings: VerifierSettings, *, start_timeout_s: float = 60.0, name: str | None = None) -> None:
        """Prepare a pool; nothing runs before `start`.

        Args:
            settings: The function and its processes. A deadline counts from when a process is given a call.
            start_timeout_s: Seconds that importing and preparing the function may take; no call is charged for it.
            name: For messages; None = the function's.
        """
        self._settings, self._start_timeout_s = settings, start_timeout_s
        self._name = name or settings.function
        self._line = Line()
        self._pending: set[asyncio.Future[Reply]] = set()
        self._processes: set[VerifierProcess] = set()
        self._slots: list[asyncio.Task[None]] = []
        self._unusable: VerifierError | None = VerifierError("the verifier pool must be started before it scores")
        self._quarantine = Quarantine(self._name, max_share=settings.max_failure_share)
        self._num_calls = self._num_busy = self._num_restarts = 0
        self._failures: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        """Seconds of the last calls, without waiting."""

    async def start(self) -> None:
        """Start serving; returns once the first process has loaded the function, the others follow.

        Raises:
            VerifierError: The function cannot be found, imported or prepared; the message holds the error.
        """
        try:
            # Looked up once, here: a process that is replaced must not pay for it.
            function = ":".join(split_name(self._settings.function, kind="verifier"))
        except PluginError as error:
            raise VerifierError(str(error)) from error
        self._settings = self._settings.model_copy(update={"function": function})
        first = await self._launch()
        processes = [first, *[None] * (self._settings.processes - 1)]
        self._slots = [asyncio.create_task(self._serve(process)) for process in processes]
        self._unusable = None

    async def score(
        self, prompt: Prompt, completions: Sequence[str], *, messages: Sequence[Messages] | None = None
    ) -> list[Reply]:
        """Score the completions of one prompt, spread over the free processes.

        Args:
            prompt: Its row's columns `verifier` and `workflow` are not passed on.
            completions: As text.
            messages: The turns of each completion, none where it has just one; None = none has.

        Returns:
            One reply per completion, in order. Failures are those of `protocol.py`, and `timeout`, `crashed`,
            `memory`, `processes`, `reply_too_large`, `unavailable`, `lost`, `bad_row`.

        Raises:
            VerifierError: The pool is not started, closed, broken (its processes do not start any more), or fails too
                often.
        """
        if self._unusable is not None:
            raise self._unusable
        row = {name: value for name, value in prompt.row.items() if name not in _NOT_FOR_VERIFIERS}
        rows = [row | ({"messages": list(turns)} if turns else {}) for turns in messages or [()] * len(completions)]
        replies = [
            self._submit((prompt.text, completion, prompt.answer, columns))
            for completion, columns in zip(completions, rows, strict=True)
        ]
        return list(await asyncio.gather(*replies))

    def gauges(self) -> dict[str, Any]:
        """Return calls finished, failures by reason, latency quantiles, restarts, calls running and waiting."""
        return {
            "calls": self._num_calls,
            "failures": dict(self._failures),
            "timeouts": self._failures["timeout"],
            "latency_p50_s": quantile(self.latencies, 0.50),
            "latency_p95_s": quantile(self.latencies, 0.95),
            "latency_p99_s": quantile(self.latencies, 0.99),
            "restarts": self._num_restarts,
            "busy": self._num_busy,
            "waiting": len(self._line),
        }

    async def close(self) -> None:
        """Kill the processes and wake everybody who waits for a score with a `VerifierError`; idempotent."""
        self._give_up(VerifierError("the verifier pool is closed"))
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in list(self._processes)))
        self._processes.clear()

    def _submit(self, call: tuple[str, str, str, Mapping[str, Any]]) -> "asyncio.Future[Reply]":
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending.add(reply)
        reply.add_done_callback(self._pending.discard)
        try:
            waiting = Waiting(pack(call), reply)
        except (TypeError, ValueError, OverflowError) as error:
            self._finish(Waiting(b"", reply), Reply(None, "bad_row", f"the data row cannot be sent: {error}"))
        else:
            self._line.put(waiting)
        return reply

    async def _serve(self, process: VerifierProcess | None) -> None:
        """Keep one process busy.

        Consumes calls, produces replies; waits for calls, for replies (hard deadlines) and for the process to start
        (`start_timeout_s`); unblocked by `close`.
        """
        try:
            while True:
                process = process or await self._relaunch()
                await self._feed(process)
                await process.kill()
                self._processes.discard(process)
                process = None
                self._num_restarts += 1
        except Exception as error:  # whatever it is, nobody may wait for this slot any longer
            self._give_up(error if isinstance(error, VerifierError) else VerifierError(f"verifier pool: {error!r}"))

    async def _feed(self, process: VerifierProcess) -> None:
        """Give a process as many jobs as it may have, until it has ended and all of them are over."""
        limit = self._settings.concurrency if process.is_async else 1
        jobs: dict[asyncio.Task[None], bool] = {}
        try:
            while jobs or not process.ended:
                calls: list[Waiting] = []
                if not process.ended and len(jobs) < limit and not any(jobs.values()):
                    calls = self._line.take(process.batch_size or 1, is_idle=not jobs)
                if calls:
                    job = asyncio.create_task(self._run(process, calls))
                    jobs[job] = calls[0].is_alone
                    job.add_done_callback(lambda _: self._line.notify())
                else:
                    await self._line.change()
                for job in [job for job in jobs if job.done()]:
                    del jobs[job]
                    job.result()
        finally:
            for job in jobs:
                job.cancel()

    async def _run(self, process: VerifierProcess, calls: list[Waiting]) -> None:
        """Have one job done, and see to each of its calls."""
        began = time.monotonic()
        self._num_busy += len(calls)
        try:
            replies = await process.call([call.packed for call in calls], timeout_s=self._settings.timeout_s)
        except ProcessEnded as end:
            for call in calls:
                if not end.begun:
                    self._try_again(call, Reply(None, "lost", end.ending.detail))
                elif end.alone:
                    self._finish(call, Reply(None, *end.ending), took_s=time.monotonic() - began)
                else:
                    self._try_alone(call)
            return
        finally:
            self._num_busy -= len(calls)
        took_s = time.monotonic() - began
        if len(replies) != len(calls):  # one failure for the whole batch
            replies = replies[:1] * len(calls)
            if replies[0].failure != "unavailable":
                for call in calls:
                    self._try_alone(call)
                return
        for call, reply in zip(calls, replies, strict=True):
            if reply.failure == "unavailable":
                self._try_again(call, reply)
            else:
                self._finish(call, reply, took_s=took_s)

    def _try_alone(self, call: Waiting) -> None:
        call.is_alone = True
        self._line.put(call)

    def _try_again(self, call: Waiting, reply: Reply) -> None:
        if call.retries >= self._settings.retries:
            self._finish(call, reply)
            return
        pause_s = min(_FIRST_PAUSE_S * _PAUSE_GROWTH**call.retries, _LONGEST_PAUSE_S)
        call.retries += 1
        self._line.put(call, pause_s=pause_s)

    def _finish(self, call: Waiting, reply: Reply, *, took_s: float | None = None) -> None:
        self._num_calls += 1
        if took_s is not None:
            self.latencies.append(took_s)
        if reply.failure is not None:
            self._failures[reply.failure] += 1
            if self._failures[reply.failure] == 1:
                _log.warning("%s failed (%s), shown once per reason: %s", self._name, reply.failure, reply.detail)
        if not call.reply.done():
            call.reply.set_result(reply)
        if error := self._quarantine.add(reply):
            self._give_up(error)

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
        process = VerifierProcess(self._settings, when_ended=self._line.notify)
        self._processes.add(process)
        try:
            await process.wait_until_ready(timeout_s=self._start_timeout_s)
        except BaseException:
            await process.kill()
            self._processes.discard(process)
            raise
        return process

    def _give_up(self, error: VerifierError) -> None:
        """Let every present and future caller of `score` know that no score will come."""
        self._unusable = error
        for reply in list(self._pending):
            if not reply.done():
                reply.set_exception(error)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of them do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
