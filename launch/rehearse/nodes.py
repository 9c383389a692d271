"""`areal-lite rehearse nodes`: a recipe as a job on several nodes of this machine, and what becomes of it in a fault.

The job is one of kind ssh whose shell enters a node's namespaces. The nodes share the disk and no memory; what breaks
is the second node, which has a trainer rank, and the engines if there are two.
"""

import contextlib
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.launch.clusters.attempts import Attempts, last_step
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.profile import Profile, SshProfile
from areal_lite.launch.rehearse.namespaces import NETWORK, Node, make_nodes

_POLL_S = 0.2


class Fault(NamedTuple):
    """Something that happens to the second node; it is whole again for the next attempt."""

    how: str
    """kill or cut"""
    step: int
    """The trainer step after which it happens."""


def settings_of(num_nodes: int) -> list[str]:
    """Return overrides by which a small run uses all nodes: ranks on the first two, an engine on each further one."""
    ranks = min(2, num_nodes - 1)
    return [
        f"trainer.ranks={ranks}", f"rollout.workers={num_nodes - ranks}", "run.steps=10", "run.eval_every=0",
        "run.checkpoint_every=2", "run.stall_timeout_s=30", "weights.timeout_s=10", "weights.parity_every=1",
        "launch.max_attempts=3", "launch.pause_s=2",
    ]  # fmt: skip


@contextlib.contextmanager
def rehearsal(
    name: str, words: Sequence[str], *, num_nodes: int, faults: Sequence[Fault] = (), slow_mbit: float | None = None
) -> Iterator[Job]:
    """Make nodes for a job, and break them as asked until the block ends; submitting it is the caller's.

    Args:
        words: The command, as behind `areal-lite`.
        slow_mbit: Rate of every node's link.
    """
    names = [f"node-{index + 1}" for index in range(num_nodes)]
    job = Job(name=name, kind="ssh", folder=str(Path.cwd()), words=list(words))
    ssh = SshProfile(hosts=names, shell=f"{shlex.quote(str(job.files / 'shell-of-'))}{{host}}")
    job = job.model_copy(update={"profile": profile_of(num_nodes, ssh=ssh)})
    shared = [job.run_folder.parent] if job.run_folder else []
    for folder in (job.files, *shared):
        folder.mkdir(parents=True, exist_ok=True)
    with make_nodes(names, shared=shared) as nodes:
        if slow_mbit is not None:
            for node in nodes:
                node.slow(rate_mbit=slow_mbit)
        for node in nodes:
            _write_shell(job, node)
        ended = threading.Event()
        trouble = threading.Thread(target=_cause_trouble, args=(faults, nodes[1], job, ended), daemon=True)
        trouble.start()
        try:
            yield job
        finally:
            ended.set()
            trouble.join()


def profile_of(num_nodes: int, **more: Any) -> Profile:
    """Return the profile of such nodes."""
    # They share the machine's cores: one each is what Ray is told, so that the processes are spread.
    env = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'}
    return Profile(nodes=num_nodes, shared="/", network=str(NETWORK), ports="10000-32767", env=env, **more)


def _write_shell(job: Job, node: Node) -> None:
    """Write what the job calls to reach a node: as a machine's control board, it needs no network."""
    command = f'exec {shlex.join(node.command([]))} "$@"' if node.is_up else f"echo {node.name} is off >&2; exit 255"
    path = job.files / f"shell-of-{node.name}"
    made = path.with_suffix(".tmp")
    made.write_text(f"#!/bin/sh\n{command}\n")
    made.chmod(0o755)
    made.replace(path)  # it may be called at any time


def _cause_trouble(faults: Sequence[Fault], node: Node, job: Job, ended: threading.Event) -> None:
    """Per attempt: wait for the step, break the node, wait for the attempt's end, mend it. Unblocked by `ended`."""
    for number, fault in enumerate(faults):
        while last_step(job.run_folder) < fault.step:
            if ended.wait(_POLL_S):
                return
        getattr(node, fault.how)()
        _write_shell(job, node)
        _say(f"{node.name} ({node.address}) lost its {'power' if fault.how == 'kill' else 'link'}")
        while len(ends := Attempts.read(job).attempts) <= number or ends[number].code is None:
            if ended.wait(_POLL_S):
                return
        node.boot() if fault.how == "kill" else node.mend()
        _write_shell(job, node)
        _say(f"{node.name} is whole again")


def _say(text: str) -> None:
    print(f"areal-lite rehearse: {text}", flush=True)
