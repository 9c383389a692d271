"""A run's places on real Ray nodes: two on this machine, which pretend to have 8 GPUs each."""

import json
import subprocess
import sys
from typing import Any

import pytest
from places import SUPPORT

pytestmark = pytest.mark.loop


@pytest.fixture(scope="module")
def results() -> Any:
    """What came of several runs, in a process of their own: it has a Ray of its own."""
    command = [sys.executable, str(SUPPORT / "pretended_gpus.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_are_packed_and_engines_whole(results: Any) -> None:
    places = results["mixed"]
    nodes = {lane: node for lane, (node, _) in places.items()}
    driver = results["driver"]
    assert {nodes[f"trainer/{rank}"] for rank in range(4)} == {driver}
    assert nodes["queue"] == driver
    assert [nodes[f"rollout/{index}"] == driver for index in range(3)] == [False, False, True]
    assert nodes["verifier/0"] != nodes["verifier/1"]
    gpus = [(node, gpu) for node, text in places.values() if text for gpu in text.split(",")]
    assert len(gpus) == len(set(gpus)) == 4 + 3 * 2


def test_over_ipc_each_engine_is_on_the_gpu_of_its_rank(results: Any) -> None:
    places = results["ipc"]
    assert [places[f"rollout/{index}"] for index in range(2)] == [places[f"trainer/{index}"] for index in range(2)]
    assert len({tuple(places[f"trainer/{index}"]) for index in range(2)}) == 2


def test_an_impossible_request_ends_at_once_with_the_table(results: Any) -> None:
    message = results["impossible"]
    assert message.startswith("ConfigError: the run must fit into the cluster's GPUs, an engine on one node")
    assert " ".join(message.splitlines()[-2].split()) == "no node 12 1 x rollout of 8, 4 x trainer of 1"


def test_gpus_that_another_run_holds_are_waited_for_and_then_tabled(results: Any) -> None:
    message = results["busy"]
    begin = "StallError: GPUs did not get free within run.start_timeout_s=2 s; other runs hold them:\nnode "
    assert message.startswith(begin)
