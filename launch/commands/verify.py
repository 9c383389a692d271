"""`areal-lite verify`: score completions from a file with a verifier."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.plugins import known_names, split_name, with_a_colon
from areal_lite.config.reading import apply_overrides, read_recipe, shipped_recipes
from areal_lite.config.recipe import Config, parse_config
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError, PluginError
from areal_lite.launch.commands.options import Json, Overrides, argument, option
from areal_lite.launch.commands.scores import show, summarise
from areal_lite.launch.commands.trial import load_cases, load_rows, score_all


def verify(
    verifier: Annotated[
        str,
        argument(
            "VERIFIER",
            f"module:function, path.py:function, one of {', '.join(known_names('verifier'))}; or a recipe (a YAML "
            "file, or a shipped name), to test its whole verifier section",
        ),
    ],
    overrides: Overrides,
    data: Annotated[
        Path | None, option("FILE", "data rows, one JSON object per line (default: the recipe's data)")
    ] = None,
    completions: Annotated[
        Path | None,
        option(
            "FILE",
            "one JSON object per line with completion, a text or a list of texts; matched to data rows by index "
            "(from 0), else by prompt, else by position",
        ),
    ] = None,
    limit: Annotated[int | None, option("N", "use at most the first N rows", min=1)] = None,
    json_path: Json = None,
) -> int:
    """Test a verifier without training.

    Score completions in processes with time limits, as in a run. Print scores and their parts, latencies, failures
    with a traceback, and the lowest-scored completions. Without --completions, score the data's reference answers,
    which a good verifier accepts. Exit with 1 if anything failed. Ctrl-C shows the scores so far.

    Example: areal-lite verify numeric verifier.arguments.relative=0.01 data.prompt_column=problem --data test.jsonl
    """
    is_recipe, config = _config(verifier, overrides, data)
    lenient = {"max_failure_share": 1.0}  # the point is to show failures: they never stop it
    named = {key: settings.model_copy(update=lenient) for key, settings in config.verifier.named.items()}
    changed = config.verifier.model_copy(update={**lenient, "named": named})
    config = config.model_copy(update={"verifier": changed})
    check_plugins(config, verifiers_only=True)
    rows = load_rows(config, is_alone=not is_recipe)
    cases = [case for case in load_cases(rows, completions) if limit is None or case.index < limit]
    console = Console()
    logging.getLogger("areal_lite.verify").addHandler(logging.NullHandler())  # the tables show each failure
    bar = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))
        wall_s, gauges = asyncio.run(score_all(config, cases, on_reply=lambda: progress.advance(task)))
    summary = summarise(cases, wall_s=wall_s, gauges=gauges)
    cut = "" if summary["tried"] == summary["cases"] else f" of {summary['cases']}"
    console.print(
        f"{summary['tried']}{cut} completions in {wall_s:.1f} s: {summary['calls_per_s']:.1f} per second, "
        f"{summary['scored']} scored, {summary['tried'] - summary['scored']} failed",
        highlight=False,
    )
    show(summary, console)
    if completions is None and summary["reward"] and summary["reward"]["max"] <= 0:
        console.print(
            "these are the data's own answers, and none of them scores: a rule that looks for more than a bare answer "
            "(a mark before it, say) is tried with --completions FILE",
            style="yellow",
        )
    if json_path is not None:
        json_path.write_text(json.dumps(summary, indent=1) + "\n")
    return 130 if summary["tried"] < len(cases) else int(summary["scored"] < len(cases))


def _config(name: str, overrides: Sequence[str], data: Path | None) -> tuple[bool, Config]:
    """Return whether VERIFIER is a recipe, and the recipe: itself, or one with nothing but that verifier."""
    is_recipe = name.endswith((".yaml", ".yml")) or (name in shipped_recipes() and name not in known_names("verifier"))
    if is_recipe:
        raw = read_recipe(name, command="train")
    else:
        try:
            split_name(name, kind="verifier")
        except PluginError as error:
            near = suggestion(name, [*known_names("verifier"), *shipped_recipes(), *with_a_colon(name)])
            raise PluginError(f"{str(error).partition('; got')[0]}, or is a recipe; got {name!r}{near}") from None
        if data is None:
            raise ConfigError(
                f"--data must name the file with the rows to try {name} on, got none: give it, or a recipe alone, with "
                "its rows"
            )
        # Longer than in training: here waiting beats a timeout.
        raw = {"verifier": {"function": name, "timeout_s": 30.0}}
    if data is not None:
        own = raw.get("data") or {}
        kept = {key: value for key, value in own.items() if key not in ("mix", "arith", "arguments", "eval_path")}
        raw["data"] = kept | {"source": "jsonl", "path": str(data), "max_bad_fraction": 0.0}
    apply_overrides(raw, overrides)
    return is_recipe, parse_config(raw)
