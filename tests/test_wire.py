"""The wire form: what goes in comes out, and what was not written by it is refused by `WireError` alone."""

import contextlib
import dataclasses
import datetime
import itertools
import struct
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ledger_builders import make_sample

from areal_lite.errors import WireError
from areal_lite.types import Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, StopReason, VersionSpan
from areal_lite.wire import ARRAY_DTYPES, SCHEMA_VERSION, Raw, as_type, decode, encode


def same(left: Any, right: Any) -> bool:
    """Equality that knows arrays (dtype and shape included), NaN, and tuples that became lists."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype.newbyteorder("<") == right.dtype
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same_typed(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return type(left) is type(right) and left == right


def same_typed(left: Any, right: Any) -> bool:
    """As `same`; in fields of a dataclass tuples and enum members stay what they are."""
    return type(left) is type(right) and same(left, right)


texts = st.text(max_size=8)
versions = st.integers(0, 2**40)
arrays = st.sampled_from(sorted(ARRAY_DTYPES)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=8) | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
figures = st.dictionaries(texts, st.floats(allow_nan=False), max_size=2)


rewards = st.floats(-1e35, 1e35)


def scores(num_tokens: int = 10) -> st.SearchStrategy[Score]:
    steps = st.builds(StepReward, token=st.integers(0, num_tokens - 1), value=rewards)
    return st.builds(
        Score,
        reward=rewards,
        step_rewards=st.lists(steps, max_size=2).map(tuple),
        parts=figures,
        metrics=figures,
        feedback=texts,
    ) | st.builds(Score, failure=texts)


prompts = st.builds(
    Prompt,
    prompt_id=texts,
    text=texts,
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    answer=texts,
    row=st.dictionaries(texts, plain, max_size=3),
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    num_tokens = draw(st.integers(1, 9))
    edges = sorted({0, num_tokens} | set(draw(st.lists(st.integers(1, num_tokens), max_size=3))))
    return Sample(
        token_ids=draw(hnp.arrays(np.int32, num_tokens)),
        logprobs=draw(hnp.arrays(np.float32, num_tokens)),
        spans=tuple(
            VersionSpan(version=draw(versions), start=start, end=end) for start, end in itertools.pairwise(edges)
        ),
        stop_reason=draw(st.sampled_from(StopReason)),
        text=draw(texts),
        messages=draw(st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2).map(tuple)),
        score=draw(st.none() | scores(num_tokens)),
        routes=draw(st.none() | hnp.arrays(np.uint8, (2, 3, 2)) | hnp.arrays(np.uint16, (0, 1, 1))),
    )


groups = st.builds(Group, group_id=texts, prompt=prompts, samples=st.lists(samples(), max_size=3).map(tuple))
leases = st.builds(Lease, lease_id=texts, group=groups, version=versions)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    num_groups, num_samples = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    row = st.builds(
        Row,
        group_index=st.integers(0, num_groups - 1),
        sample_index=st.integers(0, num_samples - 1),
        minibatch=st.integers(0, 3),
        prompt_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        sample=samples(),
    )
    return Shard(
        batch_id=draw(texts),
        rank=draw(st.integers(0, 3)),
        version=draw(versions),
        rewards=draw(hnp.arrays(np.float32, (num_groups, num_samples))),
        rows=tuple(draw(st.lists(row, max_size=3))),
        has_step_rewards=draw(st.booleans()),
    )


SAMPLE_OF_THREE = make_sample(versions=(3, 3, 4))


@given(plain)
def test_decode_undoes_encode(value: Any) -> None:
    """Seen failing with array bytes written big-endian."""
    assert same(value, decode(encode(value)))


@given(scores() | prompts | leases | shards() | samples())
def test_decode_restores_dataclasses(value: Any) -> None:
    """Seen failing with arrays of several dimensions written as one of one dimension."""
    kind = type(value)
    assert same(value, decode(encode(value), kind))
    (lists,) = decode(encode({"values": [value, value]}), dict[str, list[kind]]).values()  # type: ignore[valid-type]
    assert same([value, value], lists)


def test_golden_bytes() -> None:
    """The layout, written out by hand from the msgpack specification; a change of it needs a new SCHEMA_VERSION."""
    assert encode({"a": [1, None]}) == bytes.fromhex("92 06 81 a161 92 01 c0")
    row = bytes.fromhex("d6 04 0500ff7f")  # 4 bytes of the fourth dtype, <i2: 5 and 32767, low byte first
    assert encode(np.array([5, 32767], "<i2")) == bytes.fromhex("92 06") + row
    table = bytes.fromhex("93 a33c6932 92 01 02 c404 0500ff7f")  # ["<i2", [1, 2], 4 bytes]
    assert encode(np.array([[5, 32767]], "<i2")) == bytes.fromhex("92 06 c7") + bytes([len(table), 0]) + table
    step = bytes.fromhex("82 a5746f6b656e 07 a576616c7565 cb3ff0000000000000")
    assert encode(StepReward(token=7, value=1.0)) == bytes.fromhex("92 06") + step


def test_values_that_change_kind_on_the_way() -> None:
    class Colour(StrEnum):
        RED = "red"

    big_endian, transposed = np.array([1, 2], ">f4"), np.arange(6, dtype=np.int64).reshape(2, 3).T
    sent = {"enum": Colour.RED, "tuple": (1, (2,)), "scalar": np.float32(0.5), "arrays": [big_endian, transposed]}
    got = decode(encode(sent))
    assert got["enum"] == "red"
    assert type(got["enum"]) is str
    assert got["tuple"] == [1, [2]]
    assert got["scalar"] == 0.5
    assert got["arrays"][0].dtype == np.dtype("<f4")
    assert [array.tolist() for array in got["arrays"]] == [[1.0, 2.0], [[0, 3], [1, 4], [2, 5]]]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        ENDLESS,
        {1: "int key"},
        {"deep": [({(1, 2): "tuple key"},)]},
        {1, 2},
        datetime.date(2026, 11, 21),
        2**64,
        "\ud800",
        np.array(["text"]),
        np.array([object()]),
        np.array([1 + 2j]),
        len,
    ],
)
def test_what_does_not_travel_is_refused_where_it_is_sent(value: Any) -> None:
    """Seen failing without our own check: msgspec writes sets, dates and int keys, and reads back something else."""
    with pytest.raises(WireError):
        encode(value)


def test_a_class_of_the_same_name_is_not_ours() -> None:
    @dataclasses.dataclass
    class Score:
        reward: float = 1.0

    with pytest.raises(WireError, match="convert it"):
        encode(Score())


def test_another_schema_version_is_named_with_ours() -> None:
    """Seen failing with the version read after the value, whose unknown parts then hid it."""
    newer = msgpack.packb([SCHEMA_VERSION + 1, msgpack.ExtType(99, b"something new")])
    with pytest.raises(WireError, match=rf"version {SCHEMA_VERSION}, got {SCHEMA_VERSION + 1}"):
        decode(newer)


def message(value: Any) -> bytes:
    return bytes(msgpack.packb([SCHEMA_VERSION, value]))


def row(*numbers: int) -> msgpack.ExtType:
    return msgpack.ExtType(6, np.array(numbers, "<i4").tobytes())


def array(*content: Any) -> bytes:
    return message(msgpack.ExtType(0, msgpack.packb(list(content))))


SAMPLE: dict[str, Any] = {
    "token_ids": row(5),
    "logprobs": msgpack.ExtType(11, bytes(4)),
    "spans": [{"version": 0, "start": 0, "end": 1}],
    "stop_reason": "stop",
}


def test_a_sample_needs_no_more_than_its_fields_without_defaults() -> None:
    """Also a sample from before there were routes, as an earlier version saved it. Seen failing without the default."""
    read = decode(message(SAMPLE), Sample)
    assert (read.token_ids.tolist(), read.routes) == ([5], None)


@pytest.mark.parametrize(
    ("data", "kind", "complaint"),
    [
        (b"", Any, "0 bytes"),
        (b"\x01", Any, "array"),
        (bytes(msgpack.packb([SCHEMA_VERSION])), Any, "length 2"),
        (bytes(msgpack.packb([SCHEMA_VERSION, 1, 2])), Any, "length 2"),
        (encode(1) + b"\x00", Any, "trailing"),
        (message(msgpack.ExtType(99, b"")), Any, "kind 0 to 12, got 99"),
        (message(1), Score, "Expected `object`, got `int`"),
        (message({"token": 1}), StepReward, "required field `value`"),
        (message({"token": 1, "value": "1.0"}), StepReward, r"Expected `float`, got `str` - at `\$\[1\].value`"),
        (message({}), Score, "a reward or a failure"),
        (message({"version": 0, "start": 0, "end": True}), VersionSpan, "Expected `int`, got `bool`"),
        (message({"version": 0, "start": 0, "end": 0}), VersionSpan, "start < end"),
        (message(SAMPLE | {"token_ids": msgpack.ExtType(6, bytes(5))}), Sample, "multiple of element size"),
        (message(SAMPLE | {"token_ids": row(5, 6)}), Sample, "one logprob per token"),
        (message(SAMPLE | {"token_ids": msgpack.ExtType(11, bytes(4))}), Sample, r"an array of int32, .*token_ids"),
        (message(SAMPLE | {"token_ids": [5]}), Sample, "an array of int32"),
        (message(SAMPLE | {"spans": [{"version": 0}]}), Sample, r"missing required field `start` - at .*spans\[0\]"),
        (message(SAMPLE | {"stop_reason": "halt"}), Sample, "halt"),
        (message(SAMPLE | {"text": b"bytes"}), Sample, "Expected `str`, got `bytes`"),
        (array("|O8", [1], b"12345678"), Any, r"\|O8"),
        (array("<i4", [2], b"1234"), Any, "does not fill"),
        (array("<i4", [-1, -1], b"1234"), Any, "does not fill"),
        (array("<i4", [1] * 100, b"1234"), Any, "not"),
        (array("<i4", "1", b"1234"), Any, "not"),
        (array("<i4"), Any, "not"),
    ],
)
def test_malformed_messages(data: bytes, kind: Any, complaint: str) -> None:
    """Seen failing with the dtype of arrays in fields unchecked, and with exceptions of the hooks let through."""
    with pytest.raises(WireError, match=complaint):
        decode(data, kind)


def test_every_truncation_is_refused() -> None:
    data = encode([SAMPLE_OF_THREE, {"a": 1}])
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: bytes([0x92, SCHEMA_VERSION]) + tail))
@example(bytes([0x92, SCHEMA_VERSION]) + b"\x91" * 5000)
@example(bytes([0x92, SCHEMA_VERSION]) + b"\xdd\xff\xff\xff\xff")
@example(bytes([0x92, SCHEMA_VERSION]) + b"\x81\x90\x01")
def test_random_bytes_raise_nothing_but_wire_errors(data: bytes) -> None:
    """Seen failing with `RecursionError` left out of the errors that mean unreadable."""
    refuse_or_read(data)


contents = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["Score", "reward", "<i4", ""]) | st.just(b"1234"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["reward", "failure"]), inner),
    max_leaves=6,
)


@given(
    st.tuples(st.just("<i4"), contents, st.just(b"1234")).map(lambda content: array(*content))
    | st.tuples(st.sampled_from(sorted(SAMPLE)), contents).map(lambda field: message(SAMPLE | dict([field])))
    | contents.map(message)
)
def test_wrong_content_raises_nothing_but_wire_errors(data: bytes) -> None:
    """Seen failing with `TypeError` left out of the errors that mean unreadable."""
    refuse_or_read(data)


def refuse_or_read(data: bytes) -> None:
    for kind in (Any, Sample, Score, list[Group]):
        with contextlib.suppress(WireError):
            decode(data, kind)


def test_a_part_is_read_once_its_type_is_known() -> None:
    """Seen failing with `Raw` converted as if it were a plain value."""
    parts = decode(encode({"op": "take", "samples": [SAMPLE_OF_THREE]}), dict[str, Raw])
    assert as_type(parts["op"], str) == "take"
    assert same((SAMPLE_OF_THREE,), as_type(parts["samples"], tuple[Sample, ...]))
    with pytest.raises(WireError, match="Expected `int`, got `str`"):
        as_type(parts["op"], int)


def test_plain_values_become_what_they_were() -> None:
    plain = decode(encode([SAMPLE_OF_THREE]))
    assert same((SAMPLE_OF_THREE,), as_type(plain, tuple[Sample, ...]))
    sample = SAMPLE_OF_THREE
    assert as_type([sample], list[Sample])[0] is sample
    assert as_type("stop", StopReason) is StopReason.STOP
    with pytest.raises(WireError, match=r"Expected `int`, got `str` - at `\$\[1\]`"):
        as_type([1, "2"], tuple[int, ...])
