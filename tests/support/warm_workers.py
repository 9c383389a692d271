"""The tests' own Ray, whose workers are copies of a process that has imported torch, transformers and vLLM.

Imports are half of what a short run costs; the engine cores of these workers are copies too. So are the workers of
commands that tests type with `copied`, also on nodes of their own; other typed runs start as users' do. Ray runs this
file in place of Python (`py_executable` of its runtime environments) to start a worker, which waits for its copy: each
ends with the other. A worker whose variables differ from those that the imports saw starts without a copy. Copies share
the seed of Python's hashes: what depends on it, only other runs can show.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ADDRESS = "WARM_WORKERS"
"""The variable with the abstract address of the process that is copied."""
OF_ACTORS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Variables that most runs give to their actors."""
FIRST_JOB = "01000000"
"""The first of every Ray."""
NOT_SEEN = (
    "RAY_", "NO_PROXY", "no_proxy", "PATH", "TERM", "PWD", "OLDPWD", "SHLVL", "_", "AREAL_LITE_", "PYTEST_", "PYTHON",
    "SPT_NOENV", "MALLOC_", "ONEDNN_", "SLURM", "HF_HUB_OFFLINE", "VLLM_USE_FLASHINFER_SAMPLER",
)  # fmt: skip
"""Variables that differ between workers, and at which no import looks but Ray's (see `become`), or with no effect here:
`PYTHONPATH` names this code, and no test asks for a model of the hub."""
MALLOPT = {"MALLOC_ARENA_MAX": -8, "MALLOC_MMAP_THRESHOLD_": -3}
"""glibc reads these when a process starts, which a copy does not: numbers of `mallopt`."""
_START_S, _ASKED_S, _LOOK_S, _IDLE_S = 120, 10, 0.5, 120
serving: set[int] = set()
"""Processes that are copied."""
IMPORTED = (
    "areal_lite.actors.rollout", "areal_lite.train.trainer", "areal_lite.train.offline", "areal_lite.weights.publisher",
)  # fmt: skip


class ForkedProcess(ForkProcess):
    """A copy of this process in place of one that vLLM spawns, which would import vLLM again.

    What another thread holds locked stays locked in the copy. The others are Ray's, and an engine core uses no Ray.
    """

    def run(self) -> None:
        import torch._dynamo.config

        from areal_lite.rollout.engine_process import set_up_engine_process

        torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # torch reads it when imported
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the list's own, which is closed by now
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.close(number)  # the other end must see when the parent is gone
        Path("/proc/self/comm").write_text("VLLM::EngineCor")  # as the spawned one's, which a test looks for
        set_up_engine_process()  # vLLM's plug-ins count as loaded
        super().run()


def copy_engine_cores() -> Any:
    """Return a patch with which this process starts engine cores as copies of itself."""
    from unittest import mock

    importlib.import_module("vllm.v1.engine.core")
    return mock.patch("vllm.v1.engine.utils.get_mp_context", return_value=SimpleNamespace(Process=ForkedProcess))


@contextlib.contextmanager
def warm_process(folder: Path) -> Iterator[Mapping[str, str]]:
    """The process that is copied, which ends with the block; yields the variables of a Ray that uses it."""
    address = f"warm-workers-{os.getpid()}"
    job = {"runtime_env": {"py_executable": f"{sys.executable} {__file__}"}}
    variables = {ADDRESS: address, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env=os.environ | OF_ACTORS | {ADDRESS: address}, start_new_session=True,
        )  # fmt: skip
    with process:
        try:
            said = select.select([process.stdout], [], [], _START_S)[0] and os.read(process.stdout.fileno(), 5)
            assert said, f"nothing to copy within {_START_S} s: {(folder / 'log').read_text()}"
            serving.add(process.pid)
            yield variables
        finally:
            serving.discard(process.pid)
            process.kill()


@contextlib.contextmanager
def warm_ray(variables: Mapping[str, str]) -> Iterator[None]:
    """A private Ray with the variables of `warm_process`."""
    import pytest
    import ray

    from areal_lite.launch.run.ray_session import OWN_RAY

    with pytest.MonkeyPatch.context() as patches:
        for name, value in {**variables, **OWN_RAY}.items():
            patches.setenv(name, value)
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        patches.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")  # commands that tests type start Rays of their own
        try:
            yield
        finally:
            ray.shutdown()


def seen(variables: dict[str, str]) -> dict[str, str]:
    """Return those that imports may look at."""
    return {name: value for name, value in variables.items() if not name.startswith(NOT_SEEN)}


def serve(idle_s: float | None) -> None:
    """Import everything, and be copied until standard input ends, or nobody has asked for so long."""
    server = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # another is there: two workers have started one each
        server.bind(f"\0{os.environ[ADDRESS]}")
        server.listen(64)
    if not server.getsockname():
        return
    before = seen(dict(os.environ))
    # Ray reads these when it is imported: the worker's job, and whose end is its end.
    os.environ |= {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    said = os.dup(1)
    os.dup2(2, 1)
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    copy_engine_cores().start()
    gc.enable()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "threads, which a copy lacks"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leave no zombies
    os.write(said, b"ready")
    os.close(said)
    ends = [0] if idle_s is None else []  # standard input ends with the tests
    while server in select.select([server, *ends], [], [], idle_s)[0]:
        files: list[int] = []
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError, ValueError):  # who asks has ended
            connection.settimeout(_ASKED_S)
            text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            while more := connection.recv(1 << 16):
                text += more
            asked = json.loads(text)
            if differ := sorted({name for name, _ in seen(asked["variables"]).items() ^ before.items()}):
                print("not copied, as these differ:", *differ, file=sys.stderr, flush=True)
                connection.send(b"no")
            elif os.fork() == 0:
                kept = connection.dup()
                break
        for file in files:
            os.close(file)
    else:
        return
    server.close()
    kept.send(b"ok")

    def watch() -> None:
        ends = select.poll()
        ends.register(kept, 0)  # a hang-up alone: who asked has ended its sentence, and lives on
        ends.poll()
        os._exit(1)

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for that thread, too: `become` has the worker's
    threading.Thread(target=watch, name="end-with-worker", daemon=True).start()
    become(files, **asked)


def become(files: list[int], *, words: list[str], variables: dict[str, str], folder: str, blocked: list[int]) -> None:
    """Be the worker that was asked for; who asked sees the connection end with it."""
    os.setpgid(0, 0)  # Ray kills all of a worker's group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    import ctypes

    import numpy
    from ray._raylet import AuthenticationTokenLoader, Config

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(variables)  # vLLM's import has set some more
    Config.initialize("")  # Ray has read its own when it was imported
    AuthenticationTokenLoader.instance().reset_cache()
    for name in MALLOPT.keys() & variables.keys():
        ctypes.CDLL(None).mallopt(MALLOPT[name], int(variables[name]))
    os.chdir(folder)
    numpy.random.seed()
    Path("/proc/self/oom_score_adj").write_text("1000")  # as Ray's, of which the kernel ends the workers first
    sys.argv, sys.path[0] = words, os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def connect(connection: socket.socket) -> None:
    """Reach the process that is copied. A node has a network of its own: its first worker starts one there, which ends
    with the node, or once it is idle.
    """
    address = f"\0{os.environ.get(ADDRESS)}"
    if connection.connect_ex(address):
        command = [sys.executable, __file__, "--serve", str(_IDLE_S)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True)
        until = time.monotonic() + _START_S
        while connection.connect_ex(address) and time.monotonic() < until:
            time.sleep(0.05)


def start(arguments: list[str]) -> None:
    """Have a worker copied, and wait for its end or the raylet's, or become it."""
    words, raylet = [sys.executable, *arguments], os.getppid()
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    asked: dict[str, Any] = {"variables": dict(os.environ), "folder": os.getcwd(), "blocked": blocked}
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):  # where it has ended: as ever
        if os.environ.get("RAY_JOB_ID") == FIRST_JOB:
            connect(connection)
            text = json.dumps({"words": words[1:], **asked}).encode()
            sent = socket.send_fds(connection, [text], [0, 1, 2])
            connection.sendall(text[sent:])
            connection.shutdown(socket.SHUT_WR)
            if connection.recv(2) == b"ok":
                words = []
                while os.getppid() == raylet and not select.select([connection], [], [], _LOOK_S)[0]:
                    pass
    if words:
        os.execv(words[0], words)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(idle_s=float(sys.argv[2]) if sys.argv[2:] else None)
    else:
        start(sys.argv[1:])
