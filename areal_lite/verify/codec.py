"""Messages between a verifier's process and its parent: msgpack, one after another.

The process sends `[problem, batch size or None, whether it is async]` once its function is loaded and prepared. Then it
receives jobs `[job, deadline on the machine's monotonic clock, calls]`, and answers each with `[job, replies, share of
its memory that is in use]`; without replies if an event loop cancelled the job at its deadline. A call travels as bytes
packed once, since it may be tried again.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgpack

MAX_REPLY_BYTES = 1024 * 1024
"""For one completion: a larger reply is a fault, and must not fill the parent's memory."""


def pack(message: Any) -> bytes:
    """Turn a message into bytes."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return body


def unpack(body: bytes) -> Any:
    """Read what `pack` wrote; sequences come as lists."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass", strict_map_key=False)


def unpacker(stream: Any = None, *, max_bytes: int = 0) -> Any:
    """Return a reader of one message after another, from a stream or from what it is fed; sequences are tuples."""
    options = {"unicode_errors": "surrogatepass", "strict_map_key": False, "use_list": False}
    return msgpack.Unpacker(stream, max_buffer_size=max_bytes, **options)


async def messages(reader: asyncio.StreamReader, *, max_bytes: int = 0) -> AsyncGenerator[Any, None]:
    """Yield messages until the other side hangs up; raises msgpack's errors where one has more than `max_bytes`."""
    received = unpacker(max_bytes=max_bytes)
    while data := await reader.read(2**16):
        received.feed(data)
        for message in received:
            yield message
