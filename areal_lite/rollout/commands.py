"""Agents that are programs: any language, a process tree of its own for each rollout, which ends with it."""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from areal_lite.verify.descendants import kill_trees

if TYPE_CHECKING:
    from areal_lite.rollout.agents import Llm

_OUTPUT_MB = 64
_SHOWN = 500


async def run_command(task: Mapping[str, Any], llm: "Llm", *, command: str, memory_mb: int) -> Any:
    """Run a shell command, which reads the task from a line of JSON; return what its last line says, as JSON.

    It finds the model by `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, or by `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`. With it ends everything that it started, however this ends.

    Args:
        memory_mb: That each of its processes may take.

    Raises:
        ChildProcessError: It ended with an error.
        ValueError: Its last line is no JSON.
    """
    own = {"OPENAI_BASE_URL": llm.base_url, "OPENAI_API_KEY": llm.api_key, "OPENAI_MODEL": llm.model}
    own |= {"ANTHROPIC_BASE_URL": llm.anthropic_base_url, "ANTHROPIC_API_KEY": llm.api_key}
    limited = f"ulimit -d {memory_mb * 1024}\nulimit -f {_OUTPUT_MB * 2048}\n{command}"
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(json.dumps(dict(task), default=str).encode() + b"\n")
        stdin.seek(0)
        process = await asyncio.create_subprocess_shell(
            limited, env={**os.environ, **own}, start_new_session=True, stdin=stdin, stdout=stdout, stderr=stderr
        )
        try:
            code = await process.wait()
        finally:
            kill_trees(lambda: _alive(process, llm.api_key))
        said, complaint = _end_of(stdout).strip(), _end_of(stderr).strip()[-_SHOWN:]
    if code != 0:
        raise ChildProcessError(f"rollout.workflow_command must end with exit code 0, got {code}: {complaint!r}")
    last = said.rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError as error:
        raise ValueError(
            f"the last line that rollout.workflow_command prints must be its reward, a number or a JSON object with "
            f"one named reward, or null; got {last[:_SHOWN]!r}"
        ) from error


def _alive(process: asyncio.subprocess.Process, key: str) -> list[int]:
    """Return the process, if it runs, and whoever else has its key in the environment: orphans, too."""
    found = [] if process.returncode is not None else [process.pid]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if key.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
    return file.read().decode(errors="replace")
