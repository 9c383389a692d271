"""A run's checkpoints on disk: whole or not at all, and verified before anything is made of them.

step-000012/            meta.json, queue.msgpack, trainer/, and in the last one model/
manifest.json       size and SHA-256 of every other file, written last
.step-000012.tmp/       is being written
.step-000012.aside/     counts while there is no other of its step: it is being saved again
orphaned-step-000012-*  a resume went on from an earlier one; never deleted here
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_lite.errors import CheckpointError

_MANIFEST, _META = "manifest.json", "meta.json"
_NAME = re.compile(r"\.?step-(\d+)(\.aside)?")


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by step, oldest first."""
    found = {
        int(name[1]): path
        for path in [*folder.glob(".step-*.aside"), *folder.glob("step-*")]
        if (name := _NAME.fullmatch(path.name)) and any((path / file).is_file() for file in (_META, _MANIFEST))
    }
    return dict(sorted(found.items()))


def choose_checkpoint(folder: Path, wanted: str | None, *, say: Callable[[str], object]) -> Path:
    """Return the newest checkpoint that is what was saved, or the wanted one (`step-12`); nothing changes.

    Args:
        say: Told of each that is passed over, and of one that cannot be verified.

    Raises:
        CheckpointError: There is none such.
    """
    there = whole_checkpoints(folder)
    if not there:
        raise CheckpointError(
            f"expected a complete checkpoint under {folder}, got none: the run ended before its first one "
            "(run.checkpoint_every), start anew"
        )
    steps = [step for step in reversed(there) if wanted in (None, f"step-{step}", f"step-{step:06d}")]
    if not steps:
        raise CheckpointError(
            f"run.resume_from must be one of {', '.join(f'step-{step}' for step in there)}, got {wanted!r}"
        )
    bad = []
    for step in steps:
        if not (problem := damage(there[step])):
            if not (there[step] / _MANIFEST).exists():
                say(f"step-{step} cannot be verified: an earlier version wrote it, without a manifest")
            return there[step]
        bad.append(f"step-{step}: {problem}")
        say(f"DAMAGED checkpoint, not taken: {there[step]}: {problem}")
    raise CheckpointError(
        f"a checkpoint must be what was saved, got under {folder}: {'; '.join(bad)}: choose another with "
        "run.resume_from=step-N, or start anew"
    )


@contextlib.contextmanager
def new_checkpoint(folder: Path, step: int, *, keep: int) -> Iterator[Path]:
    """Yield where a checkpoint is written, which counts from the end of the block on; the newest are kept.

    At no moment is there none of its step if there was one.

    Args:
        step: Completed steps.
        keep: How many to keep; the one written now, just verified, is among them.

    Raises:
        CheckpointError: The disk is full; whatever fails, what was written is gone.
    """
    final, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    aside = folder / f".{final.name}.aside"
    _clear(folder)
    temporary.mkdir(parents=True)
    began = time.time()
    try:
        yield temporary
        (temporary / _META).write_text(json.dumps({"step": step, "time": began, "manifest": True}))
        seal(temporary)
    except Exception as error:
        written, free = _size(temporary), shutil.disk_usage(folder).free
        shutil.rmtree(temporary, ignore_errors=True)
        needed = max([written + 2**20, *map(_size, whole_checkpoints(folder).values())])
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or written + free < needed:
            raise CheckpointError(
                f"disk full: {needed / 2**20:.0f} MB needed in {folder}, {(written + free) / 2**20:.0f} MB are free; "
                f"step {step} is not saved, earlier checkpoints are kept: make room there"
            ) from error
        raise
    if final.exists():
        os.replace(final, aside)
    os.replace(temporary, final)
    _sync(folder)
    shutil.rmtree(aside, ignore_errors=True)
    for old in [path for known, path in whole_checkpoints(folder).items() if known <= step][:-keep]:
        hidden = old.with_name(f".{old.name}.old")
        os.replace(old, hidden)  # one that a kill left half deleted is never taken for whole
        shutil.rmtree(hidden)


def go_on_from(checkpoint: Path, *, say: Callable[[str], object]) -> None:
    """Make a checkpoint the newest: those of later steps are set aside, so that no rule keeps them in its place."""
    folder = checkpoint.parent
    steps = {path: step for step, path in whole_checkpoints(folder).items()}
    for path, step in reversed(steps.items()):
        if step > steps[checkpoint]:
            orphan = folder / f"orphaned-step-{step:06d}-{time.time_ns()}"
            os.replace(path, orphan)
            say(f"step-{step} is later than where the run goes on: kept as {orphan.name}")
    _clear(folder)


def seal(checkpoint: Path) -> None:
    """Enter every file that is not yet there into the manifest, once it is on the disk."""
    final, temporary = checkpoint / _MANIFEST, checkpoint / f".{_MANIFEST}.tmp"
    manifest = json.loads(final.read_text()) if final.exists() else {}
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path not in (final, temporary)]
    new = {name: path for path in paths if (name := path.relative_to(checkpoint).as_posix()) not in manifest}
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter's lock
        manifest |= dict(zip(new, pool.map(_fingerprint, new.values()), strict=True))
    temporary.write_text(_text(manifest))
    _sync(temporary)
    os.replace(temporary, final)
    for path in {path.parent for path in paths} | {checkpoint, checkpoint.parent}:
        _sync(path)


def damage(checkpoint: Path, part: str = "") -> str:
    """Say which files of a checkpoint, or of a folder in it, are not what was saved; nothing where nobody can know."""
    path = checkpoint / _MANIFEST
    if not path.exists():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            meta = json.loads((checkpoint / _META).read_text())
            return f"{_MANIFEST}: expected one, found none" if meta.get("manifest") else ""
        return f"{_META}: expected JSON, found something else"
    try:
        manifest = json.loads(text := path.read_text())
    except (OSError, ValueError) as error:
        return f"{_MANIFEST}: expected what was written, found {error}"
    if text != _text(manifest) or _META not in manifest:
        return f"{_MANIFEST}: expected what was written, found something else"
    if not (manifest := {name: value for name, value in manifest.items() if name.startswith(part)}):
        return f"{part}: expected in {_MANIFEST}, found nothing: it was not written to its end"
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: _difference(checkpoint / item[0], item[1]), manifest.items())
        return "; ".join(f"{name}: {problem}" for name, problem in zip(manifest, found, strict=True) if problem)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _difference(path: Path, expected: Any) -> str:
    try:
        found: Any = _fingerprint(path, sync=False)
    except (OSError, ValueError) as error:
        found = repr(error)
    return "" if found == expected else f"expected {expected}, found {found}"


def _fingerprint(path: Path, *, sync: bool = True) -> dict[str, int | str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": sha256}


def _clear(folder: Path) -> None:
    """Undo what a kill has left half done."""
    there = whole_checkpoints(folder)
    for path in folder.glob(".step-*"):
        if path in there.values():
            os.replace(path, path.with_name(path.name.removeprefix(".").removesuffix(".aside")))
        else:
            shutil.rmtree(path)


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1)


def _sync(path: Path) -> None:
    """Have a file or a folder reach the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot do it with folders
            os.fsync(number)
    finally:
        os.close(number)
