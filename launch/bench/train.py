"""`areal-lite bench train`: trained tokens per second of the trainer, against the loop that people write.

A process for each side, on the same batches. A batch has prompts of the recipe's data. How long the completions are is
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
from dataclasses import asdict, dataclass, replace
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from areal_lite.config.recipe import Config, load_config
from areal_lite.data.arith import arith_problems
from areal_lite.data.prompts import load_source
from areal_lite.errors import ConfigError, TrainerError
from areal_lite.launch.bench.harness import CONSOLE, check_comparable, finish, in_turns, ratios, say, target
from areal_lite.launch.bench.longtail import LONGTAIL, draw_length
from areal_lite.launch.bench.padded_loop import PaddedLoop
from areal_lite.launch.bench.view import Row
from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.ledger import Batch
from areal_lite.sample_queue.shards import ShardedBatch
from areal_lite.train.trainer import Trainer
from areal_lite.types import Prompt, Sample, Score, Shard, StopReason, VersionSpan

Steps = dict[str, list[list["Step"]]]
"""By side and repeat."""

OURS, PADDED, FASTEST = "areal-lite", "padded", "fastest"
"""The sides: the trainer; the padded loop with `TrainBench.rows`; and with the rows with which it is fastest here."""
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


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Settings of the bench."""

    repeats: int
    steps: int
    """Trainer steps of one measurement, each with a batch of its own."""
    rows: int
    """Rows of a micro-batch of the padded loop; 8 is what `TrainingArguments` of transformers has."""
    work: tuple[str, ...] = tuple(WORK)
    searches: bool = True
    """Whether the padded loop also runs with the number of rows with which it is fastest on this machine."""


def bench(settings: TrainBench, recipes: Sequence[str], overrides: Sequence[str], *, out: Path) -> int:
    """Measure recipe after recipe."""
    for recipe in recipes:
        check_recipe(load_config(recipe, overrides))
    rows = [row for recipe in recipes for row in measure(settings, recipe, overrides)]
    described = asdict(settings) | {"overrides": list(overrides)}
    return finish("train", "trained tokens per second", rows, settings=described, out=out, targets=targets(rows))


def measure(settings: TrainBench, recipe: str, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure a recipe's lengths with each kind of work; yield a row for each side, which the console shows too."""
    from areal_lite.launch.run.train import prepare_model

    configs = {work: load_config(recipe, [*overrides, *WORK[work]]) for work in settings.work}
    first = settings.work[0]
    folder, name = prepare_model(configs[first], console=CONSOLE), Path(recipe).stem
    batches = {work: _make_batches(config, folder, count=settings.steps) for work, config in configs.items()}
    rows_per_pass = {OURS: None, PADDED: settings.rows}
    if settings.searches:
        rows_per_pass[FASTEST] = fastest = _fastest_rows(configs[first], folder, batches[first])
        say(f"{name}: the padded loop is fastest with micro-batches of {_in_words(fastest)}", style="")
    for work, config in configs.items():
        with _sides(rows_per_pass, config, folder, batches[work]) as sides:
            for side, process in sides.items():
                process.step(0, rows_per_pass[side])
            steps = run_steps(settings, sides, lambda side, number: sides[side].step(number, rows_per_pass[side]))
            peaks = {side: process.peak_mb() for side, process in sides.items()}
        for side, row in rows_of(steps).items():
            words = _in_words(rows_per_pass[side]) if side != OURS else f"{config.trainer.micro_batch_tokens} tokens"
            figures = f"{row['median']:.0f} tokens/s, {peaks[side]:.0f} MB"
            say(f"{name}, {work}: {side} {figures}", style="")
            yield {
                "side": side,
                "recipe": name,
                "work": work,
                "is_longtail": config.rollout.workflow == LONGTAIL,
                "micro_batch": words,
                "peak_mb": peaks[side],
                **row,
            }


def _in_words(num_rows: int | None) -> str:
    return f"{num_rows} row" if num_rows == 1 else f"{num_rows} rows"


def rows_tried(rows_per_minibatch: int) -> list[int]:
    """Return the sizes of a padded pass among which the fastest is chosen: powers of two up to a whole minibatch."""
    return [2**power for power in range(int(math.log2(rows_per_minibatch)) + 1)]


def _fastest_rows(config: Config, folder: Path, batches: Sequence[Shard]) -> int:
    """Give the padded loop the size that suits it best on this machine, in a process that is not measured."""
    sizes = rows_tried(config.samples_per_step // config.trainer.minibatches)
    with _sides([PADDED], config, folder, batches[:1]) as sides:
        sides[PADDED].step(0, sizes[-1])
        seconds = dict.fromkeys(sizes, math.inf)
        # There and back, each size's best: what else the machine does should favour none.
        for size in [*sizes, *reversed(sizes), *sizes]:
            seconds[size] = min(seconds[size], sides[PADDED].step(0, size).seconds)
    return min(sizes, key=seconds.__getitem__)


def check_recipe(config: Config) -> None:
    """Refuse recipes that the padded loop cannot train, or that do not say how long completions are.

    Raises:
        ConfigError: The objective has other terms, the recipe is not for one rank on a CPU in float32, or has neither
            drawn lengths nor worked sums alone.
    """
    dtype = config.model.compute_dtype.replace("bfloat16", "float32")  # `auto` is float32 on a CPU
    check_comparable(config, "train", {"run.device": "cpu", "model.compute_dtype": dtype, "trainer.ranks": 1})
    if config.rollout.workflow != LONGTAIL and (config.data.source != "arith" or config.data.mix):
        raise ConfigError(
            f"bench train must know how long completions are: expected rollout.workflow={LONGTAIL} (with "
            "rollout.workflow_arguments, see the recipe longtail_cpu) or data.source=arith alone, got "
            f"{config.rollout.workflow} and {', '.join(config.data.mix) or config.data.source}"
        )


def run_steps(settings: TrainBench, sides: Iterable[str], step: Callable[[str, int], Step]) -> Steps:
    """Let the sides take turns on the same batches (0 was the one that warmed up), and check their gradients.

    Raises:
        TrainerError: The norms of the sides' gradients, or their trained tokens, differ: no figure counts.
    """
    numbers = {side: itertools.count(1) for side in sides}

    def repeat(side: str) -> list[Step]:
        return [step(side, next(numbers[side])) for _ in range(settings.steps)]

    steps = in_turns(numbers, repeats=settings.repeats, measure=repeat)
    for side in steps:
        for number, (mine, other) in enumerate(zip(_flat(steps[OURS]), _flat(steps[side]), strict=True), start=1):
            if mine.tokens != other.tokens or not _difference(mine, other) <= TOLERANCE:
                raise TrainerError(
                    f"in step {number} our gradient has the norm {mine.grad_norm:.7g} over {mine.tokens} tokens, the "
                    f"padded loop's {other.grad_norm:.7g} over {other.tokens}: they do not compute the same, so that "
                    "no figure counts; report it"
                )
    return steps


def rows_of(steps: Steps) -> dict[str, dict[str, Any]]:
    """Return the figures of each side: tokens/s of all repeats, and the ratios inside each repeat."""
    tokens = {side: [sum(step.tokens for step in repeat) for repeat in steps[side]] for side in steps}
    seconds = {side: [sum(step.seconds for step in repeat) for repeat in steps[side]] for side in steps}
    rates = {side: ratios(tokens[side], seconds[side]) for side in steps}
    rows = {}
    for side, repeats in steps.items():
        pairs = list(zip(_flat(repeats), _flat(steps[PADDED]), strict=True))
        rows[side] = {
            "seconds": seconds[side],
            "tokens_per_s": rates[side],
            "median": statistics.median(rates[side]),
            "over": {other: ratios(rates[side], rates[other]) for other in rates if other not in (side, OURS)},
            "tokens": tokens[side][0],
            "positions_per_token": sum(step.positions for step in _flat(repeats)) / sum(tokens[side]),
            "grad_norm": repeats[0][0].grad_norm,
            "gradient_difference": max(_difference(mine, other) for mine, other in pairs),
        }
    return rows


def targets(rows: Iterable[Row]) -> list[Any]:
    """Return what is aimed at: 1.5 times the padded loop on long-tailed lengths, and the same gradients everywhere."""
    ours = [row for row in rows if row["side"] == OURS]
    over = "trained tokens/s over a padded transformers loop, lengths of {recipe}, {work}"
    speed = [target(over.format(**row), row["over"][PADDED], at_least=1.5) for row in ours if row["is_longtail"]]
    differences = [row["gradient_difference"] for row in ours]
    return [*speed, target("relative difference of the gradient norms", differences, at_most=TOLERANCE)]


def _flat(repeats: Iterable[Iterable[Step]]) -> list[Step]:
    return list(itertools.chain.from_iterable(repeats))


def _difference(mine: Step, other: Step) -> float:
    return abs(mine.grad_norm - other.grad_norm) / other.grad_norm


class _Side:
    """The trainer or the padded loop, with batches that come round again."""

    def __init__(self, side: str, config: Config, folder: str, batches: Sequence[Shard]) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._threads, self._batches, self._version, self._positions = config.trainer.threads, batches, 0, 0
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
        shard, self._positions = self._batches[number % len(self._batches)], 0
        rows = (
            replace(row, sample=replace(row.sample, spans=_whole(row.sample.num_tokens, version=self._version)))
            for row in shard.rows
        )
        shard = replace(shard, version=self._version, rows=tuple(rows))
        self._version += 1
        start = time.perf_counter()
        if rows_per_pass is None:
            stats = self._loop.train_step(shard)
            tokens, grad_norm = stats["tokens_trained"], stats["grad_norm"]
        else:
            tokens, grad_norm = self._loop.train_step(shard, rows_per_pass=rows_per_pass)
        return Step(time.perf_counter() - start, tokens, self._positions, grad_norm)

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
    """Start the processes of sides, and end them behind the block."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        sides = {}
        for name in names:
            process = _Process(ctx=context)
            # The command that started this process ends it, not Ctrl-C.
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
    trainer = Trainer(config, model_folder=str(folder), rank=0)
    batches = []
    for number in range(count):
        chosen = [prompts[place] for place in rng.integers(0, len(prompts), queue.groups_per_step)]
        given = [prompt for prompt in chosen for _ in range(size)]
        lengths = _lengths(config, given, rng=rng)
        drawn = [rng.integers(0, len(tokenizer), length, dtype=np.int32) for length in lengths]
        pairs = [(prompt.token_ids, tokens.tolist()) for prompt, tokens in zip(given, drawn, strict=True)]
        samples = tuple(
            Sample(
                token_ids=tokens,
                logprobs=(logprobs + rng.normal(0, _NOISE, len(tokens))).astype(np.float32),
                spans=_whole(len(tokens), version=0),
                stop_reason=StopReason.STOP,
                score=Score(reward=float(rng.integers(0, 2))),
            )
            for tokens, logprobs in zip(drawn, trainer.score(pairs), strict=True)
        )
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        groups = tuple(
            GroupRecord(prompt_id=prompt.prompt_id, attempt=0, sequence=place, admitted_version=0, samples=part)
            for place, (prompt, part) in enumerate(zip(chosen, parts, strict=True))
        )
        batch = Batch(batch_id=f"batch-{number}", version=number, groups=groups)
        minibatches = config.trainer.minibatches
        dealt = ShardedBatch(batch, chosen, num_minibatches=minibatches, num_ranks=1, run_seed=config.run.seed)
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


def _whole(length: int, *, version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version=version, start=0, end=length),)
