"""A process on a node: started by a script over the node's shell, watched, and ended by its recorded id.

The script goes in by stdin, so that no token stands in a list of processes. What is ended is the process that this job
started: one of the same number without AREAL_LITE_JOB in its environment is somebody else's.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from areal_lite.launch.clusters.job import Job
from areal_lite.launch.run.signals import notices_held_back

_TIMEOUT_S = 60.0
_GRACE_S = 20
"""Before SIGKILL."""
_PID = re.compile(r"^areal-lite pid (\d+)$", re.MULTILINE)


def python_of(job: Job) -> str:
    """Return the interpreter on the nodes: that of what is entered, or the present one, at the same path."""
    return "python" if job.ships or job.profile.enter or job.profile.container else shlex.quote(sys.executable)


def script(job: Job, command: Iterable[str], env: Mapping[str, str] | None = None) -> str:
    """Return a shell script that says its process id and becomes a command, in the job's folder and environment.

    Args:
        command: Words as the shell is to read them: quoted where they need it.
        env: Beside the profile's.
    """
    variables = {**job.profile.env, **(env or {}), "AREAL_LITE_JOB": job.name}
    lines = [
        f"cd {shlex.quote(job.folder)} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        *filter(None, [job.profile.enter]),
        'echo "areal-lite pid $$"',
        " ".join(["exec", *filter(None, [job.profile.container]), *command, "< /dev/null"]),
    ]
    return "\n".join(lines) + "\n"


class Remote:
    """One such process; when the shell that reaches its node ends, it has ended or is out of reach."""

    def __init__(self, node: str, shell: Sequence[str], text: str, *, log: Path) -> None:
        """Start it; what it says goes into `log`."""
        self.node, self.shell, self.log = node, shell, log
        # It outlives what is sent to all processes: what it reaches saves, and then ends it.
        with log.open("wb") as output, notices_held_back():
            # A session of its own: Ctrl-C in a terminal is for the supervisor alone.
            self._process = subprocess.Popen(
                [*shell, "bash", "-s"], stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # the shell ended at once: `code` tells, and the log says why

    @property
    def code(self) -> int | None:
        """Exit code of the shell, once it has ended."""
        return self._process.poll()

    @property
    def pid(self) -> int | None:
        """Its id on its node, once it has said so."""
        found = _PID.search(self.said())
        return int(found[1]) if found else None

    def said(self) -> str:
        """Return its output so far."""
        return self.log.read_text(errors="replace")

    def output(self) -> str:
        """Return what the command itself has said so far; before it began, whatever was in its way."""
        text = self.said()
        return text if self.pid is None else text.partition(f"areal-lite pid {self.pid}\n")[2]

    def last_words(self, lines: int = 1) -> str:
        """Return the end of its output."""
        return " / ".join([line.strip() for line in self.said().splitlines() if line.strip()][-lines:])

    def signal(self, name: str) -> None:
        """Send it a signal such as INT; one that is gone gets none."""
        if self.pid is not None and self.code is None:
            _run(self.shell, f"kill -{name} {self.pid}")

    def end(self, job_name: str, by: str = "TERM") -> str | None:
        """Have it ended, by force after a grace; returns what went wrong."""
        problem = end_process(self.node, self.shell, self.pid, job_name, by) if self.pid is not None else None
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return problem


def end_process(node: str, shell: Sequence[str], pid: int, job_name: str, by: str = "TERM") -> str | None:
    """End a process of a job on a node, unless it has ended; returns what went wrong."""
    own = shlex.quote(f"AREAL_LITE_JOB={job_name}")
    text = (
        f"alive() {{ tr '\\0' '\\n' 2>/dev/null < /proc/{pid}/environ | grep -qxF {own}; }}\n"
        f"alive || exit 0\nkill -{by} {pid}\n"
        f"for i in $(seq {10 * _GRACE_S}); do alive || exit 0; sleep 0.1; done\nkill -KILL {pid}\n"
    )
    return _run(shell, text, node=node)


def _run(shell: Sequence[str], text: str, *, node: str = "") -> str | None:
    done = ask(*shell, "bash", "-s", text=text)
    return f"{node}: {done.stderr.strip()}" if done.returncode else None


def ask(*argv: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command with `text` as its input; one that is not there, or is late, counts as one that failed."""
    try:
        # A session of its own: Ctrl-C in a terminal is not for it.
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"{argv[0]} must be there and answer within {_TIMEOUT_S:g} s, got {error}"
        return subprocess.CompletedProcess(argv, 1, "", said)
