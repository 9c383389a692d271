"""What every process of an engine does first."""

import logging.config
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lite.rollout.engine_process import EngineErrors, in_a_line, set_up_engine_process

PROGRAM = """
import multiprocessing, os, signal, sys, time

def work(pipe, killed):
    from areal_lite.rollout.engine_process import set_up_engine_process
    from tqdm import tqdm

    set_up_engine_process()
    list(tqdm([1], disable=True))
    if killed == "child":
        os.kill(os.getpid(), signal.SIGKILL)
    os.write(1, b"set up")
    pipe.send(None)
    time.sleep(3600)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, sys.argv[1]))
    process.start()
    if sys.argv[1] == "parent":
        ours.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    process.join()
    print(process.exitcode)
"""


def run_and_kill(killed: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Start a process and one of an engine below it, and kill one of the two."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), killed]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def log_errors() -> None:
    """As vLLM does in a process of an engine; each error has a cause."""
    set_up_engine_process()
    core, registry = "vllm.v1.engine.core", "vllm.model_executor.models.registry"
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"level": "INFO"}}})
    for logger, line, name in (
        (core, "EngineCore failed to start.", "what came before"),
        (core, "Invocation of %s method failed", "a transfer that broke"),
        (registry, "Error in inspecting model architecture '%s'", "one of two architectures"),
        (core, "EngineCore failed to start.", "torchvision"),
        (core, "EngineCore failed to start.", "another"),
    ):
        try:
            try:
                raise ImportError(f"this needs\n{name}")
            except ImportError as error:
                raise RuntimeError("no worker") from error
        except RuntimeError:
            logging.getLogger(logger).exception(line, *["it"] * line.count("%"))


def test_the_first_error_of_an_engine_reaches_the_process_that_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, with its root; not an error that it survived.

    Seen failing with vLLM's own words alone: `Engine core initialization failed`, with a handler, which vLLM's own
    configuration of logging removed, and with the first error logged, which an engine killed later did not die of.
    """
    errors = EngineErrors()
    assert errors.first() == ""
    for name, value in errors.environment.items():
        monkeypatch.setenv(name, value)
    process = multiprocessing.get_context("spawn").Process(target=log_errors)
    process.start()
    process.join()
    assert errors.first() == "RuntimeError: no worker; caused by ImportError: this needs torchvision"


def test_of_an_error_that_quotes_a_traceback_the_last_line_counts() -> None:
    """vLLM inspects models in a process. Seen failing with `CalledProcessError`, its cause, and with all its lines."""
    quoted = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'torchvision'\n"
    error = RuntimeError(f"Error raised in subprocess:\n{quoted}")
    error.__cause__ = subprocess.CalledProcessError(1, "python")
    assert in_a_line(error) == "ModuleNotFoundError: No module named 'torchvision'"


def test_an_engine_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Its standard output ends only with it. Seen failing, by the timeout, without the thread that watches."""
    done = run_and_kill("parent", tmp_path)
    assert (done.returncode, done.stdout) == (-9, "set up")


def test_an_engine_process_that_is_killed_leaves_no_lock_behind(tmp_path: Path) -> None:
    """Python's tracker of such locks would say so. Seen failing with tqdm's own."""
    done = run_and_kill("child", tmp_path)
    assert (done.stdout, done.stderr) == ("-9\n", "")
