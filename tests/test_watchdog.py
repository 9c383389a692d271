"""The watchdog over every wait (I6), on a clock that is told the time."""

import pytest
from ledger_builders import FakeClock

from areal_lite.errors import StallError
from areal_lite.watchdog import Watchdog

TIMEOUT_S = 120.0


def never() -> str:
    raise AssertionError("the culprit is asked for only on expiry")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def watchdog(clock: FakeClock) -> Watchdog:
    return Watchdog(TIMEOUT_S, clock=clock)


def test_progress_resets_the_deadline(watchdog: Watchdog, clock: FakeClock) -> None:
    """I6: a wait of twelve deadlines is fine while something moves now and then.

    Seen failing with a deadline on duration (`_since` set only by `restart`).
    """
    for reading in range(12):
        for _ in range(3):
            watchdog.check(reading, waiting_for="a batch", culprit=never)
            clock.now += (TIMEOUT_S - 1) / 3


def test_a_reading_that_falls_is_progress_too(watchdog: Watchdog, clock: FakeClock) -> None:
    """Pending results fall; a worker that is lost takes its count with it. Seen failing with `reading > old`."""
    for reading in (5, 4, 3, 2, 1, 0):
        watchdog.check((reading, 7), waiting_for="trainer ranks", culprit=never)
        clock.now += TIMEOUT_S - 1


@pytest.mark.parametrize("reading", [7, None])
def test_standing_still_raises_with_what_was_waited_for_and_who_is_late(
    watchdog: Watchdog, clock: FakeClock, reading: int | None
) -> None:
    """I6, from the first reading on. Seen failing with `raise` left out, and with no culprit in the message."""
    watchdog.check(reading, waiting_for="the batch of step 3", culprit=never)
    clock.now += TIMEOUT_S
    watchdog.check(reading, waiting_for="the batch of step 3", culprit=never)
    clock.now += 5.0
    with pytest.raises(StallError) as caught:
        watchdog.check(
            reading, waiting_for="the batch of step 3", culprit=lambda: "rollout/1 holds 4 leases, since 130 s"
        )
    assert str(caught.value) == (
        "no progress for 125 s while waiting for the batch of step 3 (run.stall_timeout_s=120); "
        "late: rollout/1 holds 4 leases, since 130 s"
    )


def test_a_new_wait_has_a_deadline_of_its_own(watchdog: Watchdog, clock: FakeClock) -> None:
    """The reading may be the last wait's. Seen failing with an empty `restart`."""
    watchdog.check(7, waiting_for="a batch", culprit=never)
    clock.now += 10 * TIMEOUT_S
    watchdog.restart()
    watchdog.check(7, waiting_for="a publication", culprit=never)
    clock.now += TIMEOUT_S + 1
    with pytest.raises(StallError, match="a publication"):
        watchdog.check(7, waiting_for="a publication", culprit=lambda: "trainer/0")
