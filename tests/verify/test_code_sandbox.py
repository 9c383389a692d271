"""Programs that try to get out of the sandbox in bubblewrap, each contained. They are in code_programs.py.

Needs `bwrap` and the right to use it, as root or as any other user.
"""

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_programs import ATTACKS, ENDLESS, LIMITS, PROCESSES, processes_with, run_code

from areal_lite.verify.descendants import descendants

pytestmark = pytest.mark.sandbox

CONTAINED = [{"input": "", "output": "contained"}]


class Outside:
    """What there is to reach, and whether it was reached."""

    def __init__(self, folder: Path) -> None:
        self.token = f"EXPECTED-{secrets.token_hex(8)}"
        self.folder = folder
        self.secret = folder / "secret.txt"
        self.secret.write_text(self.token)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind("\0" + self.token)
        self.abstract.listen()

    def run(self, name: str, **options: Any) -> Any:
        return self.run_text(ATTACKS[name], **ENDLESS.get(name, {}) | options)

    def run_text(self, program: str, **options: Any) -> Any:
        values = {"port": self.server.getsockname()[1], "parent": os.getpid(), "processes": PROCESSES}
        for word, value in {**values, "token": self.token, "secret": self.secret, "folder": self.folder}.items():
            program = program.replace(f"@{word}@", str(value))
        return run_code(program, **{"sandbox": "bubblewrap", "tests": CONTAINED, **LIMITS, **options})

    def is_untouched(self) -> bool:
        return self.secret.read_text() == self.token and [item.name for item in self.folder.iterdir()] == ["secret.txt"]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    """Nothing of it may be touched, and no process may be left behind, whatever a program did."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o777)
    place = Outside(folder)
    monkeypatch.setenv("A_SECRET", place.token)
    before = set(descendants(os.getpid()))
    yield place
    place.server.close()
    place.abstract.close()
    assert place.is_untouched()
    assert set(descendants(os.getpid())) <= before
    assert processes_with(place.token) == []


@pytest.mark.parametrize(
    "name",
    [
        "network", "write outside", "read a secret file", "read the environment", "see and trace others",
        "kill the parent", "become root", "raise its limits", "file descriptors", "thread bomb",
        "hidden memory",
    ],
)  # fmt: skip
def test_an_attack_has_no_success(name: str, outside: Outside) -> None:
    """The program itself says what it could do.

    Seen failing, one part of the command changed at a time: the network's namespace (network), the processes' (see and
    trace others, kill the parent), `--clearenv` with the environment handed on (read the environment), `--ro-bind / /`
    in place of `system_view` (read a secret file and others), `--disable-userns` (become root), `--as-pid-1` (kill the
    parent, see and trace others), the runner left dumpable (see and trace others), and `refuse_hidden_memory` left out
    (hidden memory).
    """
    result = outside.run(name)
    assert (result.reward, result.feedback) == (1.0, "")


def test_the_disk_is_small(outside: Outside) -> None:
    """400 MiB do not fit into 8, wherever it writes. Seen failing without `--size`."""
    before = os.statvfs("/tmp").f_bavail
    result = outside.run("fill the disk")
    assert (result.reward, result.feedback) == (1.0, "")
    assert (before - os.statvfs("/tmp").f_bavail) * os.statvfs("/tmp").f_frsize < 200 * 2**20


def test_what_is_expected_cannot_be_found(outside: Outside) -> None:
    """The expected output never enters the sandbox."""
    result = outside.run("find what is expected", tests=[{"input": "", "output": outside.token}])
    assert (result.reward, result.metrics["passed"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("fork bomb", {"timeout", "cpu"}),
        ("huge output", {"output"}),
        ("sleep", {"timeout"}),
        ("ignores signals", {"timeout"}),
        ("memory hog", {"memory"}),
        ("memory hogs", {"memory"}),
        ("many files", {"memory"}),
    ],
)
def test_a_hog_meets_its_limit(name: str, statuses: set[str], outside: Outside) -> None:
    """It is a result that scores 0, and nothing is left of it. Seen failing (cpu) without inodes (many files)."""
    result = outside.run(name, **({"memory_mb": 64} if name == "many files" else {}))
    assert result.reward == 0.0
    assert {status for status, share in result.metrics.items() if share} <= statuses


def test_a_fork_bomb_never_has_more_processes_than_allowed(outside: Outside) -> None:
    """Counted from outside while it goes on; bubblewrap's own processes come on top.

    Seen failing, as root, without the user of its own: the kernel does not count root's processes.
    """
    counts: list[int] = []
    over = threading.Event()
    others = set(descendants(os.getpid()))

    def count() -> None:
        while not over.wait(0.02):
            counts.append(len(set(descendants(os.getpid())) - others))

    watcher = threading.Thread(target=count)
    watcher.start()
    outside.run("fork bomb", wall_s=5.0, total_s=5.0)
    over.set()
    watcher.join()
    assert PROCESSES - 2 <= max(counts) <= PROCESSES + 4


@pytest.mark.parametrize("name", ["zombies", "daemon"])
def test_nothing_outlives_its_program(name: str, outside: Outside) -> None:
    """The fixture looks for what is left. Seen failing without the subreaper (daemon): what
    bubblewrap held together was gone a moment later only.
    """
    assert outside.run(name).reward == 1.0


@pytest.mark.parametrize("name", ["fork bomb", "huge output"])
def test_the_cases_behind_an_attack_are_run(name: str, outside: Outside) -> None:
    """Seen failing with no second sandbox behind one that was ended (fork bomb, huge output)."""
    attacks = ATTACKS[name]
    program = f"text = input()\nif text == 'attack':\n    exec({attacks!r}, globals())\nelse:\n    print(text)"
    result = outside.run_text(
        program, wall_s=5.0, tests=[{"input": "attack", "output": "contained"}, {"input": "a", "output": "a"}]
    )
    assert result.metrics["passed"] >= 0.5
    assert not result.feedback.startswith("case 2")


def test_the_standard_library_works_inside(outside: Outside) -> None:
    """Else an honest program would fail for no fault of its own. Packages of ours are not there."""
    program = """
import collections, decimal, fractions, heapq, itertools, json, math, random, re, sqlite3, ssl, subprocess, tempfile
print(subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout.strip())
with tempfile.TemporaryFile() as stream:
    stream.write(b"x")
try:
    import torch
except ImportError:
    print("no torch")
print("contained" if exit else "")
"""
    result = run_code(program, sandbox="bubblewrap", tests=[{"input": "", "output": "hello\nno torch\ncontained"}])
    assert (result.reward, result.feedback) == (1.0, "")


def test_asserts_are_out_of_the_candidates_reach(outside: Outside) -> None:
    """Their process can be neither signalled nor read, and no copy of them lies in the candidate's memory or files.

    Seen failing with the tests read, and kept, before the fork, and with the runner left dumpable.
    """
    program = """
import gc, glob, os, signal
def names(): return sorted(os.listdir("/program"))
def others(): return [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
def attack():
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        os.kill(1, number)
    try:
        return bool(open("/proc/1/mem", "rb"))
    except OSError:
        return False
def search():
    found = []
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw" in line:
            with open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(start)
                _, *after = memory.read(end - start).split(b"hidden in ")
                found += [text for text in after if text[:3] == b"the"]
    return len(found)
"""
    asserts = [
        "assert search() == 0, search() or 'hidden in the tests'",
        "assert names() == ['candidate.py', 'inside.py', 'remote.py', 'stdin']",
        "assert others() == []",
        "assert not attack()",
    ]
    result = run_code(program, sandbox="bubblewrap", asserts=asserts)
    assert (result.reward, result.feedback) == (1.0, "")
