"""Sends a run's figures to TensorBoard, wandb, MLflow (`run.trackers`) and Prometheus (`run.prometheus_port`).

A resumed run continues in the same place there. Accounts, servers and projects are the packages' own settings
(`WANDB_PROJECT`, `WANDB_MODE`, `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`).
"""

import errno
import functools
import importlib.util
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

from areal_lite.errors import ConfigError
from areal_lite.record.metrics import Metric

logger = logging.getLogger(__name__)

Sample = tuple[int, str, str, str, float | None]
"""Step, prompt, answer, completion and reward."""
_COLUMNS = ("step", "prompt", "answer", "completion", "reward")
_ROOM_BYTES = 2**20
"""Free disk that TensorBoard's writer is left with: it writes later, in a thread of its own."""
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


class Tracker(Protocol):
    """One service that shows a run's figures."""

    def show(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Add a step: its row of `metrics.jsonl`, and the figures to show, by `group/name`."""

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Add some samples of a batch, at least one, as a table."""

    def close(self) -> None:
        """Close the connection."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise a `ConfigError` if a package that `run.trackers` needs is not installed; none is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"run.trackers={name} needs a package that is not installed. Fix: pip install {_PACKAGES[name]}"
            )


def open_trackers(names: Iterable[str], folder: Path, *, next_step: int) -> list[Tracker]:
    """Open the services that `run.trackers` names, for a folder with a `config.json`.

    Raises:
        ConfigError: One fails before the first step; later, it is skipped with a warning.
    """
    kinds: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MlFlow}
    trackers = []
    for name in names:
        try:
            trackers.append(kinds[name](folder, next_step))
        except Exception as error:  # the packages' own, of many kinds
            problem = f"run.trackers={name} cannot be opened: {type(error).__name__}: {error}"
            if next_step == 1:
                raise ConfigError(f"{problem}. Fix: set it up, or remove it") from error
            logger.warning("%s; it gets no figures until the next start", problem)
    return trackers


class _TensorBoard:
    """Uses TensorBoard's own writer: that of torch would make the controller import torch, which takes seconds."""

    def __init__(self, folder: Path, next_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text, self._folder = Event, Summary, text_pb, folder
        self._open = functools.partial(EventFileWriter, str(folder / "tensorboard"))
        self._board = self._open()
        self._add(next_step, session_log=SessionLog(status=SessionLog.START))  # hides later steps of an earlier start
        self._add_text("recipe", indent((folder / "config.json").read_text(), " " * 4), step=0)

    def _add(self, step: int, **content: Any) -> None:
        self._board.add_event(self._event(step=step, wall_time=time.time(), **content))

    def _check_room(self) -> None:
        """Raise on a full disk, on which the writer's thread would end with a traceback at every step."""
        if shutil.disk_usage(self._folder).free < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))

    def _add_text(self, name: str, text: str, *, step: int) -> None:
        self._add(step, summary=self._text(f"{name}/text_summary", text))

    def show(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        self._check_room()
        try:
            for name, value in figures.items():
                self._add(row["step"], summary=self._summary(value=[{"tag": name, "simple_value": value}]))
        except OSError:
            self._board = self._open()  # its thread has ended
            raise

    def show_samples(self, samples: Sequence[Sample]) -> None:
        self._check_room()
        rows = [_COLUMNS, ["---"] * len(_COLUMNS), *samples]
        cells = [[escape(str(value)).replace("|", "&#124;").replace("\n", "<br>") for value in row] for row in rows]
        self._add_text("samples", "\n".join(map(" | ".join, cells)), step=samples[0][0])

    def close(self) -> None:
        self._board.close()


class _Wandb:
    """Figures are plotted over the trainer's step: wandb's own step can only grow, and a run may go back."""

    def __init__(self, folder: Path, next_step: int) -> None:
        import wandb

        self._table, number = wandb.Table, folder / "wandb-id"
        if not number.is_file():
            number.write_text(uuid.uuid4().hex[:12])
        project = os.environ.get("WANDB_PROJECT", "areal-lite")
        known: dict[str, Any] = {"project": project, "name": folder.name, "id": number.read_text(), "dir": str(folder)}
        self._run = wandb.init(**known, resume="allow", config=json.loads((folder / "config.json").read_text()))
        self._run.define_metric("*", step_metric="step")

    def show(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "step": row["step"]})

    def show_samples(self, samples: Sequence[Sample]) -> None:
        self._run.log({"samples": self._table(columns=list(_COLUMNS), data=list(map(list, samples)))})

    def close(self) -> None:
        self._run.finish()


class _MlFlow:
    def __init__(self, folder: Path, next_step: int) -> None:
        import mlflow

        self._client, number = mlflow.MlflowClient(), folder / "mlflow-id"
        if not number.is_file():
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "areal-lite")
            run = self._client.create_run(mlflow.set_experiment(title).experiment_id, run_name=folder.name)
            number.write_text(run.info.run_id)
        self._id = number.read_text()
        self._client.update_run(self._id, status="RUNNING")  # a resumed one has ended before
        self._client.log_artifact(self._id, str(folder / "config.json"))

    def show(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            allowed = re.sub(r"[^\w./ :-]", "_", name)  # MLflow would drop every figure after another name
            self._client.log_metric(self._id, allowed, value, step=row["step"])

    def show_samples(self, samples: Sequence[Sample]) -> None:
        columns = map(list, zip(*samples, strict=True))
        self._client.log_table(self._id, dict(zip(_COLUMNS, columns, strict=True)), "samples.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class PrometheusPage:
    """Serves `areal_lite_<metric>` at `http://address:port/metrics`, with a label `part` for metrics with parts."""

    def __init__(self, metrics: Iterable[Metric], *, address: str, port: int) -> None:
        """Serve from a thread until `close`; a `ConfigError` if the port is in use."""
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()
        self._gauges = dict[Metric, Gauge]()
        for metric in metrics:
            if metric.board or metric.name == "step":
                about = f"{metric.about} ({metric.unit})" if metric.unit else metric.about
                self._gauges[metric] = Gauge(f"areal_lite_{metric.name}", about, ["part"], registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port={port} must be free on {address}, got {error}. Fix: choose another port, or null"
            ) from error

    def show(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Update the figures; one that the step does not have keeps its last value."""
        for metric, gauge in self._gauges.items():
            for part, number in metric.parts(row).items():
                gauge.labels(part).set(number)

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Do nothing: Prometheus holds numbers only."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
