"""Ctrl-C: at once while nothing can be lost, then once to finish and twice to end."""

import contextlib
import os
import signal

import pytest

from areal_lite.launch.run.signals import Interrupts


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_before_work_begins_the_first_one_ends_at_once() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
        assert interrupts


def test_one_that_was_lost_on_its_way_is_made_up_for() -> None:
    """Python forgets an exception raised inside a destructor. Seen failing without the look in `work_begins`."""
    with Interrupts() as interrupts:
        with contextlib.suppress(KeyboardInterrupt):
            press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.work_begins()


def test_then_the_first_one_asks_and_the_second_one_ends() -> None:
    """Seen failing with a handler that never raises; one that always does ends the test session."""
    with Interrupts() as interrupts:
        interrupts.work_begins()
        assert not interrupts
        press_ctrl_c()
        assert interrupts
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
