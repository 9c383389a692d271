"""The command `areal-lite train`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_lite.cli.options import Overrides, Recipe
from areal_lite.cli.running import run_and_sum_up, summary_rows
from areal_lite.config.recipe import load_config

__all__ = ["SUMMARY_KEYS", "train"]

SUMMARY_KEYS = (
    "steps", "wall_s", "samples_per_s", "gen_tokens_per_s", "reward_first", "reward_last", "age_max_trained",
    "max_staleness", "rollout_idle_fraction", "trainer_idle_fraction", "paused_fraction", "parity_max_abs_logprob_diff",
)  # fmt: skip


def train(recipe: Recipe, overrides: Overrides) -> int:
    """Train a policy from a recipe.

    Ctrl-C finishes the step, saves, and says how to go on.
    """
    config = load_config(recipe, overrides)
    from areal_lite.launch.run.train import train

    return run_and_sum_up(
        ["train", recipe],
        overrides,
        run=lambda console: train(config, recipe_name=Path(recipe).stem, console=console),
        rows=_rows,
    )


def _rows(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if evaluations := list(summary["eval"].values()):
        yield "held-out accuracy, greedy", f"{evaluations[0]:.3f} → {evaluations[-1]:.3f}"
    yield from summary_rows(summary, SUMMARY_KEYS)
