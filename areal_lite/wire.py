"""The wire form: values to bytes and back, for the sample queue and for what checkpoints keep of it.

Used by the queue's server and clients, and for ledger state in checkpoints. It opens no socket and reads no file. A
message is msgpack of `[SCHEMA_VERSION, value]`. Beyond msgpack's own types:

    a dataclass of `types.py`        a map of its fields
    an enum member                   its value
    an array of one dimension        extension 1..12: its bytes; the number is the dtype's place in `ARRAY_DTYPES`
    any other array                  extension 0: [dtype, shape, bytes]

Nothing is ever pickled, and a message does not name its type: the reader names the expected one, as in
`decode(data, list[Lease])`, and gets exactly that or a `WireError` with the place that is wrong. msgspec does the work:
it restores a dataclass from its annotations many times faster than Python could.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec
import numpy as np

from areal_lite.errors import WireError
from areal_lite.types import Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, VersionSpan

SCHEMA_VERSION = 6
"""Goes up with every change of the layout above or of a dataclass in `types.py`, except for a new field with a default:
a reader that does not know the field skips it.
"""

ARRAY_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""numpy's names of the array dtypes that may travel."""

Raw = msgspec.Raw
"""As the type of a field: leave it encoded, for `as_type` to read once its type is known."""

_DTYPES = dict(enumerate(map(np.dtype, ARRAY_DTYPES), start=1))
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ANY_SHAPE = 0
_OURS = msgspec.msgpack.encode((SCHEMA_VERSION, None))[:-1]
"""How every message of this version begins."""
_EMPTY_LIST, _LONG_LIST = b"\x90", b"\xdd"
"""In msgpack: a list without items; the begin of one, before its length in 4 bytes."""
_DATACLASSES = (Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, VersionSpan)
_TRAVELLERS = (type(None), bool, int, float, str, bytes, np.ndarray, np.generic, StrEnum, *_DATACLASSES)
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)


def encode(value: Any) -> bytes:
    """Turn a value into bytes.

    Args:
        value: None, bool, int (64 bits), float, str, bytes, a list, tuple or str-keyed mapping of such values, a
            numpy array, an enum member, or a dataclass of `types.py`.

    Raises:
        WireError: The value holds something that does not travel.
    """
    try:
        return _ENCODER.encode((SCHEMA_VERSION, _checked(value)))
    except _UNREADABLE as error:
        raise WireError(
            "a message holds plain values, numpy arrays and the dataclasses of areal_lite.types, got something else "
            f"({error}): convert it before sending"
        ) from error


def encode_in_parts(value: Any, items: Sequence[Any]) -> Iterator[bytes]:
    """Yield, in parts, the bytes of a message that ends with a long list: a part is quick to make.

    Example: `b"".join(encode_in_parts({"ids": []}, [1, 2]))` decodes to `{"ids": [1, 2]}`.

    Args:
        value: As for `encode`; its very last value is an empty list.
        items: Of that list, in the value's place.
    """
    head = encode(value)
    assert head.endswith(_EMPTY_LIST)
    yield head[: -len(_EMPTY_LIST)] + _LONG_LIST + len(items).to_bytes(4, "big")
    for item in items:
        yield _ENCODER.encode(_checked(item))


def decode(data: bytes, kind: Any = Any) -> Any:
    """Turn bytes made by `encode` into the value again. Arrays are read-only.

    Args:
        data: One message.
        kind: Type of the value; with `Any`, tuples come back as lists and dataclasses as dicts.

    Raises:
        WireError: Truncated, malformed, of another schema version, or not of this kind.
    """
    # Of another version only the version is read: the rest may be unreadable.
    version = SCHEMA_VERSION if data.startswith(_OURS) else _read(data, (Any, Raw))[0]
    if version != SCHEMA_VERSION:
        raise WireError(
            f"messages here have schema version {SCHEMA_VERSION}, got {version!r}: "
            "run the same areal-lite on both sides"
        )
    return _read(data, (int, kind))[1]


def as_type(value: Any, kind: Any) -> Any:
    """Read a part of a message that `decode` left as `Raw` or as plain values.

    Args:
        value: The part.
        kind: As for `decode`.

    Raises:
        WireError: It is malformed, or of another type.
    """
    try:
        if isinstance(value, Raw):
            return _decoder(kind).decode(value)
        return msgspec.convert(value, kind, dec_hook=_check_array)
    except _UNREADABLE as error:
        raise WireError(str(error)) from error


# Writing


def _checked(value: Any) -> Any:
    """Refuse what msgspec would write but not read back as it was: better now than when a checkpoint is loaded."""
    if isinstance(value, _TRAVELLERS):
        return value
    if isinstance(value, list | tuple):
        items: Iterable[Any] = value
    elif isinstance(value, Mapping):
        items = value.values()
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a mapping with the key {key!r}, which is no str")
    else:
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")
    for item in items:
        _checked(item)
    return value


def _to_plain(value: Any) -> Any:
    """Encoder's hook for types that msgspec does not know: arrays, numpy scalars, other mappings."""
    if isinstance(value, np.ndarray):
        little = value if value.dtype in _CODES else value.astype(value.dtype.newbyteorder("<"))
        if little.dtype not in _CODES:
            raise TypeError(f"an array of dtype {value.dtype}, not one of {', '.join(ARRAY_DTYPES)}")
        if little.ndim == 1:
            return msgspec.msgpack.Ext(_CODES[little.dtype], little.tobytes())
        content = (little.dtype.str, little.shape, little.tobytes())
        return msgspec.msgpack.Ext(_ANY_SHAPE, _ENCODER.encode(content))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)


# Reading


def _read(data: bytes, kinds: tuple[Any, Any]) -> Any:
    try:
        return _decoder(tuple[kinds]).decode(data)  # type: ignore[valid-type]
    except _UNREADABLE as error:
        raise WireError(
            f"a message is msgpack of [schema version, value], got {len(data)} bytes that are not ({error})"
        ) from error


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind, ext_hook=_from_extension, dec_hook=_check_array)


def _from_extension(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    """Decoder's hook: the array of an extension. Its bytes are copied, since in a message they lie anywhere."""
    if code in _DTYPES:
        return np.frombuffer(bytes(data), _DTYPES[code])
    if code != _ANY_SHAPE:
        raise ValueError(f"extensions in a message are of kind {_ANY_SHAPE} to {max(_DTYPES)}, got {code}")
    dtype, shape, content = _decoder(tuple[str, list[int], bytes]).decode(data)
    if dtype not in ARRAY_DTYPES:
        raise ValueError(f"arrays in a message have a dtype of {', '.join(ARRAY_DTYPES)}, got {dtype!r}")
    if min(shape, default=0) < 0 or math.prod(shape) * np.dtype(dtype).itemsize != len(content):
        raise ValueError(f"an array of dtype {dtype} and shape {shape} does not fill {len(content)} bytes")
    return np.ndarray(tuple(shape), dtype, buffer=content)


def _check_array(annotation: Any, value: Any) -> np.ndarray[Any, Any]:
    """Decoder's hook for fields annotated `NDArray[...]`."""
    scalar = annotation.__args__[1].__args__[0]
    if not isinstance(value, np.ndarray) or scalar not in (Any, value.dtype.type):
        raise ValueError(f"expected an array of {scalar.__name__}, got {value!r:.80}")
    return value
