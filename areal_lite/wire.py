"""The wire form: values to bytes and back, for the sample queue and for what checkpoints keep of it.

Called by the queue's server and clients, by the verifier's child process and by whoever saves ledger
state. It opens no socket and reads no file. A message is msgpack of `[SCHEMA_VERSION, value]`. Beyond what
msgpack knows, two kinds travel as extensions, and nothing is ever pickled:

    ARRAY      [dtype, shape, bytes]      numpy arrays of the dtypes in `ARRAY_DTYPES`, little-endian
    DATACLASS  [name, *values]            the dataclasses of `types.py`, values in the order of their fields

Tuples come back as lists and enum members as their value, except in fields of our dataclasses, where the
annotation says what to restore. There a dataclass is only its list of values, and an array of one dimension only its
bytes: what is known on both sides is not written, since a group of samples has hundreds of such values. All of them
are checked on arrival.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from areal_lite.errors import WireError
from areal_lite.types import Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, VersionSpan

__all__ = ["ARRAY_DTYPES", "SCHEMA_VERSION", "as_type", "decode", "encode", "schema_version"]

SCHEMA_VERSION = 3
"""Goes up with every change of a dataclass in `types.py` or of the layout above."""

ARRAY_DTYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
"""numpy's names of the array dtypes that may travel."""

_ARRAY, _DATACLASS = 1, 2
_OURS = msgpack.packb([SCHEMA_VERSION, None])[:-1]
"""How every message of this version begins."""
_PACK_BUFFER_BYTES = 65536  # msgpack would start with 1 MiB for each array and dataclass, which halves the speed
_CONTAINERS = (dict, list, tuple)
_CLASSES: dict[str, Any] = {
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
    except (AttributeError, ValueError, TypeError, OverflowError, RecursionError) as error:
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
        version = SCHEMA_VERSION if data.startswith(_OURS) else schema_version(data)
        if version != SCHEMA_VERSION:
            raise WireError(
                f"messages here have schema version {SCHEMA_VERSION}, got {version!r}: "
                "run the same areal-lite on both sides"
            )
        _, value = msgpack.unpackb(data, ext_hook=_from_extension)
    except WireError:
        raise
    except msgpack.ExtraData as error:
        raise _malformed(data, f"{len(error.extra)} bytes too many") from error
    except _UNREADABLE as error:
        raise _malformed(data, error) from error
    return value


def schema_version(data: bytes) -> Any:
    """Read only the schema version of a message, whatever it is.

    Raises:
        WireError: There is none to read.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    try:
        if unpacker.read_array_header() != 2:
            raise ValueError("not a pair")
        return unpacker.unpack()
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
        return msgpack.ExtType(_DATACLASS, _pack([name, *_object_writer(_CLASSES[name])(value)]))
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
    name, *values = msgpack.unpackb(data, ext_hook=_from_extension)
    if name not in _CLASSES:
        raise WireError(f"a message holds the dataclasses {', '.join(sorted(_CLASSES))}, got {name!r}")
    return _object_restorer(_CLASSES[name])(values)


def _unpack_array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    if dtype not in ARRAY_DTYPES:
        raise WireError(f"arrays in a message have a dtype of {sorted(ARRAY_DTYPES)}, got {dtype!r}")
    if min(shape, default=0) < 0 or math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise WireError(f"an array of dtype {dtype} and shape {shape} does not fill {len(data)} bytes")
    return np.ndarray(tuple(shape), dtype, buffer=data)


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


@cache
def _writer(annotation: Any) -> Callable[[Any], Any] | None:
    """Build the function that makes plain what a field holds, once; None for what msgpack takes as it is.

    A value of another type passes as it is, for the other side to refuse by name.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return None
    if origin in (tuple, list, Sequence):
        write = _writer(args[0])
        return write and (lambda values: list(map(write, values)))
    if origin is np.ndarray:
        dtype = np.dtype(get_args(args[1])[0]).newbyteorder("<")
        return lambda array: array.tobytes() if _is_row(array, dtype) else array
    if origin is Mapping:
        return _checked_mapping
    return _object_writer(annotation) if annotation in _CLASSES.values() else None


def _is_row(array: Any, dtype: np.dtype[Any]) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype


def _checked_mapping(value: Any) -> Any:
    _check_keys(value)
    return value


@cache
def _object_writer(cls: Any) -> Callable[[Any], list[Any]]:
    read = attrgetter(*_field_types(cls))
    writers = [(place, write) for place, kind in enumerate(_field_types(cls).values()) if (write := _writer(kind))]

    def write_object(value: Any) -> list[Any]:
        values = list(read(value))
        for place, write in writers:
            values[place] = write(values[place])
        return values

    return write_object


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
    if kind in _CLASSES.values():
        return _object_restorer(kind)
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
        if value.__class__ is bytes:
            return np.frombuffer(value, dtype)
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            raise WireError(f"expected an array of {dtype}, got {value!r:.80}")
        return value

    return restore


@cache
def _object_restorer(cls: Any) -> Callable[[Any], Any]:
    names = tuple(_field_types(cls))
    steps = [(name, _plain_kind(kind), _restorer(kind)) for name, kind in _field_types(cls).items()]

    def restore(values: Any) -> Any:
        if isinstance(values, cls):
            return values
        if not isinstance(values, list) or len(values) != len(names):
            raise WireError(f"expected {cls.__name__} with the fields {', '.join(names)}, got {values!r:.80}")
        content = {}
        for (name, kind, restore_field), value in zip(steps, values, strict=True):
            # Most values need no restoring, and not looking closer halves the time of a group.
            content[name] = value if value.__class__ is kind else restore_field(value)
        return cls(**content)

    return restore


def _plain_kind(annotation: Any) -> Any:
    """Return the type whose values are right as they come, if any."""
    kinds = [arg for arg in get_args(annotation) or [annotation] if arg is not type(None)]
    return dict if get_origin(annotation) is Mapping else kinds[0] if kinds[0] in (str, int, float) else None


def _kind_restorer(kinds: Any) -> Callable[[Any], Any]:
    def restore(value: Any) -> Any:
        if not isinstance(value, kinds) or (value.__class__ is bool and kinds is not bool):
            raise WireError(f"expected {getattr(kinds, '__name__', kinds)}, got {value!r:.80}")
        return value

    return restore
