"""Killable processes that run one verify function, with a hard deadline per call.

A call that outlives its deadline costs its process, which is killed with everything it started and replaced, while
the others go on. What a verifier fails at becomes a `Reply` with a reason, never a reward and never an exception; a
verifier that does little but fail ends the run.

Who is tried again:
1. a call that its process had not begun: up to `retries` times, after a growing pause, then it is `lost`;
2. a call whose function raised `VerifierUnavailable`: after growing pauses, until nobody was answered, or the call has
   tried, for `unavailable_s`, then it is `unavailable`;
3. calls that shared a process or a batch when it crashed, failed or was killed: nobody knows whose fault it was, so
   each runs once more with a process to itself, and what happens then is its own;
4. a call for which there was not enough memory: it may be the calls before that left none, so the process is replaced,
   and the call is the first of the next one, alone;
5. nobody else: a call's own time-out, crash or exception would only happen again.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_lite.config.plugins import split_name
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import PluginError, VerifierError
from areal_lite.types import Prompt
from areal_lite.verify.calls import Call, Calls
from areal_lite.verify.frames import pack
from areal_lite.verify.process import VerifierProcess
from areal_lite.verify.protocol import Reply, failed
from areal_lite.verify.quarantine import Quarantine

_log = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_LATENCIES_KEPT = 1000
_FIRST_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 0.2, 4.0, 10.0
_NOT_FOR_VERIFIERS = ("verifier", "workflow")
_NO_FIGURES = ("lost", "shared", "unavailable")
"""Failures of tries that say nothing about how long the function takes."""

Messages = Sequence[Mapping[str, str]]
"""The turns behind a prompt."""


class VerifierPool:
    """Scores completions with a verify function that is not trusted to return."""

    def __init__(self, settings: VerifierSettings, *, start_timeout_s: float = 60.0, name: str | None = None) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            settings: The function and its processes. A deadline counts from when a process is given a call.
            start_timeout_s: Seconds that importing and preparing the function may take; no call is charged for it.
            name: For messages; None = the function's.
        """
        self._settings, self._start_timeout_s = settings, start_timeout_s
        self._name = name or settings.function
        self._calls = Calls()
        self._scoring: set[asyncio.Task[Reply]] = set()
        self._processes: set[VerifierProcess] = set()
        self._slots: list[asyncio.Task[None]] = []
        self._unusable: VerifierError | None = VerifierError("the verifier pool must be started before it scores")
        self._quarantine = Quarantine(self._name, settings)
        self._away_since: float | None = None
        self._told: set[str] = set()
        self._num_calls = self._num_busy = self._num_restarts = 0
        self._failures: Counter[str] = Counter()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    async def start(self) -> None:
        """Start serving; returns once one process has loaded the function, or raises a `VerifierError` with why not."""
        try:
            # Looked up once, here: a process that is replaced must not pay for it.
            function = ":".join(split_name(self._settings.function, kind="verifier"))
        except PluginError as error:
            raise VerifierError(str(error)) from error
        self._settings = self._settings.model_copy(update={"function": function})
        processes = [await self._launch(), *[None] * (self._settings.processes - 1)]
        self._slots = [asyncio.create_task(self._serve(process)) for process in processes]
        self._unusable = None

    async def score(
        self, prompt: Prompt, completions: Sequence[str], *, messages: Sequence[Messages] | None = None
    ) -> list[Reply]:
        """Score the completions of one prompt, spread over the free processes, as `VerifierSet.score` is asked to.

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
        tasks = [
            asyncio.create_task(self._scored(prompt.text, completion, prompt.answer, columns))
            for completion, columns in zip(completions, rows, strict=True)
        ]
        for task in tasks:
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._unusable is not None and not (caller and caller.cancelling()):
                raise self._unusable from None
            raise

    def gauges(self) -> dict[str, Any]:
        """Return calls finished, failures by reason, latency quantiles, restarts, calls running and waiting."""
        latencies = np.quantile(self._latencies or [0.0], (0.50, 0.95, 0.99), method="inverted_cdf")
        return {
            "calls": self._num_calls,
            "failures": dict(self._failures),
            "timeouts": self._failures["timeout"],
            **dict(zip(("latency_p50_s", "latency_p95_s", "latency_p99_s"), latencies.tolist(), strict=True)),
            "restarts": self._num_restarts,
            "busy": self._num_busy,
            "waiting": max(0, len(self._scoring) - self._num_busy),
        }

    async def close(self) -> None:
        """Kill the processes and wake everybody who waits for a score with a `VerifierError`; idempotent."""
        self._give_up(VerifierError("the verifier pool is closed"))
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*map(self._end, list(self._processes)))

    # --- one call, from its first try to a reply that is its own ---

    async def _scored(self, *call: Any) -> Reply:
        try:
            packed = pack(call)
        except (TypeError, ValueError, OverflowError) as error:
            reply = failed("bad_row", f"the data row cannot be sent: {error}")
        else:
            reply = await self._own_reply(Call(packed))
        self._count(reply)
        return reply

    async def _own_reply(self, call: Call) -> Reply:
        """Have a call tried until what comes of it is its own; who is tried again stands at the top of this file."""
        num_lost = num_unanswered = 0
        had_fresh = False
        away_since: float | None = None
        while True:
            reply = await self._calls.reply_to(call)
            if reply.failure not in _NO_FIGURES:
                self._away_since = None
            match reply.failure:
                case "shared":
                    self._tell_once("calls that shared a process or a batch when it ended run alone", reply.detail)
                    call.is_alone = True
                case "memory" if not had_fresh:
                    had_fresh = call.needs_fresh = call.is_alone = True
                case "lost" if num_lost < self._settings.retries:
                    await asyncio.sleep(_pause_s(num_lost))
                    num_lost += 1
                case "unavailable":
                    # No such call ends while others are answered, but by its own time.
                    now = time.monotonic()
                    self._away_since, away_since = self._away_since or now, away_since or now
                    left_s = self._settings.unavailable_s - (now - min(self._away_since, away_since))
                    if left_s <= 0:
                        return reply
                    await asyncio.sleep(min(max(_pause_s(num_unanswered), reply.retry_after_s), left_s))
                    num_unanswered += 1
                case _:
                    return reply

    def _tell_once(self, what: str, detail: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s: %s, shown once: %s", self._name, what, detail)

    def _count(self, reply: Reply) -> None:
        self._num_calls += 1
        if reply.failure is not None:
            self._failures[reply.failure] += 1
            self._tell_once(f"failed ({reply.failure})", reply.detail)
        if error := self._quarantine.add(reply):
            self._give_up(error)

    def _give_up(self, error: VerifierError) -> None:
        """Let every present and future caller of `score` know that no score will come."""
        self._unusable = error
        for task in self._scoring:
            task.cancel()

    # --- the processes ---

    async def _serve(self, process: VerifierProcess | None) -> None:
        """Keep one process busy, and replace it, until `close`."""
        try:
            while True:
                process = process or await self._relaunch()
                await self._feed(process)
                await self._end(process)
                process = None
                self._num_restarts += 1
        except Exception as error:  # whatever it is, nobody may wait for this slot any longer
            self._give_up(error if isinstance(error, VerifierError) else VerifierError(f"verifier pool: {error!r}"))

    async def _feed(self, process: VerifierProcess) -> None:
        """Give a process as many jobs as it may have, until it takes no more and all of them are over."""
        async with asyncio.TaskGroup() as jobs:
            while not process.is_over:
                if process.num_served and self._calls.num_needing_fresh() > self._num_fresh():
                    process.is_over = True
                    break
                calls = self._calls.take(process)
                if not calls:
                    await self._calls.change()
                    continue
                process.num_jobs += 1
                process.num_served += 1
                job = jobs.create_task(self._run(process, calls))
                if calls[0].is_alone:
                    await job

    def _num_fresh(self) -> int:
        """Return how many processes have served nobody, those included that will start where another has ended."""
        return len(self._slots) - sum(process.num_served > 0 and not process.is_over for process in self._processes)

    async def _run(self, process: VerifierProcess, calls: Sequence[Call]) -> None:
        """Have one job done, and hand over its replies."""
        began = time.monotonic()
        self._num_busy += len(calls)
        try:
            replies = await process.call([call.packed for call in calls])
        finally:
            self._num_busy -= len(calls)
            process.num_jobs -= 1
            self._calls.notify()
        for call, reply in zip(calls, replies, strict=True):
            has_figures = reply.failure not in _NO_FIGURES
            if has_figures:
                self._latencies.append(time.monotonic() - began)
            if not call.reply.done():
                call.reply.set_result(reply)
            elif has_figures:  # nobody waits for it any more
                self._count(reply)

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
        process = VerifierProcess(self._settings, when_ended=self._calls.notify)
        self._processes.add(process)
        try:
            await process.start(timeout_s=self._start_timeout_s)
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _end(self, process: VerifierProcess) -> None:
        await process.kill()
        self._processes.discard(process)


def _pause_s(num_tries: int) -> float:
    return min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** min(num_tries, 10), _LONGEST_PAUSE_S)
