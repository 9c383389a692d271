"""Nodes on one machine: what each has of its own, what they share, and that nothing stays behind.

Seen failing: without `--mount-proc`, `--uts` (the machine itself is renamed!), a tmpfs on /dev/shm, or the bind of a
shared folder; with an init that does not wait for its input. How nodes fail is shown by `test_nodes.py`.
"""

import os
import subprocess
import sys

import psutil
import pytest
from namespaces import Node, make_nodes
from places import SUPPORT


def run(node: Node, command: str, **options: object) -> str:
    done = subprocess.run(
        node.command(["sh", "-ec", command], **options), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with make_nodes(["one", "two"], shared=[tmp_path_factory.getbasetemp()]) as made:
        yield made


@pytest.mark.cluster
def test_a_node_has_a_name_processes_and_folders_of_its_own(nodes, tmp_path):
    one, two = nodes
    assert [run(node, "hostname") for node in nodes] == ["one", "two"]
    assert [run(node, "ip -4 -br addr show dev eth0").split()[2] for node in nodes] == ["10.77.0.1/24", "10.77.0.2/24"]
    assert run(one, "cat /etc/hosts").splitlines() == ["127.0.0.1 localhost", "127.0.1.1 one", "10.77.0.2 two"]
    for folder in ("/tmp", "/dev/shm"):
        run(one, f"touch {folder}/only-here")
        assert "only-here" not in run(two, f"ls {folder}") + "".join(os.listdir(folder))
    assert int(run(one, "ls /proc | grep -c '^[0-9]'")) < 10
    # What is asked to be shared is, though it lies in /tmp.
    (tmp_path / "run").write_text("seen")
    assert run(one, "cat run; echo too >> run", cwd=tmp_path) == "seen"
    assert (tmp_path / "run").read_text() == "seentoo\n"
    assert run(two, "echo $COLOUR", env={"COLOUR": "blue"}) == "blue"


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
