"""What every process of an engine does first."""

import subprocess
import sys
from pathlib import Path

KILLED = """
import multiprocessing, os, signal

def work():
    from areal_lite.rollout.engine_process import begin_process
    from tqdm import tqdm

    begin_process()
    list(tqdm([1], disable=True))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    print(process.exitcode)
"""

FORKED = """
import os, signal, socket, time
from areal_lite.rollout.engine_process import ForkedProcess

def work():
    os.write(said, open("/proc/self/comm", "rb").read())
    time.sleep(60)

ours, peers = socket.socketpair()
heard, said = os.pipe()
ForkedProcess(target=work, name="EngineCore").start()
ours.close()
print(os.read(heard, 100), peers.recv(1), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_engine_process_holds_none_of_its_parents_sockets_and_ends_with_it(tmp_path: Path) -> None:
    """Ray knows by a socket that an actor is gone. Seen failing with the sockets kept, and without `begin_process`."""
    (tmp_path / "forked.py").write_text(FORKED)
    done = subprocess.run([sys.executable, tmp_path / "forked.py"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (-9, "b'VLLM::EngineCor\\n' b''\n", "")


def test_an_engine_process_that_is_killed_leaves_no_lock_behind(tmp_path: Path) -> None:
    """Python's tracker of such locks would say so. Seen failing with tqdm's own."""
    (tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run([sys.executable, tmp_path / "killed.py"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("-9\n", "")
