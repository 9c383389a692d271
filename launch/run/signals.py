"""Ctrl-C, and the SIGTERM of a batch system: once means finish and save, twice (or before there is work) at once."""

import signal
from typing import Any, Self


class Interrupts:
    """True once the user has asked to stop; a context manager, which catches the signals."""

    def __init__(self) -> None:
        self._count = self._told = 0
        self._at_once = True
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self._count > 0

    def are_news(self) -> bool:
        """Whether the user has asked to stop, and nobody has been told yet: true once."""
        before, self._told = self._told, min(self._count, 1)
        return self._told > before

    def ask(self) -> None:
        """Ask to stop, as one Ctrl-C does."""
        self._count = max(self._count, 1)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def work_begins(self) -> None:
        """Say that there is something to save from now on.

        Raises:
            KeyboardInterrupt: The user asked to stop before, and the exception was lost on its way: one that is raised
                inside a destructor or a callback of a library is printed and forgotten.
        """
        self._at_once = False
        if self._count:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: Any) -> None:
        # Nothing is printed here: the handler may have interrupted somebody who is printing.
        self._count += 1
        if self._count > 1 or self._at_once:
            raise KeyboardInterrupt
