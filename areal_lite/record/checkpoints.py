"""A run's checkpoints on disk: each is complete or absent, and is verified before it is loaded.

step-000012/            meta.json, queue.msgpack, trainer/, and in the last one model/
    manifest.json       size and SHA-256 of every other file, written last
.step-000012.tmp/       is being written
.step-000012.aside/     the previous save of a step that is being saved again; counts until the new one is in place
orphaned-step-000012-*  a resume continued from an earlier step; never deleted here
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_lite.errors import CheckpointError
from areal_lite.events import now
from areal_lite.record.run_files import number, read_json, remove

_MANIFEST, _META = "manifest.json", "meta.json"
Digest = dict[str, int | str]
"""`size` in bytes and `sha256` of a file."""
LATE_S = 15.0
"""How late a file may show on another node: storage that nodes share may cache what a folder holds."""
_NAME = re.compile(r"\.?step-(\d+)(\.aside)?")


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by step, oldest first."""
    found = {
        int(name[1]): path
        for path in [*folder.glob(".step-*.aside"), *folder.glob("step-*")]
        if (name := _NAME.fullmatch(path.name)) and any((path / file).is_file() for file in (_META, _MANIFEST))
    }
    return dict(sorted(found.items()))


def read_meta(checkpoint: Path) -> tuple[int, float]:
    """Return a checkpoint's step, and the time at which its save began, in seconds since the epoch.

    Raises:
        CheckpointError: Its `meta.json` does not hold them.
    """
    meta = read_json(checkpoint / _META)
    step, moment = meta.get("step"), number(meta.get("time"))
    if not isinstance(step, int) or moment is None:
        raise CheckpointError(f"{checkpoint / _META}: expected a step and a time, found something else")
    return step, moment


def choose_checkpoint(folder: Path, wanted: str | None, *, say: Callable[[str], object]) -> Path:
    """Return the newest undamaged checkpoint, or the wanted one (`step-12`); nothing on the disk changes.

    Args:
        say: Shows which checkpoints are passed over, and why.

    Raises:
        CheckpointError: There is none.
    """
    there = whole_checkpoints(folder)
    if not there:
        raise CheckpointError(
            f"expected a complete checkpoint under {folder}, got none: the run ended before its first one "
            "(run.checkpoint_every). Fix: start a new run"
        )
    steps = [step for step in reversed(there) if wanted in (None, f"step-{step}", f"step-{step:06d}")]
    if not steps:
        raise CheckpointError(
            f"run.resume_from must be one of {', '.join(f'step-{step}' for step in there)}, got {wanted!r}"
        )
    bad = []
    for step in steps:
        if not (problem := damage(there[step])):
            return there[step]
        bad.append(f"step-{step}: {problem}")
        say(f"DAMAGED checkpoint, skipped: {there[step]}: {problem}")
    raise CheckpointError(
        f"no undamaged checkpoint under {folder}: {'; '.join(bad)}. Fix: choose another with run.resume_from=step-N, "
        "or start a new run"
    )


@contextlib.contextmanager
def new_checkpoint(folder: Path, step: int, *, keep: int) -> Iterator[Path]:
    """Yield the folder to write a checkpoint into; it counts once the block has ended, and older ones are deleted.

    A step that is saved again has a complete checkpoint at every moment: the old one until the new one is in place.

    Args:
        step: Completed steps.
        keep: How many to keep, this one included.

    Raises:
        CheckpointError: The disk is full. After any failure the files written so far are deleted.
    """
    final, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    aside = folder / f".{final.name}.aside"
    began = now()
    try:
        _clear(folder)
        temporary.mkdir(parents=True)
        yield temporary
        (temporary / _META).write_text(json.dumps({"step": step, "time": began}))
        seal(temporary)
    except Exception as error:
        written, free = _size(temporary), shutil.disk_usage(folder if folder.exists() else folder.parent).free
        shutil.rmtree(temporary, ignore_errors=True)
        needed = max([written + 2**20, *map(_size, whole_checkpoints(folder).values())])
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or written + free < needed:
            raise CheckpointError(
                f"disk full: {needed / 2**20:.0f} MB needed in {folder}, {(written + free) / 2**20:.0f} MB are free; "
                f"step {step} is not saved, earlier checkpoints are kept. Fix: free some space"
            ) from error
        raise
    if final.exists():
        os.replace(final, aside)
    os.replace(temporary, final)
    _sync(folder)
    remove(aside)
    for old in [path for known, path in whole_checkpoints(folder).items() if known <= step][:-keep]:
        hidden = old.with_name(f".{old.name}.old")
        os.replace(old, hidden)  # so that one that a kill leaves half deleted never looks complete
        remove(hidden)


def make_newest(checkpoint: Path, *, say: Callable[[str], object]) -> None:
    """Set the checkpoints of later steps aside: they would count as the newest, and this one would be deleted."""
    folder = checkpoint.parent
    steps = {path: step for step, path in whole_checkpoints(folder).items()}
    for path, step in reversed(steps.items()):
        if step > steps[checkpoint]:
            orphan = folder / f"orphaned-step-{step:06d}-{time.time_ns()}"
            os.replace(path, orphan)
            say(f"step-{step} is later than the step to resume from: kept as {orphan.name}")
    _clear(folder)


def digests(paths: Iterable[Path]) -> dict[str, Digest]:
    """Return size and SHA-256 of files, by path, once they have reached the disk."""
    found = list(paths)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        return dict(zip(map(str, found), pool.map(_digest, found), strict=True))


def seal(checkpoint: Path, known: Mapping[str, Digest] | None = None) -> None:
    """Add every file that the manifest lacks to it, once the file has reached the disk.

    Args:
        known: From `digests`, by those that wrote the files: these are not read again.

    Raises:
        CheckpointError: The manifest is damaged, or a file of `known` is not there.
    """
    final, temporary = checkpoint / _MANIFEST, checkpoint / f".{_MANIFEST}.tmp"
    remove(temporary)
    problems: list[str] = []
    manifest = read_json(final, problems)
    if final.exists() and problems:
        raise CheckpointError(f"{checkpoint} is damaged: {problems[0]}")
    _wait_for(known or {})
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path not in (final, temporary)]
    known = known or {}
    name_of = {str(path): path.relative_to(checkpoint).as_posix() for path in paths}
    new = [path for path in paths if name_of[str(path)] not in manifest and str(path) not in known]
    manifest |= {name_of[path]: digest for path, digest in {**known, **digests(new)}.items()}
    temporary.write_text(_text(manifest))
    _sync(temporary)
    os.replace(temporary, final)
    for path in {path.parent for path in paths} | {checkpoint, checkpoint.parent}:
        _sync(path)


def _wait_for(known: Mapping[str, Digest]) -> None:
    """Wait until files of other nodes are here, whole: storage may show them late."""
    deadline = time.monotonic() + LATE_S
    for path, digest in known.items():
        while not (os.path.isfile(path) and os.path.getsize(path) == digest["size"]):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"expected {path}, which a trainer rank wrote, got no such file here within {LATE_S:g} s. Fix: put "
                    "run.dir on storage that all nodes share, and that shows new files sooner"
                )
            time.sleep(0.2)


def damage(checkpoint: Path, part: str = "") -> str:
    """Describe which files of a checkpoint, or of a folder in it, changed since they were saved; empty if none did."""
    path, name = checkpoint / _MANIFEST, _NAME.fullmatch(checkpoint.name)
    step = read_json(checkpoint / _META).get("step")
    if name and isinstance(step, int) and step != int(name[1]):
        return f"expected step {int(name[1])} in {_META}, as in the folder's name, found step {step}"
    if not path.exists():
        return f"{_MANIFEST}: expected one, found none"
    manifest = read_json(path)
    # Of two names that one flipped bit has made equal, JSON keeps one: so the text is compared too.
    if _META not in manifest or path.read_bytes() != _text(manifest).encode():
        return f"{_MANIFEST}: expected what was written, found something else"
    if not (manifest := {name: value for name, value in manifest.items() if name.startswith(part)}):
        return f"{part}: expected in {_MANIFEST}, found nothing: its save did not finish"
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: _difference(checkpoint / item[0], item[1]), manifest.items())
        return "; ".join(f"{name}: {problem}" for name, problem in zip(manifest, found, strict=True) if problem)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _difference(path: Path, expected: Any) -> str:
    try:
        found: Any = _digest(path, sync=False)
    except (OSError, ValueError) as error:
        found = repr(error)
    return "" if found == expected else f"expected {expected}, found {found}"


def _digest(path: Path, *, sync: bool = True) -> Digest:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": sha256}


def _clear(folder: Path) -> None:
    """Finish or undo what a kill has interrupted."""
    there = whole_checkpoints(folder)
    for path in folder.glob(".step-*"):
        if path in there.values():
            os.replace(path, path.with_name(path.name.removeprefix(".").removesuffix(".aside")))
        else:
            remove(path)


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1)


def _sync(path: Path) -> None:
    """Wait until a file or a folder has reached the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync folders
            os.fsync(number)
    finally:
        os.close(number)
