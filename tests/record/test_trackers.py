"""Where figures are shown beside the run folder, each place through its own package, without a network."""

import contextlib
import json
import logging
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ledger_builders import make_sample
from prometheus_client.parser import text_string_to_metric_families
from run_folders import new_run_folder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from user_run import wait_until

from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError
from areal_lite.record import recorder as recorder_module
from areal_lite.record.metrics import METRICS
from areal_lite.record.recorder import OnlineRecorder
from areal_lite.record.run_folder import RunFolder
from areal_lite.record.trackers import PrometheusPage, open_trackers
from areal_lite.types import Group, Prompt

STATS = {"age_histogram": {0: 3}, "reward_by_source": {"a, b": 0.5}, "reward_mean": 0.5, "tokens_trained": 3}
GROUP = Group(
    group_id="g#0",
    prompt=Prompt(prompt_id="g", text="1+1=?", token_ids=(1,), answer="2", row={}),
    samples=(make_sample(),),
)


def recorder(folder: Path, *trackers: str) -> OnlineRecorder:
    config = parse_config({"run": {"dir": str(folder / "run"), "trackers": trackers}})
    run = RunFolder(folder / "run")
    return OnlineRecorder(config, run if (run.path / "config.json").is_file() else new_run_folder(config))


def two_steps(folder: Path, *trackers: str) -> None:
    """Of which the second comes after a resume."""
    for step in (1, 2):
        written = recorder(folder, *trackers)
        written.step(STATS, step=step, tokens_generated=3, ledger={}, trainer_wait_s=1.0, train_s=1.0, publish_s=1.0)
        written.samples(step, [GROUP])
        written.close()


def test_tensorboard_is_one_of_them_and_may_be_left_out(tmp_path: Path) -> None:
    """Seen failing with the steps left out, and without recipe and samples, which are texts there."""
    two_steps(tmp_path, "tensorboard")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward/reward_mean")] == [(1, 0.5), (2, 0.5)]
    texts = {name: board.Tensors(f"{name}/text_summary") for name in ("recipe", "samples")}
    assert b'"max_staleness"' in texts["recipe"][0].tensor_proto.string_val[0]
    assert [event.step for event in texts["samples"]] == [1, 2]
    head, _, row, *_ = texts["samples"][1].tensor_proto.string_val[0].decode().splitlines()
    assert (head, row.startswith("2 | 1+1=? | 2 | ")) == ("step | prompt | answer | completion | reward", True)
    two_steps(tmp_path / "without")
    assert not (tmp_path / "without" / "run" / "tensorboard").exists()


def test_tensorboard_hides_the_steps_that_a_resume_does_again(tmp_path: Path) -> None:
    """Seen failing without the entry that a new start begins at its step."""
    (tmp_path / "config.json").touch()
    for next_step, value in ((1, 0.0), (3, 1.1)):
        (board,) = open_trackers(["tensorboard"], tmp_path, next_step=next_step)
        for step in range(next_step, 5):
            board.show({"step": step}, {"a/b": value})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, round(event.value, 1)) for event in events.Scalars("a/b")]
    assert found == [(1, 0.0), (2, 0.0), (3, 1.1), (4, 1.1)]


def test_a_full_disk_is_one_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many steps it lasts. Seen failing with 316,676 lines in 60 s, tracebacks of TensorBoard's threads."""
    written, figures = recorder(tmp_path, "tensorboard"), {"trainer_wait_s": 1.0, "train_s": 1.0, "publish_s": 1.0}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 9):
            written.step(STATS, step=step, tokens_generated=3, ledger={}, **figures)
            written.samples(step, [GROUP])
    assert caplog.text.count("\n") == caplog.text.count("No space left on device") == 1
    monkeypatch.undo()
    written.step(STATS, step=9, tokens_generated=3, ledger={}, **figures)
    written.close()
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("reward/reward_mean")] == [9]


def test_one_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen failing with the errors of files alone caught.

    Not even one that cannot be opened, unless there is no step yet: seen failing with a restart that it ended.
    """

    def fail(*_: Any) -> None:
        raise RuntimeError("no server")

    place = SimpleNamespace(show=fail, show_samples=fail, close=fail)
    monkeypatch.setattr(recorder_module, "open_trackers", lambda *_, **__: [place])
    with caplog.at_level(logging.WARNING):
        two_steps(tmp_path)
        monkeypatch.undo()
        assert open_trackers(["tensorboard"], tmp_path, next_step=3) == []
    assert "no server" in caplog.text
    assert "run.trackers=tensorboard cannot be opened: FileNotFoundError" in caplog.text
    with pytest.raises(ConfigError, match=r"run\.trackers=tensorboard cannot be opened"):
        open_trackers(["tensorboard"], tmp_path, next_step=1)
    assert len(RunFolder(tmp_path / "run").read("metrics.jsonl")) == 2


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(None)


@pytest.mark.trackers
def test_a_resumed_run_is_one_of_mlflow(tmp_path: Path, mlflow_store: Any) -> None:
    """Its figures by group, its samples as one table, its recipe.

    Seen failing with a new run for each start, with one that stayed finished, and with no figure after one whose name
    MLflow refuses.
    """
    two_steps(tmp_path, "mlflow")
    (experiment,) = mlflow_store.search_experiments(filter_string="name = 'areal-lite'")
    (run,) = mlflow_store.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run"
    history = mlflow_store.get_metric_history(run.info.run_id, "reward/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.5)]
    assert {found.path for found in mlflow_store.list_artifacts(run.info.run_id)} == {"config.json", "samples.json"}
    table = json.loads(
        Path(mlflow_store.download_artifacts(run.info.run_id, "samples.json", str(tmp_path))).read_text()
    )
    assert [row[:2] for row in table["data"]] == [[1, "1+1=?"], [2, "1+1=?"]]
    assert mlflow_store.get_run(run.info.run_id).data.metrics["reward/reward_by_source/a_ b"] == 0.5
    recorder(tmp_path, "mlflow")
    assert mlflow_store.get_run(run.info.run_id).info.status == "RUNNING"


@pytest.mark.trackers
def test_a_resumed_run_is_one_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, as `WANDB_MODE` says: two files of the same run. Seen failing with a new id for each start.

    Its samples are tables, its recipe the run's config. Seen failing without either.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    two_steps(tmp_path, "wandb")
    number = (tmp_path / "run" / "wandb-id").read_text()
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    # wandb's own process writes, and may end after `finish` has returned.
    wait_until(lambda: all(b"max_staleness" in path.read_bytes() for path in written), "recipe in wandb's files")
    assert [path.name for path in written] == [f"run-{number}.wandb"] * len(written)
    assert written
    assert any(b"reward/reward_mean" in path.read_bytes() for path in written)
    tables = [json.loads(path.read_text()) for path in (tmp_path / "run" / "wandb").rglob("*.table.json")]
    assert sorted(table["data"][0][:2] for table in tables) == [[1, "1+1=?"], [2, "1+1=?"]]


# --- the page for Prometheus, read as Prometheus reads it ---


def page_at_a_free_port() -> tuple[PrometheusPage, int]:
    for port in range(23000, 24000):
        with contextlib.suppress(ConfigError):
            return PrometheusPage(METRICS, address="127.0.0.1", port=port), port
    raise AssertionError("no port is free")


def read(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    return {(one.name, one.labels.get("part", "")): one.value for family in families for one in family.samples}


def test_the_page_shows_the_last_row_and_keeps_what_a_step_does_not_have() -> None:
    """Seen failing with zero for a figure that a row lacks."""
    page, port = page_at_a_free_port()
    try:
        page.show({"step": 1, "reward_mean": 0.5, "eval_reward": 0.25, "eval_by_source": {"a": 0.1, "b": 0.4}}, {})
        page.show({"step": 2, "reward_mean": 0.75, "eval_reward": None}, {})
        assert read(port) == {
            ("areal_lite_step", ""): 2.0,
            ("areal_lite_reward_mean", ""): 0.75,
            ("areal_lite_eval_reward", ""): 0.25,
            ("areal_lite_eval_by_source", "a"): 0.1,
            ("areal_lite_eval_by_source", "b"): 0.4,
        }
        with pytest.raises(ConfigError, match=rf"run\.prometheus_port={port} must be free"):
            PrometheusPage(METRICS, address="127.0.0.1", port=port)
    finally:
        page.close()
    with pytest.raises(OSError, match=r".+"):
        read(port)
