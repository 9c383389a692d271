"""Killable processes that run one verify function, with a hard deadline per call.

Used by `verifier_set.py`, inside one event loop. A call that outlives its deadline costs its process, which is killed
with everything it started and replaced, while the others go on. What a verifier fails at becomes a `Reply` with a
reason, never a reward and never an exception; a verifier that does little but fail ends the run.

Who is tried again:
1. a call that its process had not begun: up to `retries` times, after a growing pause, then it is `lost`;
2. a call whose function raised `VerifierUnavailable`: after growing pauses, until nobody was answered, or the call has
   tried, for `unavailable_s`, then it is `unavailable`;
3. calls of which several were in one process, or in one batch, when it crashed or was killed: nobody knows whose fault
   it was, so each runs once more with a process to itself, and what happens then is its own;
4. a call for which there was not enough memory: it may be the calls before that left none, so the process is replaced,
   and the call is the first of the next one, alone;
5. nobody else: a call's own time-out, crash or exception would only happen again.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.config.plugins import split_name
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import PluginError, VerifierError
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
        self._quarantine = Quarantine(
            self._name, max_share=settings.max_failure_share, unavailable_s=settings.unavailable_s
        )
        self._away_since: float | None = None
        self._is_told_of_batches = False
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
        firsts: list[Waiting] = []
        try:
            while True:
                process = process or await self._relaunch()
                await self._feed(process, firsts)
                await process.kill()
                self._processes.discard(process)
                process = None
                self._num_restarts += 1
        except Exception as error:  # whatever it is, nobody may wait for this slot any longer
            self._give_up(error if isinstance(error, VerifierError) else VerifierError(f"verifier pool: {error!r}"))

    async def _feed(self, process: VerifierProcess, firsts: list[Waiting]) -> None:
        """Give a process as many jobs as it may have, until it takes no more and all of them are over.

        Args:
            process: Fresh.
            firsts: Calls that need a fresh process: it takes one of them, and adds those for which it has no memory.
        """
        first = [firsts.pop(0)] if firsts else []
        limit = self._settings.concurrency if process.is_async else 1
        jobs: dict[asyncio.Task[None], bool] = {}
        try:
            while jobs or first or not (process.ended or process.is_worn or firsts):
                calls, first = first, []
                takes_more = not (process.ended or process.is_worn or firsts)
                if not calls and takes_more and len(jobs) < limit and not any(jobs.values()):
                    calls = self._line.take(process.batch_size or 1, is_idle=not jobs)
                if calls:
                    job = asyncio.create_task(self._run(process, calls, firsts))
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

    async def _run(self, process: VerifierProcess, calls: list[Waiting], firsts: list[Waiting]) -> None:
        """Have one job done, and see to each of its calls."""
        timeout_s = self._settings.timeout_s * len(calls)
        began = time.monotonic()
        self._num_busy += len(calls)
        try:
            replies = await process.call([call.packed for call in calls], timeout_s=timeout_s)
        except ProcessEnded as end:
            for call in calls:
                if not end.begun:
                    self._try_again(call, Reply(None, "lost", end.ending.detail))
                elif end.alone:
                    self._conclude(call, Reply(None, *end.ending), firsts, took_s=time.monotonic() - began)
                else:
                    self._try_alone(call, end.ending.failure)
            return
        finally:
            self._num_busy -= len(calls)
        took_s = time.monotonic() - began
        if len(replies) != len(calls):  # one failure for the whole batch
            replies = replies[:1] * len(calls)
            process.is_worn |= replies[0].failure == "memory"
            if replies[0].failure != "unavailable":
                for call in calls:
                    self._try_alone(call, str(replies[0].failure))
                return
        for call, reply in zip(calls, replies, strict=True):
            process.is_worn |= reply.failure == "memory"
            self._conclude(call, reply, firsts, took_s=took_s)

    def _conclude(self, call: Waiting, reply: Reply, firsts: list[Waiting], *, took_s: float) -> None:
        """End a call, unless its failure is one of those that need not be its own."""
        if reply.failure == "unavailable":
            self._ask_again(call, reply)
            return
        self._away_since = None
        if reply.failure == "memory" and not call.had_fresh:
            call.had_fresh = call.is_alone = True
            firsts.append(call)
        else:
            self._finish(call, reply, took_s=took_s)

    def _try_alone(self, call: Waiting, reason: str) -> None:
        if not self._is_told_of_batches:
            self._is_told_of_batches = True
            _log.warning("%s: calls that shared a process or a batch when it ended (%s) run alone", self._name, reason)
        call.is_alone = True
        self._line.put(call)

    def _try_again(self, call: Waiting, reply: Reply) -> None:
        if call.retries >= self._settings.retries:
            self._finish(call, reply)
        else:
            self._line.put(call, pause_s=_pause_s(call.retries))
            call.retries += 1

    def _ask_again(self, call: Waiting, reply: Reply) -> None:
        """See to a call whose service does not answer; no such call ends while others are answered, but by its own."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        call.away_since = call.away_since or now
        left_s = self._settings.unavailable_s - (now - min(self._away_since, call.away_since))
        if left_s <= 0:
            self._finish(call, reply)
        else:
            self._line.put(call, pause_s=min(max(_pause_s(call.num_unanswered), reply.retry_after_s), left_s))
            call.num_unanswered += 1

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


def _pause_s(num_tries: int) -> float:
    return min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** min(num_tries, 10), _LONGEST_PAUSE_S)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of them do not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
