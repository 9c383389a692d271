"""Guards the process that runs a verify function: watches its memory and its processes, and ends all it started.

The guardian is the parent of that process and runs none of the verifier's code, so that it outlives whatever happens
there. As a "child subreaper" it inherits every descendant whose own parent ended, daemons in sessions of their own
included: nothing below it can get away. (A marker in the environment is lost with `env -i`, a session id with `setsid`,
a walk over /proc from the verifier's process finds no orphans once that is dead, and neither control groups nor
namespaces of one's own are to be had in every container.)
"""

import os
import select
import socket
import time
from typing import NamedTuple

from areal_lite.verify.descendants import children, descendants, kill_trees, proportional_bytes, resident_bytes
from areal_lite.verify.fork_gate import decide

MAX_PROCESSES = 64
"""Nothing below a guardian starts another process while there are so many."""

_LOOK_S = 0.05
_FULL_S = 0.3
"""How long there may be no room for another process, before this is a fork bomb and the end. A verifier that runs
programs of others must have a moment to see that one of them is a bomb, which is that program's failure."""


class Ending(NamedTuple):
    """Why a verifier's process is no more."""

    failure: str
    """`crashed`, `memory`, `processes`, or `killed` by request."""
    detail: str


def watch(worker: int, *, lifeline: int, reports: socket.socket, memory_bytes: int) -> Ending:
    """Watch a worker until there is a reason to end.

    Args:
        lifeline: A descriptor whose other end the parent closes to ask for the end, as does its own.
        reports: From it comes, at the worker's start, the descriptor of `ask_before_forks`, and later what memory it
            took once it was ready.
        memory_bytes: What it and all below it may take beyond that.
    """
    poll, ended = select.poll(), os.pidfd_open(worker)
    for descriptor in (lifeline, ended, reports.fileno()):
        poll.register(descriptor, select.POLLIN)
    limits = _Limits(worker, memory_bytes)
    listener: int | None = None
    look_at = 0.0
    while True:
        events = dict(poll.poll(max(0.0, look_at - time.monotonic()) * 1000))
        if ended in events:
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            return Ending("crashed", f"signal {-code}" if code < 0 else f"exit code {code}")
        if lifeline in events:
            return Ending("killed", "by request")
        if reports.fileno() in events:
            message, descriptors, _, _ = socket.recv_fds(reports, 64, 1)
            if descriptors:
                (listener,) = descriptors
                poll.register(listener, select.POLLIN)
            elif message:
                limits.base_bytes = int(message)
            else:
                poll.unregister(reports)
        if listener in events:
            limits.decide_a_fork(listener)
        if time.monotonic() >= look_at:
            if ending := limits.look():
                return ending
            look_at = time.monotonic() + _LOOK_S


class _Limits:
    """What a worker and all below it may take."""

    def __init__(self, worker: int, memory_bytes: int) -> None:
        self._worker, self._memory_bytes = worker, memory_bytes
        self.base_bytes: int | None = None
        self._full_since: float | None = None

    def decide_a_fork(self, listener: int) -> None:
        if not decide(listener, is_allowed=lambda: len(descendants(os.getpid())) < MAX_PROCESSES):
            self._full_since = self._full_since or time.monotonic()

    def look(self) -> Ending | None:
        """End orphans; returns what else is to be ended, if anything."""
        members = descendants(os.getpid())
        if len(members) < MAX_PROCESSES:
            self._full_since = None
        is_long_full = self._full_since is not None and time.monotonic() - self._full_since > _FULL_S
        if is_long_full or len(members) > 2 * MAX_PROCESSES:  # the latter only where forks cannot be refused
            return Ending("processes", f"more than {MAX_PROCESSES} at a time")
        orphans = set(children(os.getpid())) - {self._worker}
        kill_trees(lambda: orphans)  # daemons: their parents ended without them, and nobody waits for them
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
        if self.base_bytes is None:
            return None
        limit = self.base_bytes + self._memory_bytes
        # The second figure takes longer, and tells what is shared apart.
        if resident_bytes(members) <= limit or (held := proportional_bytes(members)) <= limit:
            return None
        extra, allowed = (held - self.base_bytes) >> 20, self._memory_bytes >> 20
        return Ending("memory", f"{extra} MiB more than when it was ready, all it started included; allowed {allowed}")
