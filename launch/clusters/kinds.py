"""Kinds of cluster: what each can do, and where it is found. A kind is one small file with one class."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, Status

KINDS = {
    "local": "supervised:Local",
    "ray": "ray_cluster:RayCluster",
    "ssh": "ssh:Ssh",
    "slurm": "slurm:Slurm",
    "kubernetes": "kubernetes:Kubernetes",
}
"""File and class of each, in this folder."""


class Kind(Protocol):
    """What a kind of cluster is made of. The job itself calls `nodes`, on its head, `areal-lite launch` all others."""

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the text of each file that the cluster is given, by name. Pure: a snapshot of it is a test."""

    def check(self, job: Job) -> Sequence[str]:
        """Return a sentence per problem that the kind's own tool or schema finds in them; no cluster needed."""

    def submit(self, job: Job) -> str:
        """Start the job and return what the cluster calls it, at once."""

    def status(self, job: Job) -> Status:
        """Say where it stands."""

    def logs(self, job: Job) -> str:
        """Return what the command and its attempts have said so far."""
        return job.log.read_text(errors="replace") if job.log.is_file() else ""

    def stop(self, job: Job) -> None:
        """Ask it to save and to end on every node; returns at once."""

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return the words in front of a shell command for each node, the head's first.

        Empty when somebody else forms the Ray cluster: the run itself, or whoever has it.
        """
        return {}


def find_kind(name: str) -> Kind:
    """Return a kind by its name; a `ConfigError` where there is none of that name."""
    if name not in KINDS:
        raise ConfigError(f"a kind of cluster is one of {', '.join(KINDS)}, got {name!r}{suggestion(name, KINDS)}")
    file, _, kind = KINDS[name].partition(":")
    return cast(Kind, getattr(import_module(f"areal_lite.launch.clusters.{file}"), kind)())
