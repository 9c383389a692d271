"""Accuracy of one model on a recipe's held-out prompts: the run's own engine and verifier pool, without a run.

Called by `areal-lite eval`. Everything happens in this process and its children; nothing is written.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_lite.config import Config
from areal_lite.data.source import load_source
from areal_lite.errors import ConfigError
from areal_lite.model_folder import find_model_folder
from areal_lite.paths import with_absolute_paths
from areal_lite.rollout.engine import Sampling
from areal_lite.types import Prompt, Score
from areal_lite.verify.pool import VerifierPool

__all__ = ["Accuracy", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Result of an evaluation."""

    accuracy: float
    """Mean reward of the scored completions; 0 where there are none."""
    prompts: int
    """Held-out prompts."""
    scored: int
    """Those whose completion the verifier could score."""


def evaluate(config: Config, *, model: str) -> Accuracy:
    """Complete the held-out prompts greedily and score them.

    Args:
        config: A recipe of `areal-lite train`: its data, rollout and verifier sections say how.
        model: A model folder, or the folder of a run that has ended.

    Raises:
        ArealLiteError: With what to do about it.
    """
    from transformers import AutoTokenizer

    if config.verifier.eval_function is not None:
        # The reward learned from is not asked; its model need not even be there.
        verifier = {"function": config.verifier.eval_function, "arguments": {}}
        config = config.model_copy(update={"verifier": config.verifier.model_copy(update=verifier)})
    config = with_absolute_paths(config)
    folder = str(find_model_folder(model, option="MODEL_OR_RUN"))
    prompts = load_source(config, AutoTokenizer.from_pretrained(folder), "eval")
    if not prompts:
        raise ConfigError("an evaluation needs held-out prompts, the recipe has none: set data.eval_path")
    with _output_kept_back():
        scores = asyncio.run(_run(config, prompts, model_folder=folder))
    rewards = [score.reward for score in scores if score.reward is not None]
    accuracy = sum(rewards) / len(rewards) if rewards else 0.0
    return Accuracy(accuracy=accuracy, prompts=len(prompts), scored=len(rewards))


async def _run(config: Config, prompts: Sequence[Prompt], *, model_folder: str) -> list[Score]:
    from areal_lite.rollout.vllm_engine import VllmEngine

    verifier = config.verifier
    pool = VerifierPool(
        verifier.function,
        processes=verifier.processes,
        timeout_s=verifier.timeout_s,
        start_timeout_s=config.run.start_timeout_s,
        arguments=verifier.arguments,
    )
    await pool.start()
    try:
        engine = await VllmEngine.start(config, model_folder=model_folder)
        try:
            samples = await asyncio.gather(
                *(engine.generate(prompt.token_ids, _greedy(prompt, config)) for prompt in prompts)
            )
        finally:
            await engine.close()
        pairs = zip(prompts, samples, strict=True)
        return [
            score for (score,) in await asyncio.gather(*(pool.score(prompt, [sample.text]) for prompt, sample in pairs))
        ]
    finally:
        await pool.close()


@contextlib.contextmanager
def _output_kept_back() -> Iterator[None]:
    """Show what vLLM and its processes print only when something goes wrong: it is long, and all of it is harmless."""
    with tempfile.TemporaryFile() as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield
        except Exception:
            file.seek(0)
            os.write(kept[1], file.read())
            raise
        finally:
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def _greedy(prompt: Prompt, config: Config) -> Sampling:
    """A data row may set its own limit."""
    limit = int(prompt.row.get("max_new_tokens", config.rollout.max_new_tokens))
    return Sampling(max_new_tokens=limit, temperature=0.0)
