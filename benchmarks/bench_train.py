"""Trained tokens/s of the trainer, against the loop that people write (about 5 minutes).

    python benchmarks/bench_train.py longtail_cpu --rows 4

Trains the same batches with the trainer and with a padded transformers loop (`padded_loop.py`), a process for each
side. A batch has prompts of the recipe's data (default longtail_cpu and arith_cpu). How long the completions are is
drawn as the workflow `drawn_length` draws it, or is the length of worked sums. Their tokens are drawn at random: what
they are costs no time. Their behaviour log-probabilities are the initial model's with some noise, so that the weights
of decoupled PPO are near 1 but not 1.
"""

import functools
import gc
import itertools
import math
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import measuring
import numpy as np
import torch
import transformers
import typer
from padded_loop import PaddedLoop

from areal_lite.config.recipe import Config, load_config
from areal_lite.data.arith import arith_problems
from areal_lite.data.prompts import load_source
from areal_lite.errors import ConfigError, TrainerError
from areal_lite.launch.bench.harness import CONSOLE, ratios, say, turns
from areal_lite.launch.bench.longtail import LONGTAIL, draw_length
from areal_lite.launch.run.train import prepare_model
from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.ledger import Batch
from areal_lite.sample_queue.shards import ShardedBatch
from areal_lite.train.trainer import Trainer
from areal_lite.types import Prompt, Sample, Score, Shard, StopReason, VersionSpan

Steps = dict[str, list[list["Step"]]]
"""By side and repeat."""

OURS, PADDED, FASTEST = "areal-lite", "padded", "fastest"
"""The sides: the trainer; the padded loop with `--rows`; and with the rows with which it is fastest here."""
WORK = {"one pass": ["trainer.minibatches=1", "objective.proximal=reuse"], "recipe": []}
"""Kind of work -> what it changes in a recipe.

In one pass there is one update and no proximal pass: both sides do the same forward and backward passes, and only
padding and code differ. In the recipe's own work the trainer takes the proximal log-probabilities of the first
minibatch from its update, while the padded loop has a pass over the whole batch before the updates, as verl has.
"""
TOLERANCE = 1e-3
"""Largest relative difference of gradient norms with which a figure counts."""
_NOISE = 0.1
"""Standard deviation of what is added to behaviour log-probabilities, in nats."""


class Step(NamedTuple):
    """What one trainer step of one side was."""

    seconds: float
    tokens: int
    """Completion tokens that trained."""
    positions: int
    """Places of all forward passes, prompts and padding included."""
    grad_norm: float
    """Mean over the step's updates, before clipping."""


def main(
    words: measuring.Words = None,
    repeats: measuring.Repeats = 5,
    steps: Annotated[int, typer.Option(min=1, help="trainer steps of a measurement, each with its own batch")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="rows of the padded loop's micro-batches")] = 8,
    out: measuring.Out = Path("runs/bench-train"),
) -> None:
    """Measure the trainer beside a padded transformers loop; both must compute the same gradients."""
    recipes, overrides = measuring.split_words(words, default=["longtail_cpu", "arith_cpu"])
    for recipe in recipes:
        check_recipe(load_config(recipe, overrides))
    found = [
        row
        for recipe in recipes
        for row in measure_recipe(recipe, overrides, repeats=repeats, steps=steps, rows_per_pass=rows)
    ]
    over = "trained tokens/s over a padded transformers loop, lengths of {recipe}, {work}"
    targets = [
        measuring.target(over.format(**row), row["over"][PADDED], at_least=1.5)
        for row in found
        if row["side"] == OURS and row["is_longtail"]
    ]
    settings = {"overrides": overrides, "repeats": repeats, "steps": steps, "rows": rows, "work": list(WORK)}
    measuring.finish("train", "trained tokens per second", found, settings=settings, out=out, targets=targets)


def measure_recipe(
    recipe: str, overrides: Sequence[str], *, repeats: int, steps: int, rows_per_pass: int
) -> Iterator[dict[str, Any]]:
    """Measure a recipe's lengths with each kind of work; yield a row for each side, which the console shows too."""
    configs = {work: load_config(recipe, [*overrides, *changes]) for work, changes in WORK.items()}
    folder, name = prepare_model(configs["recipe"], console=CONSOLE), Path(recipe).stem
    num_rows = {PADDED: rows_per_pass, FASTEST: 0}
    for work, config in configs.items():
        batches = _make_batches(config, folder, count=steps)
        if not num_rows[FASTEST]:
            num_rows[FASTEST] = _fastest_rows(config, folder, batches)
            say(f"{name}: the padded loop is fastest with micro-batches of {_in_words(num_rows[FASTEST])}", style="")
        with _sides([OURS, *num_rows], config, folder, batches) as sides:
            for side, process in sides.items():
                process.step(0, num_rows.get(side))

            def step(side: str, number: int, sides: dict[str, Any] = sides) -> Step:
                return sides[side].step(number, num_rows.get(side))

            measured = run_steps(sides, step, repeats=repeats, steps=steps)
            peaks = {side: process.peak_mb() for side, process in sides.items()}
        is_longtail = config.rollout.workflow == LONGTAIL
        for side, row in rows_of(measured).items():
            words = _in_words(num_rows[side]) if side in num_rows else f"{config.trainer.micro_batch_tokens} tokens"
            say(f"{name}, {work}: {side} {row['median']:.0f} tokens/s, {peaks[side]:.0f} MB", style="")
            case = {"side": side, "recipe": name, "work": work, "is_longtail": is_longtail, "micro_batch": words}
            yield {**case, "peak_mb": peaks[side], **row}


def _in_words(num_rows: int) -> str:
    return f"{num_rows} row{'s' * (num_rows != 1)}"


def _fastest_rows(config: Config, folder: Path, batches: Sequence[Shard]) -> int:
    """Return the padded loop's fastest micro-batch on this machine, of the powers of two up to a whole minibatch."""
    per_minibatch = config.samples_per_step // config.trainer.minibatches
    sizes = [2**power for power in range(int(math.log2(per_minibatch)) + 1)]
    with _sides([PADDED], config, folder, batches[:1]) as sides:
        sides[PADDED].step(0, sizes[-1])
        # Sizes in turns, and each one's best time: other work on the machine should favour none.
        seconds = dict.fromkeys(sizes, math.inf)
        for _, size in turns(sizes, 3):
            seconds[size] = min(seconds[size], sides[PADDED].step(0, size).seconds)
    return min(sizes, key=seconds.__getitem__)


def check_recipe(config: Config) -> None:
    """Refuse recipes that the padded loop cannot train, or that do not fix the lengths of completions.

    Raises:
        ConfigError: The objective has other terms, the recipe is not for one rank on a CPU in float32, or has neither
            drawn lengths nor worked sums alone.
    """
    dtype = config.model.compute_dtype.replace("bfloat16", "float32")  # `auto` is float32 on a CPU
    measuring.check_comparable(config, "train", {"run.device": "cpu", "model.compute_dtype": dtype, "trainer.ranks": 1})
    if config.rollout.workflow != LONGTAIL and (config.data.source != "arith" or config.data.mix):
        raise ConfigError(
            f"completions of an unknown length: expected rollout.workflow={LONGTAIL} (with "
            "rollout.workflow_arguments, see the recipe longtail_cpu) or data.source=arith alone, got "
            f"{config.rollout.workflow} and {', '.join(config.data.mix) or config.data.source}"
        )


def run_steps(sides: Iterable[str], step: Callable[[str, int], Step], *, repeats: int, steps: int) -> Steps:
    """Let the sides take turns on the same batches (0 was the one that warmed up), and check their gradients.

    Raises:
        TrainerError: The norms of the sides' gradients, or their trained tokens, differ: no figure counts.
    """
    numbers = {side: itertools.count(1) for side in sides}

    def repeat(side: str) -> list[Step]:
        return [step(side, next(numbers[side])) for _ in range(steps)]

    measured = measuring.in_turns(numbers, repeats=repeats, measure=repeat)
    for side in measured:
        for number, (mine, other) in enumerate(_pairs(measured, OURS, side), start=1):
            if mine.tokens != other.tokens or not _difference(mine, other) <= TOLERANCE:
                raise TrainerError(
                    f"in step {number} our gradient has the norm {mine.grad_norm:.7g} over {mine.tokens} tokens, the "
                    f"padded loop's {other.grad_norm:.7g} over {other.tokens}: they do not compute the same, so that "
                    "no figure counts. Fix: report it"
                )
    return measured


def rows_of(steps: Steps) -> dict[str, dict[str, Any]]:
    """Return the figures of each side: tokens/s of all repeats, and the ratios inside each repeat."""
    seconds = {side: [sum(step.seconds for step in repeat) for repeat in steps[side]] for side in steps}
    tokens = [sum(step.tokens for step in repeat) for repeat in steps[PADDED]]
    rates = {side: ratios(tokens, seconds[side]) for side in steps}
    return {
        side: {
            "seconds": seconds[side],
            "tokens_per_s": rates[side],
            "median": statistics.median(rates[side]),
            "over": {other: ratios(rates[side], rates[other]) for other in rates if other not in (side, OURS)},
            "tokens": tokens[0],
            "positions_per_token": sum(step.positions for step in itertools.chain(*repeats)) / sum(tokens),
            "grad_norm": repeats[0][0].grad_norm,
            "gradient_difference": max(itertools.starmap(_difference, _pairs(steps, side, PADDED))),
        }
        for side, repeats in steps.items()
    }


def _pairs(steps: Steps, *sides: str) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of two sides on the same batch."""
    return zip(*(itertools.chain(*steps[side]) for side in sides), strict=True)


def _difference(mine: Step, other: Step) -> float:
    return abs(mine.grad_norm - other.grad_norm) / other.grad_norm


class _Side:
    """The trainer or the padded loop, with batches that come round again."""

    def __init__(self, side: str, config: Config, folder: str, batches: Sequence[Shard]) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._threads, self._batches, self._positions = config.trainer.threads, batches, 0
        gc.collect()
        # The mark of the highest memory forgets what the imports took.
        Path("/proc/self/clear_refs").write_text("5")
        self._base_kb = _status_kb("VmRSS")
        make = functools.partial(Trainer, rank=0) if side == OURS else PaddedLoop
        self._loop: Any = make(config, model_folder=folder)
        self._loop.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def step(self, number: int, rows_per_pass: int | None) -> Step:
        """Train one step on the batch of that number, every token of it at age 0.

        The trainer, which has its own rule of micro-batches, gets None for `rows_per_pass`.
        """
        torch.set_num_threads(self._threads)  # here, as the thread that answers is not the one that made this
        shard, self._positions, self._loop.version = self._batches[number % len(self._batches)], 0, 0
        options = {} if rows_per_pass is None else {"rows_per_pass": rows_per_pass}
        start = time.perf_counter()
        stats = self._loop.train_step(shard, **options)
        return Step(time.perf_counter() - start, stats["tokens_trained"], self._positions, stats["grad_norm"])

    def peak_mb(self) -> float:
        """Return by how much the process has grown at most since it had imported everything."""
        return (_status_kb("VmHWM") - self._base_kb) / 1000

    def _count(self, _model: object, _args: object, kwargs: dict[str, Any]) -> None:
        self._positions += kwargs["input_ids"].numel()


class _Process(BaseManager):
    """A process that holds a `_Side`."""


_Process.register("Side", _Side)


@contextmanager
def _sides(names: Iterable[str], config: Config, folder: Path, batches: Sequence[Shard]) -> Iterator[dict[str, Any]]:
    """Start a process for each side; stop them at the end of the block."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        sides = {}
        for name in names:
            process = _Process(ctx=context)
            # Ctrl-C must not end it: this process does.
            process.start(signal.signal, (signal.SIGINT, signal.SIG_IGN))
            stack.callback(process.shutdown)
            sides[name] = process.Side(name, config, str(folder), batches)  # type: ignore[attr-defined]
        yield sides


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _make_batches(config: Config, folder: Path, *, count: int) -> list[Shard]:
    """Draw batches of the recipe's size; `run.seed` seeds what is drawn."""
    rng, queue = np.random.default_rng(config.run.seed), config.queue
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts, size = load_source(config, tokenizer, "train"), queue.samples_per_group
    torch.set_num_threads(config.trainer.threads)
    trainer, batches = Trainer(config, model_folder=str(folder), rank=0), []
    for number in range(count):
        chosen = [prompts[place] for place in rng.integers(0, len(prompts), queue.groups_per_step)]
        given = [prompt for prompt in chosen for _ in range(size)]
        lengths = _lengths(config, given, rng=rng)
        drawn = [rng.integers(0, len(tokenizer), length, dtype=np.int32) for length in lengths]
        pairs = [(prompt.token_ids, tokens.tolist()) for prompt, tokens in zip(given, drawn, strict=True)]
        samples = [
            Sample(
                token_ids=tokens,
                logprobs=(logprobs + rng.normal(0, _NOISE, len(tokens))).astype(np.float32),
                spans=(VersionSpan(version=0, start=0, end=len(tokens)),),
                stop_reason=StopReason.STOP,
                score=Score(reward=float(rng.integers(0, 2))),
            )
            for tokens, logprobs in zip(drawn, trainer.score(pairs), strict=True)
        ]
        groups = tuple(
            GroupRecord(
                prompt_id=prompt.prompt_id, attempt=0, sequence=place, admitted_version=0,
                samples=tuple(samples[place * size : (place + 1) * size]),
            )
            for place, prompt in enumerate(chosen)
        )  # fmt: skip
        batch, num_minibatches = Batch(batch_id=f"batch-{number}", version=0, groups=groups), config.trainer.minibatches
        dealt = ShardedBatch(batch, chosen, num_minibatches=num_minibatches, num_ranks=1, run_seed=number)
        batches.append(dealt.shard(0))
    return batches


def _lengths(config: Config, prompts: Sequence[Prompt], *, rng: np.random.Generator) -> list[int]:
    longest = config.rollout.max_new_tokens
    if config.rollout.workflow == LONGTAIL:
        arguments: Any = config.rollout.workflow_arguments
        return [draw_length(int(seed), longest=longest, **arguments) for seed in rng.integers(0, 2**31, len(prompts))]
    solutions = {problem.prompt: str(problem.demonstration) for problem in arith_problems(config.data.arith, "train")}
    # One token a character, and the end.
    return [min(longest, len(solutions[prompt.text]) + 1) for prompt in prompts]


if __name__ == "__main__":
    measuring.run(main)
