"""Ctrl-C and notices: at once while nothing can be lost; then Ctrl-C once to finish, twice to end; a notice to save."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from offline_runs import handlers_kept

from areal_lite.launch.run import signals
from areal_lite.launch.run.signals import NOTICES, Interrupts, notices_held_back, undisturbed


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


HANGS = """
import sys, threading, time
from areal_lite.launch.commands import entry, main

def command():
    threading.Thread(target=time.sleep, args=(600,), name=entry_name).start()
    print("ends")
    return 7

from areal_lite.launch.run.signals import LEAVING as entry_name
main.main = command
sys.exit(entry.main())
"""


def test_a_command_that_cannot_leave_ray_ends_with_its_code() -> None:
    """Seen failing, for real: with a segmentation fault (code -11) where the raylet of others hangs; here, it waits."""
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (7, "ends\n"), done.stderr


def test_before_work_begins_the_first_one_ends_at_once() -> None:
    for number in (signal.SIGINT, *NOTICES):
        with handlers_kept(), Interrupts(save_deadline_s=30) as interrupts:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            assert interrupts


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    with handlers_kept():
        yield


@pytest.mark.parametrize("number", NOTICES)
def test_a_notice_asks_however_often_it_comes_and_leaves_some_time(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one on. Seen failing with a second one that ends at once, or that begins the time anew; and with a
    notice that counts as a Ctrl-C.
    """
    now = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with Interrupts(save_deadline_s=30) as interrupts:
        interrupts.set_immediate(False)
        for seconds in (0, 20, 9):
            now += seconds
            os.kill(os.getpid(), number)
            assert interrupts
            assert (interrupts.notice, interrupts.is_overdue()) == (number.name, False)
        now += 2
        assert interrupts.is_overdue()
        press_ctrl_c()  # as a supervisor hands on what it was told as well
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    os.kill(os.getpid(), number)  # while the process ends


def test_what_is_started_with_notices_held_back_hears_none() -> None:
    """Nor does what that starts, though it has a handler, as Ray's processes do.

    Seen failing with the signals ignored, which a handler undoes.
    """
    outer = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    inner = "import signal, os; signal.signal(signal.SIGTERM, lambda *_: os._exit(9)); print(os.getpid(), flush=True);"
    with notices_held_back():
        command = [sys.executable, "-c", outer, inner + "input()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    inner_pid = int(process.stdout.readline())
    for number in NOTICES:
        os.kill(process.pid, number)
        os.kill(inner_pid, number)
    process.communicate("\n")
    assert process.returncode == 0


def test_a_run_in_a_thread_leaves_signals_alone() -> None:
    """Seen failing with a ValueError of Python's, and Ray's processes left behind."""

    def enter() -> bool:
        with undisturbed(), Interrupts(save_deadline_s=30) as interrupts:
            return bool(interrupts)

    with ThreadPoolExecutor() as pool:
        assert not pool.submit(enter).result()


def test_a_ctrl_c_that_any_thread_takes_is_answered_behind_an_undisturbed_block() -> None:
    """Seen failing with SIGINT masked in the main thread: the end of a run was cut short, and Ray's agents stayed."""
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait, daemon=True)
    other.start()
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with undisturbed():
            for _ in range(2):
                signal.pthread_kill(other.ident, signal.SIGINT)
                time.sleep(0.05)
            done.append("all")
        done.append("too much")
    is_over.set()
    assert done == ["all"]


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    """Seen failing with a run that ended as its terminal closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with undisturbed(), Interrupts(save_deadline_s=30) as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts


def test_one_that_was_lost_on_its_way_is_made_up_for() -> None:
    """Python forgets an exception raised inside a destructor. Seen failing without the look in `work_begins`."""
    with Interrupts(save_deadline_s=30) as interrupts:
        with contextlib.suppress(KeyboardInterrupt):
            press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.set_immediate(False)
