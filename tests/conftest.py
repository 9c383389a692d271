"""One thread for torch, and one Ray for all integration tests."""

import contextlib
import functools
import gc
import itertools
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

# Read when torch is imported, here and in every process that a test starts. Two threads on these tiny matrices, beside
# other processes, spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers 15 less: beside others that want all of the machine they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # threads that tests abandon warn of their stores minutes later
# A job in the background of a script (`make test &`) is started with Ctrl-C ignored, and would pass that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(10_000)  # torch, transformers and vLLM are imported in less time


# A busy machine is no failure: no example has to be quick.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


LONGEST = (
    "alone", "nodes", "test_faults", "slurm", "test_smollm2", "test_bench_loop", "test_loop", "test_server_run",
    "gpu_check", "test_drilled_run", "test_nccl_run", "test_rlhf", "test_attempts", "test_mesh", "_ranks",
    "test_lora", "test_memory", "test_checkpoint", "_transport",
)  # fmt: skip
"""Begun first, so that all lanes end together: files that take long, and those of one lane."""
MOST_RUNS = 2
"""Lanes that start whole systems: each keeps a core busy, and Ray's start has a limit of its own."""


@functools.cache
def looks_at_time(file: Path) -> bool:
    """Tell whether a file has tests that nobody else may slow."""
    return re.search(r"\bmark\.(deadline|sandbox)\b", file.read_text()) is not None


@functools.cache
def starts_runs(file: Path) -> bool:
    """Tell whether a file has tests that start the whole system."""
    return re.search(r"\bmark\.(loop|gpu|cluster)\b", file.read_text()) is not None


_GIVES_WAY, _RUNS_GIVE_WAY = 5, 2
"""Niceness: a third of a processor is left to tests where somebody wants all of it, more to runs, which take long."""
_BEGAN_AT = os.nice(0)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """A file at a time for each lane, the longest first; files that make nodes on this machine are of three groups,
    those that look at time are one. Runs and other tests are in lanes of their own, beside each other: the Ray of a
    lane's runs must not be there for tests that start one.

    pytest-xdist's own groups come to nothing under pytest 9.2, whose ids cannot be changed.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if looks_at_time(self.config.rootpath / file):
            return "alone"
        return next((lane for lane in ("slurm", "nodes", "namespaces") if lane in file), file)

    def _assign_work_unit(self, node: Any) -> None:
        """Give a lane its next file, which is bound to it from now on, though the lane has a test to run before.

        So a lane in a long file gets a short one. A lane keeps the Ray of its first run: it gets runs alone.
        """
        of_runs = [lane for lane in self.assigned_work if self._had_runs(lane)]
        runs = [scope for scope in self.workqueue if scope in self._runs]
        others = [scope for scope in self.workqueue if scope not in self._runs]
        if node in of_runs:
            has_other = any(lane not in of_runs and not lane.shutting_down for lane in self.assigned_work)
            fitting = runs or ([] if has_other else others)
        else:
            fitting = others + (runs if len(of_runs) < MOST_RUNS else [])
        long = [scope for name in LONGEST for scope in fitting if name in scope]
        short = [scope for scope in fitting if scope not in long]
        unfinished = [scope for scope, tests in self.assigned_work[node].items() if not all(tests.values())]
        is_in_long = any(name in scope for scope in unfinished for name in LONGEST)
        ordered = short + long if is_in_long else long + short
        if not ordered:
            node.shutdown()
            return
        self.workqueue.move_to_end(ordered[0], last=False)
        super()._assign_work_unit(node)

    def _had_runs(self, node: Any) -> bool:
        return not self._runs.isdisjoint(self.assigned_work[node])

    @functools.cached_property
    def _runs(self) -> set[str]:
        """Files with tests that start the whole system."""
        root = self.config.rootpath
        return {
            self._split_scope(test) for test in self.collection or () if starts_runs(root / test.partition("::")[0])
        }

    def remove_node(self, node: Any) -> str | None:
        """A test that ended its worker is not run again, as xdist would, once for every worker that it may replace."""
        lanes = self.assigned_work[node].values()
        pending = [(lane, test) for lane in lanes for test, is_done in lane.items() if not is_done]
        for lane, crashed in pending[:1]:
            lane[crashed] = True
        super().remove_node(node)
        return pending[0][1] if pending else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Lanes(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where tests look at time, those of other lanes give way to them, with all that they start."""
    if "PYTEST_XDIST_WORKER" in os.environ and not looks_at_time(item.path) and _has_deadlines(item.session):
        with contextlib.suppress(PermissionError):  # to be less nice than before needs root
            niceness = _RUNS_GIVE_WAY if starts_runs(item.path) else _GIVES_WAY
            os.setpriority(os.PRIO_PROCESS, 0, max(niceness, _BEGAN_AT))


@functools.cache
def _has_deadlines(session: pytest.Session) -> bool:
    return any(item.get_closest_marker(name) for item in session.items for name in ("deadline", "sandbox"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file in which no test can have the marks that `-m` asks for is not imported: all take 20 s of a processor."""
    asked = config.getoption("markexpr")
    if not asked or not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    named = set(re.findall(r"\bmark\.(\w+)", collection_path.read_text())) & set(re.findall(r"\w+", asked))
    wanted = Expression.compile(asked)
    possible = itertools.chain.from_iterable(itertools.combinations(named, size) for size in range(len(named) + 1))
    return None if any(wanted.evaluate(lambda name, /, marks=marks, **_: name in marks) for marks in possible) else True


@pytest.fixture(scope="session")
def warm_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """What makes a Ray start its workers as copies (`warm_workers.py`), in the environment of what starts it."""
    import torch
    from warm_workers import warm_process

    # What imports do about a GPU must not be copied, and somebody's cluster starts workers in its own way.
    if torch.version.cuda is None and "RAY_ADDRESS" not in os.environ:
        with warm_process(tmp_path_factory.mktemp("warm")) as variables:
            yield variables
    else:
        yield {}


@pytest.fixture(scope="session")
def ray_cluster(warm_variables: Mapping[str, str]) -> Iterator[None]:
    """A private Ray, started when the first test asks for it."""
    from warm_workers import warm_ray

    from areal_lite.launch.run.ray_session import ray_session

    with warm_ray(warm_variables) if warm_variables else ray_session():
        yield


@pytest.fixture
def copied(warm_variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test types have workers that are copies."""
    for name, value in warm_variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def adopted_orphans() -> Iterator[None]:
    """For tests of what a command leaves behind."""
    from user_run import adopting_orphans

    with adopting_orphans():
        yield


@pytest.fixture(scope="session")
def loop_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the integration tests keep the model and data that they share."""
    return tmp_path_factory.mktemp("loop")
