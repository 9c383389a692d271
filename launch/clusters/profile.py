"""The profile: what a cluster has and how it is reached, typed; a YAML file that one person writes for many runs."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from areal_lite.config.reading import parse_section, read_yaml
from areal_lite.config.section import Section
from areal_lite.errors import ConfigError
from areal_lite.network import port_range

PORTS_PER_NODE = 300
"""Ray starts a worker per core in advance, each with a port."""


class RayProfile(Section):
    """A Ray cluster that runs already (kind ray)."""

    address: str | None = None
    """host:port of its head; the command then runs on this machine, which is one of its nodes"""
    jobs: str | None = None
    """http://host:8265 in place of address: a Ray job, which ships the recipe and plug-in files"""


class SshProfile(Section):
    """Machines with a name (kind ssh)."""

    hosts: list[str] = []
    """the first is the head; as many as nodes"""
    shell: str = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 {host}"
    """command in front of a shell command line that is meant for a host; it must notice by itself that a link is cut"""


class SlurmProfile(Section):
    """A batch system (kind slurm)."""

    partition: str | None = None
    """null = the cluster's default"""
    account: str | None = None
    """null = yours"""
    time: str | None = None
    """time limit, such as 4:00:00; null = the partition's"""
    signal_s: int = Field(300, ge=10)
    """seconds before the time limit at which the run is asked to save and stop"""
    requeue: bool = True
    """go on in another job after the time limit, or when a node failed"""
    options: list[str] = []
    """further options of sbatch, such as --constraint=h200"""


class KubernetesProfile(Section):
    """A Kubernetes cluster with the KubeRay operator (kind kubernetes)."""

    image: str | None = None
    """image with areal-lite, see docker/"""
    namespace: str = "default"
    """namespace of the job"""
    context: str | None = None
    """context of kubectl; null = the present one"""
    claim: str | None = None
    """persistent volume claim that is mounted as shared on every node"""
    claims: dict[str, str] = {}
    """further claims, each with its folder, such as {models: /models}"""
    cpus: int = Field(8, ge=1)
    """cores of a node"""
    memory: str = "64Gi"
    """memory of a node"""
    shared_memory: str = "16Gi"
    """/dev/shm of a node, out of its memory"""
    gpu: str = "nvidia.com/gpu"
    """resource name of a GPU"""
    secrets: list[str] = []
    """secrets whose keys become environment variables"""
    service_account: str | None = None
    """of the pods; null = the namespace's default"""


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
    ray: RayProfile = RayProfile()
    ssh: SshProfile = SshProfile()
    slurm: SlurmProfile = SlurmProfile()
    kubernetes: KubernetesProfile = KubernetesProfile()

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
        if self.ssh.hosts and len(self.ssh.hosts) != self.nodes:
            yield (
                f"ssh.hosts must name nodes={self.nodes} hosts, got {len(self.ssh.hosts)} "
                f"({', '.join(self.ssh.hosts)}): add hosts or correct nodes"
            )
        if self.ray.address and self.ray.jobs:
            yield (
                f"ray takes an address or a jobs URL, got {self.ray.address} and {self.ray.jobs}: leave out address to "
                "ship the recipe as a Ray job"
            )


def load_profile(path: str | None) -> Profile:
    """Read a profile; without a path, one machine. A `ConfigError` where it is missing, unreadable or impossible."""
    if path is None:
        return Profile()
    if not Path(path).is_file():
        raise ConfigError(
            f"a profile is a YAML file, got {path}, which is not there: areal-lite launch --new-profile KIND > {path}"
        )
    return parse_section(read_yaml(Path(path), holding="a profile (nodes, gpus_per_node, ...)"), Profile)
