"""The wire form: values to bytes and back, for the sample queue and for what checkpoints keep of it.

Called by the queue's server and clients, by the verifier's child process and by whoever saves ledger
state. It opens no socket and reads no file. A message is msgpack of `[SCHEMA_VERSION, value]`. Beyond what
msgpack knows, two kinds travel as extensions, and nothing is ever pickled:

    ARRAY      [dtype, shape, bytes]      numpy arrays of the dtypes in `ARRAY_DTYPES`, little-endian
    DATACLASS  [name, {field: value}]     the dataclasses of `types.py`, by name, fields checked on arrival

Tuples come back as lists and enum members as their value, except in fields of our dataclasses, where the
annotation says what to restore.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from areal_lite.errors import WireError
from areal_lite.types import Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, VersionSpan

__all__ = ["ARRAY_DTYPES", "SCHEMA_VERSION", "as_type", "decode", "encode", "schema_version"]

SCHEMA_VERSION = 2
"""Goes up with every change of a dataclass in `types.py` or of the layout above."""

ARRAY_DTYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
"""numpy's names of the array dtypes that may travel."""

_ARRAY, _DATACLASS = 1, 2
_PACK_BUFFER_BYTES = 65536  # msgpack would start with 1 MiB for each array and dataclass, which halves the speed
_CONTAINERS = (dict, list, tuple)
_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, VersionSpan)
}
_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException)


def encode(value: Any) -> bytes:
    """Turn a value into bytes.

    Args:
        value: None, bool, int (64 bits), float, str, bytes, a list, tuple or str-keyed dict of such values, a
            numpy array, an enum member, or a dataclass of `types.py`.

    Raises:
        WireError: The value holds something that does not travel.
    """
    try:
        _check_keys(value)
        return _pack([SCHEMA_VERSION, value])
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(
            f"a message holds plain values, numpy arrays and the dataclasses of areal_lite.types, got something else "
            f"({error}): convert it before sending"
        ) from error


def decode(data: bytes, *, max_bytes: int | None = None) -> Any:
    """Turn bytes made by `encode` into the value again. Arrays are read-only views of the message.

    Args:
        data: One message.
        max_bytes: Longest message accepted; None = any.

    Raises:
        WireError: Too long, truncated, malformed, of another schema version, or holding an unknown dataclass, a
            dataclass with other fields, or a field of another type.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise WireError(f"a message may have {max_bytes} bytes, got {len(data)}: send less, or raise the limit")
    try:
        unpacker = _open(data)
        version = unpacker.unpack()
        if version != SCHEMA_VERSION:
            raise WireError(
                f"messages here have schema version {SCHEMA_VERSION}, got {version!r}: "
                "run the same areal-lite on both sides"
            )
        value = unpacker.unpack()
    except WireError:
        raise
    except _UNREADABLE as error:
        raise _malformed(data, error) from error
    if unpacker.tell() != len(data):
        raise _malformed(data, f"{len(data) - unpacker.tell()} bytes too many")
    return value


def schema_version(data: bytes) -> Any:
    """Read only the schema version of a message, whatever it is.

    Raises:
        WireError: There is none to read.
    """
    try:
        return _open(data).unpack()
    except _UNREADABLE as error:
        raise _malformed(data, error) from error


def as_type(value: Any, annotation: Any) -> Any:
    """Check a decoded value against a type annotation, and restore the tuples and enum members it asks for.

    Args:
        value: As `decode` returned it.
        annotation: A plain type, `X | None`, `tuple[X, ...]`, `Sequence[X]`, `list[X]`, `Mapping[str, Any]`, a
            `StrEnum`, a dataclass of `types.py`, or a numpy array type with its dtype.

    Raises:
        WireError: The value is of another type.
    """
    return _restorer(annotation)(value)


def _malformed(data: bytes, why: object) -> WireError:
    return WireError(f"a message is msgpack of [schema version, value], got {len(data)} bytes that are not ({why!s})")


def _open(data: bytes) -> Any:
    """Return an unpacker that stands before the schema version."""
    unpacker = msgpack.Unpacker(ext_hook=_from_extension, max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    if unpacker.read_array_header() != 2:
        raise ValueError("not a pair")
    return unpacker


def _check_keys(value: Any) -> None:
    """Refuse keys that msgpack would write but not read back: better now than when a checkpoint is loaded."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise WireError(f"keys of a mapping must be str, got {key!r}: convert the keys before sending")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        if isinstance(item, _CONTAINERS):
            _check_keys(item)


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, default=_to_extension, buf_size=_PACK_BUFFER_BYTES))


def _to_extension(value: Any) -> Any:
    """Packer hook for what msgpack does not know: arrays, our dataclasses, numpy scalars, other mappings."""
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _pack_array(value))
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        content = {key: getattr(value, key) for key in _field_restorers(name)}
        _check_keys([item for item in content.values() if isinstance(item, dict)])
        return msgpack.ExtType(_DATACLASS, _pack([name, content]))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        plain = dict(value)
        _check_keys(plain)
        return plain
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _pack_array(array: np.ndarray[Any, Any]) -> bytes:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in ARRAY_DTYPES:
        raise TypeError(f"an array of dtype {array.dtype}, not one of {sorted(ARRAY_DTYPES)}")
    return _pack([little.dtype.str, little.shape, np.ascontiguousarray(little).data])


def _from_extension(code: int, data: bytes) -> Any:
    """Unpacker hook: the array or dataclass that an extension holds."""
    if code == _ARRAY:
        return _unpack_array(*msgpack.unpackb(data))
    if code != _DATACLASS:
        raise WireError(f"extensions in a message are of kind {_ARRAY} or {_DATACLASS}, got {code}")
    name, content = msgpack.unpackb(data, ext_hook=_from_extension)
    cls = _CLASSES.get(name)
    if cls is None:
        raise WireError(f"a message holds the dataclasses {', '.join(sorted(_CLASSES))}, got {name!r}")
    restorers = _field_restorers(name)
    if not isinstance(content, dict) or content.keys() != restorers.keys():
        raise WireError(f"{name} has the fields {', '.join(restorers)}, got {content!r:.200}")
    return cls(**{key: restorers[key](value) for key, value in content.items()})


def _unpack_array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    if dtype not in ARRAY_DTYPES:
        raise WireError(f"arrays in a message have a dtype of {sorted(ARRAY_DTYPES)}, got {dtype!r}")
    if min(shape, default=0) < 0 or math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise WireError(f"an array of dtype {dtype} and shape {shape} does not fill {len(data)} bytes")
    return np.ndarray(tuple(shape), dtype, buffer=data)


@cache
def _field_restorers(name: str) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(_CLASSES[name])
    return {field.name: _restorer(hints[field.name]) for field in fields(_CLASSES[name])}


@cache
def _restorer(annotation: Any) -> Callable[[Any], Any]:
    """Build the function behind `as_type` for one annotation, once: every field of every sample passes through it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda value: value
    if origin in (Union, types.UnionType):
        inner = _restorer(next(arg for arg in args if arg is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin in (tuple, list, Sequence):
        return _sequence_restorer(args[0], list if origin is list else tuple)
    if origin is np.ndarray:
        return _array_restorer(get_args(args[1])[0])
    kind = origin or annotation
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    return _kind_restorer({float: (float, int), Mapping: dict}.get(kind, kind))


def _sequence_restorer(item: Any, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    restore_item = _restorer(item)

    def restore(value: Any) -> Any:
        if not isinstance(value, list):
            raise WireError(f"expected a list, got {value!r:.80}")
        return build(map(restore_item, value))

    return restore


def _array_restorer(scalar: type[np.generic]) -> Callable[[Any], Any]:
    dtype = np.dtype(scalar)

    def restore(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            raise WireError(f"expected an array of {dtype}, got {value!r:.80}")
        return value

    return restore


def _kind_restorer(kinds: Any) -> Callable[[Any], Any]:
    def restore(value: Any) -> Any:
        if not isinstance(value, kinds) or (value.__class__ is bool and kinds is not bool):
            raise WireError(f"expected {getattr(kinds, '__name__', kinds)}, got {value!r:.80}")
        return value

    return restore
