"""Nodes on one machine: what each has of its own, what they share, and that nothing stays behind.

Seen failing: without `--mount-proc`, `--uts` (the machine itself is renamed!), a tmpfs on /dev/shm, or the bind of a
shared folder; with an init that does not wait for its input. How nodes fail is shown by `test_nodes.py`.
"""

import os
import subprocess
import sys

import psutil
import pytest
from places import SUPPORT

HOLD = """
import time
from namespaces import make_nodes
with make_nodes(["three", "four"]) as nodes:
    nodes[0].popen(["sleep", "60"])
    print(*(node.pid for node in nodes), flush=True)
    time.sleep(60)
"""


@pytest.mark.cluster
def test_nothing_stays_behind_a_holder_that_was_killed():
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT / "rigs")}
    holder = subprocess.Popen([sys.executable, "-c", HOLD], env=environment, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    assert len(pids) == 2
    left = [psutil.Process(pid) for pid in pids] + psutil.Process(holder.pid).children(recursive=True)
    assert len(left) > 4
    holder.kill()
    holder.wait(60)
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
