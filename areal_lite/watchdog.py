"""One watchdog over every wait (invariant I6): a deadline on progress, not on duration.

The controller passes it a progress reading at every tick of a wait; when the reading has not changed for `timeout_s`,
it raises an error that names the stuck process.
"""

import time
from collections.abc import Callable, Hashable

from areal_lite.errors import StallError


class Watchdog:
    """Raises once a reading has not changed for too long."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._reading: Hashable = None
        self._since = clock()

    def restart(self) -> None:
        """Start a new wait."""
        self._since = self._clock()

    def check(self, reading: Hashable, *, waiting_for: str, culprit: Callable[[], str]) -> None:
        """Take a progress reading.

        Args:
            reading: Anything that changes when there is progress.
            waiting_for: What this wait is for.
            culprit: Describes the stuck process, what it waits for and for how long; called only on expiry.

        Raises:
            StallError: The reading has been the same for `timeout_s`.
        """
        now = self._clock()
        if reading != self._reading:
            self._reading, self._since = reading, now
        elif now - self._since > self._timeout_s:
            raise StallError(
                f"no progress for {now - self._since:.0f} s while waiting for {waiting_for} "
                f"(run.stall_timeout_s={self._timeout_s:g}); late: {culprit()}"
            )
