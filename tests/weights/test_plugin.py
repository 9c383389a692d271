"""What every process of an engine does first."""

import subprocess
import sys
from pathlib import Path

KILLED = """
import multiprocessing, os, signal

def work():
    from areal_lite.weights.plugin import _begin_engine_process
    from tqdm import tqdm

    _begin_engine_process()
    list(tqdm([1], disable=True))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_an_engine_process_that_is_killed_leaves_no_lock_behind(tmp_path: Path) -> None:
    """Python's tracker of such locks would say so. Seen failing with tqdm's own."""
    (tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run([sys.executable, tmp_path / "killed.py"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("-9\n", "")
