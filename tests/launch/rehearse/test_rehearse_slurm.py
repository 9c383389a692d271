"""A real Slurm on nodes of this machine: it answers, runs what it is given, and nothing of it stays behind."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from areal_lite.errors import ConfigError
from areal_lite.launch.rehearse.slurm import make_slurm

DEADLINE_S = 300.0


def test_needs_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "munged" else tool)
    with pytest.raises(ConfigError, match="got no munged: apt-get install slurm-wlm munge"), make_slurm(1):
        pass


def home(process: psutil.Process) -> str:
    """Return the process namespace that a process is in; none where it has just ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    return ""


@pytest.mark.slurm
@pytest.mark.cluster
def test_slurm_runs_jobs_on_its_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    """A step on two nodes at once; a batch job with an exit code, put back into the queue once; then all is gone."""
    script, seen = tmp_path / "job.sh", tmp_path / "seen"
    script.write_text(f'#!/bin/bash\n[ -n "$SLURM_RESTART_COUNT" ] && exit 7\ntouch {seen}; sleep 100\n')
    with make_slurm(2, shared=[tmp_path]) as slurm:
        assert sorted(slurm.ask("srun", "--nodes=2", "hostname").split()) == ["slurm0", "slurm1"]
        job = slurm.ask("sbatch", "--parsable", "--requeue", f"--output={tmp_path}/log", str(script))
        deadline = time.monotonic() + DEADLINE_S
        while not seen.exists():
            assert time.monotonic() < deadline, slurm.ask("scontrol", "show", "job", job)
            time.sleep(0.1)
        slurm.ask("scontrol", "requeue", job)
        while "ExitCode=7:0" not in (facts := slurm.ask("scontrol", "show", "job", job)):
            assert time.monotonic() < deadline, facts
            time.sleep(0.5)
        with pytest.raises(ConfigError):
            slurm.ask("scontrol", "show", "node", "slurm2")
        homes = {os.readlink(f"/proc/{node.pid}/ns/pid") for node in slurm.nodes}
        processes = [process for process in psutil.process_iter() if home(process) in homes]
        assert {"munged", "slurmctld", "slurmd"} <= {process.name() for process in processes}
    assert not slurm.folder.exists()
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive
