"""What `areal-lite bench peers` runs: a run of ours in the product's own way, and one of TRL in a process of its own.

Nothing of ours is alive while TRL runs, and the other way round: each run has the machine to itself.
"""

import json
import os
import queue
import shutil
import statistics
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config.recipe import Config
from areal_lite.data.mix import make_cursor
from areal_lite.data.prompts import load_source, load_sources
from areal_lite.errors import StallError, TrainerError
from areal_lite.launch.bench.peers import Learning
from areal_lite.launch.bench.peers_trl import greedy_accuracy, read_line
from areal_lite.launch.run.controller import Interrupted
from areal_lite.launch.run.train import train
from areal_lite.record.run_folder import RunFolder

__all__ = ["Task", "load_task", "run_ours", "run_trl"]

Pair = tuple[str, str]

_SILENCE_S = 300.0
"""Seconds without a line after which TRL's process is given up; a step takes one, its start ten."""
_SHOWN_LINES = 8


class Task:
    """What both sides learn: the tokenizer's prompts with their answers."""

    def __init__(self, *, prompts: Sequence[Pair], problems: Sequence[Pair]) -> None:
        self.prompts, self.problems = prompts, problems


def load_task(config: Config, *, model_folder: Path) -> Task:
    """Return the prompts that a run of ours takes, in its order, and the held-out problems."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    cursor = make_cursor(config, load_sources(config, tokenizer, "train"))
    prompts = [cursor.next() for _ in range(config.run.steps * config.queue.groups_per_step)]
    problems = load_source(config, tokenizer, "eval")
    return Task(
        prompts=[(prompt.text, prompt.answer) for prompt in prompts],
        problems=[(prompt.text, prompt.answer) for prompt in problems],
    )


def run_ours(
    config: Config, *, folder: Path, model_folder: Path, problems: Sequence[Pair], console: Console
) -> Learning:
    """Train a recipe as `areal-lite train` does, and measure the accuracy of its snapshots afterwards.

    Args:
        config: The recipe; with `run.checkpoint_every: 0` no accuracy is measured.
        folder: Of the run; what is there is deleted, and so are the snapshots in the end.
        model_folder: Of the initial policy.
        problems: Held-out prompts and their answers.
        console: Shows how it goes.

    Raises:
        KeyboardInterrupt: After Ctrl-C.
    """
    shutil.rmtree(folder, ignore_errors=True)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
    try:
        train(config, recipe_name="peers", console=console)
    except Interrupted:
        raise KeyboardInterrupt from None
    run = RunFolder(folder)
    events = run.read("events.jsonl")
    begin = min(event["time"] for event in events if event["lane"] == "trainer")
    published = {event["version"]: event["time"] - begin for event in events if event["kind"] == "published"}
    accuracies = {}
    if config.run.checkpoint_every:
        with console.status("measuring the accuracy of the snapshots"):
            accuracies = _accuracies(run, model_folder, problems, max_new_tokens=config.rollout.max_new_tokens)
    shutil.rmtree(run.checkpoints)
    return Learning(
        seconds=tuple(published[step] for step in range(1, config.run.steps + 1)),
        accuracies=accuracies,
        tokens=statistics.fmean(row["length_mean"] for row in run.read("metrics.jsonl")),
    )


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
    with _lines([*command, str(folder / "settings.json")], threads=settings["threads"], log=folder / "log") as lines:
        for told in filter(None, map(read_line, lines)):
            if told["peer"] == "step":
                seconds.append(told["seconds"])
                tokens.append(told["tokens"])
                progress(told["step"])
            else:
                accuracies[told["step"]] = told["accuracy"]
    if len(seconds) != settings["steps"]:
        raise TrainerError(
            f"TRL must do {settings['steps']} steps, it ended after {len(seconds)}: see {folder / 'log'}"
        )
    return Learning(seconds=tuple(seconds), accuracies=accuracies, tokens=statistics.fmean(tokens))


def _accuracies(
    run: RunFolder, model_folder: Path, problems: Sequence[Pair], *, max_new_tokens: int
) -> dict[int, float]:
    """Measure the initial policy and every snapshot, just as TRL's side does."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    accuracies = {0: greedy_accuracy(model, tokenizer, problems, max_new_tokens=max_new_tokens)}
    for snapshot in sorted(run.checkpoints.glob("step-*")):
        _load_weights(model, snapshot / "trainer")
        step = int(snapshot.name.partition("-")[2])
        accuracies[step] = greedy_accuracy(model, tokenizer, problems, max_new_tokens=max_new_tokens)
    return accuracies


def _load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights of a trainer checkpoint, nothing else of it; in place, into the tensors of the state."""
    state = {"model": get_model_state_dict(model)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is wanted
        load(state, checkpoint_id=folder)


@contextmanager
def _lines(command: Sequence[str], *, threads: int, log: Path) -> Iterator[Iterator[str]]:
    """Run a process and hand out its lines as they come; it ends with the block."""
    # Nothing is looked up on the hub: model and data are here.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        yield _read(process.stdout, log=log)
        if process.wait(_SILENCE_S) != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise TrainerError(f"TRL's process must end with 0, got {process.returncode}:\n{end}\nAll of it: {log}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _read(stdout: IO[str], *, log: Path) -> Iterator[str]:
    lines = queue.SimpleQueue[str | None]()

    def pump() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_SILENCE_S)
        except queue.Empty:
            raise StallError(
                f"TRL's process must do a step within {_SILENCE_S:.0f} s, got nothing: see {log}"
            ) from None
        if line is None:
            return
        yield line
