"""Slurm on one machine: its real daemons on the nodes of `make_nodes`, and nothing of them outside.

    python tests/support/rigs/slurm_daemons.py --nodes 2            as root; the demo's task as a batch job

The controller and munge run on the first node. Keys, states and logs lie in a folder of their own, nothing in /etc, and
the daemons end with their nodes.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from namespaces import Node, make_nodes
from nodes import profile_of, words_of

from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.clusters.job import job_name
from areal_lite.launch.clusters.remote import output_of

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
_START_TIMEOUT_S = 180.0
_POLL_S = 0.2
_CONF = """\
ClusterName=rig
SlurmctldHost={head.name}({head.address})
SlurmUser=root
# A job that is requeued starts again when its credentials have expired, by default after two minutes.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
# What a cluster does by control groups, which several nodes on one machine would share.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=30
# Look for work that can start every second, not every half minute.
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_CGROUP_CONF = "CgroupPlugin=autodetect\nCgroupMountpoint=/sys/fs/cgroup\nIgnoreSystemd=yes\n"


class Slurm(NamedTuple):
    """A cluster that answers."""

    nodes: Sequence[Node]
    """The first one has the controller, and is where one logs in."""
    folder: Path
    """Of its configuration and the daemons' logs."""

    def command(self, argv: Sequence[str], *, cwd: str | Path = "/") -> list[str]:
        """Return the command that runs another one where a user of the cluster types it."""
        return self.nodes[0].command(argv, cwd=cwd, env={"SLURM_CONF": str(self.folder / "slurm.conf")})

    def ask(self, *argv: str) -> str:
        """Return what a command of Slurm says; a `ConfigError` where it failed."""
        return output_of(*self.command(argv), fix="look at the daemons' logs").strip()


@contextlib.contextmanager
def make_slurm(num_nodes: int, *, shared: Sequence[str | Path] = ()) -> Iterator[Slurm]:
    """Boot nodes with Slurm on them, and end them afterwards.

    Args:
        shared: As of `make_nodes`.

    Raises:
        ConfigError: Not root, or Slurm is not installed.
        StallError: A daemon did not start; shows the logs.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise ConfigError(
            f"Slurm on one machine needs the commands {', '.join(_TOOLS)}, got no {', '.join(missing)}: "
            "apt-get install slurm-wlm munge"
        )
    names = [f"slurm{number}" for number in range(num_nodes)]
    with tempfile.TemporaryDirectory(prefix="areal-lite-slurm-") as made, contextlib.ExitStack() as logs:
        folder = Path(made)
        folder.chmod(0o711)  # munge has to get through
        for name in ("munge", "controller", *names):
            (folder / name).mkdir()
        (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge" / "key").chmod(0o400)
        for path in (folder / "munge" / "key", folder / "munge"):
            shutil.chown(path, "munge", "munge")
        with make_nodes(names, shared=[*shared, folder]) as nodes:
            described = "\n".join(
                f"NodeName={node.name} NodeAddr={node.address} CPUs={os.cpu_count()} State=UNKNOWN" for node in nodes
            )
            (folder / "slurm.conf").write_text(_CONF.format(folder=folder, head=nodes[0], nodes=described))
            (folder / "cgroup.conf").write_text(_CGROUP_CONF)
            slurm = Slurm(nodes, folder)

            def start(node: Node, *argv: str) -> None:
                log = logs.enter_context((folder / f"{argv[0]}-{node.name}.log").open("w"))
                environment = {"SLURM_CONF": str(folder / "slurm.conf")}
                node.popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

            munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
            start(
                nodes[0],
                *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"),
                *("munged", "--foreground", f"--key-file={folder}/munge/key", *munge),
            )
            _wait(slurm, (folder / "munge" / "socket").exists, "munge")
            start(nodes[0], "slurmctld", "-D")
            for node in nodes:
                start(node, "slurmd", "-D", "-N", node.name)
            _wait(slurm, lambda: set(slurm.ask("sinfo", "-h", "-N", "-o", "%t").split()) == {"idle"}, "all nodes idle")
            yield slurm


def _wait(slurm: Slurm, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(ConfigError):
            if condition():
                return
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in slurm.folder.glob("*.log"))
            raise StallError(f"Slurm must have {what} within {_START_TIMEOUT_S:g} s, got:\n{logs}")
        time.sleep(_POLL_S)


def main(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE [section.field=value]...]")] = None,
    nodes: Annotated[int, typer.Option(min=2, help="machines to simulate")] = 2,
) -> None:
    """Train under Slurm: its real daemons on nodes of this machine, and one batch job, with a line for each state."""
    typed = words_of(words, num_nodes=nodes)
    launch = [sys.executable, "-m", "areal_lite.launch.commands.main", "launch", "--on", "slurm"]
    with make_slurm(nodes) as slurm:
        profile = slurm.folder / "profile.yaml"
        profile.write_text(profile_of(nodes).model_dump_json())
        named = ["--name", job_name(typed), "--profile", str(profile)]
        process = subprocess.Popen(slurm.command([*launch, *named, *typed], cwd=Path.cwd()))
        shown = ""
        try:
            while process.poll() is None:
                state = slurm.ask("squeue", "--noheader", "--states=all", "--format=batch job %i: %T %N")
                if state != shown:
                    print(state, flush=True)
                shown = state
                time.sleep(_POLL_S)
        finally:
            process.wait()  # Ctrl-C reaches it too: the job saves
    sys.exit(process.returncode)


if __name__ == "__main__":
    typer.run(main)
