"""The `ray start` of a node, alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from areal_lite.launch.run.signals import NOTICES

pytestmark = pytest.mark.loop

DEADLINE_S = 300


def soon_ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    return not alive


def test_ray_outlives_what_is_sent_to_all_processes_and_leaves_nothing_when_it_is_ended() -> None:
    """A batch system signals them all; the supervisor sends SIGINT once the run has saved.

    Seen failing with signals that Ray's processes do not ignore.
    """
    module = [sys.executable, "-m", "areal_lite.launch.clusters.ray_nodes"]
    start = ["start", "--head", "--block", "--port=0", "--disable-usage-stats"]
    ray = psutil.Popen([*module, *start], stdout=subprocess.PIPE, text=True, start_new_session=True)
    tree = [ray]
    try:
        assert ray.stdout is not None
        assert any("Ray runtime started" in line for line in ray.stdout)
        tree += ray.children(recursive=True)
        assert {"raylet", "gcs_server"} <= {process.name() for process in tree}
        for number in NOTICES:
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        time.sleep(3)
        names = {process.name() for process in tree if process.is_running() and process.status() != "zombie"}
        assert {"raylet", "gcs_server"} <= names
        assert ray.poll() is None
        os.kill(ray.pid, signal.SIGINT)
        assert soon_ended(tree)
    finally:
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ray.wait()
