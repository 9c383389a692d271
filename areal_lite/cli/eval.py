"""The command `areal-lite eval`. Called by `cli.py`; heavy imports happen inside."""

import argparse
from typing import Any

from rich.console import Console

from areal_lite.config.recipe import load_config, shipped_recipes
from areal_lite.errors import VerifierError

__all__ = ["add_eval"]


def add_eval(commands: Any) -> None:
    """Add the command; `commands` is what `add_subparsers` returned."""
    parser = commands.add_parser(
        "eval",
        help="measure a model's accuracy on a recipe's held-out prompts",
        description="Complete a recipe's held-out prompts greedily with a model, score the completions with the "
        "recipe's verifier (verifier.eval_function where it has one), and print the mean reward.",
    )
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="model folder, or the folder of a run that has ended")
    parser.add_argument(
        "--recipe", required=True, help=f"recipe of areal-lite train: a YAML file, or {', '.join(shipped_recipes())}"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="settings that replace the recipe's"
    )
    parser.set_defaults(command=_eval)


def _eval(words: argparse.Namespace) -> int:
    config = load_config(words.recipe, words.overrides)
    from areal_lite.cli.evaluate import evaluate

    result = evaluate(config, model=words.model)
    if not result.scored:
        raise VerifierError(f"the verifier should have scored {result.prompts} completions, it failed on all of them")
    failures = f", {result.prompts - result.scored} could not be scored" if result.scored < result.prompts else ""
    Console().print(
        f"held-out accuracy, greedy: {result.accuracy:.3f} ({result.scored} problems{failures})", highlight=False
    )
    return 0
