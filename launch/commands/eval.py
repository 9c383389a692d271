"""`areal-lite eval`: measure a model on a recipe's held-out prompts, and compare two measurements."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.recipe import Config
from areal_lite.data.encode import load_tokenizer
from areal_lite.data.prompts import load_source
from areal_lite.errors import ConfigError, EngineError, VerifierError
from areal_lite.launch.commands.options import Json, Overrides, RecipeOption, option, optional, recipe_for, run_of
from areal_lite.launch.commands.scores import show, show_comparison, summarise
from areal_lite.launch.commands.serve import on_own_screen
from areal_lite.launch.commands.trial import Case
from areal_lite.node import check_memory, out_of_memory
from areal_lite.record.metrics import mean_called
from areal_lite.record.paths import EVALUATED, find_model_folder, with_absolute_paths
from areal_lite.record.run_files import read_summary
from areal_lite.types import Prompt
from areal_lite.verify.verifier_set import VerifierSet
from areal_lite.watchdog import Watchdog

_POLL_S = 0.25


def eval_model(
    model: Annotated[
        str, optional("MODEL_OR_RUN", "model folder, or folder of a finished run; leave out with --compare")
    ],
    overrides: Overrides,
    recipe: RecipeOption = None,
    json_path: Json = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        option("BEFORE AFTER", "instead of a model: compare two files that --json wrote, row by row"),
    ] = None,
) -> int:
    """Evaluate a model on a recipe's held-out prompts, or compare two evaluations.

    Generate completions greedily, score them with the recipe's verifier (verifier.eval_function if it is set), and
    print rewards and their parts, metrics, failures, and the completions with the lowest rewards.
    """
    console = Console(highlight=False, soft_wrap=True)
    if compare is not None and not model:
        show_comparison(*compare, console=console)
        return 0
    if compare is not None or not model:
        raise typer.BadParameter("expected either MODEL_OR_RUN or --compare, got both or neither")
    config, run = recipe_for(model, recipe, overrides, console=console), run_of(model)
    summary = summarise(evaluate(config, model=model))
    reward, num_failed = summary["reward"], summary["tried"] - summary["scored"]
    if reward:
        before = read_summary(run or Path(model)).get("eval_called")  # a run's name for its figure
        rewards = [row["reward"] for row in summary["results"] if row["reward"] is not None]
        called = mean_called(rewards, before=[before])
        failures = f", {num_failed} could not be scored" if num_failed else ""
        interval = ", 95 % interval {:.3f} to {:.3f}".format(*reward["interval"]) if reward["interval"] else ""
        console.print(f"held-out {called}, greedy: {reward['mean']:.3f}{interval} ({len(rewards)} problems{failures})")
    show(summary, console)
    if json_path is not None:
        json_path.write_text(json.dumps({"model": model} | summary, indent=1) + "\n")
    if not reward:
        raise VerifierError(f"nothing was scored: the verifier failed on all {num_failed} completions. Fix: see above")
    return 0


def evaluate(config: Config, *, model: str) -> list[Case]:
    """Complete the held-out prompts greedily, and score the completions.

    Args:
        config: Its data, rollout and verifier sections are used.
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


def _in_a_process_of_its_own(config: Config, prompts: Sequence[Prompt], folder: str) -> list[Case]:
    """Run vLLM in another process: it changes the environment, and its long output is shown only after an error."""
    with on_own_screen(), ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_evaluate, config, prompts, folder).result()
        except BrokenProcessPool as error:
            ended = f"the process of the engine ended by itself{out_of_memory()}; its last output is above"
            raise EngineError(ended) from error


def _evaluate(config: Config, prompts: Sequence[Prompt], folder: str) -> list[Case]:
    return asyncio.run(_run(config, prompts, model_folder=folder))


async def _run(config: Config, prompts: Sequence[Prompt], *, model_folder: str) -> list[Case]:
    from areal_lite.rollout.runner import complete_greedily, load_workflows
    from areal_lite.rollout.vllm_engine import VllmEngine

    workflows, limit = load_workflows(config), config.rollout.max_new_tokens
    # An `eval_function` scores every row, whatever verifier its source names.
    also = config.data.chosen_verifiers if config.verifier.eval_function is None else ()
    verifiers = VerifierSet(config.verifier, watch=config.reward_watch, also=also, run=config.run)
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(verifiers.close)
        await verifiers.start()
        engine = await VllmEngine.start(config, model_folder=model_folder)
        opened.push_async_callback(engine.close)
        opened.push_async_callback(workflows.endpoint.close)

        async def score() -> list[Case]:
            samples = await complete_greedily(engine, prompts, max_new_tokens=limit, workflows=workflows)
            replies = await asyncio.gather(*map(verifiers.judge, prompts, samples))
            return [
                Case(index=index, prompt=prompt, completion=sample.text if sample else "", reply=reply)
                for index, (prompt, sample, reply) in enumerate(zip(prompts, samples, replies, strict=True))
            ]

        def progress() -> tuple[int, ...]:
            gauges = verifiers.gauges()
            return engine.tokens_generated, *(gauges[name] for name in ("busy", "waiting", "calls", "restarts"))

        def late() -> str:
            text = "the engine, after {} tokens, or the verifier, with {} calls running and {} waiting after {}"
            return text.format(*progress())

        watchdog, task = Watchdog(config.run.stall_timeout_s), asyncio.ensure_future(score())
        try:
            while not task.done():  # as long as it makes progress (invariant I6)
                watchdog.check(progress(), waiting_for=f"{len(prompts)} completions and scores", culprit=late)
                await asyncio.wait([task], timeout=_POLL_S)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # also ends what it waits for, before that is closed
        return task.result()
