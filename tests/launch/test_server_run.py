"""A run whose engine is a vLLM server that somebody else runs, over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loop_builders import PARITY, check_books, loop_config, run_loop

from areal_lite.config.recipe import Config
from areal_lite.record.run_folder import RunFolder
from areal_lite.rollout.engine_settings import server_command

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("ray_cluster")]

STEPS = 8


class Server:
    """`vllm serve` as the documented command starts it."""

    def __init__(self, config: Config) -> None:
        self._command = server_command(config, config.model.path, config.rollout.servers[0])
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        self._environment = os.environ | own | config.run.given_env
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["bash", "-c", self._command], env=self._environment, start_new_session=True, stdout=sys.stderr
        )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def killed_and_started_again(server: Server, folder: RunFolder) -> Iterator[None]:
    """Kill the server after two steps, and start it again once the run has noticed."""

    def wait_for(file: str, kind: str, count: int) -> None:
        while not ended.is_set() and sum(kind in row for row in map(str, folder.read(file))) < count:
            time.sleep(0.2)

    def work() -> None:
        wait_for("metrics.jsonl", "step", 2)
        server.kill()
        wait_for("events.jsonl", "'kind': 'lost'", 1)
        server.start()

    ended, thread = threading.Event(), threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        server.kill()


def test_a_server_that_dies_and_comes_back_trains_to_the_end_within_the_bound(loop_folder: Path) -> None:
    """Its tokens have the versions that the run stamped; its death is named, and its initial weights are replaced.

    Seen failing with stamps that stop at version 2.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    name = loop_folder / "served"
    config = loop_config(
        loop_folder,
        run={
            "steps": STEPS,
            "dir": str(name),
            "log_samples": 4,
            "checkpoint_every": 0,
            "env": {"SERVER_KEY": "secret"},
        },
        rollout={"servers": [address], "server_key_env": "SERVER_KEY", "kv_cache_mb": 256},
        queue={"max_staleness": 1},
    )
    with killed_and_started_again(Server(config), RunFolder(name)):
        summary, folder = run_loop(config)
    rows, events = folder.read("metrics.jsonl"), folder.read("events.jsonl")
    check_books(folder, total=STEPS)
    assert summary["age_max_trained"] <= 1
    parity = [row["parity_max_abs_logprob_diff"] for row in rows if "parity_max_abs_logprob_diff" in row]
    assert len(parity) >= STEPS - 2  # a step whose server died has none
    assert max(parity) < PARITY
    (lost,) = [event["reason"] for event in events if event["kind"] == "lost"]
    assert f"the vLLM server at {address} " in lost
    made = [
        (row["step"], *span)
        for row in folder.read("samples.jsonl")
        for sample in row["samples"]
        for span in sample["spans"]
    ]
    assert all(version < step for step, version, _, _ in made)
    for row in rows:  # a sample that two hand-overs interrupted may begin with tokens over the bound
        old = [end - start for step, version, start, end in made if step == row["step"] and version < step - 2]
        assert sum(old) == row["tokens_masked_stale"]
    assert {version for _, version, _, _ in made} >= {0, 1, STEPS - 2}
