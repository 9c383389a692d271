"""Guards the process that runs a verify function: watches its memory and its processes, and ends all it started.

The guardian is the parent of that process and runs none of the verifier's code, so that it outlives whatever happens
there. As a "child subreaper" it inherits every descendant whose own parent ended, daemons in sessions of their own
included: nothing below it can get away. (A marker in the environment is lost with `env -i`, a session id with `setsid`,
and a walk over /proc from the verifier's process finds no orphans once that is dead.) When it has no child left, by the
kernel's own word, the tree is gone.
"""

import os
import select
import signal
import socket
import time
from typing import NamedTuple

from areal_lite.verify.fork_gate import decide
from areal_lite.verify.tree import children, descendants, proportional_bytes, resident_bytes, stop_and_kill

__all__ = ["MAX_PROCESSES", "WAKING_SIGNALS", "Ending", "Guardian", "end_all"]

MAX_PROCESSES = 64
"""Nothing below a guardian starts another process while there are so many."""

WAKING_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
"""Must be blocked until there is a `Guardian`. SIGTERM: the parent asks for the end, or has died."""

_LOOK_S = 0.05
_FULL_S = 0.3
"""How long there may be no room for another process, before this is a fork bomb and the end. A verifier that runs
programs of others must have a moment to see that one of them is a bomb, which is that program's failure."""


class Ending(NamedTuple):
    """Why a verifier's process is no more."""

    failure: str
    """`crashed`, `memory`, `processes`, or `killed` by request."""
    detail: str


class Guardian:
    """Watches one worker."""

    def __init__(self, worker: int, *, reports: socket.socket, memory_bytes: int) -> None:
        """Prepare to watch.

        Args:
            worker: The child that runs the verify function.
            reports: From it comes, at its start, the descriptor of `ask_before_forks`, and later what memory it took
                once it was ready.
            memory_bytes: What it and all below it may take beyond that.
        """
        self._worker, self._reports, self._memory_bytes = worker, reports, memory_bytes
        self._base: int | None = None
        self._listener: int | None = None
        self._full_since: float | None = None
        self._is_told_to_end = False
        wake, self._woken = socket.socketpair()
        for end in (wake, self._woken, reports):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake = wake
        for number in WAKING_SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKING_SIGNALS)

    def _note(self, number: int, _: object) -> None:
        self._is_told_to_end |= number == signal.SIGTERM

    def watch(self) -> Ending:
        """Watch until there is a reason to end."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._reports, select.POLLIN)
        look_at = 0.0
        while True:
            events = dict(poll.poll(max(0.0, look_at - time.monotonic()) * 1000))
            if self._woken.fileno() in events:
                self._woken.recv(4096)
            if ending := _reap(self._worker):
                return ending
            if self._is_told_to_end:
                return Ending("killed", "by request")
            if self._reports.fileno() in events:
                self._read_reports(poll)
            if self._listener in events and not decide(self._listener, is_allowed=_has_room):
                self._full_since = self._full_since or time.monotonic()
            if time.monotonic() >= look_at:
                if ending := self._look():
                    return ending
                look_at = time.monotonic() + _LOOK_S

    def _look(self) -> Ending | None:
        me = os.getpid()
        members = descendants(me)
        if len(members) < MAX_PROCESSES:
            self._full_since = None
        is_long_full = self._full_since is not None and time.monotonic() - self._full_since > _FULL_S
        if is_long_full or len(members) > 2 * MAX_PROCESSES:  # the latter only where forks cannot be refused
            return Ending("processes", f"more than {MAX_PROCESSES} at a time")
        for orphan in set(children(me)) - {self._worker}:
            # Its parent ended without it: a daemon, which nobody waits for.
            stop_and_kill(orphan)
            os.kill(orphan, signal.SIGKILL)
        if self._base is None:
            return None
        limit = self._base + self._memory_bytes
        # The second figure takes longer, and tells what is shared apart.
        if resident_bytes(members) <= limit or (held := proportional_bytes(members)) <= limit:
            return None
        extra, allowed = (held - self._base) >> 20, self._memory_bytes >> 20
        return Ending("memory", f"{extra} MiB more than when it was ready, all it started included; allowed {allowed}")

    def _read_reports(self, poll: select.poll) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._reports, 64, 1)
        if descriptors:
            self._listener = descriptors[0]
            poll.register(self._listener, select.POLLIN)
        elif message:
            self._base = int(message)
        else:
            poll.unregister(self._reports)


def end_all() -> None:
    """Kill all below this process; returns when the kernel says that nobody is left."""
    me = os.getpid()
    while True:
        stop_and_kill(me)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _reap(worker: int) -> Ending | None:
    """Collect who ended; tells whether the worker is among them."""
    ending = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
                ending = Ending("crashed", f"signal {-code}" if code < 0 else f"exit code {code}")
    except ChildProcessError:
        pass
    return ending


def _has_room() -> bool:
    return len(descendants(os.getpid())) < MAX_PROCESSES
