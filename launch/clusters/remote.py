"""A process on a node: started by a script over the node's shell, watched, and ended by the id in its log.

The script arrives over stdin, so that no token shows in a list of processes. Only processes of this job are ended: one
with the same number but without the job's AREAL_LITE_JOB in its environment is a stranger's.
"""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.run.signals import notices_held_back

_TIMEOUT_S = 60.0
_GRACE_S = 20
"""Before SIGKILL."""
_PID = re.compile(r"^areal-lite pid (\d+)\n", re.MULTILINE)
_ENDED = "\nareal-lite ended it\n"


def python_of(job: Job) -> str:
    """Return the interpreter on the nodes: that of the profile's `enter`, or the present one, at the same path."""
    return "python" if job.ships or job.profile.enter else shlex.quote(sys.executable)


def script(job: Job, *, env: Mapping[str, str] = {}, template: str = "node.sh", **values: Any) -> str:
    """Return a shell script that prints its process id and becomes a command, in the job's folder and environment.

    Args:
        env: Variables beside the profile's, which the script reads from `job.env_file`.
        template: Filled with `values`: for `node.sh`, the `command`, a list of words quoted where they need it.
    """
    return render(template, job=job, env={**env, "AREAL_LITE_JOB": job.name}, python=python_of(job), **values)


def render(template: str, *, templates: Path | None = None, **values: Any) -> str:
    """Fill a template, in which the filter `quote` quotes for a shell.

    `templates` is a folder of further ones, which may extend those here, such as `batch.sh`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([*([templates] if templates else []), Path(__file__).with_name("templates")])
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}  # YAML has no surrogate pairs
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(values)


class Remote:
    """A process of a job on a node; once the shell that reaches the node ends, it has ended or is out of reach."""

    def __init__(self, job: Job, shell: Sequence[str], text: str, *, log: Path) -> None:
        """Start it; its output goes into `log`, which is named NODE-driver.log or NODE-ray.log."""
        self._job, self._shell, self._text, self.log = job, shell, text, log
        self.start()

    def start(self) -> None:
        """Start it again, once its shell has ended."""
        # A batch system signals all processes; this one must outlive that, until the run has saved.
        with self.log.open("ab") as output, notices_held_back():
            # A session of its own: Ctrl-C in a terminal is for the supervisor alone.
            own: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
            self._process = subprocess.Popen([*self._shell, "bash", "-s"], stdin=subprocess.PIPE, **own)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the shell ended at once: see `code` and the log
            self._process.stdin.write(self._text.encode())
            self._process.stdin.close()

    @property
    def code(self) -> int | None:
        """Exit code of the shell, once it has ended; 128 more than the signal that ended it, as in a shell."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def pid(self) -> int | None:
        """Its id on its node, once it has printed it; after another start, the last one printed."""
        found = _PID.findall(self.read_log())
        return int(found[-1]) if found else None

    def read_log(self) -> str:
        """Return its output so far."""
        return self.log.read_text(errors="replace")

    def output(self) -> str:
        """Return the output of the command itself so far; if it never started, what stopped it."""
        return _PID.split(self.read_log(), maxsplit=1)[-1]

    def last_lines(self) -> str:
        """Return what its output ends with: the line that names an error of areal-lite, or else the last three."""
        lines = [line.strip() for line in self.read_log().splitlines() if line.strip()]
        named = [line.removeprefix("areal_lite.errors.") for line in lines if "ConfigError: " in line]
        return named[-1] if named else " / ".join(lines[-3:])

    def interrupt(self) -> None:
        """Send it SIGINT; one that is gone gets none."""
        if self.pid is not None and self.code is None:
            ask(*self._shell, "bash", "-s", text=f"kill -INT {self.pid}")

    def end(self) -> str | None:
        """End it, by force after a grace period; returns what went wrong."""
        problem = end_process(self._job, self._shell, log=self.log)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return problem


def end_process(job: Job, shell: Sequence[str], *, log: Path) -> str | None:
    """End the process that wrote a log, unless it has ended, and note that in the log; returns what went wrong."""
    text = log.read_text(errors="replace")
    if not (found := _PID.findall(text)) or _ENDED in text:
        return None
    node, _, what = log.stem.rpartition("-")
    own, by = f"AREAL_LITE_JOB={job.name}", "INT" if what == "ray" else "TERM"
    end = render("end.sh", pid=found[-1], own=own, signal=by, grace_s=_GRACE_S)
    done = ask(*shell, "bash", "-s", text=end)
    if done.returncode:
        return f"{node}: {done.stderr.strip()}"
    with contextlib.suppress(OSError), log.open("a") as file:  # a full disk: it would be looked for once more
        file.write(_ENDED)
    return None


def ask(*argv: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command with `text` as its input; one that is missing, or is late, counts as one that failed."""
    try:
        # A session of its own: Ctrl-C in a terminal is not for it. SIGPIPE stays ignored, as Python has it: Slurm's
        # commands survive a munged that hangs up on them, and retry.
        own: dict[str, Any] = {"start_new_session": True, "restore_signals": False}
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, **own)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"{argv[0]} must be there and answer within {_TIMEOUT_S:g} s, got {error}"
        return subprocess.CompletedProcess(argv, 1, "", problem)


def output_of(*argv: str, fix: str) -> str:
    """Return the output of a cluster's own tool; a `ConfigError` where it fails, is late or is missing."""
    done = ask(*argv)
    if done.returncode:
        raise ConfigError(f"`{' '.join(argv)}` must work, got: {done.stderr.strip()}: {fix}")
    return done.stdout


def bash_problems(files: Mapping[str, str]) -> list[str]:
    """Return what bash cannot read in the scripts among files, by name; none of them is run."""
    problems = []
    for name, text in files.items():
        if name.endswith(("sh", "sbatch")) and (read := ask("bash", "-n", text=text)).returncode:
            problems.append(
                f"{name} must be a script that bash reads, got {read.stderr.strip()}: see enter in the profile"
            )
    return problems
