"""Commands that start, resume and scale runs: `train`, `sft`, `reward-model`, `dpo`, `resume`, `scale`."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from areal_lite.config.offline import OfflineConfig, load_any_config, parse_any_config
from areal_lite.config.reading import apply_overrides, set_value
from areal_lite.config.recipe import Config
from areal_lite.launch.commands.options import Overrides, Recipe, argument, word_list

SUMMARY_KEYS = (
    "steps", "wall_s", "samples_per_s", "gen_tokens_per_s", "reward_first", "reward_last", "age_max_trained",
    "max_staleness", "rollout_idle_fraction", "trainer_idle_fraction", "paused_fraction", "parity_max_abs_logprob_diff",
)  # fmt: skip
_OFFLINE_KEYS = ("steps", "wall_s", "trained_tokens", "trained_tokens_per_s", "loss_first", "loss_last")


def train(recipe: Recipe, overrides: Overrides) -> int:
    """Train a policy from a recipe.

    Ctrl-C finishes the current step, saves, and prints the command that resumes the run.
    """
    return _start("train", recipe, overrides)


def sft(recipe: Recipe, overrides: Overrides) -> int:
    """Fine-tune a model on completions (SFT).

    Rows are prompts with completions, or chats. Ctrl-C finishes the current step, saves, and prints the command that
    resumes the run.
    """
    return _start("sft", recipe, overrides)


def reward_model(recipe: Recipe, overrides: Overrides) -> int:
    """Train a reward model on preferences.

    The model learns to score completions from pairs of a better and a worse one. It can then be a recipe's verifier
    (verifier.function=reward_model). Ctrl-C finishes the current step, saves, and prints the command that resumes the
    run.
    """
    return _start("reward_model", recipe, overrides)


def dpo(recipe: Recipe, overrides: Overrides) -> int:
    """Train a policy on preferences, without a reward model (DPO, IPO or SimPO).

    The policy learns from pairs of a better and a worse completion. Ctrl-C finishes the current step, saves, and prints
    the command that resumes the run.
    """
    return _start("dpo", recipe, overrides)


def resume(
    folder: Annotated[Path, argument("RUN_DIR", "run folder")],
    overrides: Overrides,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="take over the folder from another process; first make sure that the process is dead"
        ),
    ] = False,
) -> int:
    """Resume a run from its latest checkpoint.

    The recipe is the one in the run folder. run.resume_from=step-N selects an older checkpoint; run.steps, trainer.lr
    and settings that do not affect learning may change. If files moved, name each: data.path=NEW_DIR/train.jsonl. To
    train a finished run further, raise run.steps.
    """
    from areal_lite.record.run_folder import RunFolder

    saved = RunFolder(folder.resolve()).recipe()
    raw = saved.model_dump()
    if isinstance(saved, OfflineConfig) and saved.trainer.epochs is not None:
        del raw["run"]["steps"]  # follows from the epochs
    set_value(raw, "run.resume", str(folder.resolve()))
    apply_overrides(raw, overrides)
    named = [override.partition("=")[0] for override in overrides]
    return _run(parse_any_config(raw), recipe_name=folder.name, take_over=take_over, named=named)


def scale(
    folder: Annotated[Path, argument("RUN_DIR", "folder of an active run")],
    workers: Annotated[list[str], word_list("rollout=N verifier=N", "target number of workers")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds to wait for the run's answer")] = 60.0,
) -> int:
    """Change the number of workers of an active run.

    New workers start on any node with room, including nodes that joined the Ray cluster later; a rollout worker joins
    at the next weight sync. If there are too many, those with the highest numbers leave at the next step, and others
    take over their work. A resumed run starts with the recipe's numbers of workers.
    """
    from areal_lite.launch.run.scaling import parse_counts, request

    request(folder.resolve(), parse_counts(workers), timeout_s=timeout_s)
    Console().print("accepted: the run's terminal shows which workers join and leave", highlight=False)
    return 0


def _start(command: str, recipe: str, overrides: list[str]) -> int:
    return _run(load_any_config(recipe, overrides, command=command), recipe_name=Path(recipe).stem)


def _run(
    config: Config | OfflineConfig, *, recipe_name: str, take_over: bool = False, named: Sequence[str] = ()
) -> int:
    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.train import train

    console, keys = Console(), SUMMARY_KEYS if config.command == "train" else _OFFLINE_KEYS
    try:
        summary = train(config, recipe_name=recipe_name, console=console, take_over=take_over, named=named)
    except Interrupted as stop:
        if stop.summary:
            show(stop.summary, keys, console)
        if stop.is_resumable:
            again = shlex.join(["areal-lite", "resume", str(stop)])
            console.print(f"stopped. Resume with:\n  {again}", highlight=False, markup=False, soft_wrap=True)
        else:
            console.print("stopped before there was a checkpoint to resume from", highlight=False)
        return 130
    show(summary, keys, console)
    return 0


def show(summary: Mapping[str, Any], keys: Sequence[str], console: Console) -> None:
    """Print the summary of a run, its warnings and the path of its report."""
    table = Table(title="summary", show_header=False, title_justify="left")
    for name, text in _evaluations(summary):
        table.add_row(f"held-out {name}", text)
    for key in keys:
        if (value := summary.get(key)) is not None:  # of a run without a step some are missing
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    for warning in summary.get("warnings", ()):
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if path := summary.get("report"):
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def _evaluations(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name, first and last value of each evaluated figure, and the best value if it is another one."""
    called = f"{summary.get('eval_called', 'accuracy')}, greedy"
    rows = {step: row if isinstance(row, dict) else {called: row} for step, row in summary["eval"].items()}
    for name in next(iter(rows.values()), ()):
        values = {step: row[name] for step, row in rows.items()}
        first, last = (list(values.values())[place] for place in (0, -1))
        best = min(values, key=lambda step: values[step] if name == "loss" else -values[step])
        is_between = values[best] not in (first, last)
        yield name, f"{first:.3f} → {last:.3f}" + is_between * f", best {values[best]:.3f} at step {best}"
