"""When a rehearsal breaks its second node, and when that is whole again; the node is faked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_lite.launch.clusters.attempts import Attempt, Attempts
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.rehearse.nodes import Fault, _cause_trouble, settings_of


class FakeNode:
    """Notes what was done to it."""

    name, address, is_up = "node-2", "10.77.0.2", True

    def __init__(self) -> None:
        self.events = list[str]()

    def command(self, argv: list[str]) -> list[str]:
        return ["enter", *argv]

    def __getattr__(self, how: str) -> Callable[[], None]:
        return lambda: self.events.append(how)


def soon(condition: Callable[[], Any]) -> bool:
    until = time.monotonic() + 20
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return bool(met)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(name="j", kind="ssh", folder=str(tmp_path), words=["train", "arith_cpu"])
    made.files.mkdir(parents=True)
    (tmp_path / "runs" / "j").mkdir()
    return made


@pytest.fixture
def trouble(job: Job) -> Iterator[FakeNode]:
    node, ended = FakeNode(), threading.Event()
    faults = [Fault("cut", 2), Fault("kill", 4)]
    thread = threading.Thread(target=_cause_trouble, args=(faults, node, job, ended))
    thread.start()
    yield node
    ended.set()
    thread.join(20)
    assert not thread.is_alive()


def trained(job: Job, step: int) -> None:
    assert job.run_folder is not None
    with (job.run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def test_each_fault_waits_for_its_step_and_ends_with_its_attempt(job: Job, trouble: FakeNode) -> None:
    """Seen failing with a second fault that ends with the first attempt."""
    trained(job, 1)
    time.sleep(0.5)
    assert trouble.events == []
    trained(job, 2)
    assert soon(lambda: trouble.events == ["cut"])
    failed = Attempt(began=0, ended=1, code=1)
    Attempts([failed]).save(job)
    assert soon(lambda: trouble.events == ["cut", "mend"])
    Attempts([failed, Attempt(began=2)]).save(job)
    trained(job, 4)
    assert soon(lambda: trouble.events == ["cut", "mend", "kill"])
    time.sleep(0.5)
    assert trouble.events[-1] == "kill"
    Attempts([failed, failed]).save(job)
    assert soon(lambda: trouble.events[-1] == "boot")
    assert soon(lambda: (job.files / "shell-of-node-2").read_text() == '#!/bin/sh\nexec enter "$@"\n')


@pytest.mark.parametrize(("num_nodes", "ranks", "engines"), [(2, 1, 1), (3, 2, 1), (5, 2, 3)])
def test_every_node_gets_something(num_nodes: int, ranks: int, engines: int) -> None:
    assert settings_of(num_nodes)[:2] == [f"trainer.ranks={ranks}", f"rollout.workers={engines}"]
