"""Checks every node of a cluster before anything is loaded: for `areal-lite doctor --cluster`, and for each run.

A probe on each node reports what it has; all probes together measure an all-reduce and a broadcast. `find_problems`
judges, and knows nothing of Ray.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.table import Table

from areal_lite.actors.calls import Calls, call_all, describe, kill
from areal_lite.actors.probe import ProbeActor, measure_collectives
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.plugins import plugin_files
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.run.places import with_network
from areal_lite.network import local_address, port_range
from areal_lite.node import NodeReport, look_at_node, wait_for_file
from areal_lite.record.checkpoints import LATE_S

_TIMEOUT_S = 60.0
"""Time-out of a connection, a round trip, a collective."""
_MIN_DISK_GIB = 5.0


@dataclass(slots=True, kw_only=True)
class ClusterReport:
    """What the probes reported; nodes by host name."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    all_reduce: float | None = None
    """MB/s over all nodes."""
    broadcast: float | None = None
    """MB/s from the first node."""
    links: dict[str, float] = field(default_factory=dict)
    """MB/s of an all-reduce of one node with each other one; measured where the one over all nodes is slow."""
    links_of: str = ""
    """That node. `nodes` are in the order of their answers."""
    failures: list[str] = field(default_factory=list)
    """Probes that failed, with their nodes."""


def check_cluster(config: Config | OfflineConfig, *, model_folder: Path | None, console: Console) -> None:
    """Check every node of the Ray cluster that this process has joined, and print a table.

    Args:
        config: Of any command, with absolute paths.
        model_folder: Must be the same everywhere; None where every node has its own.
        console: To print to.

    Raises:
        ConfigError: The cluster is not ready for the run; lists every problem.
    """
    config = with_network(config)
    model: list[str] = [] if model_folder is None else [str(model_folder)]
    shared = Path(config.run.resume or config.run.dir or "runs").expanduser().resolve()
    with console.status("looking at every node ..."):
        report = look_at_cluster(config, paths=[*model, *sorted(plugin_files(config.model_dump()))], shared=shared)
    console.print(preflight_table(report))
    environment = {name: os.environ.get(name, "") for name in config.run.env} | config.run.given_env
    problems = list(find_problems(report, min_bandwidth=config.run.min_bandwidth_mb_s, environment=environment))
    if problems:
        found = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the cluster is not ready for this run:\n{found}\nlook again: areal-lite doctor --cluster")


def look_at_cluster(config: Config | OfflineConfig, *, paths: Sequence[str], shared: Path) -> ClusterReport:
    """Probe every live node. The first answer may take `run.start_timeout_s`, each further one three minutes.

    Args:
        config: Its `run.network` settled (`with_network`).
        paths: Files and folders that must be the same everywhere.
        shared: A folder that all nodes must share: a canary is written there, and removed.
    """
    report = ClusterReport()
    with _canary(shared) as canary:
        started = probes = _start(config)
        try:
            # The first answer includes the start of the process.
            found = call_all(probes, "call", local_address, config.run.network)
            report.addresses = _ask(report, found, config.run.start_timeout_s, setting="run.start_timeout_s")
            probes = {name: probes[name] for name in report.addresses}
            _ask(report, call_all(probes, "call", wait_for_file, canary, LATE_S), 3 * _TIMEOUT_S)
            wanted = {"disk": str(shared), "environment": list(config.run.env)}
            seen = call_all(probes, "call", look_at_node, [canary, *paths], **wanted)
            report.nodes = _ask(report, seen, 3 * _TIMEOUT_S)
            if config.run.device == "cuda":
                probes = {name: probes[name] for name, node in report.nodes.items() if node.gpus}
            if len(probes) > 1:
                _measure_links(report, probes, config)
        finally:
            kill(*started.values())
    return report


@contextlib.contextmanager
def _canary(folder: Path) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".canary-{secrets.token_hex(8)}"
    path.write_text(path.name)
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def _start(config: Config | OfflineConfig) -> dict[str, Any]:
    """Start a probe on each node, by host name, and address where two nodes have the same name."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = [node["NodeManagerHostname"] for node in nodes]
    # No GPU is reserved: a node may have none, or none free yet.
    options = {"num_cpus": 0, "max_concurrency": 4, "runtime_env": {"env_vars": config.run.given_env}}

    def probe(node_id: str) -> Any:
        place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        return ray.remote(ProbeActor).options(**options, scheduling_strategy=place).remote()

    return {
        name if names.count(name) == 1 else f"{name} ({node['NodeManagerAddress']})": probe(node["NodeID"])
        for name, node in zip(names, nodes, strict=True)
    }


def _ask(report: ClusterReport, calls: Calls, timeout_s: float, *, setting: str = "") -> dict[str, Any]:
    """Return the answers, and add probes that failed or are late to the report, with the setting that gave the time."""
    for name, error in calls.answers(timeout_s):
        if error is not None:
            report.failures.append(f"{name}: {describe(error)}")
    limit, fix = (f"{setting}={timeout_s:g}", ": raise it where nodes are slow") if setting else (f"{timeout_s:g}", "")
    report.failures += [f"{name} gave no answer within {limit} s{fix}" for name in calls.pending]
    return calls.values


def _measure_links(report: ClusterReport, probes: Mapping[str, Any], config: Config | OfflineConfig) -> None:
    """Measure all nodes together; where that is slow, also the first one with each other one."""
    group = port_range(config.run.ports), config.run.device
    report.all_reduce, report.broadcast = _measure_collectives(report, probes, *group)
    if report.all_reduce is not None and report.all_reduce < config.run.min_bandwidth_mb_s:
        report.links_of, *others = probes
        for other in others:
            rate, _ = _measure_collectives(report, {name: probes[name] for name in (report.links_of, other)}, *group)
            report.links[other] = rate or 0.0


def _measure_collectives(
    report: ClusterReport, probes: Mapping[str, Any], ports: range, device: str
) -> tuple[float | None, float | None]:
    """Return the rates (MB/s) of an all-reduce and of a broadcast over these nodes; None where a node failed."""
    first = next(iter(probes))
    opening = probes[first].open_store.remote(report.addresses[first], ports)
    if not (stores := _ask(report, Calls({first: opening}), _TIMEOUT_S)):
        return None, None
    group = len(probes), device
    ranks = {
        name: probe.call.remote(measure_collectives, stores[first], rank, *group, timeout_s=_TIMEOUT_S)
        for rank, (name, probe) in enumerate(probes.items())
    }
    rates = _ask(report, Calls(ranks), 3 * _TIMEOUT_S)
    if len(rates) < len(probes):
        return None, None
    return min(rate[0] for rate in rates.values()), min(rate[1] for rate in rates.values())


def find_problems(report: ClusterReport, *, min_bandwidth: float, environment: Mapping[str, str]) -> Iterable[str]:
    """Yield each problem of the cluster with its fix.

    Args:
        report: Of all nodes.
        min_bandwidth: MB/s that each collective must reach; 0 = any.
        environment: Variables with the values that every node must have.
    """
    yield from report.failures
    for kind, to_do in (("versions", "install the same on every node"), ("contents", "give every node the same files")):
        of_node = {name: getattr(node, kind) for name, node in report.nodes.items()}
        for key in sorted({key for found in of_node.values() for key in found}):
            without = [name for name in of_node if key == "driver" and not report.nodes[name].gpus]
            values = {name: found.get(key, "missing") for name, found in of_node.items() if name not in without}
            if Path(key).name.startswith(".canary-"):
                if alone := [name for name, value in values.items() if value == "missing"]:
                    yield (
                        f"{Path(key).parent} must be a folder that all nodes share, got one in which "
                        f"{', '.join(alone)} cannot see the controller's file within {LATE_S:g} s: set run.dir to a "
                        "shared folder"
                    )
            elif len(set(values.values())) > 1:
                yield f"{key} must be the same everywhere, got {_grouped(values)}: {to_do}"
    for name, node in report.nodes.items():
        if node.disk_gib < _MIN_DISK_GIB:
            yield f"{name} has {node.disk_gib:.1f} GiB of free disk for the run, wanted {_MIN_DISK_GIB:g}: free some"
        if lost := [key for key, value in environment.items() if node.environment.get(key) != value]:
            yield f"run.env has not arrived on {name}: {', '.join(lost)}: set it in the profile, or where Ray starts"
    for what, rate in (("an all-reduce over all nodes", report.all_reduce), ("a broadcast", report.broadcast)):
        if rate is not None and rate < min_bandwidth:
            yield (
                f"{what} must reach run.min_bandwidth_mb_s={min_bandwidth:g}, got {rate:.1f} MB/s"
                f"{_slow_link(report, min_bandwidth)}: choose the fast interface with run.network, or lower the setting"
            )


def _slow_link(report: ClusterReport, min_bandwidth: float) -> str:
    """Name the node at the end of the slow link: the one that was measured where it is slow with all others."""
    if not (slow := {name: f"{name} ({rate:.1f})" for name, rate in report.links.items() if rate < min_bandwidth}):
        return ""
    if len(slow) == len(report.links) > 1:
        return f"; {report.links_of} is slow with every other node"
    return f"; {report.links_of} is slow with {', '.join(slow.values())}" + (
        ", not with others" if report.links.keys() - slow else ""
    )


def _grouped(values: Mapping[str, str]) -> str:
    groups = {value: [name for name, one in values.items() if one == value] for value in dict.fromkeys(values.values())}
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())


def preflight_table(report: ClusterReport) -> Table:
    """Draw a row for each node."""
    table = Table("node", "address", "cores", "memory, free disk", "GPUs", box=None)
    for name, node in report.nodes.items():
        table.add_row(
            name,
            report.addresses[name],
            str(node.cores),
            f"{node.memory_gib:.0f}, {node.disk_gib:.0f} GiB",
            f"{len(node.gpus)} x {node.gpus[0]}" if node.gpus else "none",
        )
    versions = next((node.versions for node in report.nodes.values()), {})
    lines = [", ".join(f"{name} {version}" for name, version in versions.items())]
    if report.all_reduce is not None:
        lines.append(f"all-reduce {report.all_reduce:,.0f} MB/s, broadcast {report.broadcast:,.0f} MB/s")
    table.caption, table.caption_justify = "\n".join(lines), "left"
    return table
