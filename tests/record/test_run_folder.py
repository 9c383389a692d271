"""The run folder: made once, continued from its newest whole checkpoint, never half-written."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_builders import make_job
from run_folders import new_run_folder, save_run

from areal_lite.api import open_run
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.config.sections import RunConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.record.checkpoints import seal
from areal_lite.record.run_folder import RunFolder, run_path


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    return parse_config({"run": {"dir": str(tmp_path / "run")}} | sections)


def resumed(tmp_path: Path, *, run: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunFolder:
    config = parse_config({"run": {"resume": str(tmp_path / "run")} | (run or {})} | sections)
    folder = RunFolder.resume(config)
    folder.go_on(config)
    return folder


def test_a_pickled_function_is_the_same_whatever_its_digest(tmp_path: Path) -> None:
    """Seen failing: the same code in another kernel was another recipe."""
    names = [f"functions/mine-{digest}.pkl" for digest in ("01234567", "89abcdef")]
    first, again = (make_config(tmp_path, verifier={"function": name}, data={"source": name}) for name in names)
    folder = RunFolder(tmp_path / "run")
    folder.begin(first)
    save_run(folder, 1, Path.mkdir)
    resumed(tmp_path, verifier={"function": names[1]}, data={"source": names[1]})
    assert first.data.sources.keys() == again.data.sources.keys()


def checkpoint(folder: RunFolder, step: int, *, save: Callable[[Path], object] = Path.mkdir, keep: int = 2) -> Path:
    return save_run(folder, step, save, queue=b"q", keep=keep)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder(make_config(tmp_path))


def event(time: float) -> dict[str, Any]:
    return {"time": time, "lane": "trainer", "kind": "wait"}


def group(step: int, name: str = "a") -> dict[str, Any]:
    return {"step": step, "group": name, "samples": []}


# --- a new run ---


def test_a_folder_with_a_run_is_not_written_over(folder: RunFolder, tmp_path: Path) -> None:
    """Seen failing without the check: the new run's rows would stand behind the old one's."""
    checkpoint(folder, 1)
    with pytest.raises(ConfigError, match=r"holds a run. Fix: choose another, or resume; .* areal-lite resume .*run$"):
        new_run_folder(make_config(tmp_path))


def test_a_start_that_failed_does_not_stand_in_the_way(folder: RunFolder, tmp_path: Path) -> None:
    """What it left is set aside. Seen failing with every config.json taken for a run, and without the setting aside."""
    folder.append("events.jsonl", [event(1.0)])
    again = new_run_folder(make_config(tmp_path, queue={"max_staleness": 1}))
    assert again.read("events.jsonl") == []
    assert len(again.read("events.orphaned.jsonl")) == 1
    recipe = again.recipe()
    assert isinstance(recipe, Config)
    assert recipe.queue.max_staleness == 1


def test_a_folder_of_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with a folder that was named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_run_folder(parse_config({"run": {"dir": "~/run"}})).path == tmp_path / "run"
    assert make_job(words="train arith_cpu run.dir=~/run").run_folder == tmp_path / "run"


def test_runs_that_start_in_the_same_second_have_folders_of_their_own() -> None:
    """Seen failing with one folder, and all runs of a sweep but one refused."""
    assert len({run_path(RunConfig(), recipe_name="arith_cpu") for _ in range(9)}) == 9


# --- rows ---


@pytest.mark.parametrize("content", ["{", "[]", '{"status": "done"}'])
def test_a_run_with_an_unreadable_summary_is_resumed(folder: RunFolder, tmp_path: Path, content: str) -> None:
    """Seen failing: its resume ended in a traceback."""
    (folder.path / "summary.json").write_text(content)
    assert folder.finished(make_config(tmp_path)) is None


@pytest.mark.parametrize("goes_back", [False, True])
def test_rows_that_a_full_disk_does_not_take_are_written_when_it_does(folder: RunFolder, goes_back: bool) -> None:
    """/dev/full fails as a full disk does. Rows that wait are set aside like those in the file.

    Seen failing with the error raised, and with a second row of step 2, written when there was room again.
    """
    path = folder.path / "metrics.jsonl"
    folder.append("metrics.jsonl", [{"step": 1, "text": "a\u2028b\nc"}])
    checkpoint(folder, 1)
    path.rename(path.with_name("before"))
    path.symlink_to("/dev/full")
    for step in (2, 3):
        folder.append("metrics.jsonl", [{"step": step}])
    path.unlink()
    path.with_name("before").rename(path)
    if goes_back:
        folder.go_back(say=print)
        assert folder.read("metrics.orphaned.jsonl") == [{"step": 2}, {"step": 3}]
    folder.append("metrics.jsonl", [{"step": 2 if goes_back else 4}])
    assert [row["step"] for row in folder.read("metrics.jsonl")] == ([1, 2] if goes_back else [1, 2, 3, 4])
    assert folder.read("metrics.jsonl")[0]["text"] == "a\u2028b\nc"


def test_json_is_written_whole_or_not_at_all(folder: RunFolder) -> None:
    """Seen failing with the file opened for writing first: a run killed then could not be resumed."""
    before = (folder.path / "config.json").read_text()
    with pytest.raises(TypeError):
        folder.write_json("config.json", {"a": 1, "b": object()})
    assert (folder.path / "config.json").read_text() == before


# --- a resumed run ---


def test_rows_beyond_the_checkpoint_move_to_orphaned_files(folder: RunFolder, tmp_path: Path) -> None:
    """Two resumes: what was orphaned first stays. Seen failing with rows deleted, and with `<` for `<=`."""
    for step in (1, 2, 3):
        folder.append("metrics.jsonl", [{"step": step}])
        folder.append("samples.jsonl", [group(step, "a"), group(step, "b")])
        folder.append("events.jsonl", [event(1.0 * step)])
        if step == 2:
            checkpoint(folder, 2)
    (folder.newest_checkpoint() / "meta.json").write_text(json.dumps({"step": 2, "time": 2.5}))
    (folder.newest_checkpoint() / "manifest.json").unlink()
    seal(folder.newest_checkpoint())
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')

    for _ in range(2):
        again = resumed(tmp_path)
        assert again.read("metrics.jsonl") == [{"step": 1}, {"step": 2}]
        assert again.read("metrics.orphaned.jsonl") == [{"step": 3}]
        assert [row["step"] for row in again.read("samples.jsonl")] == [1, 1, 2, 2]
        assert again.read("samples.orphaned.jsonl") == [group(3, "a"), group(3, "b")]
        assert again.read("events.jsonl") == [event(1.0), event(2.0)]
        assert again.read("events.orphaned.jsonl") == [event(3.0)]
    again.append("metrics.jsonl", [{"step": 3, "again": True}])
    resumed(tmp_path)
    assert again.read("metrics.orphaned.jsonl") == [{"step": 3}, {"step": 3, "again": True}]


def test_events_of_before_the_save_began_stay(folder: RunFolder, tmp_path: Path) -> None:
    """The moment is taken before the save: what happens beside it belongs to what comes after."""
    checkpoint(folder, 1, save=lambda path: folder.append("events.jsonl", [event(9e9)]))
    folder.append("events.jsonl", [event(1.0)])
    assert resumed(tmp_path).read("events.jsonl") == [event(1.0)]


def test_the_trace_of_a_long_log_is_that_of_its_end(folder: RunFolder) -> None:
    """Seen failing with all of it: 16 minutes for 700 MB on a busy machine."""
    times = [float(time) for time in range(100, 200)]
    folder.append(
        "events.jsonl", [{"time": time, "lane": "rollout/0", "kind": "running", "n": int(time)} for time in times]
    )
    line = (folder.path / "events.jsonl").stat().st_size // 100
    folder.write_trace(max_log_bytes=10 * line + line // 2)
    trace = json.loads(gzip.decompress((folder.path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert [row["args"]["samples"] for row in trace if row["ph"] == "C"] == times[-10:]


def test_what_does_not_change_what_is_learned_may_change(folder: RunFolder, tmp_path: Path) -> None:
    """The folder then holds the recipe that the run resumes with. Seen failing without `trainer.mesh`."""
    checkpoint(folder, 1)
    changes: dict[str, dict[str, Any]] = {
        "rollout": {"workers": 2, "slots": 8, "threads": 2},
        "verifier": {"processes": 3, "timeout_s": 1.0},
        "trainer": {"ranks": 4, "micro_batch_tokens": 64, "mesh": {"replicate": 2, "tensor": 2}, "offload": True},
        "weights": {"parity_every": 0},
    }
    again = resumed(tmp_path, run={"steps": 999, "eval_every": 7}, **changes)
    saved = json.loads((again.path / "config.json").read_text())
    assert (saved["run"]["steps"], saved["rollout"]["workers"], saved["trainer"]["ranks"]) == (999, 2, 4)


def test_settings_changed_after_a_checkpoint_are_known_when_a_resume_goes_back_behind_the_change(
    folder: RunFolder, tmp_path: Path
) -> None:
    """lr is 1e-4 until step 2 and then 3e-4; a resume from step 1 with 3e-4 changes it at step 1 already.

    Seen failing: the event was set aside with the rows after step 1, and the page showed 3e-4 for all steps. With
    1e-4 again nothing has changed.
    """
    for step in (1, 2):
        folder.append("metrics.jsonl", [{"step": step}])
        folder.append("events.jsonl", [{"time": time.time(), "lane": "trainer", "kind": "published", "version": step}])
        checkpoint(folder, step, keep=9)
    run = {"resume": str(tmp_path / "run")}
    for resume_from, lr, expected in (("step-2", 3e-4, (2, 1e-4)), ("step-1", 3e-4, (1, 1e-4)), ("step-1", 1e-4, None)):
        config = parse_config({"run": run | {"resume_from": resume_from}, "trainer": {"lr": lr}})
        again = RunFolder.resume(config, named=["trainer.lr"])
        again.go_on(config)
        changes = [event for event in again.read("events.jsonl") if event["kind"] == "settings"]
        assert [(event["step"], event["was"]["trainer.lr"]) for event in changes] == ([expected] if expected else [])
        again.go_back(say=print)
        assert [event for event in again.read("events.jsonl") if event["kind"] == "settings"] == changes


@pytest.mark.parametrize(
    ("run", "sections", "difference"),
    [
        ({}, {"trainer": {"lr": 3e-4}}, "trainer.lr was 0.0001, is 0.0003"),
        ({}, {"model": {"path": "/models/other"}}, "model.path was 'builtin:arith', is '/models/other'"),
        ({"seed": 1}, {}, "run.seed was 0, is 1"),
        ({}, {"verifier": {"arguments": {"model": "x"}}}, "verifier.arguments.model was None, is 'x'"),
    ],
)
def test_another_recipe_is_refused_with_the_difference(
    folder: RunFolder, tmp_path: Path, run: dict[str, Any], sections: dict[str, Any], difference: str
) -> None:
    """Seen failing without the comparison, with all of `run` free, and with the saved keys only (`arguments`)."""
    folder.append("metrics.jsonl", [{"step": 1}])
    checkpoint(folder, 0)
    with pytest.raises(CheckpointError) as caught:
        resumed(tmp_path, run=run, **sections)
    assert difference in str(caught.value)
    assert "resume with the recipe and overrides of the first start" in str(caught.value)
    assert folder.read("metrics.jsonl") == [{"step": 1}], "a refused resume changes nothing"


def test_a_run_of_an_earlier_version_is_named_as_one(folder: RunFolder, tmp_path: Path) -> None:
    """Its recipe holds settings that are gone. Seen failing with a ConfigError about the recipe given."""
    checkpoint(folder, 1)
    saved = json.loads((folder.path / "config.json").read_text())
    saved["data"] |= {"guess_number": {"low": 1}, "gridworld": {"size": 4}}
    folder.write_json("config.json", saved)
    with pytest.raises(CheckpointError, match=r"written by an earlier version.*unknown key data\.guess_number"):
        resumed(tmp_path)


def test_an_unreadable_line_costs_its_own_row_alone(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named. Seen failing with reading ended at the first such line, and without a message."""
    for step in (1, 2, 3):
        folder.append("metrics.jsonl", [{"step": step}])
        if step == 1:
            with (folder.path / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": \xff\x00 1.5, "rew\n')
    checkpoint(folder, 2)
    again = resumed(tmp_path)
    assert again.read("metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert again.read("metrics.orphaned.jsonl") == [{"step": 3}]
    assert capsys.readouterr().out == f"{folder.path / 'metrics.jsonl'}: left out what cannot be read: line 2\n"


def test_a_resume_from_an_older_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    """It is meant once: the next resume starts from the newest. Seen failing with the wish kept in `config.json`.

    A finished run then no longer is: seen failing with its summary kept, so that a killed resume counted as done.
    """
    for step in (1, 2, 3):
        folder.append("metrics.jsonl", [{"step": step}])
        checkpoint(folder, step, keep=9)
    folder.write_json("summary.json", {"status": "done", "version": 3})
    again = resumed(tmp_path, run={"resume_from": "step-1"})
    assert again.checkpoint == again.newest_checkpoint() == folder.checkpoints / "step-000001"
    assert again.read("metrics.jsonl") == [{"step": 1}]
    assert again.recipe().run.resume_from is None
    assert again.finished(parse_config({"run": {"steps": 3}})) is None
    with pytest.raises(CheckpointError, match=r"resume_from must be one of step-1, got 'step-3'"):
        resumed(tmp_path, run={"resume_from": "step-3"})
    with pytest.raises(ConfigError, match=r"run\.resume_from=step-3 needs run\.resume"):
        parse_config({"run": {"resume_from": "step-3"}})


def test_nothing_is_written_once_another_process_has_the_folder(folder: RunFolder) -> None:
    """Seen failing, for each, without the look before it."""

    def refuse() -> None:
        raise CheckpointError("taken over")

    folder.guard = refuse
    (folder.checkpoints / ".step-000001.tmp").mkdir()  # the other's
    before = sorted(folder.path.rglob("*"))
    for write in (
        lambda: folder.append("metrics.jsonl", [{"step": 1}]),
        lambda: folder.write_json("summary.json", {}),
        lambda: checkpoint(folder, 1),
        lambda: folder.go_back(say=print),
    ):
        with pytest.raises(CheckpointError, match="taken over"):
            write()
    assert sorted(folder.path.rglob("*")) == before


def test_values_of_the_environment_stay_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Readable by its owner alone, and read by a resume; a name without a value is never stored.

    Seen failing with the values in config.json, which reports and trackers show.
    """
    config = load_config("arith_cpu", [f"run.dir={tmp_path}", "run.env={TOKEN: secret-1, HOME: null}"])
    folder = RunFolder(tmp_path)
    folder.begin(config)
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.name != "env.json" and path.is_file() and "secret-1" in path.read_text()
    ]
    assert (tmp_path / "env.json").stat().st_mode & 0o077 == 0
    assert folder.recipe().run.env == {"TOKEN": "secret-1", "HOME": None}
    assert open_run(tmp_path).config["run"]["env"] == {"TOKEN": None, "HOME": None}
