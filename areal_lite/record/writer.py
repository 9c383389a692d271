"""One writer per run folder (invariant I9): `writer.json` names it, is locked by flock, and carries a heartbeat.

Some network file systems do not share flocks, and a heartbeat alone is slow. So a writer is taken for dead when its
lock is free and its process has ended; or, on another machine, when its heartbeat (the file's modification time) does
not change for a while. Clocks of two machines are never compared.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.record.run_files import has_shape, shape

_OWNER = shape(host=str, machine=str, pid=int, began=float, since=str)
_CLOCK_S = 5.0
"""Tolerance of a process's start time: it is computed from the clock, which may have been set since."""
_BEAT_S, _SILENCE_S = 5.0, 120.0
"""Between two heartbeats, and without one until a writer on another machine is taken for dead."""
_NO_PLACE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOTDIR,
    errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.ENOLCK, errno.EOPNOTSUPP,
}  # fmt: skip
"""Errors of the place that is written to, not of the code that writes."""


@contextlib.contextmanager
def writable(what: str, folder: Path) -> Iterator[None]:
    """Turn errors of a read-only folder or a full disk into a `ConfigError` that names the folder."""
    try:
        yield
    except Exception as error:
        in_rust = re.search(r"\(os error (\d+)\)", str(error))  # a library's in Rust has no errno
        number = error.errno if isinstance(error, OSError) else in_rust and int(in_rust[1])
        if number not in _NO_PLACE and (number != errno.ENOENT or folder.exists()):
            raise
        raise ConfigError(
            f"{what} must be writable, got {folder.absolute()}: {getattr(error, 'strerror', None) or error}. Fix: "
            "choose another, or make it writable"
        ) from error


class SoleWriter:
    """Holds a run folder while it is entered."""

    def __init__(self, folder: Path, *, take_over: bool = False, say: Callable[[str], object] = print) -> None:
        """Nothing on the disk changes yet.

        Args:
            folder: Made where it is missing.
            take_over: Take it from a writer that still holds it, which then writes nothing more.
        """
        self._folder, self._path, self._take_over, self._say = folder, folder / "writer.json", take_over, say
        self._stop = threading.Event()
        me = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
        began = psutil.Process().create_time()
        self._mine = json.dumps(me | {"began": began, "since": time.ctime(), "id": time.time_ns()}).encode()

    def __enter__(self) -> Self:
        """Take the folder; a `CheckpointError` names another holder, a `ConfigError` an unwritable folder."""
        self._is_new = not self._folder.exists()
        with writable("a run folder (run.dir)", self._folder), contextlib.ExitStack() as files:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._take_over:  # the lock of a live process cannot be taken, but its file can be replaced
                self._path.unlink(missing_ok=True)
            is_there = False
            while not is_there:  # the file may be removed between opening and locking it
                file = self._file = files.enter_context(self._path.open("a+b"))
                is_free, (_, found) = _flock(file.fileno()), read_lease(self._path)
                is_ours = is_free and (not found or self._is_gone(_owner(found)))
                is_there = os.fstat(file.fileno()).st_nlink > 0
            if not is_ours:
                raise CheckpointError(
                    f"{self._folder} is in use by {_named(_owner(found))}. Fix: wait until it ends, or end it; if you "
                    f"know that it is dead: areal-lite resume {shlex.quote(str(self._folder))} --take-over"
                )
            file.truncate(0)
            file.write(self._mine)
            file.flush()
            os.fsync(file.fileno())
            self._files = files.pop_all()
        self.check()  # where flock has no effect, two writers may have come this far
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()
        return self

    def check(self) -> None:
        """Raise a `CheckpointError` if another process has taken the folder over."""
        if (found := read_lease(self._path)[1]) != self._mine:
            raise CheckpointError(
                f"{self._folder} was taken over by {_named(_owner(found))}: this process writes nothing more there"
            )

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._heart.join()
        if read_lease(self._path)[1] == self._mine:
            self._path.unlink()
        self._files.close()
        if self._is_new:
            with contextlib.suppress(OSError):  # it holds something
                self._folder.rmdir()

    def _is_gone(self, owner: dict[str, Any]) -> bool:
        if owner.get("machine") == _machine():
            return find_process(owner["pid"], owner["began"]) is None
        self._say(f"waiting {_SILENCE_S:g} s for a heartbeat of {_named(owner)}, which holds {self._folder}")
        seen, until = read_lease(self._path), time.monotonic() + _SILENCE_S
        while time.monotonic() < until:
            time.sleep(min(_BEAT_S, _SILENCE_S / 4))
            if read_lease(self._path) != seen:
                return False
        return True

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._file.fileno())


def read_lease(path: Path) -> tuple[int, bytes]:
    """Return the time of the last heartbeat and the holder's entry from `writer.json`; nothing if it is not there."""
    try:
        with path.open("rb") as file:  # opening makes network file systems ask their server
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return 0, b""


def find_process(pid: int, began: float) -> psutil.Process | None:
    """Return the process of this machine that began then, in seconds since the epoch; None if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if abs(process.create_time() - began) <= _CLOCK_S and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _flock(number: int) -> bool:
    """Take the lock; False if another process has it, True if the file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _machine() -> str:
    """Return an id of this boot of this machine, and of the container whose process ids count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _owner(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if has_shape(owner := json.loads(content), _OWNER):
            return dict(owner)
    return {}


def _named(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown process"
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
