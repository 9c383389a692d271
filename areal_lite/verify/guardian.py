"""Guards the process that runs a verify function: watches its memory and its processes, and ends all it started.

The guardian is the parent of that process and runs none of the verifier's code, so that it outlives whatever happens
there. As a "child subreaper" it inherits every descendant whose own parent ended, daemons in sessions of their own
included: nothing below it can get away. (A marker in the environment is lost with `env -i`, a session id with `setsid`,
a walk over /proc from the verifier's process finds no orphans once that is dead, and neither control groups nor
namespaces of one's own are to be had in every container.)
"""

import math
import os
import select
import socket
import time

from areal_lite.verify.descendants import children, descendants, held_above, kill_trees
from areal_lite.verify.fork_gate import decide
from areal_lite.verify.protocol import Reply, failed

MAX_PROCESSES = 64
"""Nothing below a guardian starts another process while there are so many."""

_LOOK_S = 0.05
_FULL_S = 0.3
"""How long there may be no room for another process, before this is a fork bomb and the end. A verifier that runs
programs of others must have a moment to see that one of them is a bomb, which is that program's failure."""


class Guardian:
    """Watches a worker and all below it."""

    def __init__(self, worker: int, *, memory_bytes: int) -> None:
        """Prepare; `memory_bytes` is what they may take beyond what the worker took once it was ready."""
        self._worker, self._memory_bytes = worker, memory_bytes
        self._base_bytes = math.inf
        self._full_since: float | None = None

    def watch(self, *, lifeline: int, reports: socket.socket) -> Reply:
        """Watch until there is a reason to end: `crashed`, `memory`, `processes`, or `killed` by request.

        Args:
            lifeline: A descriptor whose other end the parent closes to ask for the end, as does its own.
            reports: From it comes, at the worker's start, the descriptor of `ask_before_forks`, and later what memory
                it took once it was ready.
        """
        poll, ended = select.poll(), os.pidfd_open(self._worker)
        for descriptor in (lifeline, ended, reports.fileno()):
            poll.register(descriptor, select.POLLIN)
        listener: int | None = None
        look_at = 0.0
        while True:
            events = dict(poll.poll(max(0.0, look_at - time.monotonic()) * 1000))
            if ended in events:
                code = os.waitstatus_to_exitcode(os.waitpid(self._worker, 0)[1])
                return failed("crashed", f"signal {-code}" if code < 0 else f"exit code {code}")
            if lifeline in events:
                return failed("killed", "by request")
            if reports.fileno() in events:
                message, descriptors, _, _ = socket.recv_fds(reports, 64, 1)
                if descriptors:
                    (listener,) = descriptors
                    poll.register(listener, select.POLLIN)
                elif message:
                    self._base_bytes = float(message)
                else:
                    poll.unregister(reports)
            if listener in events and not decide(listener, is_allowed=self._has_room):
                self._full_since = self._full_since or time.monotonic()
            if time.monotonic() >= look_at:
                if ending := self._look():
                    return ending
                look_at = time.monotonic() + _LOOK_S

    def _has_room(self) -> bool:
        return len(descendants(os.getpid())) < MAX_PROCESSES

    def _look(self) -> Reply | None:
        """End orphans; returns what else is to be ended, if anything."""
        members = descendants(os.getpid())
        if len(members) < MAX_PROCESSES:
            self._full_since = None
        is_long_full = self._full_since is not None and time.monotonic() - self._full_since > _FULL_S
        if is_long_full or len(members) > 2 * MAX_PROCESSES:  # the latter only where forks cannot be refused
            return failed("processes", f"more than {MAX_PROCESSES} at a time")
        orphans = set(children(os.getpid())) - {self._worker}
        kill_trees(lambda: orphans)  # daemons: their parents ended without them, and nobody waits for them
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
        if not (held := held_above(self._base_bytes + self._memory_bytes, members)):
            return None
        extra, allowed = (held - int(self._base_bytes)) >> 20, self._memory_bytes >> 20
        return failed("memory", f"{extra} MiB more than when it was ready, all it started included; allowed {allowed}")
