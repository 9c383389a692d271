"""The profile: what a cluster has and how it is reached, typed; a YAML file that one person writes for many runs."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, model_validator

from areal_lite.config.section import Section
from areal_lite.network import port_range

PORTS_PER_NODE = 300
"""Ray starts a worker per core in advance, each with a port."""


class Profile(Section):
    """A cluster: what is the same for every run on it."""

    nodes: int = Field(1, ge=1)
    """machines of a job"""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each"""
    shared: str | None = None
    """folder that every node sees under this path; runs, models and plug-in files are in it"""
    network: str | None = None
    """subnet (10.0.0.0/16) or interface that the nodes speak over; null = the route to the head"""
    ports: str = "20000-29999"
    """every port of a job comes from here, below those that Linux gives away (32768)"""
    env: dict[str, str] = {}
    """environment of every process of a job"""
    enter: str = ""
    """shell line before every command, such as: source /shared/venv/bin/activate"""
    container: str = ""
    """command in front of every command, such as: apptainer exec --nv /shared/areal-lite.sif"""
    price_per_gpu_hour: float = Field(0.0, ge=0)
    """for the cost in summary.json; 0 = unknown"""
    start_timeout_s: float = Field(300.0, gt=0)
    """seconds that all nodes may take to join"""
    own: dict[str, Any] = {}
    """settings of one kind of cluster, by its name; in a file they stand as a section of that name"""

    @model_validator(mode="before")
    @classmethod
    def _gather_sections(cls, raw: Any) -> Any:
        """Move the sections of kinds into `own`: `find_kind(...).settings` checks one."""
        if not isinstance(raw, Mapping):
            return raw
        sections = {
            name: value
            for name, value in raw.items()
            if name not in cls.model_fields and (value is None or isinstance(value, Mapping))
        }
        others = {name: value for name, value in raw.items() if name not in sections}
        return {**others, "own": {**others.get("own", {}), **sections}} if sections else others

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
