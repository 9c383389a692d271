"""One writer per run folder: a second is refused by name, a dead one is no hindrance, a refusal touches nothing."""

import errno
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.record import writer
from areal_lite.record.writer import SoleWriter, writable


def _hold(folder: Path, end: Connection) -> None:
    writer._BEAT_S = 0.01
    with SoleWriter(folder):
        end.send("held")
        end.recv()


@contextmanager
def other_writer(folder: Path) -> Iterator[Any]:
    """A process that holds the folder."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(folder, theirs))
    process.start()
    assert mine.recv() == "held"
    try:
        yield process
    finally:
        process.kill()
        process.join()


def lease(folder: Path, **changes: Any) -> bytes:
    """Leave what a writer that was killed leaves."""
    with SoleWriter(folder):
        owner = json.loads((folder / "writer.json").read_text()) | {"host": "gpu7", "since": "Sunday"}
    folder.mkdir(exist_ok=True)
    (folder / "writer.json").write_text(json.dumps(owner | changes))
    return (folder / "writer.json").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_free_again_after_its_writer(tmp_path: Path) -> None:
    """And a folder that was made for nothing is gone."""
    for _ in range(2):
        with SoleWriter(tmp_path / "run") as held:
            assert [path.name for path in (tmp_path / "run").iterdir()] == ["writer.json"]
            held.check()
    assert not (tmp_path / "run").exists()


def test_a_second_writer_is_refused_by_name_until_the_first_is_dead(tmp_path: Path) -> None:
    """Of another process, and of this one; kill -9 leaves the lease, which is then no hindrance.

    Seen failing without flock and the look at the process; and with a lease that nobody breaks.
    """
    with other_writer(tmp_path) as process:
        before = contents(tmp_path)
        with pytest.raises(CheckpointError) as caught, SoleWriter(tmp_path):
            pass
        assert f"is in use by process {process.pid} on {os.uname().nodename}, since " in str(caught.value)
        assert f"areal-lite resume {tmp_path} --take-over" in str(caught.value)
        assert contents(tmp_path) == before
    assert (tmp_path / "writer.json").exists()
    with SoleWriter(tmp_path), pytest.raises(CheckpointError, match=f"process {os.getpid()} on"), SoleWriter(tmp_path):
        pass


@pytest.mark.parametrize(
    ("changes", "is_gone"), [({}, False), ({"pid": 2**22 + 1}, True), ({"began": 1000.0}, True)]
)  # fmt: skip
def test_without_flock_the_process_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_gone: bool
) -> None:
    """A process id that was reused is another process. Seen failing with the id compared alone."""
    monkeypatch.setattr(writer, "_flock", lambda number: True)
    lease(tmp_path, **changes)
    refusal = pytest.raises(CheckpointError, match="is in use by process")
    with nullcontext() if is_gone else refusal, SoleWriter(tmp_path):
        pass


def test_an_owner_on_another_machine_is_watched_before_it_counts_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old its lease: clocks differ. Seen failing with the age of the file in place of a look at it."""
    lease(tmp_path, machine="elsewhere")
    os.utime(tmp_path / "writer.json", (0, 0))
    monkeypatch.setattr(writer, "_SILENCE_S", 0.3)
    messages: list[str] = []
    begun = time.monotonic()
    with SoleWriter(tmp_path, say=messages.append) as held:
        assert time.monotonic() - begun >= 0.3
        held.check()
    assert messages == [
        f"waiting 0.3 s for a heartbeat of process {os.getpid()} on gpu7, since Sunday, which holds {tmp_path}"
    ]


def test_an_owner_on_another_machine_that_lives_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heart beats. Seen failing without the thread that beats."""
    with other_writer(tmp_path):
        monkeypatch.setattr(writer, "_flock", lambda number: True)
        monkeypatch.setattr(writer, "_machine", lambda: "another")
        begun = time.monotonic()
        monkeypatch.setattr(writer, "_BEAT_S", 0.05)
        with pytest.raises(CheckpointError, match="is in use by"), SoleWriter(tmp_path, say=lambda _: None):
            pass
        assert time.monotonic() - begun < 60, "of 120 s"


def test_who_is_taken_over_notices_and_leaves_the_lease_alone(tmp_path: Path) -> None:
    """Also one that is alive. Seen failing with the lock asked for on the old file."""
    with SoleWriter(tmp_path) as old:
        with SoleWriter(tmp_path, take_over=True) as new:
            new.check()
            with pytest.raises(CheckpointError, match=r"was taken over by process \d+ on .*nothing more"):
                old.check()
        with pytest.raises(CheckpointError, match="taken over"):
            old.check()


def test_a_refusal_after_a_dead_owner_leaves_a_free_folder(tmp_path: Path) -> None:
    """Seen failing with its lease restored: each further try waited for a heartbeat from the other machine."""
    lease(tmp_path, pid=2**22 + 1)
    with pytest.raises(ValueError, match="a misspelt path"), SoleWriter(tmp_path):
        raise ValueError("a misspelt path")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("content", ["{", '{"since": "Sunday"}'])
def test_a_lease_that_cannot_be_read_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Seen failing with a `KeyError` for a lease without a process."""
    monkeypatch.setattr(writer, "_SILENCE_S", 0.05)
    (tmp_path / "writer.json").write_text(content)
    messages: list[str] = []
    with SoleWriter(tmp_path, say=messages.append) as held:
        held.check()
    assert "of an unknown process, which holds" in messages[0]


def test_an_error_of_the_work_does_not_blame_the_folder(tmp_path: Path) -> None:
    """A file that is missing, a connection that is refused. Seen failing with every error of the system's taken."""
    for number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOMEM):
        for error in (OSError(number, "x"), ValueError(f"x (os error {number})")):
            with pytest.raises(type(error), match="x"), writable("a folder", tmp_path):
                raise error
    for number, folder in ((errno.EDQUOT, tmp_path), (errno.ENOENT, tmp_path / "none")):
        with pytest.raises(ConfigError, match="a folder must be writable"), writable("a folder", folder):
            raise OSError(number, "x")
