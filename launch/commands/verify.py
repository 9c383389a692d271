"""`areal-lite verify`: score completions from a file with a verifier."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.plugins import known_names, split_name, with_a_colon
from areal_lite.config.reading import shipped_recipes
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError, PluginError
from areal_lite.launch.commands.options import out_file
from areal_lite.launch.commands.scores import show, summarise
from areal_lite.launch.commands.trial import load_cases, load_rows, score_all, with_file

_COLUMNS = {
    "prompt": ("question", "prompt", "problem", "instruction"),
    "answer": ("answer", "solution", "ground_truth"),
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        return TypeAdapter(dict[str, Any]).validate_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"must be a JSON object such as '{{\"tolerance\": 0.01}}', got {text!r}") from error


def _column(kind: str) -> Any:
    text = f"column with the {kind} (default: the recipe's, else the first that exists of {', '.join(_COLUMNS[kind])})"
    return typer.Option(metavar="NAME", help=text)


def verify(
    verifier: Annotated[
        str,
        typer.Argument(
            metavar="VERIFIER",
            help=f"module:function, path.py:function, one of {', '.join(known_names('verifier'))}; or a recipe (a YAML "
            "file, or a shipped name), whose whole verifier section is tried",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="data rows, one JSON object per line (default: the recipe's data)"),
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="one JSON object per line with completion, a text or a list of texts; matched to data rows by index "
            "(from 0), else by prompt, else by position",
        ),
    ] = None,
    prompt_column: Annotated[str | None, _column("prompt")] = None,
    answer_column: Annotated[str | None, _column("answer")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="use at most the first N rows")] = None,
    json_path: Annotated[
        Path | None, out_file("--json", metavar="OUT", help="write all figures and scores to this file")
    ] = None,
    arguments: Annotated[
        Any,
        typer.Option(
            parser=_json_object, metavar="JSON", help="the verifier's arguments, e.g. '{\"tolerance\": 0.01}'"
        ),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="processes per verifier")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e6, metavar="S", help="time limit of one call in seconds (default 30)"),
    ] = None,
) -> int:
    """Test a verifier without training.

    Score completions in processes with time limits, as in a run. Print scores and their parts, latencies, failures
    with a traceback, and the lowest-scored completions. Without --completions, score the data's reference answers,
    which a good verifier accepts. Exit with 1 if anything failed. Ctrl-C shows the scores so far.

    Example: areal-lite verify math --data gsm8k/test.jsonl
    """
    is_recipe, config = _config(verifier, arguments)
    # The point is to show failures: they never stop it.
    settings = {"processes": processes, "timeout_s": timeout, "max_failure_share": 1.0}
    changes = {key: value for key, value in settings.items() if value is not None}
    named = {key: settings.model_copy(update=changes) for key, settings in config.verifier.named.items()}
    changed = config.verifier.model_copy(update={**changes, "named": named})
    config = config.model_copy(update={"verifier": changed})
    check_plugins(config, verifiers_only=True)
    if data is not None:
        own, given = config.data, {"prompt": prompt_column, "answer": answer_column}
        known = {"prompt": [own.prompt_column, *_COLUMNS["prompt"]], "answer": [own.answer_column, *_COLUMNS["answer"]]}
        config = with_file(config, data, {kind: [name] if name else known[kind] for kind, name in given.items()})
    elif not is_recipe or prompt_column or answer_column:
        what = "the columns of --prompt-column and --answer-column" if is_recipe else f"the rows to try {verifier} on"
        raise ConfigError(f"--data must name the file with {what}, got none: give it, or a recipe alone, with its rows")
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


def _config(name: str, arguments: dict[str, Any] | None) -> tuple[bool, Config]:
    """Return whether VERIFIER is a recipe, and the recipe: itself, or one with nothing but that verifier."""
    if name.endswith((".yaml", ".yml")) or (name in shipped_recipes() and name not in known_names("verifier")):
        if arguments is not None:
            raise ConfigError(f"--arguments are those of one verifier, got the recipe {name}: set them there")
        return True, load_config(name)
    try:
        split_name(name, kind="verifier")
    except PluginError as error:
        near = suggestion(name, [*known_names("verifier"), *shipped_recipes(), *with_a_colon(name)])
        raise PluginError(f"{str(error).partition('; got')[0]}, or is a recipe; got {name!r}{near}") from None
    # Longer than in training: here waiting beats a timeout.
    return False, parse_config({"verifier": {"function": name, "arguments": arguments or {}, "timeout_s": 30.0}})
