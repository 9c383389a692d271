"""What `areal-lite bench train` measures: the trainer and a padded loop on the same batches, a process for each.

A batch has prompts of the recipe's data. How long the completions are is drawn as the recipe's workflow
`areal_lite.launch.bench.longtail:drawn_length` draws it, or is the length of worked sums. Their tokens are drawn
at random: what they are costs no time. Their behaviour log-probabilities are the initial model's with some noise, so
that the weights of decoupled PPO are near 1 but not 1.
"""

import gc
import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from areal_lite.config.recipe import Config
from areal_lite.data.arith import arith_problems
from areal_lite.data.prompts import load_source
from areal_lite.launch.bench.longtail import draw_length
from areal_lite.launch.bench.padded_loop import PaddedLoop
from areal_lite.launch.bench.train import LONGTAIL, Side, Step
from areal_lite.sample_queue.split import assign_rows
from areal_lite.train.trainer import Trainer
from areal_lite.types import Prompt, Row, Sample, Shard, StopReason, VersionSpan

__all__ = ["TrainPeer", "make_batches", "train_peers"]

_NOISE = 0.1
"""Standard deviation of what is added to behaviour log-probabilities, in nats."""


def make_batches(config: Config, *, model_folder: Path, count: int) -> list[Shard]:
    """Draw batches of the recipe's size.

    Args:
        config: The recipe, one that `check_recipe` lets pass; `run.seed` seeds what is drawn.
        model_folder: Hugging Face folder of the initial policy, with its tokenizer.
        count: How many.
    """
    rng = np.random.default_rng(config.run.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    prompts = load_source(config, tokenizer, "train")
    drawn = [_draw(config, prompts, vocabulary=len(tokenizer), rng=rng) for _ in range(count)]
    scores = _scores(config, model_folder, [row for rows in drawn for row in rows])
    shape = (config.queue.groups_per_step, config.queue.samples_per_group)
    batches = []
    for number, rows in enumerate(drawn):
        scored = (_with_logprobs(row, next(scores) + rng.normal(0, _NOISE, row.sample.num_tokens)) for row in rows)
        rewards = rng.integers(0, 2, shape).astype(np.float32)
        batches.append(Shard(batch_id=f"batch-{number}", rank=0, version=0, rewards=rewards, rows=tuple(scored)))
    return batches


@dataclass(frozen=True)
class TrainPeer:
    """One side's process."""

    _pool: ProcessPoolExecutor

    def step(self, number: int, *, rows_per_pass: int | None) -> Step:
        """Train one step on the batch of that number; they come round again.

        Args:
            number: Of the batch.
            rows_per_pass: Rows of the padded loop's micro-batches; None for the trainer, which has its own rule.
        """
        return self._pool.submit(_step, number, rows_per_pass).result()

    def peak_mb(self) -> float:
        """Return by how much the process has grown at most since it had imported everything."""
        return self._pool.submit(_peak_mb).result()


@contextmanager
def train_peers(
    sides: Iterable[Side], config: Config, *, model_folder: Path, batches: Sequence[Shard]
) -> Iterator[dict[Side, TrainPeer]]:
    """Start the processes of sides, and end them behind the block."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {
            side: stack.enter_context(ProcessPoolExecutor(1, mp_context=context, initializer=_leave_ctrl_c))
            for side in sides
        }
        opened = [pool.submit(_open, side, config, str(model_folder), batches) for side, pool in pools.items()]
        for one in opened:
            one.result()
        yield {side: TrainPeer(pool) for side, pool in pools.items()}


# In the peer's process


@dataclass(kw_only=True)
class _Running:
    side: Side
    loop: Any
    batches: Sequence[Shard]
    base_kb: int
    positions: int = 0
    version: int = 0

    def count(self, _model: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        self.positions += kwargs["input_ids"].numel()


_RUNNING: list[_Running] = []


def _leave_ctrl_c() -> None:
    # The command that started this process ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _open(side: Side, config: Config, model_folder: str, batches: Sequence[Shard]) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.trainer.threads)
    gc.collect()
    # The mark of the highest memory forgets what the imports took.
    Path("/proc/self/clear_refs").write_text("5")
    base_kb = _status_kb("VmRSS")
    loop = (
        PaddedLoop(config, model_folder)
        if side != "areal-lite"
        else Trainer(config, model_folder=model_folder, rank=0, world_size=1)
    )
    running = _Running(side=side, loop=loop, batches=batches, base_kb=base_kb)
    loop.model.register_forward_pre_hook(running.count, with_kwargs=True)
    _RUNNING.append(running)


def _step(number: int, rows_per_pass: int | None) -> Step:
    (running,) = _RUNNING
    shard = _at_version(running.batches[number % len(running.batches)], running.version)
    running.positions = 0
    start = time.perf_counter()
    if running.side != "areal-lite":
        tokens, grad_norm = running.loop.train_step(shard, rows_per_pass=rows_per_pass)
    else:
        stats = running.loop.train_step(shard)
        tokens, grad_norm = stats["tokens_trained"], stats["grad_norm"]
    seconds = time.perf_counter() - start
    running.version += 1
    return Step(seconds=seconds, tokens=tokens, positions=running.positions, grad_norm=grad_norm)


def _peak_mb() -> float:
    (running,) = _RUNNING
    return (_status_kb("VmHWM") - running.base_kb) / 1000


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _at_version(shard: Shard, version: int) -> Shard:
    """Return a batch whose every token has age 0."""
    rows = (
        replace(row, sample=replace(row.sample, spans=_whole(row.sample.num_tokens, version=version)))
        for row in shard.rows
    )
    return replace(shard, version=version, rows=tuple(rows))


# Batches


def _draw(config: Config, prompts: Sequence[Prompt], *, vocabulary: int, rng: np.random.Generator) -> list[Row]:
    num_groups, num_samples = config.queue.groups_per_step, config.queue.samples_per_group
    chosen = [prompts[place] for place in rng.integers(0, len(prompts), num_groups) for _ in range(num_samples)]
    lengths = _lengths(config, chosen, rng=rng)
    minibatches, _ = assign_rows(
        [len(prompt.token_ids) + length for prompt, length in zip(chosen, lengths, strict=True)],
        num_minibatches=config.trainer.minibatches,
        num_ranks=1,
        seed=int(rng.integers(2**31)),
    )
    return [
        Row(
            group_index=place // num_samples,
            sample_index=place % num_samples,
            minibatch=minibatch,
            prompt_token_ids=prompt.token_ids,
            sample=Sample(
                token_ids=rng.integers(0, vocabulary, length, dtype=np.int32),
                logprobs=np.zeros(length, np.float32),
                spans=_whole(length, version=0),
                stop_reason=StopReason.STOP,
            ),
        )
        for place, (prompt, length, minibatch) in enumerate(zip(chosen, lengths, minibatches, strict=True))
    ]


def _lengths(config: Config, prompts: Sequence[Prompt], *, rng: np.random.Generator) -> list[int]:
    longest = config.rollout.max_new_tokens
    if config.rollout.workflow == LONGTAIL:
        arguments: Any = config.rollout.workflow_arguments
        return [draw_length(int(seed), longest=longest, **arguments) for seed in rng.integers(0, 2**31, len(prompts))]
    solutions = {problem.prompt: problem.solution for problem in arith_problems(config.data.arith, "train")}
    # One token a character, and the end.
    return [min(longest, len(solutions[prompt.text]) + 1) for prompt in prompts]


def _scores(config: Config, model_folder: Path, rows: Sequence[Row]) -> Iterator[np.ndarray]:
    torch.set_num_threads(config.trainer.threads)
    trainer = Trainer(config, model_folder=str(model_folder), rank=0, world_size=1)
    return iter(trainer.score([(row.prompt_token_ids, row.sample.token_ids.tolist()) for row in rows]))


def _with_logprobs(row: Row, logprobs: np.ndarray) -> Row:
    return replace(row, sample=replace(row.sample, logprobs=logprobs.astype(np.float32)))


def _whole(length: int, *, version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version=version, start=0, end=length),)
