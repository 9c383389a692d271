"""The commands `areal-lite train | sft | reward-model | dpo`: a run and its summary, or how to go on with it."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lite.cli.options import Overrides, Recipe
from areal_lite.config.offline import load_any_config
from areal_lite.config.sections import COMMANDS

__all__ = ["SUMMARY_KEYS", "dpo", "reward_model", "sft", "train"]

SUMMARY_KEYS = (
    "steps", "wall_s", "samples_per_s", "gen_tokens_per_s", "reward_first", "reward_last", "age_max_trained",
    "max_staleness", "rollout_idle_fraction", "trainer_idle_fraction", "paused_fraction", "parity_max_abs_logprob_diff",
)  # fmt: skip
_OFFLINE_KEYS = ("steps", "wall_s", "trained_tokens", "trained_tokens_per_s", "loss_first", "loss_last")


def train(recipe: Recipe, overrides: Overrides) -> int:
    """Train a policy from a recipe.

    Ctrl-C finishes the step, saves, and says how to go on.
    """
    return _run("train", recipe, overrides, keys=SUMMARY_KEYS)


def sft(recipe: Recipe, overrides: Overrides) -> int:
    """Train a model on completions.

    The rows are prompts with completions, or chats. Ctrl-C finishes the step, saves, and says how to go on.
    """
    return _run("sft", recipe, overrides, keys=_OFFLINE_KEYS)


def reward_model(recipe: Recipe, overrides: Overrides) -> int:
    """Train a reward model on preferences.

    It learns to score completions from pairs of a better and a worse one. The result can be a recipe's verifier:
    reward_model. Ctrl-C finishes the step, saves, and says how to go on.
    """
    return _run("reward_model", recipe, overrides, keys=_OFFLINE_KEYS)


def dpo(recipe: Recipe, overrides: Overrides) -> int:
    """Train a policy on preferences.

    It learns from pairs of a better and a worse completion, without a reward model: DPO, IPO or SimPO. Ctrl-C finishes
    the step, saves, and says how to go on.
    """
    return _run("dpo", recipe, overrides, keys=_OFFLINE_KEYS)


def _run(command: str, recipe: str, overrides: list[str], *, keys: Iterable[str]) -> int:
    config, console = load_any_config(recipe, overrides, command=command), Console()
    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.train import train

    try:
        summary = train(config, recipe_name=Path(recipe).stem, console=console)
    except Interrupted as stop:
        kept = [text for text in overrides if not text.startswith(("run.resume=", "run.dir="))]
        again = shlex.join(["areal-lite", COMMANDS[command], recipe, *kept, f"run.resume={stop}"])
        console.print("stopped and saved. To go on:", highlight=False)
        console.print(f"  {again}", highlight=False, markup=False, soft_wrap=True)
        return 130
    table = Table(title="summary", show_header=False, title_justify="left")
    for name, values in _evaluations(summary).items():
        table.add_row(f"held-out {name}", f"{values[0]:.3f} → {values[-1]:.3f}")
    for key in keys:
        value = summary[key]
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if path := summary.get("report"):
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _evaluations(summary: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return every measured figure from first to last."""
    rows = [row if isinstance(row, dict) else {"accuracy, greedy": row} for row in summary["eval"].values()]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
