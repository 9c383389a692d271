"""`areal-lite bench peers`: the arithmetic task in TRL's `GRPOTrainer`, beside ours.

Both sides start from the same model, get the same prompts in the same order, and make one optimiser step from each
batch. Nothing of ours is alive while TRL runs, and the other way round: each run has the machine to itself.
"""

import os
import shutil
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config.recipe import Config
from areal_lite.data.mix import make_cursor
from areal_lite.data.prompts import load_source, load_sources
from areal_lite.launch.bench.harness import finish, in_turns, say, training
from areal_lite.launch.bench.modes_runs import Threads
from areal_lite.launch.bench.peers_process import PINS, TRL_SCRIPT, ensure_trl, run_trl
from areal_lite.launch.bench.peers_trl import greedy_accuracy
from areal_lite.launch.bench.peers_work import (
    Learning,
    check_comparable,
    draw_peers,
    micro_batches,
    our_settings,
    samples_per_s,
    summarise,
    targets,
    thread_settings,
    trl_settings,
)
from areal_lite.launch.bench.plan import planned_run
from areal_lite.launch.run.train import prepare_model
from areal_lite.record.run_folder import RunFolder

__all__ = ["SIDES", "PeersBench", "bench", "load_weights"]

SIDES = ("async", "sync", "trl")
"""Ours with samples up to four steps old, ours in turns (for information), and TRL."""
_CACHE = Path(".cache") / "areal-lite" / "peers"


@dataclass(frozen=True, kw_only=True)
class PeersBench:
    """Settings of the bench."""

    repeats: int = 2
    """Runs of each side, each with a seed of its own."""
    steps: int = 120
    accuracy: float = 0.75
    """Greedy, on held-out problems: the one whose time is taken."""
    every: int = 10
    """Steps between two measurements of the held-out accuracy."""
    search_steps: int = 20
    """Of the short runs that choose threads and micro-batches."""


def bench(settings: PeersBench, recipe: str, *, out: Path) -> int:
    """Search each side's fastest setting, then let the sides take turns."""
    config, out, console = planned_run(recipe, "recipe", {}).config, out.resolve(), Console()
    check_comparable(config)
    runs = _Runs(recipe, config, out=out, console=console)
    chosen = {side: _fastest(side, settings, runs, console) for side in SIDES}
    done = dict.fromkeys(SIDES, 0)

    def measure(side: str) -> Learning:
        repeat, done[side] = done[side], done[side] + 1
        say(console, f"repeat {repeat + 1} of {settings.repeats}: {side}")
        return runs.run(side, chosen[side], steps=settings.steps, every=settings.every, repeat=repeat)

    measured = in_turns(SIDES, repeats=settings.repeats, measure=measure)
    rows = summarise(measured, accuracy=settings.accuracy, samples_per_step=config.samples_per_step)
    finish(
        "peers",
        title=f"{Path(recipe).stem}: ours and TRL, time to a held-out accuracy of {settings.accuracy}",
        settings=asdict(settings)
        | {"recipe": recipe, "chosen": {side: str(setting) for side, setting in chosen.items()}, "trl": PINS},
        rows=rows,
        targets=(aimed_at := targets(rows, accuracy=settings.accuracy)),
        out=out,
        console=console,
    )
    draw_peers(rows, accuracy=settings.accuracy, path=out / "peers.svg")
    for one in aimed_at:
        verdict = "met" if one["median"] >= one["at_least"] else "missed"
        spread = f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
        say(console, f"{one['measure']}: {spread}, aimed at {one['at_least']}: {verdict}")
    return 0


def _fastest(side: str, settings: PeersBench, runs: Any, console: Console) -> Any:
    """Return the fastest of a side's settings: of a split of threads, or of TRL's micro-batches."""
    samples = runs.config.samples_per_step
    tried = micro_batches(samples) if side == "trl" else thread_settings(side, cores=runs.cores)
    rates = {}
    for setting in tried if len(tried) > 1 else []:
        run = runs.run(side, setting, steps=settings.search_steps, every=0, repeat=None)
        rates[setting] = samples_per_s(run.seconds, samples_per_step=samples)
        say(console, f"search: {side} with {setting}: {rates[setting]:.0f} samples/s")
    return max(rates, key=rates.__getitem__) if rates else tried[0]


class _Runs:
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
        settings = {
            "model": str(self._model),
            "prompts": [(prompt.text, prompt.answer) for prompt in prompts],
            "problems": problems,
            "threads": self.cores,
            "every": every,
            "grpo": trl_settings(config, per_device=setting),
        }
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
