"""Messages between a verifier's process and its parent: 4 bytes of length, big-endian, then msgpack.

The process says `[problem, batch size or None, whether it is async]` once its function is loaded and prepared. Then it
gets jobs `[job, calls]`, and `[job, None]` for one to be given up; it answers with `[job, None, False]` when it begins
one, and `[job, replies, whether it keeps too much memory]` when it is done. A call travels as bytes packed once, since
it may be tried again.
"""

import struct
from typing import Any

import msgpack

__all__ = ["LENGTH", "MAX_REPLY_BYTES", "pack", "unpack"]

LENGTH = struct.Struct("!I")
"""The 4 bytes before each message."""

MAX_REPLY_BYTES = 1024 * 1024
"""For one completion; whoever says more has gone wrong, and must not fill the parent's memory."""


def pack(message: Any) -> bytes:
    """Turn a message into bytes."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return body


def unpack(body: bytes) -> Any:
    """Read what `pack` wrote."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)
