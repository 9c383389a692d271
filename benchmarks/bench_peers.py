"""Tokens/s of areal-lite and of TRL's `GRPOTrainer` on the same samples (10 to 40 minutes on 2 idle cores).

    python benchmarks/bench_peers.py
    python benchmarks/bench_peers.py longtail_cpu --size 320x8 --repeats 1 --steps 12

Both sides start from the same model, get the same prompts in the same order, and make one optimiser step from each
batch. Nothing of ours is alive while TRL runs, and the other way round: each run has the machine to itself. Where the
recipe draws lengths (longtail_cpu) each sample is as long on both sides, and the model may have any size. TRL is
installed into a folder of its own when it is first needed (2 MB).
"""

import itertools
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import measuring
import typer
from measuring import Size, parse_size
from peers_trl import PINS, Learning, ensure_trl, run_trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config.reading import parse_override, read_yaml
from areal_lite.config.recipe import Config
from areal_lite.data.cursor import make_cursor
from areal_lite.data.prompts import load_sources
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import CONSOLE, ratios, say, training
from areal_lite.launch.bench.longtail import LONGTAIL, draw_length
from areal_lite.launch.bench.modes import Threads
from areal_lite.launch.bench.modes import thread_settings as thread_settings_of_mode
from areal_lite.launch.bench.modes_figures import MAX_STALENESS, MODES, measured_steps, published, work_begins
from areal_lite.launch.bench.plan import planned_config
from areal_lite.launch.run.train import prepare_model
from areal_lite.record.run_folder import RunFolder
from areal_lite.rollout.worker import sample_seed
from areal_lite.types import Prompt

SIDES = {"async": "areal-lite, eta 4", "sync": "areal-lite, eta 0", "trl": "TRL"}
"""Ours with samples up to four steps old, ours in turns (for information), and TRL."""
_CACHE = Path(".cache") / "areal-lite" / "peers"
_EQUAL = read_yaml(Path(__file__).with_name("peers.yaml"), holding="settings of both sides")
SAME_LOSS: dict[str, Any] = _EQUAL["same loss"]
SAME_SPEED: dict[str, Any] = SAME_LOSS | _EQUAL["same speed"]
_MOST_STEPS = 40
"""Of a run, unless the command line says otherwise."""


def main(
    words: measuring.Words = None,
    size: Annotated[str | None, typer.Option(metavar="WIDTHxLAYERS", help="a model of random weights")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each side")] = 2,
    steps: Annotated[int | None, typer.Option(min=4, help="optimiser steps of a run")] = None,
    out: measuring.Out = Path("runs/bench-peers"),
) -> None:
    """Search each side's fastest setting, then measure the sides in turns."""
    (recipe,), overrides = measuring.split_words(words, default=["arith_cpu"])
    changes = (of_size(parse_size(size)) if size else {}) | dict(map(parse_override, overrides))
    config = planned_config(recipe, "recipe", [changes])
    is_drawn = config.rollout.workflow == LONGTAIL
    if size and not is_drawn:
        raise ConfigError(
            f"--size makes a model that has learned nothing: expected drawn lengths (rollout.workflow={LONGTAIL}), got "
            f"{config.rollout.workflow}. Fix: name longtail_cpu"
        )
    measuring.check_comparable(config, "peers", SAME_SPEED if is_drawn else SAME_LOSS)
    steps = steps or min(config.run.steps, _MOST_STEPS)
    runs = Runs(recipe, changes, config, out=out.resolve())
    chosen = {side: runs.fastest(side, steps=max(2, speed_steps(side, steps) // 2)) for side in SIDES}
    numbers = {side: itertools.count() for side in SIDES}

    def measure(side: str) -> Learning:
        return runs.run(side, chosen[side], steps=speed_steps(side, steps), repeat=next(numbers[side]))

    measured = measuring.in_turns(SIDES, repeats=repeats, measure=measure)
    shown = {SIDES[side]: str(one) for side, one in chosen.items()}
    settings = {"recipe": recipe, "overrides": changes, "repeats": repeats, "steps": steps, "chosen": shown}
    case = {"lengths": describe_lengths(config), "parameters": runs.parameters()}
    found = speeds(measured, samples_per_step=config.samples_per_step)
    rows = [case | row | {"setting": shown[row["side"]]} for row in found]
    measuring.finish("peers speed", "ours and TRL, speed", rows, settings=settings | {"trl": PINS}, out=out)


def of_size(size: Size) -> dict[str, Any]:
    """Return what makes the model one of this size, with random weights; and what a slower step needs."""
    shape = {"steps": 0, "hidden_size": size.width, "num_layers": size.layers}
    room = {"rollout.kv_cache_mb": 2048, "run.stall_timeout_s": 900}
    return {f"model.warm_start.{name}": value for name, value in shape.items()} | room


def speed_steps(side: str, steps: int) -> int:
    """Return a side's steps: without a queue all steps are alike, so that a third is enough.

    >>> speed_steps("async", 18), speed_steps("sync", 18), speed_steps("trl", 4)
    (18, 6, 3)
    """
    return steps if side == "async" else max(3, steps // 3)


def describe_lengths(config: Config) -> str:
    """Describe the lengths of a recipe's answers."""
    if config.rollout.workflow != LONGTAIL:
        return "as learned"
    median, sigma = (config.rollout.workflow_arguments[name] for name in ("median", "sigma"))
    return f"{median}, sigma {sigma:g}" if sigma else f"{median} each"


def drawn_lengths(config: Config, prompts: Sequence[Prompt]) -> list[int]:
    """Return the lengths of the samples of prompts, as the rollout worker has them drawn."""
    arguments: Any = config.rollout.workflow_arguments
    samples = itertools.product(prompts, range(config.queue.samples_per_group))
    seeds = (sample_seed(config.run.seed, f"{prompt.prompt_id}#0", index) for prompt, index in samples)
    return [draw_length(seed, longest=config.rollout.max_new_tokens, **arguments) for seed in seeds]


class Runs:
    """Runs either side with its settings."""

    def __init__(self, recipe: str, changes: dict[str, Any], config: Config, *, out: Path) -> None:
        """Make TRL's packages and the initial policy, where they are missing."""
        self._config, self._cores = config, len(os.sched_getaffinity(0))
        self._recipe, self._changes, self._out = recipe, changes, out
        with CONSOLE.status("looking for TRL"):
            self._packages = ensure_trl(_CACHE.resolve(), say=say)
        self._model = prepare_model(config, console=CONSOLE)
        self._tokenizer = AutoTokenizer.from_pretrained(self._model)

    def fastest(self, side: str, *, steps: int) -> Any:
        """Return the fastest of a side's settings: of a split of threads, or of TRL's micro-batches."""
        samples, is_drawn = self._config.samples_per_step, self._config.rollout.workflow == LONGTAIL
        tried: list[Any] = [*thread_settings(side, cores=self._cores)]
        if side == "trl":
            tried = [*micro_batches(samples, is_drawn=is_drawn)]
        rates = dict.fromkeys(tried, 0.0)
        for setting in tried if len(tried) > 1 else []:
            run = self.run(side, setting, steps=steps, repeat=None)
            rates[setting] = samples_per_s(run.seconds, samples_per_step=samples)
            say(f"search: {side} with {setting}: {rates[setting]:.3g} samples/s")
        return max(rates, key=rates.__getitem__)

    def run(self, side: str, setting: Any, *, steps: int, repeat: int | None) -> Learning:
        """Run one side; a run of the search has no number of a repeat."""
        folder = self._out / (f"search-{side}-{setting}" if repeat is None else f"{side}-{repeat}")
        seed = self._config.run.seed + (0 if repeat is None else 1 + repeat)
        # TRL's run has the learning rate, the seed and all else of the synchronous one.
        threads = setting if isinstance(setting, Threads) else thread_settings("sync", cores=self._cores)[0]
        changes = our_settings(side, threads, steps=steps, seed=seed)
        config = planned_config(self._recipe, "run", [self._changes, changes])
        if side != "trl":
            return self.run_ours(config, folder)
        cursor = make_cursor(config, load_sources(config, self._tokenizer, "train"))
        prompts = [cursor.next() for _ in range(steps * config.queue.groups_per_step)]
        settings = {
            "model": str(self._model),
            "prompts": [(prompt.text, prompt.answer) for prompt in prompts],
            "threads": self._cores,
            "grpo": trl_settings(config, per_device=setting),
        }
        if config.rollout.workflow == LONGTAIL:
            settings |= {"lengths": drawn_lengths(config, prompts), "regex": config.verifier.arguments}
        with CONSOLE.status(f"TRL trains {steps} steps"):
            return run_trl(settings, packages=self._packages, folder=folder)

    def parameters(self) -> int:
        """Count those of the initial policy."""
        return sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(self._model).parameters())

    def run_ours(self, config: Config, folder: Path) -> Learning:
        """Train as `areal-lite train` does."""
        shutil.rmtree(folder, ignore_errors=True)
        with training() as train:
            train(config, dir=str(folder))
        run = RunFolder(folder)
        shutil.rmtree(run.checkpoints)
        events = run.read("events.jsonl")
        begin, times = work_begins(events), published(events)
        return Learning(
            seconds=tuple(times[step] - begin for step in range(1, config.run.steps + 1)),
            tokens=tuple(row["length_mean"] for row in run.read("metrics.jsonl")),
        )


def our_settings(side: str, threads: Threads, *, steps: int, seed: int) -> dict[str, Any]:
    """Return what a run of ours changes in the recipe."""
    return {
        **_EQUAL["ours"],
        "queue.max_staleness": MAX_STALENESS if side == "async" else 0,
        "trainer.threads": threads.training,
        "rollout.threads": threads.generation,
        "run.steps": steps,
        "run.seed": seed,
        "run.checkpoint_every": 0,
    }


def trl_settings(config: Config, *, per_device: int) -> dict[str, Any]:
    """Return the arguments of TRL's `GRPOConfig`: one optimiser step per generated batch, on-policy, without KL.

    `per_device` samples make one forward and backward pass.
    """
    trainer, passes = config.trainer, config.samples_per_step // per_device
    return {
        **_EQUAL["trl"],
        "seed": config.run.seed,
        "max_steps": config.run.steps,
        "num_generations": config.queue.samples_per_group,
        "max_completion_length": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "learning_rate": trainer.lr,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "epsilon": config.objective.clip_low,
        "epsilon_high": config.objective.clip_high,
        # Equal gradient work: each batch is generated at once and trained once, in one optimiser step.
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": passes,
        "steps_per_generation": passes,
    }


def thread_settings(side: str, *, cores: int) -> list[Threads]:
    """Return the splits that are tried for a side of ours: two where there is one, both phases on all cores in turns.

    >>> [str(threads) for threads in thread_settings("async", cores=2)], str(*thread_settings("sync", cores=2))
    (['1+1', '1+2'], '2+2')
    """
    return [Threads(cores, cores)] if side == "sync" else thread_settings_of_mode(MODES["async-eta4"], cores=cores)


def micro_batches(samples: int, *, is_drawn: bool) -> list[int]:
    """Return the sizes of a pass that are tried in TRL: the whole batch, and a quarter, which may fit into a cache.

    Where lengths are drawn all rows are as long as the longest, so a quarter, and a quarter of it: of a large model
    the whole does not fit into memory.

    >>> micro_batches(128, is_drawn=False), micro_batches(64, is_drawn=True), micro_batches(6, is_drawn=True)
    ([128, 32], [16, 4], [6])
    """
    return [samples // parts for parts in ((4, 16) if is_drawn else (1, 4)) if samples % parts == 0] or [samples]


def samples_per_s(seconds: Sequence[float], *, samples_per_step: int, max_staleness: int = MAX_STALENESS) -> float:
    """Return the rate over the steps that count, the same on both sides; `seconds` as in `Learning`."""
    first, last = measured_steps(len(seconds), max_staleness=max_staleness)
    return (last - first) * samples_per_step / (seconds[last - 1] - seconds[first - 1])


def speeds(runs: Mapping[str, Sequence[Learning]], *, samples_per_step: int) -> list[dict[str, Any]]:
    """Return a row per side: its rates in all repeats, and tokens/s over TRL's inside each repeat.

    In turns all steps but the first count; at eta 4 those with full queues.
    """
    rows: list[dict[str, Any]] = []
    for side, of_side in runs.items():
        eta = MAX_STALENESS if side == "async" else 0
        rates = [samples_per_s(run.seconds, samples_per_step=samples_per_step, max_staleness=eta) for run in of_side]
        counted = slice(*measured_steps(len(of_side[0].tokens), max_staleness=eta))
        lengths = [statistics.fmean(run.tokens[counted]) for run in of_side]
        tokens = [rate * length for rate, length in zip(rates, lengths, strict=True)]
        rows.append({"side": SIDES[side], "samples_per_s": rates, "tokens_per_s": tokens})
    return [row | {"speed_over_trl": ratios(row["tokens_per_s"], rows[-1]["tokens_per_s"])} for row in rows]


if __name__ == "__main__":
    measuring.run(main)
