"""The profile: what a cluster has and how it is reached, typed; a YAML file that one person writes for many runs."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from areal_lite.config.section import Section
from areal_lite.network import port_range

PORTS_PER_NODE = 300
"""Ray starts a worker per core in advance, each with a port."""


class Profile(Section):
    """A cluster: what is the same for every run on it. Each kind of cluster may have a section of its own in it."""

    model_config = ConfigDict(extra="allow")
    nodes: int = Field(1, ge=1)
    """machines of a job"""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs per node"""
    shared: str | None = None
    """folder that every node sees under this path; runs, models and plug-in files are in it"""
    network: str | None = None
    """subnet (10.0.0.0/16) or interface over which the nodes talk; null = the route to the head"""
    ports: str = "20000-29999"
    """every port of a job comes from this range, which should lie below Linux's ephemeral ports (32768)"""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    """environment variables of every process of a job; values are kept in files of mode 0600 and never printed"""
    enter: str = ""
    """shell line to run before every command, such as: source /shared/venv/bin/activate; it must succeed"""
    start_timeout_s: float = Field(300.0, gt=0)
    """seconds that all nodes may take to join"""

    @property
    def sections(self) -> Mapping[str, Any]:
        """What the file holds beside these settings: the sections of kinds, unchecked (`job.own_settings`)."""
        return self.model_extra or {}

    @property
    def port_range(self) -> range:
        """Every port of a job."""
        return port_range(self.ports)

    def _problems(self) -> Iterable[str]:
        try:
            if len(self.port_range) < (needed := 2 * PORTS_PER_NODE * self.nodes):
                yield f"ports must hold {needed} ports for nodes={self.nodes}, got {self.ports}: widen the range"
        except ValueError as error:
            yield f"ports: {error}"
