"""Kind ssh as it is: real sshd on nodes of their own, real Ray on both; `test_nodes.py` has what fails there."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from loop_builders import loop_config, write_recipe
from namespaces import Node, make_nodes
from places import SUPPORT

pytestmark = [pytest.mark.cluster, pytest.mark.sshd]
_PORT = 2222
_SSHD = """
ListenAddress 0.0.0.0:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin yes
"""


@contextmanager
def serving_ssh(nodes: list[Node], folder: Path) -> Iterator[str]:
    """Run an sshd on each node; yields the command that reaches a host."""
    for name in ("host_key", "key"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True, timeout=120)
    (folder / "sshd_config").write_text(_SSHD.format(port=_PORT, folder=folder))
    serve = f"mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -f {folder}/sshd_config"
    servers = [node.popen(["sh", "-c", serve], stderr=subprocess.DEVNULL) for node in nodes]
    try:
        options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        shell = f"ssh {options} -o ConnectionAttempts=20 -p {_PORT} -i {folder}/key {{host}}"
        for node in nodes:
            asked = nodes[0].command([*shell.replace("{host}", node.name).split(), "true"])
            subprocess.run(asked, check=True, timeout=120)
        yield shell
    finally:
        for server in servers:
            server.terminate()
            server.wait(timeout=60)


def of_job(name: str) -> list[str]:
    """Command lines of all processes of a job, on whichever node."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AREAL_LITE_JOB") == name:
                found.append(" ".join(process.cmdline())[:150])
        except psutil.Error:
            continue
    return found


def join_late(node: Node, log: Path) -> None:
    """Connect a node again once the log has its name."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (log.exists() and f"{node.name} is out of reach" in log.read_text()):
        time.sleep(0.2)
    node.restore_link()


def test_a_run_on_two_nodes_over_ssh_of_which_one_joins_late(tmp_path: Path) -> None:
    """Seen failing with an attempt that ends at the first connection that times out."""
    shutil.copy(SUPPORT / "loop_verifiers.py", tmp_path)  # both nodes see this folder
    verifier = {"function": f"{tmp_path}/loop_verifiers.py:digit_share"}
    run = {"steps": 2, "checkpoint_every": 1}
    write_recipe(tmp_path / "tiny.yaml", loop_config(tmp_path, run=run, verifier=verifier))
    with make_nodes(["lnode1", "lnode2"], shared=[tmp_path]) as nodes, serving_ssh(nodes, tmp_path) as shell:
        profile = {
            "nodes": 2,
            "shared": str(tmp_path),
            "network": "10.77.0.0/24",
            "ssh": {"hosts": ["lnode1", "lnode2"], "shell": shell.replace("ConnectionAttempts=20", "ConnectTimeout=5")},
        }
        (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
        words = ["launch", "--on", "ssh", "--profile", "profile.yaml", "--name", "pair", "train", "tiny.yaml"]
        command = nodes[0].command(
            [sys.executable, "-m", "areal_lite.launch.commands.main", *words],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]},
        )
        nodes[1].cut()
        late = threading.Thread(target=join_late, args=(nodes[1], tmp_path / "runs/jobs/pair/log.txt"))
        late.start()
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
        late.join()
        deadline = time.monotonic() + 120
        while (left := of_job("pair")) and time.monotonic() < deadline:
            time.sleep(0.2)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "areal-lite launch: lnode2 is out of reach (ssh: connect to host lnode2 port 2222: " in done.stdout
    assert left == []
    attempts = json.loads((tmp_path / "runs/jobs/pair/attempts.json").read_text())
    assert [one["code"] for one in attempts["attempts"]] == [0]
    summary = json.loads((tmp_path / "runs/pair/summary.json").read_text())
    assert summary["attempts"] == 1
    assert summary["gpu_hours"] == 0
    logs = {path.name for path in (tmp_path / "runs/pair/logs/pair/attempt-1").iterdir()}
    assert {"lnode1-driver.log", "lnode1-ray.log", "lnode2-ray.log"} <= logs
    assert {name.split("-")[0] for name in logs} <= {"lnode1", "lnode2"}
    rows = [json.loads(line) for line in (tmp_path / "runs/pair/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
