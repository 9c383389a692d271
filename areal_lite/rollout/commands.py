"""Agents that are programs in any language. Each rollout has a process tree of its own, which ends with it."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from areal_lite.rollout.agents import Llm
from areal_lite.verify.builtin.sandbox import system_view
from areal_lite.verify.descendants import kill_trees

_OUTPUT_MB = 64
_SHOWN = 300
"""Characters of a program's output in an error, whose text is kept to 500."""

# Runs inside the sandbox, which has a network of its own: it listens there at the model's address, and sends the
# listener to the process outside, which accepts its connections.
_PRELUDE = """
import os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as outside, socket.create_server(("127.0.0.1", int(sys.argv[2]))) as own:
    socket.send_fds(outside, [b"."], [own.fileno()])
os.execv("/bin/sh", ["sh", "-c", sys.argv[3]])
"""


async def run_command(
    task: Mapping[str, Any], llm: Llm, *, command: str, memory_mb: int, is_sandboxed: bool = False
) -> Any:
    """Run a shell command, which reads the task from a line of JSON; return the JSON in the last line that it prints.

    It finds the model through `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, or `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`. Every process that it started ends with it.

    Args:
        memory_mb: Limit of each of its processes.
        is_sandboxed: It sees the system, its interpreter and the working folder, all read-only, and its network has no
            address but the model's.

    Raises:
        ChildProcessError: It ended with an error.
        ValueError: Its last line is not JSON.
    """
    own = {"OPENAI_BASE_URL": llm.base_url, "OPENAI_API_KEY": llm.api_key, "OPENAI_MODEL": llm.model}
    own |= {"ANTHROPIC_BASE_URL": llm.anthropic_base_url, "ANTHROPIC_API_KEY": llm.api_key}
    limited = f"ulimit -d {memory_mb * 1024}\nulimit -f {_OUTPUT_MB * 2048}\n{command}"
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(json.dumps(dict(task), default=str).encode() + b"\n")
        stdin.seek(0)
        streams: dict[str, Any] = {"start_new_session": True, "stdin": stdin, "stdout": stdout, "stderr": stderr}
        process: asyncio.subprocess.Process | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                if is_sandboxed:
                    process = await stack.enter_async_context(_sandboxed(limited, own, streams))
                else:
                    process = await asyncio.create_subprocess_shell(limited, env={**os.environ, **own}, **streams)
                code = await process.wait()
        finally:
            kill_trees(lambda: _alive(process, llm.api_key))
        printed, complaint = _end_of(stdout), _end_of(stderr)
    if code != 0:
        raise ChildProcessError(
            f"rollout.workflow_command must end with exit code 0, got {code}; its stderr ends with "
            f"{complaint[-_SHOWN:]!r}"
        )
    last = printed.rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError as error:
        raise ValueError(
            f"the last line that rollout.workflow_command prints must be its reward (a number, or a JSON object with "
            f"one named reward) or null; got {last[:_SHOWN]!r}"
        ) from error


@contextlib.asynccontextmanager
async def _sandboxed(
    command: str, own: Mapping[str, str], streams: Mapping[str, Any]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command in bubblewrap, and relay its connections to the model."""
    model = urlsplit(own["OPENAI_BASE_URL"])
    here, there = socket.socketpair()
    wrapped = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", *system_view(), "--proc", "/proc"]
    wrapped += ["--dev", "/dev", "--tmpfs", "/tmp"]
    for folder in (sys.prefix, os.getcwd()):
        wrapped += ["--ro-bind", folder, folder]
    wrapped += ["--chdir", os.getcwd(), "--"]
    wrapped += [sys.executable, "-I", "-S", "-c", _PRELUDE, str(there.fileno()), str(model.port), command]
    environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8", **own}
    with here:
        with there:
            process = await asyncio.create_subprocess_exec(
                *wrapped, env=environment, pass_fds=(there.fileno(),), **streams
            )
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, here, 1, 1)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_model, to_model = await asyncio.open_connection(model.hostname, model.port)
        await asyncio.gather(copy(reader, to_model), copy(from_model, writer), return_exceptions=True)

    async with contextlib.AsyncExitStack() as stack:
        for descriptor in descriptors:  # none if bubblewrap failed, which then writes why to stderr
            listener = socket.socket(fileno=descriptor)
            stack.callback((await asyncio.start_server(relay, sock=listener)).close)
        yield process


def _alive(process: asyncio.subprocess.Process | None, key: str) -> list[int]:
    """Return the process if it runs, and every process with the key in its environment, orphans included."""
    found = [] if process is None or process.returncode is not None else [process.pid]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if key.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
    return file.read().decode(errors="replace").strip()
