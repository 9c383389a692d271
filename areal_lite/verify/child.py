"""Main of the process that runs a verify function, and that may be killed at any moment.

`process.py` starts `python -m areal_lite.verify.child FUNCTION PARENT_PID ARGUMENTS` with one end of a socket pair as
standard input; ARGUMENTS are the recipe's, as JSON. Frames of both directions: 4 bytes of length, big-endian, then
msgpack. The process sends `None` once the function is loaded and prepared, or a text that says why it cannot be; then
it answers each call `[prompt, completion, answer, row]` with a `Reply`, one at a time. It knows no deadline: its parent
does.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any

import msgpack

from areal_lite.errors import VerifierError
from areal_lite.verify.protocol import call_verifier, load_verifier, prepare_verifier

__all__ = ["LENGTH", "main", "pack", "unpack"]

LENGTH = struct.Struct("!I")
"""The 4 bytes before each message."""

_PR_SET_PDEATHSIG = 1


def pack(message: Any) -> bytes:
    """Turn a message into a frame."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """Read a frame's body."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass")


def main(function_name: str, parent_pid: int, arguments: dict[str, Any]) -> None:
    """Load the function and answer calls until the parent hangs up."""
    _die_with(parent_pid)
    channel = _take_channel()
    try:
        function = load_verifier(function_name)
        prepare_verifier(function, arguments)
    except VerifierError as error:
        channel.sendall(pack(str(error)))
        return
    channel.sendall(pack(None))
    while body := _receive(channel):
        channel.sendall(pack(call_verifier(function, *unpack(body), arguments=arguments)))


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, even while a verifier holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise RuntimeError("the parent ended before its verifier process was ready")


def _take_channel() -> socket.socket:
    """Move the socket away from file descriptor 0, where a verifier could touch it by mistake.

    Standard input, output and error become the null device: whatever a verifier prints, it can neither block nor
    reach the channel. A process that a verifier forks must not speak on it either.
    """
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.register_at_fork(after_in_child=channel.close)
    return channel


def _receive(channel: socket.socket) -> bytes:
    """Return the next body; empty when the parent hung up."""
    header = _read(channel, size=LENGTH.size)
    return _read(channel, size=LENGTH.unpack(header)[0]) if header else b""


def _read(channel: socket.socket, *, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads or exit handlers that a verifier left behind must not keep this process alive.
        os._exit(status)
