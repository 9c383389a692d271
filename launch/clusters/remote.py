"""A process on a node: started by a script over the node's shell, watched, and ended by the id in its log.

The script goes in by stdin, so that no token stands in a list of processes. What is ended is the process that this job
started: one of the same number without AREAL_LITE_JOB in its environment is somebody else's.
"""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.errors import ConfigError
from areal_lite.launch.run.signals import notices_held_back

if TYPE_CHECKING:
    from areal_lite.launch.clusters.job import Job

_TIMEOUT_S = 60.0
_GRACE_S = 20
"""Before SIGKILL."""
_PID = re.compile(r"^areal-lite pid (\d+)\n", re.MULTILINE)
_ENDED = "\nareal-lite has seen to its end\n"


def python_of(job: "Job") -> str:
    """Return the interpreter on the nodes: that of what is entered, or the present one, at the same path."""
    return "python" if job.ships or job.profile.enter or job.profile.container else shlex.quote(sys.executable)


def script(job: "Job", *, env: Mapping[str, str] = {}, template: str = "node.sh", **values: Any) -> str:
    """Return a shell script that says its process id and becomes a command, in the job's folder and environment.

    Args:
        env: Beside the profile's.
        template: Makes it of `values`: of `node.sh`, the words of the `command`, quoted where they need it.
    """
    variables = {**job.profile.env, **env, "AREAL_LITE_JOB": job.name}
    return render(template, job=job, env=variables, python=python_of(job), **values)


def render(template: str, *, templates: Path | None = None, **values: Any) -> str:
    """Fill a template; in it `quote` quotes for a shell, and `before` puts a command in front, where there is one.

    `templates` has further ones, which may extend those here, such as `batch.sh`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([*([templates] if templates else []), Path(__file__).with_name("templates")])
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}  # YAML knows no surrogates
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["before"] = lambda command: f"{command} " if command else ""
    return environment.get_template(template).render(values)


class Remote:
    """One such process; when the shell that reaches its node ends, it has ended or is out of reach."""

    def __init__(self, job: "Job", shell: Sequence[str], text: str, *, log: Path) -> None:
        """Start it; what it says goes into `log`, which is named NODE-driver.log or NODE-ray.log."""
        self._job, self._shell, self.log = job, shell, log
        # It outlives what is sent to all processes: what it reaches saves, and then ends it.
        with log.open("ab") as output, notices_held_back():
            # A session of its own: Ctrl-C in a terminal is for the supervisor alone.
            self._process = subprocess.Popen(
                [*shell, "bash", "-s"], stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the shell ended at once: `code` tells, and the log says why
            self._process.stdin.write(text.encode())
            self._process.stdin.close()

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
        return _PID.split(self.said(), maxsplit=1)[-1]

    def last_words(self) -> str:
        """Return the end of its output."""
        return " / ".join([line.strip() for line in self.said().splitlines() if line.strip()][-3:])

    def interrupt(self) -> None:
        """Send it SIGINT; one that is gone gets none."""
        if self.pid is not None and self.code is None:
            ask(*self._shell, "bash", "-s", text=f"kill -INT {self.pid}")

    def end(self) -> str | None:
        """Have it ended, by force after a grace; returns what went wrong."""
        problem = end_process(self._job, self._shell, log=self.log)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return problem


def end_process(job: "Job", shell: Sequence[str], *, log: Path) -> str | None:
    """End the process of a job that a log is of, unless it has ended, and note that there; returns what went wrong."""
    said = log.read_text(errors="replace")
    if (found := _PID.search(said)) is None or _ENDED in said:
        return None
    node, _, what = log.stem.rpartition("-")
    own, by = f"AREAL_LITE_JOB={job.name}", "INT" if what == "ray" else "TERM"
    text = render("end.sh", pid=found[1], own=own, signal=by, grace_s=_GRACE_S)
    done = ask(*shell, "bash", "-s", text=text)
    if done.returncode:
        return f"{node}: {done.stderr.strip()}"
    with log.open("a") as file:
        file.write(_ENDED)
    return None


def ask(*argv: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command with `text` as its input; one that is not there, or is late, counts as one that failed."""
    try:
        # A session of its own: Ctrl-C in a terminal is not for it. And with SIGPIPE ignored, as Python has it: Slurm's
        # commands ask munged again that hung up on them, if they live.
        own: dict[str, Any] = {"start_new_session": True, "restore_signals": False}
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, **own)
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"{argv[0]} must be there and answer within {_TIMEOUT_S:g} s, got {error}"
        return subprocess.CompletedProcess(argv, 1, "", said)


def told_by(*argv: str, to_do: str) -> str:
    """Return what a cluster's own tool says; a `ConfigError` where it fails, is late or is not there."""
    done = ask(*argv)
    if done.returncode:
        raise ConfigError(f"`{' '.join(argv)}` must work, got: {done.stderr.strip()}: {to_do}")
    return done.stdout


def bash_problems(artefacts: Mapping[str, str]) -> list[str]:
    """Return what bash cannot read in the scripts among files, by name; nothing of them is run."""
    scripts = {name: text for name, text in artefacts.items() if name.endswith(("sh", "sbatch"))}
    read = {name: ask("bash", "-n", text=text) for name, text in scripts.items()}
    problem = "{} must be a script that bash reads, got {}: see enter in the profile"
    return [problem.format(name, done.stderr.strip()) for name, done in read.items() if done.returncode]
