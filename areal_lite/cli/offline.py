"""The commands `areal-lite sft | reward-model | dpo`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_lite.cli.options import Overrides, Recipe
from areal_lite.cli.running import run_and_sum_up, summary_rows
from areal_lite.config.offline import OfflineCommand, load_offline_config
from areal_lite.config.sections import COMMANDS

__all__ = ["dpo", "reward_model", "sft"]

_KEYS = ("steps", "wall_s", "trained_tokens", "trained_tokens_per_s", "loss_first", "loss_last")


def sft(recipe: Recipe, overrides: Overrides) -> int:
    """Train a model on completions.

    The rows are prompts with completions, or chats. Ctrl-C finishes the step, saves, and says how to go on.
    """
    return _run("sft", recipe, overrides)


def reward_model(recipe: Recipe, overrides: Overrides) -> int:
    """Train a reward model on preferences.

    It learns to score completions from pairs of a better and a worse one. The result can be a recipe's verifier:
    reward_model. Ctrl-C finishes the step, saves, and says how to go on.
    """
    return _run("reward_model", recipe, overrides)


def dpo(recipe: Recipe, overrides: Overrides) -> int:
    """Train a policy on preferences.

    It learns from pairs of a better and a worse completion, without a reward model: DPO, IPO or SimPO. Ctrl-C finishes
    the step, saves, and says how to go on.
    """
    return _run("dpo", recipe, overrides)


def _run(command: OfflineCommand, recipe: str, overrides: list[str]) -> int:
    config = load_offline_config(recipe, overrides, command=command)
    from areal_lite.launch.run.train import train

    return run_and_sum_up(
        [COMMANDS[command], recipe],
        overrides,
        run=lambda console: train(config, recipe_name=Path(recipe).stem, console=console),
        rows=_rows,
    )


def _rows(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    evaluations = list(summary["eval"].values())
    for name in evaluations[0] if evaluations else ():
        yield f"held-out {name}", f"{evaluations[0][name]:.3f} → {evaluations[-1][name]:.3f}"
    yield from summary_rows(summary, _KEYS)
