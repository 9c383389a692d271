"""`areal-lite train | sft | reward-model | dpo`: from a recipe to a finished run.

Everything that can be checked is, before anything heavy starts.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
import transformers
from rich.console import Console
from rich.progress import Progress

from areal_lite.config.checks import core_warning
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import BUILT_IN
from areal_lite.data.cursor import make_cursor
from areal_lite.launch.run.controller import Controller, Interrupted
from areal_lite.launch.run.offline import OfflineController
from areal_lite.launch.run.online import OnlineController
from areal_lite.launch.run.places import places_for
from areal_lite.launch.run.preflight import check_cluster
from areal_lite.launch.run.ray_session import joins_a_cluster, ray_session
from areal_lite.launch.run.recipe_check import Loaded, Reach, check_recipe
from areal_lite.launch.run.view import View
from areal_lite.node import bfloat16_instructions
from areal_lite.record.paths import find_model_folder
from areal_lite.record.run_folder import RunFolder, run_path
from areal_lite.record.writer import SoleWriter, writable
from areal_lite.sample_queue.service import read_state
from areal_lite.train.warm_start import ensure_warm_start

_CACHE = Path(".cache") / "areal-lite"
_Recipe = TypeVar("_Recipe", Config, OfflineConfig)
_Made = tuple[_Recipe, Callable[..., Controller], Callable[[Path], None]]
"""The recipe with its steps, what makes the controller, and what checks that a checkpoint is of the same data."""


def train(
    config: Config | OfflineConfig,
    *,
    recipe_name: str,
    console: Console,
    on_step: Callable[[Mapping[str, Any]], object] | None = None,
    take_over: bool = False,
    named: Iterable[str] = (),
) -> dict[str, Any]:
    """Run a recipe and return its summary, with the path of its `folder`, and of its `report` where there is one.

    Args:
        recipe_name: Names the run folder where the recipe does not.
        on_step: Gets the row of every step; returning False ends the run like Ctrl-C.
        take_over: Take the run folder from the process that holds it.
        named: Settings that a resume may change, because the user named them.

    Raises:
        ArealLiteError: With what to do about it.
        Interrupted: After Ctrl-C, saved; with the summary, unless there was no time for it.
    """
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    warn = functools.partial(say, style="yellow")
    path = run_path(config.run, recipe_name=recipe_name)
    if config.run.resume and (summary := RunFolder(path).finished(config)):
        say(f"this run is finished: {path} has all its {summary['version']} steps; to train on, raise run.steps")
        return summary | {"folder": str(path)}
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(SoleWriter(path, take_over=take_over, say=warn))
        if not config.run.resume:
            RunFolder(path).check_new()
        loaded = check_recipe(config, Reach.CLUSTER if joins_a_cluster() else Reach.MACHINE, with_weights=True)
        config = loaded.config
        made = _online(config, loaded) if isinstance(config, Config) else _offline(config, loaded, say)
        config, make_controller, check_data = made
        model_folder = loaded.model_folder or prepare_model(config, console=console)
        folder = RunFolder.resume(config, named=named, say=warn) if config.run.resume else RunFolder(path)
        if folder.checkpoint is not None:
            check_data(folder.checkpoint)
        stack.enter_context(ray_session())
        if config.run.preflight and len(ray.nodes()) > 1:
            check_cluster(config, model_folder=model_folder, console=console)
        places = stack.enter_context(places_for(config, logs=path / "logs", report=say))
        num_cores = int(ray.cluster_resources().get("CPU", os.cpu_count() or 1))
        if warning := core_warning(config, num_cores=num_cores):
            warn(f"warning: {warning}")
        # Until here nothing in the folder has changed.
        folder.guard = writer.check
        with writable("a run folder (run.dir)", path):
            if folder.checkpoint is not None:
                folder.go_on(config, say=warn)
            else:
                folder.begin(config)
        say(f"run folder: {folder.path}")
        if config.run.device == "cpu":
            say(f"compute dtype: {config.compute_dtype}, master weights in float32{_faster_dtype(config)}")
        view = View(config, console=console)
        controller = make_controller(folder=folder, places=places, model_folder=model_folder, view=view)
        try:
            summary = controller.run(on_step) | {"folder": str(folder.path)}
        except Interrupted as stop:
            if config.run.report and stop.summary:
                stop.summary["report"] = _report_of(folder, console=console)
            raise
    if config.run.report:
        summary |= {"report": _report_of(folder, console=console)}
    return summary


def _online(config: Config, loaded: Loaded) -> _Made[Config]:
    def check(checkpoint: Path) -> None:
        make_cursor(config, loaded.prompts).load(read_state((checkpoint / "queue.msgpack").read_bytes())["cursor"])

    make = functools.partial(OnlineController, prompts=loaded.prompts, eval_prompts=loaded.held_out)
    return config, make, check


def _offline(config: OfflineConfig, loaded: Loaded, say: Callable[..., object]) -> _Made[OfflineConfig]:
    """Turn `epochs` into steps; the last is a whole batch too, with rows of the next epoch where needed."""
    data = loaded.rows
    assert data is not None
    if config.trainer.epochs is not None:
        batches = config.trainer.epochs * len(data.train) / config.trainer.batch_size
        steps = math.ceil(round(batches, 6))  # 1.1 * 100 / 10 is a little more than 11
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
    say(f"{len(data.train)} training rows, {len(data.held_out)} held out")
    return config, OfflineController, data.check


def _faster_dtype(config: Config | OfflineConfig) -> str:
    """Name the setting that would speed a large model up; for the built-in one bfloat16 is no faster."""
    if config.compute_dtype == "bfloat16" or config.model.path == BUILT_IN or not (found := bfloat16_instructions()):
        return ""
    return f"; this CPU has {found}: model.compute_dtype=native is faster for models from 0.1B parameters"


def _report_of(folder: RunFolder, *, console: Console) -> str | None:
    """Write the run's report and return its path; None if that fails, which is no failure of the run."""
    from areal_lite.record.report import write_report

    try:
        return str(write_report(folder.path))
    except Exception as error:
        console.print(f"the report could not be written: {error!r}", style="yellow", markup=False, soft_wrap=True)
        return None


def prepare_model(config: Config | OfflineConfig, *, console: Console) -> Path:
    """Return the folder of the initial policy; the built-in one is warm-started and cached.

    Raises:
        ConfigError: `model.path` is neither a model folder nor a run that has one.
    """
    if config.model.path != BUILT_IN:
        return find_model_folder(config.model.path, option="model.path")
    transformers.utils.logging.disable_progress_bar()
    with Progress(console=console, transient=True) as bar:
        title = "supervised warm start of the built-in model"
        task = bar.add_task(title, total=config.model.warm_start.steps)

        def show(done: int, total: int, loss: float) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}, loss {loss:.3f}")
            if not console.is_terminal and done % max(total // 4, 1) == 0:  # a log shows no bar
                console.print(f"{title}: {done} of {total} steps, loss {loss:.3f}", highlight=False)

        return ensure_warm_start(config, cache_dir=_CACHE / "warm-start", progress=show).resolve()
