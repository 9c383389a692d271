"""The wire form: what goes in comes out, and what was not written by it is refused by `WireError` alone."""

import contextlib
import dataclasses
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

from areal_lite.errors import WireError
from areal_lite.types import Group, Lease, Prompt, Row, Sample, Score, Shard, StepReward, StopReason, VersionSpan
from areal_lite.wire import ARRAY_DTYPES, SCHEMA_VERSION, as_type, decode, encode, schema_version


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
scores = st.builds(
    Score,
    reward=st.floats(allow_nan=False),
    step_rewards=st.lists(st.builds(StepReward, token=st.integers(0, 9), value=st.floats()), max_size=2).map(tuple),
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
        reward=draw(st.none() | st.floats()),
        step_rewards=tuple(
            StepReward(token=draw(st.integers(0, num_tokens - 1)), value=value)
            for value in draw(st.lists(st.floats(), max_size=2))
        ),
        parts=draw(figures),
        feedback=draw(texts),
        failure=draw(st.none() | texts),
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


def make_sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "token_ids": np.array([5, 6, 7], np.int32),
        "logprobs": np.array([-0.5, -0.25, -2.0], np.float32),
        "spans": (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3)),
        "stop_reason": StopReason.STOP,
    }
    return Sample(**fields | changes)


@given(plain | scores | leases | shards() | st.lists(samples(), max_size=2))
def test_decode_undoes_encode(value: Any) -> None:
    """Seen failing with tuples left as lists in dataclass fields, and with array bytes written big-endian."""
    assert same(value, decode(encode(value)))


def test_golden_bytes() -> None:
    """The layout, written out by hand from the msgpack specification; a change of it needs a new SCHEMA_VERSION."""
    assert encode({"a": [1, None]}) == bytes.fromhex("92 03 81 a161 92 01 c0")
    array = bytes.fromhex("93 a33c6932 91 02 c404 0500ff7f")  # ["<i2", [2], 4 bytes: 5 and 32767, low byte first]
    assert encode(np.array([5, 32767], "<i2")) == bytes.fromhex("92 03 c7") + bytes([len(array), 1]) + array
    step = bytes.fromhex("93 aa53746570526577617264 07 cb3ff0000000000000")
    assert encode(StepReward(token=7, value=1.0)) == bytes.fromhex("92 03 c7") + bytes([len(step), 2]) + step
    # Inside of a dataclass: one span is a list of three numbers, three tokens are twelve bytes.
    sample = bytes.fromhex("9d a653616d706c65 c40c 050000000600000007000000 c40c 000000bf 000080be 000000c0")
    sample += bytes.fromhex("92 93030002 93040203 a473746f70 a0 90 c0 90 80 80 a0 c0")
    assert encode(make_sample()) == bytes.fromhex("92 03 c7") + bytes([len(sample), 2]) + sample


def test_values_that_change_kind_on_the_way() -> None:
    class Colour(StrEnum):
        RED = "red"

    big_endian = np.array([1, 2], ">f4")
    got = decode(encode({"enum": Colour.RED, "tuple": (1, (2,)), "scalar": np.float32(0.5), "array": big_endian}))
    assert got["enum"] == "red"
    assert type(got["enum"]) is str
    assert got["tuple"] == [1, [2]]
    assert got["scalar"] == 0.5
    assert got["array"].dtype == np.dtype("<f4")
    assert got["array"].tolist() == [1.0, 2.0]


def test_arrays_come_back_in_their_order_of_elements() -> None:
    transposed = np.arange(6, dtype=np.int64).reshape(2, 3).T
    assert decode(encode(transposed)).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1: "int key"},
        {"deep": [({(1, 2): "tuple key"},)]},
        Prompt(prompt_id="p", text="", token_ids=(), answer="", row={"columns": {2: "int key"}}),
        2**64,
        "\ud800",
        np.array(["text"]),
        np.array([object()]),
        np.array([1 + 2j]),
        len,
    ],
)
def test_what_does_not_travel_is_refused_where_it_is_sent(value: Any) -> None:
    """Seen failing without the check of keys: msgpack writes an int key, and refuses to read it back."""
    with pytest.raises(WireError):
        encode(value)


def test_nothing_nested_without_end_is_sent() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WireError):
        encode(endless)


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
    assert schema_version(newer) == SCHEMA_VERSION + 1


def test_too_long_a_message_is_refused_unread() -> None:
    data = encode(b"x" * 100)
    assert decode(data, max_bytes=len(data)) == b"x" * 100
    with pytest.raises(WireError, match=f"{len(data) - 1} bytes, got {len(data)}"):
        decode(data, max_bytes=len(data) - 1)


def extension(code: int, *content: Any) -> bytes:
    return bytes(msgpack.packb([SCHEMA_VERSION, msgpack.ExtType(code, msgpack.packb(list(content)))]))


SAMPLE: list[Any] = [bytes(4), bytes(4), [[0, 0, 1]], "stop", "", [], None, [], {}, {}, "", None]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (b"\x01", "not"),
        (bytes(msgpack.packb([SCHEMA_VERSION])), "not"),
        (bytes(msgpack.packb([SCHEMA_VERSION, 1, 2])), "not"),
        (encode(1) + b"\x00", "1 bytes too many"),
        (extension(3), "kind 1 or 2, got 3"),
        (extension(2, "Config"), "'Config'"),
        (extension(2, ["Score"]), "not"),
        (extension(2), "not"),
        (extension(2, "StepReward", 1), "fields token, value"),
        (extension(2, "StepReward", 1, 1.0, 1), "fields token, value"),
        (extension(2, "StepReward", 1, "1.0"), r"'1\.0'"),
        (extension(2, "Score", None, [], {}, {}, "", None), "a reward or a failure"),
        (extension(2, "VersionSpan", 0, 0, True), "expected int, got True"),
        (extension(2, "VersionSpan", 0, 0, 0), "start < end"),
        (extension(2, "Sample", bytes(5), *SAMPLE[1:]), "not"),
        (extension(2, "Sample", bytes(8), *SAMPLE[1:]), "one logprob per token"),
        (extension(2, "Sample", *SAMPLE[:2], [{"version": 0}], *SAMPLE[3:]), "VersionSpan with the fields version, st"),
        (extension(2, "Sample", *SAMPLE[:3], "halt", *SAMPLE[4:]), "halt"),
        (extension(1, "|O8", [1], b"12345678"), r"\|O8"),
        (extension(1, "<i4", [2], b"1234"), "does not fill"),
        (extension(1, "<i4", [-1, -1], b"1234"), "does not fill"),
        (extension(1, "<i4", [1] * 100, b"1234"), "not"),
        (extension(1, "<i4", "1", b"1234"), "not"),
        (extension(1, "<i4"), "not"),
    ],
)
def test_malformed_messages(data: bytes, message: str) -> None:
    """Seen failing with the values of a dataclass not counted."""
    with pytest.raises(WireError, match=message):
        decode(data)


@pytest.mark.parametrize("changes", [{"token_ids": np.arange(3.0)}, {"logprobs": [1.0, 2.0, 3.0]}, {"text": b"bytes"}])
def test_fields_of_another_type_do_not_become_a_sample(changes: dict[str, Any]) -> None:
    """Seen failing with the fields passed to the class unchecked."""
    with pytest.raises(WireError, match="expected"):
        decode(encode(make_sample(**changes)))


def test_every_truncation_is_refused() -> None:
    data = encode([make_sample(), {"a": 1}])
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])


MESSAGE = encode(
    [Group(group_id="p#0", prompt=Prompt(prompt_id="p", text="", token_ids=(1,), answer=""), samples=(make_sample(),))]
)


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: bytes([0x92, SCHEMA_VERSION]) + tail))
@example(bytes([0x92, SCHEMA_VERSION]) + b"\x91" * 5000)
@example(bytes([0x92, SCHEMA_VERSION]) + b"\xdd\xff\xff\xff\xff")
@example(bytes([0x92, SCHEMA_VERSION]) + b"\x81\x90\x01")
def test_random_bytes_raise_nothing_but_wire_errors(data: bytes) -> None:
    """Seen failing with `UnpackException` left out of the errors that mean unreadable."""
    refuse_or_read(data)


@given(st.lists(st.tuples(st.integers(0, len(MESSAGE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_messages_raise_nothing_but_wire_errors(damage: list[tuple[int, int]]) -> None:
    data = bytearray(MESSAGE)
    for place, byte in damage:
        data[place] = byte
    refuse_or_read(bytes(data))


contents = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["Score", "reward", "<i4", ""]) | st.just(b"1234"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["reward", "failure"]), inner),
    max_leaves=6,
)


@given(
    st.tuples(st.just(1), st.just("<i4"), contents, st.just(b"1234"))
    | st.tuples(st.just(2), st.sampled_from(["Score", "Prompt"]), contents)
    | st.lists(contents, max_size=4).map(lambda content: (1, *content))
)
def test_wrong_content_of_extensions_raises_nothing_but_wire_errors(arguments: tuple[Any, ...]) -> None:
    """Seen failing with `TypeError` left out of the errors that mean unreadable, and for fields that came as a list."""
    refuse_or_read(extension(*arguments))


def refuse_or_read(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(data)


def test_as_type_restores_and_checks() -> None:
    assert as_type([1, 2], tuple[int, ...]) == (1, 2)
    assert as_type(["a"], list[str]) == ["a"]
    assert as_type("stop", StopReason) is StopReason.STOP
    assert as_type(None, float | None) is None
    assert as_type(1, float) == 1
    for value, annotation in [("x", tuple[int, ...]), ([1], list[str]), (True, int), (None, str), (1.0, Score)]:
        with pytest.raises(WireError, match="expected"):
            as_type(value, annotation)
