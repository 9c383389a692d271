"""The command `areal-lite eval`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.cli.options import Overrides
from areal_lite.config.reading import shipped_recipes
from areal_lite.config.recipe import load_config
from areal_lite.errors import VerifierError


def eval_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="model folder, or the folder of a run that has ended")
    ],
    overrides: Overrides,
    recipe: Annotated[
        str, typer.Option(help=f"recipe of areal-lite train: a YAML file, or {', '.join(shipped_recipes())}")
    ],
) -> int:
    """Measure a model's accuracy on a recipe's held-out prompts.

    Completes them greedily, scores the completions with the recipe's verifier (verifier.eval_function where it has
    one), and prints the mean reward, and the means of the verifier's parts and metrics.
    """
    config = load_config(recipe, overrides)
    from areal_lite.cli.evaluate import evaluate
    from areal_lite.record.metrics import mean_called

    replies = evaluate(config, model=model)
    rewards = [reply.total for reply in replies if reply.total is not None]
    if not rewards:
        raise VerifierError(f"the verifier should have scored {len(replies)} completions, it failed on all of them")
    failures = f", {len(replies) - len(rewards)} could not be scored" if len(rewards) < len(replies) else ""
    summary = Path(model) / "summary.json"  # of a run: what it called its own
    before = json.loads(summary.read_text()).get("eval_called") if summary.exists() else None
    called, mean = mean_called(rewards, before=[before]), sum(rewards) / len(rewards)
    console = Console(highlight=False)
    console.print(f"held-out {called}, greedy: {mean:.3f} ({len(rewards)} problems{failures})")
    for figures in ([reply.parts for reply in replies], [reply.metrics for reply in replies]):
        for name in sorted({name for one in figures for name in one}):
            values = [one[name] for one in figures if name in one]
            console.print(f"  {name} {sum(values) / len(values):.3f} (mean of {len(values)})")
    return 0
