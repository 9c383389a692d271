"""The command line: `areal-lite train | sft | reward-model | dpo | eval | check-config | verify | bench | ...`.

Heavy imports happen inside the commands, so that `--help` and `check-config` answer at once.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import yaml
from rich.console import Console
from rich.text import Text

from areal_lite import __version__
from areal_lite.cli.bench import add_bench
from areal_lite.cli.eval import add_eval
from areal_lite.cli.offline import add_offline_commands
from areal_lite.cli.report import add_report
from areal_lite.cli.stopped import say_how_to_go_on, say_where_the_report_is
from areal_lite.cli.verify import add_verify
from areal_lite.config.offline import OfflineConfig, load_any_config
from areal_lite.config.recipe import Config, load_config, shipped_recipes
from areal_lite.config.sections import COMMANDS
from areal_lite.errors import ArealLiteError, ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["main"]


_SUMMARY_KEYS = (
    "steps", "wall_s", "samples_per_s", "gen_tokens_per_s", "reward_first", "reward_last", "age_max_trained",
    "max_staleness", "rollout_idle_fraction", "trainer_idle_fraction", "paused_fraction", "parity_max_abs_logprob_diff",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0 done, 1 failed, 2 bad usage, 130 stopped by Ctrl-C."""
    parser = _parser()
    words, others = parser.parse_known_args(arguments)
    # argparse gives up on overrides behind an option.
    if others and (not hasattr(words, "overrides") or any(word.startswith("-") or "=" not in word for word in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        words.overrides = [*words.overrides, *others]
    try:
        return int(words.command(words))
    except ArealLiteError as error:
        # As a Text: an error may hold brackets, which rich would read as markup.
        Console(stderr=True).print(Text.assemble((type(error).__name__, "bold red"), f": {error}"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-lite",
        description="Asynchronous reinforcement learning for language models.",
        epilog=f"Shipped recipes: {', '.join(shipped_recipes())}. First steps: areal-lite train arith_cpu",
    )
    parser.add_argument("--version", action="version", version=f"areal-lite {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a policy from a recipe",
        description="Train a policy from a recipe. Ctrl-C finishes the step, saves, and says how to go on.",
    )
    _add_recipe(train)
    train.set_defaults(command=_train)

    add_offline_commands(commands, _add_recipe)
    add_eval(commands)

    check = commands.add_parser(
        "check-config",
        help="check a recipe and print it in full",
        description="Check a recipe and print every setting with its value and meaning. Nothing is started.",
    )
    _add_recipe(check)
    check.set_defaults(command=_check_config)

    add_verify(commands)
    add_bench(commands)
    add_report(commands)

    doctor = commands.add_parser("doctor", help="say what this machine can run, and what to do about what is missing")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help=f"path of a YAML file, or one of: {', '.join(shipped_recipes())}"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.field=value",
        help="settings that replace the recipe's, e.g. run.steps=50",
    )


def _train(words: argparse.Namespace) -> int:
    config = load_config(words.recipe, words.overrides)
    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.train import train

    console = Console()
    try:
        summary = train(config, recipe_name=Path(words.recipe).stem, console=console)
    except Interrupted as stop:
        say_how_to_go_on("train", words, folder=str(stop), console=console)
        return 130
    _print_summary(summary, console)
    return 0


def _print_summary(summary: dict[str, object], console: Console) -> None:
    from rich.table import Table

    table = Table(title="summary", show_header=False, title_justify="left")
    evaluations = summary["eval"]
    if isinstance(evaluations, dict) and evaluations:
        first, *_, last = [*evaluations.values(), *evaluations.values()]
        table.add_row("held-out accuracy, greedy", f"{first:.3f} → {last:.3f}")
    for key in _SUMMARY_KEYS:
        value = summary[key]
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    say_where_the_report_is(summary, console=console)


def _check_config(words: argparse.Namespace) -> int:
    from areal_lite.config.plugin_check import plugin_problems

    config = load_any_config(words.recipe, words.overrides)
    if isinstance(config, Config) and (problems := list(plugin_problems(config))):
        raise ConfigError("\n".join(problems))
    for line in _explained(config):
        print(line)
    if isinstance(config, OfflineConfig):
        batch = f"{config.batch.batch_size} rows per step"
    else:
        batch = f"{config.samples_per_step} samples per step"
    command = COMMANDS[config.command]
    print(f"# {words.recipe} is fine for areal-lite {command}: {batch}, device {config.run.device}")
    return 0


def _explained(config: Config | OfflineConfig) -> list[str]:
    """Render a config as YAML with each field's meaning behind it."""
    from pydantic import BaseModel

    def render(section: BaseModel, indent: str) -> list[str]:
        lines = []
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                lines += [f"{indent}{name}:", *render(value, indent + "  ")]
            elif isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values()):
                lines.append(f"{indent}{name}:".ljust(44) + f"  # {field.description}")
                lines += (line for pair in value.items() for line in entry(*pair, indent + "  "))
            else:
                lines.append(
                    f"{indent}{name}: {_scalar(value)}".ljust(44) + f"  # {field.description}{_choices(field)}"
                )
        return lines

    def entry(name: str, value: BaseModel, indent: str) -> list[str]:
        """One of several sources, verifiers or workflows: only what it sets, as there may be many."""
        content = yaml.safe_dump({name: value.model_dump(exclude_unset=True)}, sort_keys=False)
        return [f"{indent}{line}" for line in content.splitlines()]

    return render(config, "")


def _choices(field: "FieldInfo") -> str:
    """Return the words that a choice allows, in brackets."""
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f" [{' | '.join(words)}]" if len(words) > 1 else ""


def _scalar(value: object) -> str:
    """Write a value as YAML on one line."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    return (
        yaml.safe_dump(value, default_style=style, default_flow_style=True, width=math.inf)
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _doctor(words: argparse.Namespace) -> int:
    from areal_lite.cli.doctor import run_doctor

    return run_doctor()


if __name__ == "__main__":
    sys.exit(main())
