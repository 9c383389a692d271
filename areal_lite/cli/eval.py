"""The command `areal-lite eval`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.cli.options import Overrides
from areal_lite.config.reading import shipped_recipes
from areal_lite.config.recipe import load_config
from areal_lite.errors import ConfigError, VerifierError


def eval_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="model folder, or the folder of a run that has ended")
    ],
    overrides: Overrides,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"recipe of train: a file, or {', '.join(shipped_recipes())} (default: that of the model's run)"
        ),
    ] = None,
) -> int:
    """Measure a model on a recipe's held-out prompts.

    Completes them greedily, scores the completions with the recipe's verifier (verifier.eval_function where it has
    one), and prints the mean reward, and the means of the verifier's parts and metrics.
    """
    run, console = _run_of(model), Console(highlight=False, soft_wrap=True)
    if recipe is None and run is None:
        raise ConfigError(
            f"--recipe must name the data and the verifier, got none, and {model} is of no run of areal-lite train, "
            "whose own would be taken: give it"
        )
    config = load_config(recipe or f"{run}/config.json", overrides)
    if recipe is None:
        console.print(f"recipe: {run}/config.json")
    from areal_lite.cli.evaluate import evaluate
    from areal_lite.record.metrics import mean_called

    replies = evaluate(config, model=model)
    rewards = [reply.total for reply in replies if reply.total is not None]
    if not rewards:
        raise VerifierError(f"the verifier should have scored {len(replies)} completions, it failed on all of them")
    failures = f", {len(replies) - len(rewards)} could not be scored" if len(rewards) < len(replies) else ""
    summary = (run or Path(model)) / "summary.json"  # of a run: what it called its own
    before = json.loads(summary.read_text()).get("eval_called") if summary.exists() else None
    called, mean = mean_called(rewards, before=[before]), sum(rewards) / len(rewards)
    console.print(f"held-out {called}, greedy: {mean:.3f} ({len(rewards)} problems{failures})")
    for figures in ([reply.parts for reply in replies], [reply.metrics for reply in replies]):
        for name in sorted({name for one in figures for name in one}):
            values = [one[name] for one in figures if name in one]
            console.print(f"  {name} {sum(values) / len(values):.3f} (mean of {len(values)})")
    return 0


def _run_of(model: str) -> Path | None:
    """Return the folder of the run of `areal-lite train` that a model is, or is an export of."""
    folder = Path(model).expanduser().resolve()
    for one in (folder, *folder.parents[:3]):  # checkpoints/step-n/model
        if (one / "checkpoints").is_dir() and (one / "config.json").is_file():
            return one if json.loads((one / "config.json").read_text()).get("command", "train") == "train" else None
    return None
