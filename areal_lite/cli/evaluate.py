"""One model on a recipe's held-out prompts, without a run: in this process and its children, nothing is written."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.recipe import Config
from areal_lite.data.encode import load_tokenizer
from areal_lite.data.prompts import load_source
from areal_lite.errors import ArealLiteError, ConfigError, EngineError
from areal_lite.node import check_memory, out_of_memory
from areal_lite.record.paths import EVALUATED, find_model_folder, with_absolute_paths
from areal_lite.rollout.runner import complete_greedily, load_workflows
from areal_lite.types import Prompt, Sample
from areal_lite.verify.protocol import Reply, failed
from areal_lite.verify.verifier_set import VerifierSet
from areal_lite.watchdog import Watchdog

T = TypeVar("T")

_POLL_S = 0.25


def evaluate(config: Config, *, model: str) -> list[Reply]:
    """Complete the held-out prompts greedily, score them, and return what each prompt's completion got.

    Args:
        config: Its data, rollout and verifier sections say how.
        model: A model folder, or the folder of a run that has ended.
    """
    check_memory(min(config.caches_mb, config.rollout.kv_cache_mb))
    # Where there is an `eval_function`, the reward learned from is not asked; its model need not even be there.
    asked = config.model_copy(update={"verifier": config.verifier.for_evaluation()})
    check_plugins(asked, verifiers_only=True)
    asked = with_absolute_paths(asked, EVALUATED)
    folder = str(find_model_folder(model, option="MODEL_OR_RUN"))
    # Rows may name any verifier of the recipe, whether it is asked here or not.
    named = asked.model_copy(update={"verifier": config.verifier})
    prompts = load_source(named, load_tokenizer(folder, config.model), "eval")
    if not prompts:
        raise ConfigError("an evaluation needs held-out prompts, the recipe has none: set data.eval_path")
    return _in_a_process_of_its_own(asked, prompts, folder)


def _in_a_process_of_its_own(config: Config, prompts: Sequence[Prompt], folder: str) -> list[Reply]:
    """Keep vLLM out of this process: its environment, and its output, which is long and shown only after a failure."""
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        try:
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=_write_to, initargs=(log.name,)) as process:
                return process.submit(_evaluate, config, prompts, folder).result()
        except (ArealLiteError, BrokenProcessPool) as error:
            sys.stderr.write(log.read())
            if isinstance(error, BrokenProcessPool):
                ended = f"the process of the engine ended by itself{out_of_memory()}; its last words are above"
                raise EngineError(ended) from error
            raise


def _write_to(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _evaluate(config: Config, prompts: Sequence[Prompt], folder: str) -> list[Reply]:
    return asyncio.run(_run(config, prompts, model_folder=folder))


async def _run(config: Config, prompts: Sequence[Prompt], *, model_folder: str) -> list[Reply]:
    from areal_lite.rollout.vllm_engine import VllmEngine

    workflows, limit, timeout_s = load_workflows(config), config.rollout.max_new_tokens, config.run.stall_timeout_s
    # Where there is an `eval_function`, it scores every row, whatever its source says.
    also = config.data.chosen_verifiers if config.verifier.eval_function is None else ()
    verifiers = VerifierSet(config.verifier, also=also, start_timeout_s=config.run.start_timeout_s)
    try:
        await verifiers.start()
        engine = await VllmEngine.start(config, model_folder=model_folder)
        try:
            samples = await _watched(
                complete_greedily(engine, prompts, max_new_tokens=limit, workflows=workflows),
                progress=lambda: engine.tokens_generated,
                waiting_for=f"{len(prompts)} completions",
                late=lambda: f"the engine, after {engine.tokens_generated} tokens",
                timeout_s=timeout_s,
            )
        finally:
            await workflows.endpoint.close()
            await engine.close()
        return await _watched(
            asyncio.gather(*map(partial(_score, verifiers), prompts, samples)),
            progress=lambda: _reading(verifiers),
            waiting_for=f"{len(prompts)} scores",
            late=lambda: "the verifier, with {2} calls running and {3} waiting after {0}".format(*_reading(verifiers)),
            timeout_s=timeout_s,
        )
    finally:
        await verifiers.close()


async def _score(verifiers: VerifierSet, prompt: Prompt, sample: Sample | None) -> Reply:
    if sample is None:
        return failed("workflow", "")
    if (score := sample.score) is not None:  # an agent's own
        return Reply(score.total, parts=score.parts, metrics=score.metrics, failure=score.failure)
    (reply,) = await verifiers.score(prompt, [sample.text], messages=[sample.messages], held_out=True)
    return reply


def _reading(verifiers: VerifierSet) -> tuple[int, ...]:
    gauges = verifiers.gauges()
    return tuple(gauges[name] for name in ("calls", "restarts", "busy", "waiting"))


async def _watched(
    work: Awaitable[T], *, progress: Callable[[], Hashable], waiting_for: str, late: Callable[[], str], timeout_s: float
) -> T:
    """Await work as long as it makes progress (invariant I6); a `StallError` where it has not for `timeout_s`."""
    watchdog, task = Watchdog(timeout_s), asyncio.ensure_future(work)
    try:
        while not task.done():
            watchdog.check(progress(), waiting_for=waiting_for, culprit=late)
            await asyncio.wait([task], timeout=_POLL_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # also ends what it waits for, before that is closed
    return task.result()
