"""Killable processes that run one verify function, with a hard deadline per call.

A call that misses its deadline costs its process, which is killed with everything it started and replaced, while the
others continue. A failure of the function becomes a `Reply` with a reason, never a reward and never an exception; a
verifier that mostly fails ends the run.

`score` appends calls to one queue. `_dispatch` hands the oldest to a process with room whenever a call arrives or a job
ends, in time that does not depend on the length of the queue. `_serve`, one task per process, waits until its process
is over (it ended, or memory is short there), replaces it, and stops at `close`.

Calls that are tried again:
1. a call whose function raised `VerifierUnavailable`: after growing pauses, until no call was answered, or this one has
   tried, for `unavailable_s`, then it is `unavailable`;
2. a suspect: a call whose process crashed or lacked memory, or that shared a process or a batch which failed. It runs
   once more with a process to itself (a fresh one, where memory was short), and the outcome is its own.
Anything else, such as a call's own time-out or exception, would only happen again.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_lite.config.plugins import split_name
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import PluginError, VerifierError
from areal_lite.types import Prompt
from areal_lite.verify.codec import pack
from areal_lite.verify.process import VerifierProcess
from areal_lite.verify.protocol import Reply, failed
from areal_lite.verify.quarantine import Quarantine

_log = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_LATENCIES_KEPT = 1000
_FIRST_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 0.2, 4.0, 10.0
_NOT_FOR_VERIFIERS = ("verifier", "workflow")

Messages = Sequence[Mapping[str, str]]
"""The turns after a prompt."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that waits for its reply, which is cancelled where nobody waits for it any more."""

    packed: bytes
    reply: "asyncio.Future[Reply]"
    last_failure: str | None = None
    """Of its last try, None before one. After `memory` the next must be the first job of its process: a lack of memory
    there is the call's own."""


@dataclass(slots=True, eq=False)
class _Server:
    """A process that serves the queue."""

    process: VerifierProcess
    suspects: deque[_Call]
    """Calls that it, or its successor, must run alone."""
    jobs: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)


class VerifierPool:
    """Scores completions with a verify function that is not trusted to return."""

    def __init__(
        self,
        settings: VerifierSettings,
        *,
        start_timeout_s: float = 60.0,
        name: str | None = None,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Create a pool that is started by `start`.

        Args:
            settings: The function and its processes. A deadline counts from when a process is given a call.
            start_timeout_s: Seconds that importing and preparing the function may take; no call is charged for it.
            name: For messages; None = the function's.
            environment: Variables of its processes, beside those of this one.
        """
        self._settings, self._start_timeout_s, self._environment = settings, start_timeout_s, environment
        self._name = name or settings.function
        self._waiting: deque[_Call] = deque()
        self._free: deque[_Server] = deque()
        """An entry for each job that a process could start now."""
        self._scoring: set[asyncio.Task[Reply]] = set()
        self._processes: set[VerifierProcess] = set()
        self._slots: list[asyncio.Task[None]] = []
        self._unusable: VerifierError | None = VerifierError("the verifier pool must be started before it scores")
        self._quarantine = Quarantine(self._name, settings)
        self._away_since: float | None = None
        self._logged: set[str] = set()
        self._num_calls = self._num_busy = self._num_restarts = 0
        self._failures: Counter[str] = Counter()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    async def start(self) -> None:
        """Start serving; returns once one process has loaded the function, a `VerifierError` if it cannot."""
        try:
            # Looked up once, here: each replaced process would pay for it again.
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
        """Score the completions of one prompt, spread over the free processes; see `VerifierSet.score`.

        Returns:
            One reply per completion, in order. Failures are those of `protocol.py`, and `timeout`, `crashed`,
            `memory`, `reply_too_large`, `unavailable`, `bad_row`.

        Raises:
            VerifierError: The pool is not started, is closed or broken (its processes no longer start), or its
                verifier fails too often.
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
        """Kill the processes and end every waiting `score` with a `VerifierError`; idempotent."""
        self._give_up(VerifierError("the verifier pool is closed"))
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*map(self._end, list(self._processes)))

    # --- one call, from the queue to its reply ---

    async def _scored(self, *call: Any) -> Reply:
        try:
            packed = pack(call)
        except (TypeError, ValueError, OverflowError) as error:
            reply = failed("bad_row", f"the data row cannot be sent: {error}")
        else:
            reply = await self._answered(packed)
        self._count(reply)
        return reply

    async def _answered(self, packed: bytes) -> Reply:
        """Queue a call, again while its service is unavailable; returns the reply that counts."""
        num_unanswered = 0
        away_since: float | None = None
        while True:
            loop = asyncio.get_running_loop()
            call = _Call(packed, loop.create_future())
            self._waiting.append(call)
            loop.call_soon(self._dispatch)  # a batch takes all calls of a `score`
            reply = await call.reply
            if reply.failure != "unavailable":
                self._away_since = None
                return reply
            # While others are answered, only the call's own time ends it.
            now = time.monotonic()
            self._away_since, away_since = self._away_since or now, away_since or now
            left_s = self._settings.unavailable_s - (now - min(self._away_since, away_since))
            if left_s <= 0:
                return reply
            pause_s = min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** min(num_unanswered, 10), _LONGEST_PAUSE_S)
            await asyncio.sleep(min(max(pause_s, reply.retry_after_s), left_s))
            num_unanswered += 1

    def _count(self, reply: Reply) -> None:
        self._num_calls += 1
        if reply.failure is not None:
            self._failures[reply.failure] += 1
            self._log_once(f"failed ({reply.failure})", reply.detail)
        if error := self._quarantine.add(reply):
            self._give_up(error)

    def _log_once(self, what: str, detail: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.warning("%s: %s, logged once: %s", self._name, what, detail)

    def _give_up(self, error: VerifierError) -> None:
        """End every present and future `score` with this error."""
        self._unusable = error
        for task in self._scoring:
            task.cancel()

    # --- jobs ---

    def _dispatch(self) -> None:
        """Give the oldest waiting calls to processes with room."""
        while self._waiting and self._free:
            server = self._free.popleft()
            if server.process.over.is_set():
                continue
            calls = self._take(server.process.batch_size or 1)
            if calls:
                server.jobs.create_task(self._serve_job(server, calls))
            else:
                self._free.appendleft(server)

    def _take(self, num_most: int) -> list[_Call]:
        calls: list[_Call] = []
        while self._waiting and len(calls) < num_most:
            call = self._waiting.popleft()
            if not call.reply.done():  # else its caller was cancelled
                calls.append(call)
        return calls

    async def _serve_job(self, server: _Server, calls: list[_Call]) -> None:
        await self._run(server, calls)
        await self._run_suspects(server)  # of a batch that failed in a process that still lives
        self._free.append(server)
        self._dispatch()

    async def _run_suspects(self, server: _Server) -> None:
        process = server.process
        while server.suspects and not process.over.is_set():
            if server.suspects[0].last_failure == "memory" and process.num_served:
                process.over.set()
                break
            await self._run(server, [server.suspects.popleft()])

    async def _run(self, server: _Server, calls: Sequence[_Call]) -> None:
        """Have one job done; each call gets its reply, or becomes a suspect."""
        began = time.monotonic()
        self._num_busy += len(calls)
        try:
            replies = await server.process.call([call.packed for call in calls])
        finally:
            self._num_busy -= len(calls)
        for call, reply in zip(calls, replies, strict=True):
            is_suspect = reply.failure in ("crashed", "memory") and call.last_failure is None
            if reply.failure == "shared" or is_suspect:
                self._log_once("calls that may have ended their process or batch run again, each alone", reply.detail)
                call.last_failure = reply.failure
                server.suspects.append(call)
                continue
            if reply.failure != "unavailable":
                self._latencies.append(time.monotonic() - began)
            if not call.reply.done():
                call.reply.set_result(reply)
            elif reply.failure != "unavailable":  # its caller was cancelled
                self._count(reply)

    # --- processes ---

    async def _serve(self, process: VerifierProcess | None) -> None:
        """Keep one process serving, and replace it, until `close`."""
        suspects: deque[_Call] = deque()
        try:
            while True:
                server = _Server(process or await self._relaunch(), suspects)
                await self._run_suspects(server)
                async with server.jobs:
                    self._free.extend([server] * server.process.max_jobs)
                    self._dispatch()
                    await server.process.over.wait()
                await self._end(server.process)
                process = None
                self._num_restarts += 1
        except Exception as error:  # whatever it is, no caller may wait for this slot any longer
            self._give_up(error if isinstance(error, VerifierError) else VerifierError(f"verifier pool: {error!r}"))

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
        process = VerifierProcess(self._settings, environment=self._environment)
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
