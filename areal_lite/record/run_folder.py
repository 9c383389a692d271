"""The run folder: where a run writes all its files, and what a resume makes of them.

`runs/<recipe>-<time>/` holds `config.json`, `metrics.jsonl` (one row per trainer step), `samples.jsonl`,
`events.jsonl`, `trace.json.gz`, `summary.json`, `logs/`, `checkpoints/step-<n>/` and TensorBoard events.

A resume moves rows later than its checkpoint to `*.orphaned.jsonl`, and later checkpoints to `orphaned-step-*`.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from areal_lite.config.offline import OfflineConfig, parse_saved_config
from areal_lite.config.plugins import without_digests
from areal_lite.config.recipe import Config
from areal_lite.config.sections import LaunchConfig, MeshConfig, RunConfig, WeightsConfig, without_env_values
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.record.checkpoints import choose_checkpoint, make_newest, new_checkpoint, read_meta, whole_checkpoints
from areal_lite.record.run_files import (
    Row,
    iterate_lines,
    iterate_rows,
    load_line,
    missing_steps,
    read_json,
    read_rows,
    read_summary,
    remove,
    table,
    write_whole,
)
from areal_lite.record.trace import write_trace

logger = logging.getLogger(__name__)

_ENV_VALUES = "env.json"
_FREE_ON_RESUME = {
    *(f"run.{name}" for name in RunConfig.model_fields if name != "seed"),
    *(f"launch.{name}" for name in LaunchConfig.model_fields),
    *(f"weights.{name}" for name in WeightsConfig.model_fields),
    *(f"trainer.mesh.{name}" for name in MeshConfig.model_fields),
    *(f"verifier.{name}" for name in VerifierSettings.model_fields if name not in ("function", "arguments")),
    "rollout.workers", "rollout.slots", "rollout.threads", "rollout.kv_cache_mb", "rollout.gpu_memory_fraction",
    "rollout.tensor_parallel", "rollout.servers", "rollout.server_key_env", "rollout.turn_timeout_s",
    "rollout.max_episodes", "rollout.command_memory_mb", "queue.lease_timeout_s", "queue.max_message_mb",
    "verifier.workers", "trainer.ranks", "trainer.threads", "trainer.micro_batch_tokens", "trainer.packing",
    "trainer.offload", "trainer.activation_checkpointing", "trainer.epochs", "trainer.collective_timeout_s",
    "data.eval_size",
}  # fmt: skip
"""Settings that may change on a resume because they do not change what is learned, those of a named verifier like the
section's; but `run.steps` does change the learning rate of `trainer.schedule: cosine`."""

_NAMED_VERIFIER = re.compile(r"^verifier\.named\.[^.]+")
_CHANGEABLE = {f"trainer.{name}" for name in ("lr", "schedule", "warmup_steps", "max_grad_norm")}
"""Settings that a resume may change only if its command line names them; so it is with the folder of a path."""


def run_path(run: RunConfig, *, recipe_name: str) -> Path:
    """Return the folder of a run: the one it continues in, its `run.dir`, or `runs/<recipe>-<time>`."""
    # To the microsecond: runs of a sweep start in the same second.
    default = Path("runs") / f"{recipe_name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    return Path(os.path.expanduser(run.resume or run.dir or default)).resolve()


class RunFolder:
    """Paths and append-only files of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs, self.checkpoints = path, path / "logs", path / "checkpoints"
        self.checkpoint: Path | None = None
        """What a resumed run starts from."""
        self.guard: Callable[[], None] = lambda: None
        """Called before anything is written; raises if another process has taken the folder over."""
        self._late: dict[str, str] = {}
        """Lines that could not be written yet, by file."""

    def check_new(self) -> None:
        """Raise a `ConfigError` if the folder holds a run that has trained a step; one that failed to start is fine."""
        if whole_checkpoints(self.checkpoints) or any(iterate_rows(self.path / "metrics.jsonl")):
            raise ConfigError(
                f"run.dir must be a new folder, got {self.path}, which holds a run. Fix: choose another, or resume; "
                + self.how_to_resume()
            )

    def begin(self, config: Config | OfflineConfig) -> None:
        """Make a new folder and write the resolved config; a `ConfigError` as in `check_new`."""
        self.check_new()
        self._set_aside(logger.info)
        for path in (self.logs, self.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        self._write_recipe(config.model_dump())

    def recipe(self) -> Config | OfflineConfig:
        """Read the resolved recipe.

        Raises:
            CheckpointError: There is none, it cannot be read, or an incompatible version wrote it.
        """
        path, notes = self.path / "config.json", list[str]()
        if not path.is_file():
            raise CheckpointError(
                f"expected a run folder, got {self.path}, which has no config.json. Fix: name the folder of a run"
            )
        saved = read_json(path, notes)
        if notes:
            raise CheckpointError(f"{self.path} is damaged: {notes[0]}. Fix: restore config.json, or start a new run")
        try:
            return parse_saved_config(self._with_env_values(saved))
        except ValueError as error:
            raise CheckpointError(
                f"run.resume must name a run that this version of areal-lite can read, got {self.path}, whose "
                "config.json was written by an earlier version, or with plug-ins that are not installed now: "
                f"{error}. Fix: resume with those, or start a new run without run.resume"
            ) from error

    def _write_recipe(self, content: dict[str, Any]) -> None:
        """Write a dumped recipe; the values of `run.env` go to a file that nobody else may read, and no page shows."""
        self.write_json("config.json", without_env_values(content))
        path = self.path / _ENV_VALUES
        path.unlink(missing_ok=True)
        if any(value is not None for value in content["run"]["env"].values()):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(content["run"]["env"], file)

    def _with_env_values(self, saved: Row) -> Row:
        path, notes = self.path / _ENV_VALUES, list[str]()
        if not path.is_file() or not isinstance(saved.get("run"), dict):
            return saved
        values = read_json(path, notes)
        if notes:
            raise CheckpointError(f"{self.path} is damaged: {notes[0]}. Fix: delete {path}, and give run.env again")
        return {**saved, "run": {**saved["run"], "env": values}}

    def finished(self, config: Config | OfflineConfig) -> dict[str, Any] | None:
        """Return the summary of a run that has trained all that a recipe asks for; None if there is more to do."""
        summary = read_summary(self.path)
        if summary.get("status") != "done" or config.run.resume_from is not None:
            return None
        if isinstance(config, OfflineConfig) and config.trainer.epochs is not None:
            saved = self.recipe()
            return (
                summary if isinstance(saved, OfflineConfig) and saved.trainer.epochs == config.trainer.epochs else None
            )
        version = summary.get("version")
        return summary if isinstance(version, int) and version >= config.run.steps else None

    @classmethod
    def resume(
        cls, config: Config | OfflineConfig, *, named: Iterable[str] = (), say: Callable[[str], object] = print
    ) -> Self:
        """Open the folder of `run.resume` and check all of it; nothing on the disk changes before `go_on`.

        Args:
            named: Settings that are changed on purpose.
            say: Shows which checkpoints are passed over, and why.

        Raises:
            CheckpointError: There is no checkpoint, another version wrote the recipe, or it differs in what is learned.
        """
        assert config.run.resume is not None
        folder = cls(run_path(config.run, recipe_name=""))
        saved = folder.recipe()
        if saved.command != config.command:
            raise CheckpointError(
                f"run.resume must name a run of command: {config.command}, got {folder.path}, which is one of "
                f"command: {saved.command}"
            )
        found = differences([_identity(saved), _identity(config)])
        moved = {key for key, (was, now) in found.items() if _without_folders(was) == _without_folders(now)}
        free = (_CHANGEABLE | moved).intersection(named)
        if different := [
            f"{key} was {was!r}, is {now!r}"
            for key, (was, now) in found.items()
            if key not in free and _NAMED_VERIFIER.sub("verifier", key) not in _FREE_ON_RESUME
        ]:
            raise CheckpointError(
                f"the checkpoint belongs to another recipe: {'; '.join(different)}. Fix: resume with the recipe and "
                "overrides of the first start, or start a new run without run.resume (areal-lite resume DIR may change "
                f"{', '.join(sorted(_CHANGEABLE))}, the folder in a path, and settings that do not affect learning)"
            )
        folder.checkpoint = choose_checkpoint(folder.checkpoints, config.run.resume_from, say=say)
        return folder

    def go_on(self, config: Config | OfflineConfig, *, say: Callable[[str], object] = print) -> None:
        """Continue from `checkpoint` with a recipe that `resume` has checked."""
        content = config.model_dump()
        content["run"]["resume_from"] = None  # meant once
        self._set_aside(say, now=content)
        self._write_recipe(content)

    def go_back(self, *, say: Callable[[str], object]) -> None:
        """Continue from the newest undamaged checkpoint; from the start if none was saved."""
        there = whole_checkpoints(self.checkpoints)
        self.checkpoint = choose_checkpoint(self.checkpoints, None, say=say) if there else None
        self._set_aside(say, now=self.recipe().model_dump())

    def _set_aside(self, say: Callable[[str], object], *, now: Row | None = None) -> None:
        """Set aside whatever is later than the checkpoint; log which settings change there, if those of `now` do."""
        self.guard()
        (self.path / "summary.json").unlink(missing_ok=True)  # of the end that is undone
        step, moment = (0, 0.0) if self.checkpoint is None else read_meta(self.checkpoint)
        if self.checkpoint is not None:
            make_newest(self.checkpoint, say=say)
            self.checkpoint = self.newest_checkpoint()

        def is_earlier(number: float, line: bytes) -> bool:
            return number <= step

        def has_happened(time_s: float, line: bytes) -> bool:
            # A change of settings at this very step has not trained anything.
            return time_s <= moment and _settings_in(line).get("step") != step

        steps = (int(row) for row, _, is_kept in self._split("metrics.jsonl", "step", is_earlier, say) if is_kept)
        if missing := missing_steps([*steps, step + 1]):
            say(f"{self.path / 'metrics.jsonl'}: no row of step {missing}: figures and curves leave them out")
        deque(self._split("samples.jsonl", "step", is_earlier, say), maxlen=0)
        last, undone = 0.0, dict[str, Any]()
        for time_s, line, is_kept in self._split("events.jsonl", "time", has_happened, say):
            if is_kept:
                last = max(last, time_s)
            else:
                undone = table(_settings_in(line).get("was")) | undone  # the first change after the checkpoint knows
        if now is not None and step:
            self._log_changes(
                flattened(self.recipe().model_dump()) | undone, flattened(now), step=step, time_s=last or moment
            )

    def _log_changes(self, before: Row, now: Row, *, step: int, time_s: float) -> None:
        was = {key: before[key] for key in sorted(_CHANGEABLE & before.keys()) if before[key] != now.get(key)}
        if was:
            # At the time of the last event: the time from there to the next one is not the run's.
            event = {"time": time_s, "lane": "controller", "kind": "settings", "step": step, "was": was}
            self.append("events.jsonl", [event])

    def newest_checkpoint(self) -> Path:
        """Return the newest complete checkpoint, unverified; a `CheckpointError` if there is none."""
        there = whole_checkpoints(self.checkpoints)
        return list(there.values())[-1] if there else choose_checkpoint(self.checkpoints, None, say=print)

    def how_to_resume(self) -> str:
        """Return the command that resumes the run, or why there is none."""
        if not (there := whole_checkpoints(self.checkpoints)):
            return "there is no checkpoint to resume from (run.checkpoint_every)"
        return f"to resume from step {max(there)}: areal-lite resume {shlex.quote(str(self.path))}"

    @contextlib.contextmanager
    def new_checkpoint(self, step: int, *, queue_state: bytes | None, keep: int) -> Iterator[Path]:
        """Yield the folder for the trainer's part of a checkpoint, which is complete once the block has ended.

        Args:
            step: Completed steps.
            queue_state: The sample queue's; None for an offline run, which has no queue.
            keep: How many of the newest checkpoints stay.
        """
        self.guard()
        with new_checkpoint(self.checkpoints, step, keep=keep) as folder:
            if queue_state is not None:
                (folder / "queue.msgpack").write_bytes(queue_state)
            yield folder / "trainer"
            self.guard()  # the ranks may have taken long

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a `.jsonl` file; a killed run leaves complete lines. What cannot be written now, is later."""
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
                    logger.warning("%s cannot be written; its rows are kept in memory until it can: %s", path, error)

    def read(self, name: str) -> list[Row]:
        """Read the rows of a `.jsonl` file, those too that cannot be written yet; what is broken is left out."""
        return read_rows(self.path / name)[0] + [json.loads(line) for line in self._late.get(name, "").splitlines()]

    def iterate(self, name: str) -> Iterator[Row]:
        """Yield the same rows, one after another."""
        return iterate_rows(self.path / name)

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        self.guard()
        write_whole(self.path / name, json.dumps(content, indent=2, default=float) + "\n")

    def write_trace(self, *, max_log_bytes: int = 100_000_000) -> None:
        """Turn `events.jsonl` into `trace.json.gz` for Perfetto; of a longer log its end, as it would take minutes."""
        temporary = self.path / ".trace.json.gz.tmp"
        remove(temporary)
        events = self.path / "events.jsonl"
        write_trace(temporary, lambda: iterate_rows(events, last_bytes=max_log_bytes))
        os.replace(temporary, self.path / "trace.json.gz")

    def _split(
        self, name: str, key: str, stays: Callable[[float, bytes], bool], say: Callable[[str], object]
    ) -> Iterator[tuple[float, bytes, bool]]:
        """Move lines to `*.orphaned.jsonl`; yield the number by this key, the line, and whether it stays, of each."""
        path, broken, late = self.path / name, list[int](), self._late.pop(name, "").encode()
        kept, orphaned = path.with_name(f".{name}.kept"), path.with_name(f"{path.stem}.orphaned.jsonl")
        if not (path.is_file() or late):
            return
        remove(kept)
        path.touch()
        with path.open("rb") as lines, kept.open("wb") as staying, orphaned.open("ab") as leaving:
            for number, line in iterate_lines(itertools.chain(lines, late.splitlines()), key, broken):
                is_kept = stays(number, line)
                (staying if is_kept else leaving).write(line.rstrip(b"\n") + b"\n")
                yield number, line, is_kept
        os.replace(kept, path)
        if not orphaned.stat().st_size:
            orphaned.unlink()
        if broken:
            say(f"{path}: left out what cannot be read: line {', '.join(map(str, broken))}")


def _identity(config: Config | OfflineConfig) -> Row:
    """Return a recipe for comparison: without `reward_watch`, and without the digests of pickled functions."""
    return json.loads(without_digests(config.model_dump_json(exclude={"reward_watch"})))  # type: ignore[no-any-return]


def _settings_in(line: bytes) -> Row:
    """Return the event of a line if it is one of changed settings, else nothing."""
    event = table(load_line(line)) if b'"settings"' in line else {}
    return event if event.get("kind") == "settings" else {}


def _without_folders(value: Any) -> str:
    """Return a setting as JSON, of absolute paths only the last part: a move changes the rest."""
    return re.sub('"/[^"]*/', '"', json.dumps(value))


def changed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that differ from their defaults, by `section.field`; None if they cannot be read."""
    try:
        return flattened(parse_saved_config(config).model_dump(exclude_defaults=True))
    except ConfigError:
        return None


def differences(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what differs between configs or summaries: by `section.field`, one value each, None if missing."""
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
