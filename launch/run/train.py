"""`areal-lite train | sft | reward-model | dpo`: from a recipe to a finished run.

Everything that can be checked is, before anything heavy starts.
"""

import contextlib
import functools
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
import transformers
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from rich.console import Console
from rich.progress import Progress

from areal_lite.config.checks import check_resources
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import BUILT_IN
from areal_lite.data.cursor import make_cursor
from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.run.controller import Controller, Interrupted
from areal_lite.launch.run.lean_ray import lean_ray
from areal_lite.launch.run.offline import OfflineController
from areal_lite.launch.run.online import OnlineController
from areal_lite.launch.run.places import places_for
from areal_lite.launch.run.preflight import check_cluster
from areal_lite.launch.run.recipe_check import Loaded, Reach, check_recipe
from areal_lite.launch.run.signals import notices_held_back, undisturbed
from areal_lite.launch.run.view import View
from areal_lite.network import listens
from areal_lite.node import check_memory
from areal_lite.record.paths import find_model_folder
from areal_lite.record.run_folder import RunFolder, run_path
from areal_lite.record.writer import SoleWriter, writable
from areal_lite.sample_queue.service import read_state
from areal_lite.train.warm_start import ensure_warm_start

_CACHE = Path(".cache") / "areal-lite"
_PROBE_TIMEOUT_S = 5.0
_RAY_SAYS = 160
"""Characters at most."""
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
        take_over: Take the run folder from whoever holds it.
        named: Settings that a resume changes on purpose.

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
        loaded = check_recipe(config, Reach.CLUSTER if _joins_a_cluster() else Reach.MACHINE, with_weights=True)
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
        places = stack.enter_context(places_for(config, logs=path / "logs", say=say))
        _check_resources(config, console)
        # Until here nothing in the folder has changed.
        writer.settle()
        folder.guard = writer.check
        with writable("a run folder (run.dir)", path):
            if folder.checkpoint is not None:
                folder.go_on(config, say=warn)
            else:
                folder.begin(config)
        console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
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
    """Turn `epochs` into steps; the rows after an epoch's last full batch are skipped."""
    data = loaded.rows
    assert data is not None
    if config.batch.epochs is not None:
        steps = max(1, round(config.batch.epochs * (len(data.train) // config.batch.batch_size)))
        config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
    say(f"{len(data.train)} training rows, {len(data.held_out)} held out")
    return config, OfflineController, data.check


def _report_of(folder: RunFolder, *, console: Console) -> str | None:
    """Write the run's report and return its path; a report that fails takes nothing from the run."""
    from areal_lite.record.report import write_report

    try:
        return str(write_report(folder.path))
    except Exception as error:
        console.print(f"the report could not be written: {error!r}", style="yellow", markup=False, soft_wrap=True)
        return None


def _joins_a_cluster() -> bool:
    """Whether a run may have other machines than this one."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_session() -> Iterator[None]:
    """Join the Ray cluster that RAY_ADDRESS names, or start a private one; one joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    lean_ray()
    check_memory()
    try:
        with notices_held_back():
            # Without an address Ray would join whatever cluster this machine happens to run.
            _join(os.environ.get("RAY_ADDRESS") or "local")
        ray._private.worker.print_to_stdstream = _say_briefly  # Ray has no setting for it
        yield
    finally:
        with undisturbed():  # a second Ctrl-C must not leave half of it behind
            _leave()


def _say_briefly(message: Mapping[str, Any], **_: Any) -> None:
    """Print the beginning of what Ray has to say: of a lost process it would print half a page, log lines included."""
    first = next(iter("".join(message["lines"]).strip().splitlines()), "")
    print(f"({message['pid']}) {textwrap.shorten(first, _RAY_SAYS, placeholder=' ...')}")


def _join(address: str) -> None:
    """Start a private Ray (`local`), or join one.

    Raises:
        ConfigError: It refuses this machine, or nobody answers.
        StallError: It does not start in time.
    """
    if address != "local":
        # The head of a cluster asks for a token wherever an earlier start left one; who joins by address is not told.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        as_grpc = os.environ.get("RAY_USE_TLS") != "1"
        if address != "auto" and not listens(address, timeout_s=_PROBE_TIMEOUT_S, as_grpc=as_grpc):
            raise ConfigError(
                f"a Ray cluster must answer at {address} (RAY_ADDRESS), nobody does, or somebody else; give its head's "
                "host:port (6379 by default), or start Ray there and here; unset RAY_ADDRESS to run here alone"
            )
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ray.exceptions.AuthenticationError, ConnectionError) as error:
        raise ConfigError(
            f"Ray at {address} must let this machine in, got: {error}; where it asks for a token, copy the head's "
            "~/.ray/auth_token to every node, or start all of Ray, and this command, with RAY_AUTH_MODE=disabled"
        ) from error
    except Exception as error:  # Ray has no class for it
        if "timed out during startup" not in str(error):
            raise
        raise StallError(
            "Ray must start within 30 s here, and did not: the machine has too much to do, or too little memory or "
            "disk is left (`areal-lite doctor` looks); try again when it has less to do"
        ) from error


def _leave() -> None:
    """Leave Ray; what of it was started here does not hear SIGTERM: it is killed at once, and all below it."""
    node, below = ray._private.worker._global_node, list[psutil.Process]()
    for process in [one.process for started in node.all_processes.values() for one in started] if node else ():
        process.terminate = process.kill
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
    ray.shutdown()
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


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


def _check_resources(config: Config | OfflineConfig, console: Console) -> None:
    resources = ray.cluster_resources()
    num_cores, num_gpus = int(resources.get("CPU", os.cpu_count() or 1)), int(resources.get("GPU", 0))
    if warning := check_resources(config, num_cores=num_cores, num_gpus=num_gpus):
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)
