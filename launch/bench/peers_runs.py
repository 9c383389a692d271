"""The runs of `bench peers`: ours in the product's own way, TRL's in a process and an environment of its own.

The environment is made when it is first needed. It holds TRL and accelerate alone, pinned, and takes everything else
(torch, transformers, datasets, numpy) from the one that this runs in, through a `.pth` file. So both sides compute with
the same builds, TRL cannot change what the project runs with, and 2 MB are downloaded in place of 1 GB.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config.recipe import Config
from areal_lite.data.mix import make_cursor
from areal_lite.data.prompts import load_source, load_sources
from areal_lite.errors import ConfigError, StallError, TrainerError
from areal_lite.launch.bench.harness import say, training
from areal_lite.launch.bench.modes_runs import Threads
from areal_lite.launch.bench.peers import Learning, our_settings, thread_settings, trl_settings
from areal_lite.launch.bench.peers_trl import greedy_accuracy, read_line
from areal_lite.launch.bench.plan import planned_run
from areal_lite.launch.run.train import prepare_model
from areal_lite.record.run_folder import RunFolder

__all__ = ["PINS", "Runs", "ensure_trl", "run_trl"]

PINS = {"trl": "1.16.0", "accelerate": "1.15.0"}
"""TRL's trainer changes its defaults between minor versions; accelerate is the one that was tried with it."""
TRL_SCRIPT = Path(__file__).with_name("peers_trl.py")
_CACHE = Path(".cache") / "areal-lite" / "peers"
_INSTALL_S = 600.0
_SILENCE_S = 300.0
"""Seconds without a line after which TRL's process is given up; a step takes one, its start ten."""
_SHOWN_LINES = 8


class Runs:
    """Runs either side with its settings."""

    def __init__(self, recipe: str, config: Config, *, out: Path, console: Console) -> None:
        """Make TRL's environment and the initial policy, where they are missing."""
        self.config, self.cores = config, len(os.sched_getaffinity(0))
        self._recipe, self._out, self._console = recipe, out, console
        with console.status("looking for TRL"):
            self._python = ensure_trl(_CACHE.resolve(), say=lambda text: say(console, text))
        self._model = prepare_model(config, console=console)

    def run(self, side: str, setting: Any, *, steps: int, every: int, repeat: int | None) -> Learning:
        """Run one side; `repeat` None is a run of the search."""
        folder = self._out / (f"search-{side}-{setting}" if repeat is None else f"{side}-{repeat}")
        seed = self.config.run.seed + (0 if repeat is None else 1 + repeat)
        # TRL's run has the learning rate, the seed and all else of the synchronous one.
        threads = setting if isinstance(setting, Threads) else thread_settings("sync", cores=self.cores)[0]
        changes = our_settings(side, threads, steps=steps, every=every, seed=seed)
        config = planned_run(self._recipe, "run", changes).config
        tokenizer = AutoTokenizer.from_pretrained(self._model)
        problems = [(prompt.text, prompt.answer) for prompt in load_source(config, tokenizer, "eval")]
        if side != "trl":
            return self._run_ours(config, folder, problems)
        cursor = make_cursor(config, load_sources(config, tokenizer, "train"))
        prompts = [cursor.next() for _ in range(config.run.steps * config.queue.groups_per_step)]
        settings = trl_settings(
            config, model=str(self._model), prompts=[(prompt.text, prompt.answer) for prompt in prompts],
            problems=problems, per_device=setting, threads=self.cores, every=every,
        )  # fmt: skip
        with self._console.status("TRL is starting") as status:
            return run_trl(
                settings,
                command=[str(self._python), "-P", str(TRL_SCRIPT)],
                folder=folder,
                progress=lambda step: status.update(f"TRL: step {step} of {config.run.steps}"),
            )

    def _run_ours(self, config: Config, folder: Path, problems: Sequence[tuple[str, str]]) -> Learning:
        """Train as `areal-lite train` does, and measure the accuracy of the snapshots, if any, afterwards."""
        shutil.rmtree(folder, ignore_errors=True)
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
        with training(self._console) as train:
            train(config)
        run = RunFolder(folder)
        events = run.read("events.jsonl")
        begin = min(event["time"] for event in events if event["lane"] == "trainer")
        published = {event["version"]: event["time"] - begin for event in events if event["kind"] == "published"}
        accuracies = {}
        if config.run.checkpoint_every:
            with self._console.status("measuring the accuracy of the snapshots"):
                accuracies = self._accuracies(run, problems, max_new_tokens=config.rollout.max_new_tokens)
        shutil.rmtree(run.checkpoints)
        return Learning(
            seconds=tuple(published[step] for step in range(1, config.run.steps + 1)),
            accuracies=accuracies,
            tokens=statistics.fmean(row["length_mean"] for row in run.read("metrics.jsonl")),
        )

    def _accuracies(
        self, run: RunFolder, problems: Sequence[tuple[str, str]], *, max_new_tokens: int
    ) -> dict[int, float]:
        """Measure the initial policy and every snapshot, just as TRL's side does."""
        torch.set_num_threads(self.cores)
        tokenizer = AutoTokenizer.from_pretrained(self._model)
        model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        accuracies = {0: greedy_accuracy(model, tokenizer, problems, max_new_tokens=max_new_tokens)}
        for snapshot in sorted(run.checkpoints.glob("step-*")):
            load_weights(model, snapshot / "trainer")
            step = int(snapshot.name.partition("-")[2])
            accuracies[step] = greedy_accuracy(model, tokenizer, problems, max_new_tokens=max_new_tokens)
        return accuracies


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights of a trainer checkpoint, nothing else of it; in place, into the tensors of the state."""
    state = {"model": get_model_state_dict(model)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is wanted
        load(state, checkpoint_id=folder)


# ---------------------------------------------------------------- TRL's process


def run_trl(
    settings: Mapping[str, Any], *, command: Sequence[str], folder: Path, progress: Callable[[int], None]
) -> Learning:
    """Train with TRL in a process of its own.

    Args:
        settings: From `trl_settings`.
        command: Gets the path of a file with the settings as its last word.
        folder: Gets that file, and the log of the process.
        progress: Called with the steps done.

    Raises:
        TrainerError: The process failed; the message has the end of its log.
        StallError: It said nothing for too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    seconds, tokens, accuracies = [], [], {}
    command = [*command, str(folder / "settings.json")]
    with closing(_lines(command, threads=settings["threads"], log=folder / "log")) as lines:
        for told in filter(None, map(read_line, lines)):
            if told["peer"] == "step":
                seconds.append(told["seconds"])
                tokens.append(told["tokens"])
                progress(told["step"])
            else:
                accuracies[told["step"]] = told["accuracy"]
    if len(seconds) != settings["steps"]:
        done = f"it ended after {len(seconds)}: see {folder / 'log'}"
        raise TrainerError(f"TRL must do {settings['steps']} steps, {done}")
    return Learning(seconds=tuple(seconds), accuracies=accuracies, tokens=statistics.fmean(tokens))


def _lines(command: Sequence[str], *, threads: int, log: Path) -> Generator[str]:
    """Run a process and yield its lines as they come; it ends with the iteration."""
    # Nothing is looked up on the hub: model and data are here.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    lines = SimpleQueue[str | None]()

    def pump() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    Thread(target=pump, daemon=True).start()
    try:
        while (line := lines.get(timeout=_SILENCE_S)) is not None:
            yield line
        if process.wait(_SILENCE_S) != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise TrainerError(f"TRL's process must end with 0, got {process.returncode}:\n{end}\nAll of it: {log}")
    except Empty:
        late = f"TRL's process must do a step within {_SILENCE_S:.0f} s, got nothing: see {log}"
        raise StallError(late) from None
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- TRL's environment


def ensure_trl(cache: Path, *, say: Callable[[str], None]) -> Path:
    """Return the Python of TRL's environment; makes the environment where it is missing.

    Args:
        cache: Gets a folder for these pins; one that is not complete, or that another Python made, is made anew.
        say: Shows a line.

    Raises:
        ConfigError: It cannot be made; the message has the end of what went wrong.
    """
    folder = cache / "_".join(f"{name}-{pin}" for name, pin in PINS.items())
    marker, python = folder / "complete.json", folder / "bin" / "python"
    made_for = {"python": sys.version, "packages": sysconfig.get_path("purelib")}
    if marker.is_file() and json.loads(marker.read_text()) == made_for:
        return python
    say(f"making an environment for TRL {PINS['trl']} in {folder} (once; under a minute on a good network) ...")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], doing="make a virtual environment")
    pins = [f"{name}=={pin}" for name, pin in PINS.items()]
    # Without dependencies: the project's packages serve, and pip must not bring a second torch.
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    _run([str(python), "-m", "pip", "install", *options, *pins], doing=f"install {' and '.join(pins)}")
    (purelib,) = folder.glob("lib/python*/site-packages")
    (purelib / "areal_lite_packages.pth").write_text(f"{made_for['packages']}\n")
    _run([str(python), "-P", str(TRL_SCRIPT)], doing="import TRL")
    marker.write_text(json.dumps(made_for))
    return python


def _run(command: list[str], *, doing: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        output = "".join(str(text or "") for text in (getattr(error, "stdout", ""), getattr(error, "stderr", "")))
        # pip names every local index folder that lacks a package: noise that would hide the cause.
        lines = [line for line in output.splitlines() if "is ignored: it is neither" not in line] or [repr(error)]
        end = "\n".join(lines[-_SHOWN_LINES:])
        raise ConfigError(
            f"bench peers must be able to {doing} for TRL's environment, got:\n{end}\nSee to its cause (network? disk? "
            "pip's configured index?) and run this again: it starts over"
        ) from error
