"""A resume that is refused leaves the run folder as it was, to the byte, whatever it is refused for."""

import contextlib
import errno
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_builders import SUPPORT, loop_config
from offline_builders import offline_config, offline_trainer
from rich.console import Console
from run_folders import new_run_folder, save_run
from transformers import AutoTokenizer

from areal_lite.data.cursor import make_cursor
from areal_lite.data.prompts import load_sources
from areal_lite.errors import ArealLiteError, CheckpointError, ConfigError
from areal_lite.launch.run import train as train_module
from areal_lite.launch.run.train import train
from areal_lite.record.paths import with_absolute_paths
from areal_lite.record.writer import SoleWriter
from areal_lite.wire import encode

NAMED = {"named": {"slow": {"function": "math"}}}
LIMITS: dict[str, Any] = {
    "verifier": {"memory_mb": 4096, "unavailable_s": 9, "max_failure_share": 1}
    | {"named": {"slow": {"function": "math", "timeout_s": 60}}},
    "rollout": {"turn_timeout_s": 20, "max_episodes": 8, "command_memory_mb": 512},
    "trainer": {"collective_timeout_s": 900},
}
"""All that the errors of `verify/quarantine.py` and `config/checks.py` advise to change, and the like."""

WATCHED = {"run": {"eval_every": 1}, "reward_watch": {"verifiers": {"truth": {"function": "exact"}}, "stop": True}}
MOVED_VERIFIER = "moved/loop_verifiers.py:digit_share"


def changed_data(folder: Path) -> None:
    path = folder / "train.jsonl"
    path.write_text(path.read_text().replace("0007", "0099"))


def flipped_bit(folder: Path) -> None:
    path = folder / "run/checkpoints/step-000002/queue.msgpack"
    path.write_bytes(b"\0" + path.read_bytes()[1:])


def moved(folder: Path) -> None:
    (folder / "moved").mkdir()
    for path in (folder / "train.jsonl", SUPPORT / "loop_verifiers.py"):
        shutil.copy(path, folder / "moved")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint of step 2, killed after step 3; its Ray has no room."""
    config = with_absolute_paths(loop_config(tmp_path, run={"dir": str(tmp_path / "run")}, verifier=NAMED))
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    folder, cursor = new_run_folder(config), make_cursor(config, load_sources(config, tokenizer, "train"))
    queue_state = encode({"ledger": {}, "cursor": cursor.state()})
    save_run(folder, 2, Path.mkdir, queue=queue_state)
    folder.append("metrics.jsonl", [{"step": step} for step in (1, 2, 3)])
    folder.append("events.jsonl", [{"time": 9e9}])

    def no_room(config: Any, **_: Any) -> None:
        raise ConfigError(f"no room for {config.run.steps} steps")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_module, "ray_session", contextlib.nullcontext)
    monkeypatch.setattr(train_module, "places_for", no_room)
    monkeypatch.setattr(train_module.ray, "nodes", list)
    return tmp_path


def resume(folder: Path, *, named: tuple[str, ...] = (), said: Any = None, **sections: Any) -> dict[str, Any]:
    run = {"resume": str(folder / "run"), **sections.pop("run", {})}
    config = loop_config(folder, run=run, **{"verifier": NAMED} | sections)
    return train(config, recipe_name="x", console=Console(file=said or io.StringIO()), named=named)


@pytest.mark.parametrize(
    ("harm", "sections", "message"),
    [
        (lambda _: None, {"trainer": {"lr": 1e-2}}, r"trainer\.lr was 0\.001, is 0\.01"),
        (lambda _: None, {"trainer": {"lr": 1e-2}, "named": ("trainer.lr",)}, "no room"),
        (lambda _: None, {"queue": {"max_staleness": 9}, "named": ("queue.max_staleness",)}, "staleness was 2, is 9"),
        (moved, {"data": {"path": "moved/train.jsonl"}, "named": ("data.path",)}, "no room"),
        (moved, {"verifier": NAMED | {"function": MOVED_VERIFIER}, "named": ("verifier.function",)}, "no room"),
        (
            moved,
            {"verifier": {"function": MOVED_VERIFIER}, "named": ("verifier.function",)},
            "slow.function was 'math'",
        ),
        (moved, {"data": {"path": "moved/train.jsonl"}}, r"data\.path was"),
        (moved, {"data": {"path": "eval.jsonl"}, "named": ("data.path",)}, r"data\.path was"),
        (lambda _: None, {"run": {"resume_from": "step-1"}}, "must be one of step-2"),
        (lambda _: None, {}, "no room"),
        (lambda _: None, LIMITS, "no room"),
        (lambda _: None, WATCHED, "no room"),
        (flipped_bit, {}, r"step-2: queue\.msgpack: expected"),
        (changed_data, {}, "Resume with the data"),
    ],
)
def test_a_refused_resume_touches_nothing(
    stopped: Path, harm: Callable[[Path], None], sections: dict[str, Any], message: str
) -> None:
    """Recipe, checkpoint, data, resources. A learning rate may change where it is named; a setting that has nothing
    to do with the pace may not. Deadlines, limits of memory and a watch over rewards may, and what a path names may be
    in another folder.

    Seen failing with the rows moved as soon as the recipe fits (no room, data), with the names not looked at, with
    every name allowed, with limits refused that a run's own error had advised to raise, and with files refused that
    were moved.
    """
    harm(stopped)
    before = contents(stopped / "run")
    with pytest.raises(ArealLiteError, match=message):
        resume(stopped, **sections)
    assert contents(stopped / "run") == before


def test_a_folder_that_is_held_is_refused_first(stopped: Path) -> None:
    """Seen failing without the lock: the recipe was looked at, and the run went on."""
    with SoleWriter(stopped / "run"):
        before = contents(stopped / "run")
        with pytest.raises(ArealLiteError, match="is in use by process"):
            resume(stopped)
        assert contents(stopped / "run") == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_offline_run_on_other_rows_is_refused(stopped: Path) -> None:
    """Also on the same in another order; held-out rows do not count. Seen failing without the checksum.

    1.1 epochs of 8 rows, 4 a step, are 3 steps. Seen failing with 2, which left rows out.
    """
    folder = stopped / "sft"
    folder.mkdir()
    config = with_absolute_paths(offline_config(folder, run={"dir": str(stopped / "offline")}))
    run = new_run_folder(config)
    save_run(run, 2, offline_trainer(config).snapshot())

    def resume_offline() -> None:
        again = offline_config(folder, run={"resume": str(run.path)}, trainer={"epochs": 1.1})
        train(again, recipe_name="x", console=Console(file=io.StringIO()))

    with pytest.raises(ConfigError, match="no room for 3 steps"):
        resume_offline()
    rows = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join([rows[1], rows[0], *rows[2:]]))
    before = contents(run.path)
    with pytest.raises(CheckpointError, match="must be of the same training rows"):
        resume_offline()
    assert contents(run.path) == before


def test_a_finished_run_is_left_as_it_is(stopped: Path) -> None:
    """Unless there is more to do. Seen failing without the look: resources were asked for; and with nothing said."""
    done = {"status": "done", "version": 3, "steps": 3}
    (stopped / "run" / "summary.json").write_text(json.dumps(done))
    before, said = contents(stopped / "run"), io.StringIO()
    assert resume(stopped, run={"steps": 3}, said=said) == done | {"folder": str(stopped / "run")}
    assert said.getvalue().startswith("this run is finished: ")
    assert contents(stopped / "run") == before
    with pytest.raises(ConfigError, match="no room"):
        resume(stopped, run={"steps": 4})


def test_a_run_folder_that_may_only_be_read_is_said_before_anything_is_loaded(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume's too, and nothing there changes. Seen failing with Python's own error."""
    before, opened = contents(stopped / "run"), Path.open

    def read_only(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        if "r" not in mode and path.is_relative_to(stopped / "run"):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, mode, *more, **named)

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(ConfigError, match=r"run folder .* must be writable, got .*/run: Read-only file system"):
        resume(stopped, model={"path": "nowhere"})
    assert contents(stopped / "run") == before


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("areal_lite.node.memory_bytes", lambda: 1000 << 20, r"1000 MiB of memory, got 1200 MiB: lower rollout.kv_cac"),
        ("resource.getrlimit", lambda _: (4 << 30, -1), r"got 4096 MiB \(ulimit -v\): type `ulimit -v unlimited`"),
        ("importlib.util.find_spec", lambda _: None, r"run.trackers=tensorboard needs a package that is not installed"),
    ],
)
def test_what_the_machine_lacks_is_said_before_anything_is_loaded(
    name: str, found: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing, by the model that is not there, without each of the looks; with the cache of one engine counted."""
    config = loop_config(tmp_path, run={"dir": str(tmp_path / "run")}, model={"path": "nowhere"})
    rollout = config.rollout.model_copy(update={"workers": 2, "kv_cache_mb": 600})
    monkeypatch.setattr(name, found)
    with pytest.raises(ConfigError, match=message):
        train(config.model_copy(update={"rollout": rollout}), recipe_name="x", console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()
