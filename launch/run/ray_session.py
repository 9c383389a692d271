"""The Ray of a run: the cluster that RAY_ADDRESS names, or a private one that ends with the run.

Nothing in this process stays changed: variables and signal handlers are as before once Ray has started, and no class of
Ray's is patched.
"""

import atexit
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.run.signals import LEAVING, notices_held_back, undisturbed
from areal_lite.network import listens
from areal_lite.node import check_memory

_RAY = str(Path(ray.__file__).parent)
_PROBE_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 3.0
"""How long Ray may take to disconnect."""
OWN_RAY = {"RAY_prestart_worker_first_driver": "0", "RAY_task_events_report_interval_ms": "0"}
"""Variables of a Ray that we start. Actors have processes of their own: those that Ray starts in advance, one for each
core, would never be used. And without a dashboard nobody sees the record of calls, for which Ray's head takes 3.4 KB a
call, up to 100,000 calls."""
SLOW = "The current node timed out during startup"
"""What Ray says where its agents take more than 15 s to start, or a node more than 30: it lets nobody change either."""
MOST_STARTS = 3


def joins_a_cluster() -> bool:
    """Whether a run may use other machines than this one."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_session() -> Iterator[None]:
    """Join the Ray cluster that RAY_ADDRESS names, or start a private one; one joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    check_memory()
    try:
        with notices_held_back(), _variables_and_handlers_kept():
            os.environ.update(OWN_RAY)
            # Without an address Ray would join whatever cluster this machine happens to run.
            _join(os.environ.get("RAY_ADDRESS") or "local")
        _ignore_messages()
        with _lost_calls_ignored():
            yield
    finally:
        with undisturbed():  # a second Ctrl-C must not leave half of Ray's processes behind
            _leave()


@contextlib.contextmanager
def _variables_and_handlers_kept() -> Iterator[None]:
    """Restore environment variables and the SIGTERM handler: Ray's own would end this process with code 15."""
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _join(address: str) -> None:
    """Start a private Ray (`local`), or join one.

    Raises:
        ConfigError: It refuses this machine, or nothing answers.
        StallError: It does not start in time.
    """
    if address != "local":
        # The head of a cluster asks for a token wherever an earlier start left one; joining sends none.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        as_grpc = os.environ.get("RAY_USE_TLS") != "1"
        if address != "auto" and not listens(address, timeout_s=_PROBE_TIMEOUT_S, as_grpc=as_grpc):
            raise ConfigError(
                f"Ray was not joined: expected a Ray cluster at {address} (RAY_ADDRESS), got no answer, or another "
                "service. Fix: give its head's host:port (6379 by default), or start Ray there and here; unset "
                "RAY_ADDRESS to run on this machine alone"
            )
    # Ray starts a process with a shell command, which splits a path at its spaces.
    env = {"py_executable": shlex.quote(sys.executable)} if " " in sys.executable else {}
    for start in range(MOST_STARTS):
        before = psutil.Process().children()
        try:
            ray.init(
                address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=env
            )
            return
        except SystemExit as stop:  # of Ray's handler of SIGTERM; another thread may take a signal blocked here
            raise KeyboardInterrupt from stop
        except (ray.exceptions.AuthenticationError, ConnectionError) as error:
            raise ConfigError(
                f"Ray was not joined: expected {address} to accept this machine, got: {error}. Fix: where it asks for "
                "a token, copy the head's ~/.ray/auth_token to every node, or start all of Ray, and this command, with "
                "RAY_AUTH_MODE=disabled"
            ) from error
        except Exception as error:  # Ray has no class for it
            if SLOW not in str(error):
                raise
            _end_failed_start(before)
            if start == MOST_STARTS - 1:
                raise StallError(
                    f"Ray did not start within 30 s, {MOST_STARTS} times: the machine is overloaded, or too little "
                    "memory or disk is left. Fix: try again when it is less busy; `areal-lite doctor` checks this "
                    "machine"
                ) from error
            print("areal-lite: this machine is too busy, Ray was not ready within 30 s; retrying", file=sys.stderr)


def _end_failed_start(before: list[psutil.Process]) -> None:
    """Kill the processes of a Ray that did not start, of which Ray keeps no record; those of `before` are not its."""
    tree = list[psutil.Process]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child not in before and any(_RAY in word for word in child.cmdline()):
                tree += [child, *child.children(recursive=True)]
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=_LEAVE_TIMEOUT_S)


def _ignore_messages() -> None:
    """Stop the thread that prints Ray's messages: half a page for each lost process, which the run names in a line."""
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()  # `ray.shutdown` clears it, so that the next `ray.init` prints as ever
    worker.gcs_error_subscriber.close()


@contextlib.contextmanager
def _lost_calls_ignored() -> Iterator[None]:
    """Have Ray print no traceback of a call that failed and is not asked about, such as those of a lost worker."""
    name = "RAY_IGNORE_UNHANDLED_ERRORS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ |= {name: before} if before is not None else {}


def _leave() -> None:
    """Disconnect from Ray; kill what was started here, and all below it.

    Ray waits forever for a raylet that hangs. One of our own is killed first, with all below it; after that Ray needs a
    second. The head lives until then, as Ray would wait 5 s for it.
    """
    node = ray._private.worker._global_node
    started = node.all_processes if node else {}
    processes = [one.process for kind in started.values() for one in kind]
    tree = list[psutil.Process]()
    for process in processes:
        process.terminate = process.kill  # Ray's own shutdown sends SIGTERM, which its processes do not get here
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += psutil.Process(process.pid).children(recursive=True)
    for one in started.get("raylet", ()):
        one.process.kill()
    for child in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    leaving = threading.Thread(target=ray.shutdown, name=LEAVING, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_TIMEOUT_S)
    for process in processes:
        process.kill()
    if processes:
        leaving.join(_LEAVE_TIMEOUT_S)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait as well
