"""What preflight finds on the nodes of a cluster, and how it judges. On real nodes: `test_preflight_nodes.py`."""

import dataclasses
from pathlib import Path

import pytest
from node_reports import make_node_report

from areal_lite import node
from areal_lite.launch.run.preflight import ClusterReport, find_problems
from areal_lite.node import content_hash, look_at_node, memory_bytes

CANARY = "/shared/runs/.canary-1"
ALIKE = make_node_report(
    versions={"torch": "2.13.0", "code": "abc"},
    contents={CANARY: "1", "/models/qwen": "2"},
    environment={"HF_HOME": "/hf"},
)


def a_cluster(**changes) -> ClusterReport:
    """Two nodes that are alike, but for what is said of the second."""
    other = dataclasses.replace(ALIKE, host="b", **changes)
    return ClusterReport(
        nodes={"a": ALIKE, "b": other}, addresses={"a": "10.0.0.1", "b": "10.0.0.2"}, all_reduce=500.0, broadcast=600.0
    )


def problems(report: ClusterReport, *, min_bandwidth: float = 100.0) -> list[str]:
    return list(find_problems(report, min_bandwidth=min_bandwidth, environment={"HF_HOME": "/hf"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"torch": "2.12.0", "code": "abc"}}, ["torch", "2.12.0 on b", "2.13.0 on a", "install"]),
        ({"versions": {"torch": "2.13.0", "code": "xyz"}}, ["code", "xyz on b"]),
        ({"versions": {"torch": "2.13.0"}}, ["code", "missing on b"]),
        ({"versions": {"torch": "2.13.0", "code": "abc", "vllm": "0.32.0"}}, ["vllm", "missing on a"]),
        ({"contents": {CANARY: "missing", "/models/qwen": "2"}}, ["/shared/runs", "share", "b cannot see", "run.dir"]),
        ({"contents": {CANARY: "1", "/models/qwen": "3"}}, ["/models/qwen", "3 on b", "same files"]),
        ({"disk_gib": 1.0}, ["b has 1.0 GiB", "free disk"]),
        ({"environment": {"HF_HOME": ""}}, ["run.env", "b", "HF_HOME"]),
    ],
)
def test_what_differs_is_one_problem_that_names_node_and_remedy(changes, words) -> None:
    """Seen failing with what the first node has alone compared, and with what is missing passed over."""
    (problem,) = problems(a_cluster(**changes))
    assert all(word in problem for word in words), problem


def test_a_node_without_gpus_needs_no_driver() -> None:
    report = a_cluster(versions={"torch": "2.13.0", "code": "abc", "driver": "580"}, gpus=("H200, 141 GiB",))
    assert problems(report) == []
    report.nodes["a"] = dataclasses.replace(ALIKE, gpus=("H200, 141 GiB",))
    (problem,) = problems(report)
    assert "driver must be the same" in problem


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ({}, "got 4.0 MB/s: choose"),
        ({"a": 4.0, "c": 300.0}, "got 4.0 MB/s; b is slow with a (4.0), not with others: choose"),
        ({"a": 4.0}, "got 4.0 MB/s; b is slow with a (4.0): choose"),
        ({"a": 4.0, "c": 3.0}, "got 4.0 MB/s; b is slow with every other node: choose"),
    ],
)
def test_a_collective_below_its_limit_names_the_node_at_the_slow_link(links: dict[str, float], words: str) -> None:
    """Seen failing with a rate over all nodes that names none of them, and with the node that answered first."""
    report = a_cluster()
    report.all_reduce, report.links, report.links_of = 4.0, links, "b"
    (collective,) = problems(report)
    assert "all-reduce" in collective
    assert words in collective
    assert problems(report, min_bandwidth=0.0) == []


def test_content_is_told_apart_by_names_sizes_and_both_ends(tmp_path) -> None:
    """Seen failing with the beginning hashed alone."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(3 * 2**20))
    assert content_hash(one) == content_hash(other)
    with (other / "weights").open("r+b") as stream:
        stream.seek(3 * 2**20 - 1)
        stream.write(b"!")
    assert content_hash(one) != content_hash(other)
    (other / "weights").write_bytes(bytes(3 * 2**20))
    (other / "weights").rename(other / "renamed")
    assert content_hash(one) != content_hash(other)
    assert content_hash(tmp_path / "none") == "missing"


def test_this_node_says_what_it_has(tmp_path, monkeypatch) -> None:
    """Of its memory what a control group leaves: seen failing with all that the machine has."""
    monkeypatch.setattr(node, "memory_bytes", lambda: 3 << 30)
    monkeypatch.setenv("TOLD", "yes")
    report = look_at_node([str(tmp_path)], disk=str(tmp_path / "not" / "yet"), environment=["TOLD", "UNTOLD"])
    assert {"python", "areal-lite", "torch", "ray", "code"} <= report.versions.keys()
    assert report.disk_gib > 0
    assert report.memory_gib == 3
    assert report.environment == {"TOLD": "yes", "UNTOLD": ""}
    assert report.contents[str(tmp_path)] != "missing"


def test_a_control_group_leaves_less_memory_than_the_machine_has(tmp_path: Path) -> None:
    """Of either version, above this process too. Seen failing with v1 passed over, and with the process's own alone."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "memory" / "c").mkdir(parents=True)
    groups = tmp_path / "groups"
    groups.write_text("0::/a/b\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    assert memory_bytes(groups, tmp_path) == 1000
    groups.write_text("4:cpu,memory:/c/not/here\n3:cpu:/a\n")
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("900\n")
    assert memory_bytes(groups, tmp_path) == 900
