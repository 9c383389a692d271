"""Ctrl-C, and the notices of a batch system (SIGTERM, SIGHUP, SIGUSR1). Before there is work, either ends the run.

Later, one Ctrl-C means: finish the step, save and end; a second one ends at once. A notice, however often it comes,
means: save and end within a deadline. A batch system may send it to all processes (`scancel`); Ray's would end on
SIGTERM, so those that this one starts have it blocked.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

NOTICES = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LEAVING = "ray-shutdown"
"""Name of the thread that leaves Ray. Where it hangs, Python's own exit crashes, and a command exits without it."""


def _handled() -> tuple[signal.Signals, ...]:
    """Signals that this thread may handle: none but in the main thread. Under nohup, SIGHUP stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(one for one in (signal.SIGINT, *NOTICES) if not (is_nohup and one == signal.SIGHUP))


@contextlib.contextmanager
def notices_held_back() -> Iterator[None]:
    """Block notices for all processes started in the block, and for theirs; this one gets its own after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Answer Ctrl-C and notices that come in the block after it.

    A signal mask would not do: another thread would take the signal, and the handler runs in the main thread.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda one, _: came.append(one)) for number in _handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


class Interrupts:
    """True once a stop was requested; as a context manager, it handles the signals."""

    def __init__(self, *, save_deadline_s: float) -> None:
        self.notice = ""
        """Signal of a batch system, or another reason to save in little time; empty if there is none."""
        self._save_deadline_s, self._ends_at = save_deadline_s, 0.0
        self._why = ""
        self._is_announced = False
        self._presses = 0
        self._at_once = True
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._why)

    @property
    def why(self) -> str:
        """What requested the stop; empty if nothing did."""
        return self.notice or ("Ctrl-C" if self._presses else self._why)

    def is_unannounced(self) -> bool:
        """Whether a stop was requested since the last call."""
        before, self._is_announced = self._is_announced, bool(self)
        return self._is_announced and not before

    def is_overdue(self) -> bool:
        """Whether the deadline of a notice has passed."""
        return bool(self.notice) and time.monotonic() > self._ends_at

    def request_stop(self, why: str = "on_step") -> None:
        """Request a stop, as one Ctrl-C does."""
        self._why = self._why or why

    def give_notice(self, why: str) -> None:
        """Request a stop within the deadline for saving."""
        if not self.notice:
            self.notice, self._ends_at = why, time.monotonic() + self._save_deadline_s
        self.request_stop()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in _handled()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)  # a parent may have blocked them
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():  # a repeated notice may not cut the end short
            signal.signal(number, signal.SIG_IGN if self.notice and number in NOTICES else handler)

    def set_immediate(self, at_once: bool) -> None:
        """Set whether signals end the run at once, as while there is nothing to save.

        Raises:
            KeyboardInterrupt: A stop was requested before, and its exception got lost: Python prints and drops one that
                is raised inside a destructor or a library's callback.
        """
        self._at_once = at_once
        if self:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: Any) -> None:
        # Nothing is printed here: the handler may have interrupted a print.
        self._presses += number == signal.SIGINT
        if number == signal.SIGINT:
            self.request_stop()
        else:
            self.give_notice(signal.Signals(number).name)
        if self._at_once or (number == signal.SIGINT and self._presses > 1):
            raise KeyboardInterrupt
