"""Messages between a verifier's process and its parent: msgpack, one after another.

The process says `[problem, batch size or None, whether it is async]` once its function is loaded and prepared. Then it
gets jobs `[job, calls]`, and `[job, None]` for one to be given up; it answers with `[job, None, 0.0]` when it begins
one, and `[job, replies, which share of its memory it keeps]` when it is done. A call travels as bytes packed once,
since it may be tried again.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgpack

MAX_REPLY_BYTES = 1024 * 1024
"""For one completion; whoever says more has gone wrong, and must not fill the parent's memory."""


def pack(message: Any) -> bytes:
    """Turn a message into bytes."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return body


def unpack(body: bytes) -> Any:
    """Read what `pack` wrote; sequences come as lists."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)


def unpacker(stream: Any = None, *, max_bytes: int = 0) -> Any:
    """Return what reads message after message, of a stream or of what it is fed; sequences come as tuples."""
    options = {"unicode_errors": "surrogatepass", "strict_map_key": False, "use_list": False}
    return msgpack.Unpacker(stream, max_buffer_size=max_bytes, **options)


async def messages(reader: asyncio.StreamReader, *, max_bytes: int = 0) -> AsyncGenerator[Any, None]:
    """Yield what comes, until the other side hangs up; raises msgpack's errors where one has more than `max_bytes`."""
    pieces = unpacker(max_bytes=max_bytes)
    while data := await reader.read(2**16):
        pieces.feed(data)
        for message in pieces:
            yield message
