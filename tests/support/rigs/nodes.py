"""A recipe as a job on several nodes of this machine, and what becomes of it when one is lost.

    python tests/support/rigs/nodes.py --nodes 3 --cut-link 3               as root; the demo's task, 10 steps
    python tests/support/rigs/nodes.py --slow 100 my_recipe.yaml run.steps=50

The job is one of kind ssh whose shell enters a node's namespaces. The nodes share the disk and no memory; what breaks
is the second node, which has a trainer rank, and the engines if there are two.
"""

import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from namespaces import NETWORK, Node, make_nodes

from areal_lite.launch.clusters.attempts import Attempts, last_step
from areal_lite.launch.clusters.job import Job, job_name
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.commands.launch import run_job

_POLL_S = 0.2


def words_of(words: Sequence[str] | None, *, num_nodes: int) -> list[str]:
    """Return a training of few steps that uses all nodes: ranks on the first two, an engine on each further one."""
    recipe, *overrides = words or ["arith_cpu"]
    ranks = min(2, num_nodes - 1)
    return [
        "train", recipe, f"trainer.ranks={ranks}", f"rollout.workers={num_nodes - ranks}", "run.steps=10",
        "run.eval_every=0", "run.checkpoint_every=2", "run.stall_timeout_s=30", "weights.timeout_s=10",
        "weights.parity_every=1", "launch.max_attempts=3", "launch.pause_s=2", *overrides,
    ]  # fmt: skip


def main(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE [section.field=value]...]")] = None,
    nodes: Annotated[int, typer.Option(min=2, help="machines to simulate")] = 3,
    cut_link: Annotated[
        int | None, typer.Option(metavar="STEP", help="then the second node loses its link, until the next attempt")
    ] = None,
    slow: Annotated[float | None, typer.Option(metavar="MBIT", help="rate of every link, in Mbit/s")] = None,
) -> None:
    """Train on several nodes: real Ray nodes in network namespaces of this machine."""
    typed = words_of(words, num_nodes=nodes)
    names = [f"node-{index + 1}" for index in range(nodes)]
    job = Job(name=job_name(typed), kind="ssh", folder=str(Path.cwd()), words=typed)
    ssh = {"hosts": names, "shell": f"{shlex.quote(str(job.files / 'shell-of-'))}{{host}}"}
    job = job.model_copy(update={"profile": profile_of(nodes, ssh=ssh)})
    shared = [job.run_folder.parent] if job.run_folder else []
    for folder in (job.files, *shared):
        folder.mkdir(parents=True, exist_ok=True)
    with make_nodes(names, shared=shared) as made:
        for node in made:
            if slow is not None:
                node.slow(rate_mbit=slow)
            _write_shell(job, node)
        ended = threading.Event()
        trouble = threading.Thread(target=_cut_link, args=(made[1], cut_link, job, ended), daemon=True)
        trouble.start()
        try:
            sys.exit(run_job(job))
        finally:
            ended.set()
            trouble.join()


def profile_of(num_nodes: int, **more: Any) -> Profile:
    """Return the profile of such nodes."""
    # They share the machine's cores: Ray gets one for each, so that it spreads the processes.
    env = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'}
    return Profile(nodes=num_nodes, shared="/", network=str(NETWORK), ports="10000-32767", env=env, **more)


def _write_shell(job: Job, node: Node) -> None:
    """Write what the job calls to reach a node: as a machine's control board, it needs no network."""
    path = job.files / f"shell-of-{node.name}"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(node.command([]))} "$@"\n')
    path.chmod(0o755)


def _cut_link(node: Node, step: int | None, job: Job, ended: threading.Event) -> None:
    """Wait for the step, cut the node's link, wait for the attempt's end, restore it. Unblocked by `ended`."""
    while step is None or last_step(job.run_folder) < step:
        if ended.wait(_POLL_S):
            return
    node.cut()
    print(f"{node.name} ({node.address}) lost its link", flush=True)
    number = len(Attempts.read(job).attempts)
    while Attempts.read(job).attempts[number - 1].code is None:
        if ended.wait(_POLL_S):
            return
    node.restore_link()
    print(f"{node.name} is whole again", flush=True)


if __name__ == "__main__":
    typer.run(main)
