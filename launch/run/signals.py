"""Ctrl-C, and the notices of a batch system (SIGTERM, SIGHUP, SIGUSR1). Before there is work, either ends at once.

Then Ctrl-C means finish and save, twice at once. A notice, however often it comes, means save within a deadline. It may
go to every process at once (`scancel`), and Ray's take SIGTERM for their end: those that this one starts hear none.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any, Self

NOTICES = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def notices_held_back() -> Iterator[None]:
    """What this thread starts in the block never gets a notice, nor does what that starts; itself it gets them late."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and notices that come in the block are answered behind it.

    Masked they would come all the same: through the next thread that is not, to the handler, which is the main one's.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda one, _: came.append(one)) for number in (signal.SIGINT, *NOTICES)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


class Interrupts:
    """True once somebody has asked to stop; a context manager, which catches the signals."""

    def __init__(self, *, save_deadline_s: float) -> None:
        self.notice = ""
        """Name of the signal by which a batch system gave notice, or what else leaves little time; else empty."""
        self._save_deadline_s, self._ends_at = save_deadline_s, 0.0
        self._is_asked = self._is_told = False
        self._presses = 0
        self._at_once = True
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self._is_asked

    @property
    def why(self) -> str:
        """What asked to stop, in words; empty where nothing did."""
        return self.notice or ("Ctrl-C" if self._presses else "on_step" if self._is_asked else "")

    def is_unannounced(self) -> bool:
        """Whether somebody has asked to stop, and nobody has been told yet: true once."""
        before, self._is_told = self._is_told, self._is_asked
        return self._is_told and not before

    def is_overdue(self) -> bool:
        """Whether the time that a notice leaves is over."""
        return bool(self.notice) and time.monotonic() > self._ends_at

    def request_stop(self) -> None:
        """Ask to stop, as one Ctrl-C does."""
        self._is_asked = True

    def give_notice(self, why: str) -> None:
        """Ask to stop, and to save within the deadline."""
        if not self.notice:
            self.notice, self._ends_at = why, time.monotonic() + self._save_deadline_s
        self.request_stop()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, *NOTICES)}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)  # whoever started this one may have held them back
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():  # once told to end, nothing shall cut the end short
            signal.signal(number, signal.SIG_IGN if self.notice and number in NOTICES else handler)

    def set_immediate(self, at_once: bool) -> None:
        """Say whether there is nothing to save from now on, as at first.

        Raises:
            KeyboardInterrupt: Somebody asked to stop before; the exception may have been lost on its way: one that is
                raised inside a destructor or a callback of a library is printed and forgotten.
        """
        self._at_once = at_once
        if self._is_asked:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: Any) -> None:
        # Nothing is printed here: the handler may have interrupted somebody who is printing.
        self._presses += number == signal.SIGINT
        if number == signal.SIGINT:
            self.request_stop()
        else:
            self.give_notice(signal.Signals(number).name)
        if self._at_once or (number == signal.SIGINT and self._presses > 1):
            raise KeyboardInterrupt
