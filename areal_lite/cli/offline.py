"""The commands `areal-lite sft | reward-model | dpo`. Called by `cli.py`; heavy imports happen inside."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lite.cli.stopped import say_how_to_go_on, say_where_the_report_is
from areal_lite.config.offline import OfflineCommand, load_offline_config
from areal_lite.config.sections import COMMANDS

__all__ = ["add_offline_commands"]

_HELP: dict[OfflineCommand, tuple[str, str]] = {
    "sft": ("train a model on completions", "Train a model on prompts with completions, or on chats."),
    "reward_model": (
        "train a reward model on preferences",
        "Train a model that scores completions on pairs of a better and a worse one. The result can be a recipe's "
        "verifier: reward_model.",
    ),
    "dpo": (
        "train a policy on preferences",
        "Train a policy on pairs of a better and a worse completion, without a reward model: DPO, IPO or SimPO.",
    ),
}


def add_offline_commands(commands: Any, add_recipe: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the three commands.

    Args:
        commands: What `add_subparsers` returned.
        add_recipe: Adds the arguments RECIPE and overrides.
    """
    for command, (short, long) in _HELP.items():
        parser = commands.add_parser(
            COMMANDS[command],
            help=short,
            description=f"{long} Ctrl-C finishes the step, saves, and says how to go on.",
        )
        add_recipe(parser)
        parser.set_defaults(command=partial(_run, command))


def _run(command: OfflineCommand, words: argparse.Namespace) -> int:
    config = load_offline_config(words.recipe, words.overrides, command=command)
    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.offline import run_offline

    console = Console()
    try:
        summary = run_offline(config, recipe_name=Path(words.recipe).stem, console=console)
    except Interrupted as stop:
        say_how_to_go_on(COMMANDS[command], words, folder=str(stop), console=console)
        return 130
    _print_summary(summary, console)
    return 0


def _print_summary(summary: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table(title="summary", show_header=False, title_justify="left")
    evaluations = list(summary["eval"].values())
    for name in evaluations[0] if evaluations else ():
        table.add_row(f"held-out {name}", f"{evaluations[0][name]:.3f} → {evaluations[-1][name]:.3f}")
    for name in ("steps", "wall_s", "trained_tokens", "trained_tokens_per_s", "loss_first", "loss_last"):
        value = summary[name]
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    say_where_the_report_is(summary, console=console)
