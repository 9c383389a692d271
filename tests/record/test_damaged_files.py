"""Damaged run folders: every reader copes with them, or refuses with an error of ours that names the file."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_builders import make_run
from run_folders import write_checkpoint

from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError
from areal_lite.launch.commands.main import main
from areal_lite.record.checkpoints import seal
from areal_lite.record.length_bias import spread_warning, stale_warning
from areal_lite.record.recorder import OnlineRecorder
from areal_lite.record.report import write_comparison, write_report
from areal_lite.record.run_folder import RunFolder

STEPS = 12
FILES = [
    "config.json", "metrics.jsonl", "events.jsonl", "samples.jsonl", "summary.json", "writer.json",
    "checkpoints/step-000006/manifest.json", "checkpoints/step-000006/meta.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with a checkpoint after half of them, and a learning rate that a resume changed."""
    folder = make_run(tmp_path_factory.mktemp("whole") / "run", steps=STEPS)
    settings = {"time": 5.5, "lane": "controller", "kind": "settings", "step": 5, "was": {"trainer.lr": 3e-4}}
    warning = {"time": 9.5, "lane": "controller", "kind": "warning", "step": 9, "text": "much is stale"}
    lost = {"time": 9.6, "lane": "controller", "kind": "lost", "worker": "rollout/1"}
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in (settings, warning, lost))
    owner = {"host": "gpu7", "machine": "here", "pid": 1, "began": 0.0, "since": "noon", "id": 1}
    (folder / "writer.json").write_text(json.dumps(owner))
    path = write_checkpoint(folder / "checkpoints", 6, lambda path: (path / "shard").write_bytes(b"weights"), keep=1)
    (path / "meta.json").write_text(json.dumps({"step": 6, "time": 6.5}))
    (path / "manifest.json").unlink()
    seal(path)
    return folder


def resume(folder: Path) -> None:
    """Do what a resumed run does with its folder, and complete one more step."""
    config = Config.model_validate({"run": {"resume": str(folder)}, "queue": {"max_staleness": 2}})
    found = RunFolder(folder)
    found.finished(config)
    found = RunFolder.resume(config, say=lambda _: None)
    found.go_on(config, say=lambda _: None)
    found.go_back(say=lambda _: None)
    recorder = OnlineRecorder(config, found)
    for warning in (stale_warning, spread_warning):
        warning([*recorder.recent])
    recorder.summary("interrupted", ledger={})


READERS: dict[str, Callable[[Path], object]] = {
    "report": write_report,
    "compare": lambda folder: write_comparison([folder, folder], out=folder / "comparison.html"),
    "watch": lambda folder: main(["watch", str(folder), "--every", "1"]),
    "replay": lambda folder: main(["replay", str(folder), "sums/0/3", "--no-score"]),
    "resume": resume,
}


def flip(content: bytes, chance: random.Random) -> bytes:
    """Flip one bit."""
    changed = bytearray(content)
    bit = chance.randrange(8 * len(changed))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def swap(content: bytes, chance: random.Random) -> bytes:
    """Put a value of another kind in the place of one, anywhere in a JSON document or a row."""
    lines = content.decode().splitlines()
    is_rows = len(lines) > 1 and lines[0].endswith("}")
    place = chance.randrange(len(lines))
    document = json.loads(lines[place] if is_rows else content)
    inside = list(_containers(document))
    container, key = chance.choice(inside)
    container[key] = chance.choice([None, [], {}, "x", -1, 1e300, 10**400, True, [[]], {"a": [1]}])
    if not is_rows:
        return json.dumps(document).encode()
    lines[place] = json.dumps(document)
    return ("\n".join(lines) + "\n").encode()


def _containers(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield value, key
        yield from _containers(one)


def replace(content: bytes, chance: random.Random) -> bytes:
    """Put something else in the place of the whole file."""
    return chance.choice([b"null", b"[]", b"3", b"", b"\x00" * 50, b"[" * 5000, b'"\\ud800"', b'{"a": NaN}', b"{}\n{}"])


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_ends_no_reader_with_a_bare_error(
    whole: Path, tmp_path: Path, name: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits flipped, values of another kind, other contents: an error, if any, is one of ours.

    Seen failing with KeyError, AttributeError and TypeError, in every reader.
    """
    monkeypatch.setattr("areal_lite.launch.commands.report.time.sleep", lambda _: (folder / "writer.json").unlink())
    chance = random.Random(f"{name} {reader}")
    for number, damage in enumerate([flip, swap, replace] * 4):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        path = folder / name
        if path.exists():
            path.write_bytes(damage(path.read_bytes(), chance))
        else:
            path.write_bytes(replace(b"", chance))
        with contextlib.suppress(ArealLiteError):
            READERS[reader](folder)


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_named_like_a_temporary_file_is_removed(whole: Path, tmp_path: Path, is_folder: bool) -> None:
    """Files in the place of folders, and the other way round. Seen failing with NotADirectoryError."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    names = [".config.json.tmp", ".summary.json.tmp", ".trace.json.gz.tmp", ".events.jsonl.kept"]
    names += [f"checkpoints/.step-00000{step}.{end}" for step in (3, 6, 7) for end in ("tmp", "aside", "old")]
    for path in (folder / name for name in names):
        path.mkdir() if is_folder else path.write_text("x")
    if not is_folder:
        (folder / "checkpoints" / "step-000007").write_text("x")
    resume(folder)
    write_checkpoint(folder / "checkpoints", 7, lambda path: (path / "a").touch(), keep=1)
    assert [name for name in names if (folder / name).exists()] == []
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000007"]
