"""The run folder: every file a run leaves behind, and nothing else that writes there.

`runs/<recipe>-<time>/` holds `config.json`, `metrics.jsonl` (one row per trainer step), `samples.jsonl`,
`events.jsonl`, `trace.json.gz`, `summary.json`, `logs/`, `checkpoints/step-<n>/` and TensorBoard events.
"""

import contextlib
import gzip
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from areal_lite.config.offline import OfflineConfig, parse_saved_config
from areal_lite.config.recipe import Config
from areal_lite.config.sections import LaunchConfig, MeshConfig, RunConfig, WeightsConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.events import Event
from areal_lite.record.checkpoints import choose_checkpoint, go_on_from, new_checkpoint, whole_checkpoints
from areal_lite.record.trace import to_trace

Row = Mapping[str, Any]

logger = logging.getLogger(__name__)

_FREE_ON_RESUME = {
    *(f"run.{name}" for name in RunConfig.model_fields if name != "seed"),
    *(f"launch.{name}" for name in LaunchConfig.model_fields),
    *(f"weights.{name}" for name in WeightsConfig.model_fields),
    "rollout.workers", "rollout.slots", "rollout.threads", "rollout.kv_cache_mb", "rollout.gpu_memory_fraction",
    "rollout.tensor_parallel", "queue.lease_timeout_s", "queue.bind", "queue.max_message_mb", "verifier.timeout_s",
    "verifier.processes", "verifier.workers", "trainer.ranks", "trainer.threads", "trainer.micro_batch_tokens",
    "trainer.packing",
    *(f"trainer.mesh.{name}" for name in MeshConfig.model_fields), "trainer.offload",
    "trainer.activation_checkpointing", "sft.epochs", "preference.epochs",
}  # fmt: skip
"""Settings that may change on a resume because they do not change what is learned."""

_CHANGEABLE = {f"trainer.{name}" for name in ("lr", "schedule", "warmup_steps", "min_lr_fraction", "max_grad_norm")}
"""Settings that may change where whoever resumes names them."""


def run_path(run: RunConfig, *, recipe_name: str) -> Path:
    """Return the folder of a run: the one it continues in, its `run.dir`, or `runs/<recipe>-<time>`."""
    default = Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(run.resume or run.dir or default).resolve()


class RunFolder:
    """Paths and append-only files of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs, self.checkpoints = path, path / "logs", path / "checkpoints"
        self.checkpoint: Path | None = None
        """What a resumed run starts from."""
        self.guard: Callable[[], None] = lambda: None
        """Called before anything is written; raises where another process has taken the folder over."""
        self._late: dict[str, str] = {}

    def check_new(self) -> None:
        """Raise a `ConfigError` where the folder holds a run that has trained a step; what never began may again."""
        if whole_checkpoints(self.checkpoints) or read_rows(self.path / "metrics.jsonl")[0]:
            raise ConfigError(
                f"run.dir must be a new folder, got {self.path}, which holds a run: choose another, or continue it; "
                + self.how_to_go_on()
            )

    def begin(self, config: Config | OfflineConfig) -> None:
        """Make a new folder and write the resolved config, where `check_new` finds nothing against it."""
        self.check_new()
        self._set_aside(logger.info)
        for path in (self.logs, self.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        self.write_json("config.json", config.model_dump())

    def recipe(self) -> Config | OfflineConfig:
        """Read the resolved recipe; a `CheckpointError` where there is none, or another version wrote it."""
        if not (self.path / "config.json").is_file():
            raise CheckpointError(f"run.resume must name a run folder, got {self.path}, which has no config.json")
        try:
            return parse_saved_config(json.loads((self.path / "config.json").read_text()))
        except ValueError as error:
            raise CheckpointError(
                f"run.resume must name a run that this version of areal-lite can read, got {self.path}, whose "
                "config.json was written by an earlier version, or beside plug-ins that are not installed now: "
                f"{error}: resume with those, or start anew without run.resume"
            ) from error

    def finished(self, config: Config | OfflineConfig) -> dict[str, Any] | None:
        """Return the summary of a run that has trained all that a recipe asks for; None where there is more to do."""
        summary = read_summary(self.path)
        if summary.get("status") != "done" or config.run.resume_from is not None:
            return None
        if isinstance(config, OfflineConfig) and config.batch.epochs is not None:
            saved = self.recipe()
            return summary if isinstance(saved, OfflineConfig) and saved.batch.epochs == config.batch.epochs else None
        return summary if summary.get("version", 0) >= config.run.steps else None

    @classmethod
    def resume(
        cls, config: Config | OfflineConfig, *, named: Iterable[str] = (), say: Callable[[str], object] = print
    ) -> Self:
        """Open the folder of `run.resume` and check all of it; nothing changes before `go_on`.

        Args:
            named: Settings that are changed on purpose.
            say: Told of checkpoints that are passed over, and why.

        Raises:
            CheckpointError: There is no checkpoint, another version wrote the recipe, or it differs in what is learned.
        """
        assert config.run.resume is not None
        folder = cls(Path(config.run.resume).resolve())
        saved = folder.recipe()
        if saved.command != config.command:
            raise CheckpointError(
                f"run.resume must name a run of command: {config.command}, got {folder.path}, which is one of "
                f"command: {saved.command}"
            )
        found, free = differences([saved.model_dump(), config.model_dump()]).items(), _CHANGEABLE.intersection(named)
        free |= _FREE_ON_RESUME
        if different := [f"{key} was {was!r}, is {now!r}" for key, (was, now) in found if key not in free]:
            raise CheckpointError(
                f"the checkpoint belongs to another recipe: {'; '.join(different)}: resume with the recipe and "
                "overrides of the first start, or start anew without run.resume (areal-lite resume DIR may change "
                f"{', '.join(sorted(_CHANGEABLE))}, and what changes nothing that is learned)"
            )
        folder.checkpoint = choose_checkpoint(folder.checkpoints, config.run.resume_from, say=say)
        return folder

    def go_on(self, config: Config | OfflineConfig, *, say: Callable[[str], object] = print) -> None:
        """Continue from `checkpoint`: what came later moves to `*.orphaned.jsonl` and `orphaned-step-*`."""
        self._set_aside(say)
        content = config.model_dump()
        content["run"]["resume_from"] = None  # meant once
        found = differences([self.recipe().model_dump(), content])
        if was := {key: before for key, (before, _) in found.items() if key in _CHANGEABLE}:
            step = max((row["step"] for row in self.read("metrics.jsonl")), default=0)
            # At the last event's time, as the time until the next one is not the run's.
            time_s = max((event["time"] for event in self.read("events.jsonl")), default=time.time())
            event = {"time": time_s, "lane": "controller", "kind": "settings", "step": step, "was": was}
            self.append("events.jsonl", [event])
        self.write_json("config.json", content)

    def go_back(self, *, say: Callable[[str], object]) -> None:
        """Continue from the newest checkpoint that is what was saved; from the start where none was saved."""
        there = whole_checkpoints(self.checkpoints)
        self.checkpoint = choose_checkpoint(self.checkpoints, None, say=say) if there else None
        self._set_aside(say)

    def _set_aside(self, say: Callable[[str], object]) -> None:
        self.guard()
        meta = {"step": 0, "time": 0.0}
        if self.checkpoint is not None:
            meta = json.loads((self.checkpoint / "meta.json").read_text())
            go_on_from(self.checkpoint, say=say)
            self.checkpoint = self.newest_checkpoint()
        for name, key in (("metrics.jsonl", "step"), ("samples.jsonl", "step"), ("events.jsonl", "time")):
            self._orphan_rows(name, key, last=meta[key], say=say)

    def newest_checkpoint(self) -> Path:
        """Return the newest complete checkpoint, unverified; a `CheckpointError` where there is none."""
        there = whole_checkpoints(self.checkpoints)
        return list(there.values())[-1] if there else choose_checkpoint(self.checkpoints, None, say=print)

    def how_to_go_on(self) -> str:
        """Return the command that continues the run, or why there is none."""
        if not (there := whole_checkpoints(self.checkpoints)):
            return "there is no checkpoint to go on from (run.checkpoint_every)"
        return f"to go on from step {max(there)}: areal-lite resume {shlex.quote(str(self.path))}"

    @contextlib.contextmanager
    def new_checkpoint(self, step: int, *, queue_state: bytes | None, keep: int) -> Iterator[Path]:
        """Yield where the trainer's part of a checkpoint is written; it is there, whole, from the block's end on.

        Args:
            step: Completed steps.
            queue_state: The sample queue's; None for an offline run, which has no queue.
            keep: How many of the newest are left.
        """
        self.guard()
        with new_checkpoint(self.checkpoints, step, keep=keep) as folder:
            if queue_state is not None:
                (folder / "queue.msgpack").write_bytes(queue_state)
            yield folder / "trainer"
            self.guard()  # the ranks may have taken long

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Append rows to a `.jsonl` file; a killed run leaves whole lines. What cannot be written now comes later."""
        late, path = self._late.pop(name, ""), self.path / name
        text = late + "".join(json.dumps(row, default=float) + "\n" for row in rows)
        if text:
            self.guard()
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("a") as file:
                    file.write(text)
            except OSError as error:
                self._late[name] = text
                with contextlib.suppress(OSError):
                    os.truncate(path, size)
                if not late:
                    logger.warning("%s cannot be written, and what belongs there is kept for later: %s", path, error)

    def read(self, name: str) -> list[dict[str, Any]]:
        """Read a `.jsonl` file; a last line cut off by a kill is left out."""
        return read_rows(self.path / name)[0]

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        self.guard()
        write_whole(self.path / name, json.dumps(content, indent=2, default=float) + "\n")

    def write_trace(self) -> None:
        """Turn `events.jsonl` into `trace.json.gz` for Perfetto, which unpacks it."""
        events: list[Event] = self.read("events.jsonl")
        write_whole(self.path / "trace.json.gz", gzip.compress(json.dumps(to_trace(events)).encode(), mtime=0))

    def _orphan_rows(self, name: str, key: str, *, last: float, say: Callable[[str], object]) -> None:
        path, (rows, broken) = self.path / name, read_rows(self.path / name)
        rows += map(json.loads, self._late.pop(name, "").splitlines())
        if broken:
            say(f"{path}: left out what cannot be read: line {', '.join(map(str, broken))}")
        self.append(f"{path.stem}.orphaned.jsonl", (row for row in rows if row.get(key, last) > last))
        if path.is_file():
            write_whole(path, "".join(json.dumps(row) + "\n" for row in rows if row.get(key, last) <= last))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary, empty where there is none that can be read: the run's next end writes another."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((folder / "summary.json").read_text())
        return content if isinstance(content, dict) else {}
    return {}


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the whole rows of a `.jsonl` file, none where there is no file, and the numbers of the other lines.

    NaN and infinity, which JSON does not have, are None.
    """
    rows, broken = list[dict[str, Any]](), list[int]()
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row = None
        with contextlib.suppress(ValueError):
            row = json.loads(line, parse_constant=lambda _: None)
        if isinstance(row, dict):
            rows.append(row)
        elif line:
            broken.append(number)
    return rows, broken


def changed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that differ from their defaults, by `section.field`; None for a config of another version."""
    try:
        return flattened(parse_saved_config(config).model_dump(exclude_defaults=True))
    except ConfigError:
        return None


def differences(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what is not the same in all configs or summaries: by `section.field`, one value each, None for none."""
    flat = [flattened(table) for table in tables]
    keys = dict.fromkeys(key for found in flat for key in found)
    rows = {key: [found.get(key) for found in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings or figures by `section.field`."""
    return dict(_pairs(settings))


def _pairs(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
