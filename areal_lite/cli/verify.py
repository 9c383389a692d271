"""The command `areal-lite verify`."""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from areal_lite.cli.options import out_file
from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.plugins import known_names, split_name, with_a_colon
from areal_lite.config.reading import shipped_recipes
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.config.suggestion import suggestion
from areal_lite.config.verifier import VerifierConfig
from areal_lite.errors import ConfigError, PluginError

_COLUMNS = {
    "prompt": ("question", "prompt", "problem", "instruction"),
    "answer": ("answer", "solution", "ground_truth"),
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"must be a JSON object, got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"must be a JSON object such as '{{\"tolerance\": 0.01}}', got {text!r}")
    return value


def _column(kind: str) -> Any:
    text = f"column with the {kind} (default: the recipe's, else the first there is of {', '.join(_COLUMNS[kind])})"
    return typer.Option(metavar="NAME", help=text)


def verify(
    verifier: Annotated[
        str,
        typer.Argument(
            metavar="VERIFIER",
            help=f"module:function, path.py:function, one of {', '.join(known_names('verifier'))}; or a recipe (a YAML "
            "file, or a shipped name), whose verifier section is tried with its sums and the choice by a column "
            "verifier",
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="rows, one JSON object a line (default: a recipe's own)")
    ] = None,
    completions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="one JSON object a line with completion, a text or a list of texts; joined to the data by index "
            "(from 0), else by prompt, else line by line",
        ),
    ] = None,
    prompt_column: Annotated[str | None, _column("prompt")] = None,
    answer_column: Annotated[str | None, _column("answer")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="rows of the data tried at most")] = None,
    json_path: Annotated[
        Path | None, out_file("--json", metavar="OUT", help="write all figures and every score to this file")
    ] = None,
    arguments: Annotated[
        Any,
        typer.Option(
            parser=_json_object, metavar="JSON", help="the verifier's arguments, e.g. '{\"tolerance\": 0.01}'"
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="processes of the verifier (of each, in a recipe)")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, metavar="S", help="seconds a call may take (default 30)")
    ] = None,
) -> int:
    """Try a verifier outside training.

    Scores the completions of a file with a verifier, in processes and with deadlines as in a run. Shows scores, parts,
    latencies, failures with their first trace, and the lowest scores. Without --completions it scores the data's own
    answers, which a good verifier likes. Ends with 1 when anything failed; Ctrl-C shows what there is so far.

    Example: areal-lite verify math --data gsm8k/test.jsonl
    """
    from areal_lite.cli.trial import Trial, load_cases, load_prompts, recipe_prompts
    from areal_lite.cli.trial_report import show, summarise

    # A try is there to show failures: it never stops because of them.
    given = {"processes": processes, "timeout_s": timeout, "max_failure_share": 1.0}
    changes = {key: value for key, value in given.items() if value is not None}
    is_recipe, config = _config(verifier, arguments, changes)
    check_plugins(config, verifiers_only=True)
    columns: dict[str, Sequence[str]] = dict(_COLUMNS)
    if is_recipe:
        columns = {"prompt": [config.data.prompt_column], "answer": [config.data.answer_column]}
    columns |= {kind: [name] for kind, name in (("prompt", prompt_column), ("answer", answer_column)) if name}
    if data is None and (not is_recipe or prompt_column or answer_column):
        what = "the columns of --prompt-column and --answer-column" if is_recipe else f"the rows to try {verifier} on"
        raise ConfigError(f"--data must name the file with {what}, got none: give it, or a recipe alone, with its rows")
    if data is None:
        rows = recipe_prompts(config)
    else:
        rows = load_prompts(data, columns=columns, config=config, rows_choose=is_recipe)
    cases = [case for case in load_cases(rows, completions) if limit is None or case.index < limit]
    trial, console = Trial(config, cases), Console()
    code = _run(trial, console)
    summary = summarise(cases, wall_s=trial.wall_s, gauges=trial.gauges)
    show(summary, console)
    if completions is None and summary["reward"] and summary["reward"]["max"] <= 0:
        console.print(
            "these are the data's own answers, and none of them scores: a rule that looks for more than a bare answer "
            "(a mark before it, say) is tried with --completions FILE",
            style="yellow",
        )
    if json_path is not None:
        results = [
            {"index": case.index, "completion": case.completion, **asdict(reply)}
            for case in sorted(cases, key=lambda case: case.index)
            if (reply := case.reply) is not None
        ]
        json_path.write_text(json.dumps({**summary, "results": results}, indent=1) + "\n")
    return code or int(summary["scored"] < summary["tried"])


def _run(trial: Any, console: Console) -> int:
    """Score with a progress bar; 0 when done, 130 when stopped by Ctrl-C."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    logging.getLogger("areal_lite.verify").addHandler(logging.NullHandler())  # the tables show each failure
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(trial.cases))
        try:
            asyncio.run(trial.run(on_reply=lambda: progress.advance(task)))
        except KeyboardInterrupt:
            return 130
    return 0


def _config(name: str, arguments: dict[str, Any] | None, changes: dict[str, Any]) -> tuple[bool, Config]:
    """Return whether VERIFIER is a recipe, and the recipe: itself, or one with nothing but that verifier."""
    if name.endswith((".yaml", ".yml")) or (name in shipped_recipes() and name not in known_names("verifier")):
        if arguments is not None:
            raise ConfigError(f"--arguments are those of one verifier, got the recipe {name}: set them there")
        config = load_config(name)
        named = {key: settings.model_copy(update=changes) for key, settings in config.verifier.named.items()}
        verifier = config.verifier.model_copy(update={**changes, "named": named})
        return True, config.model_copy(update={"verifier": verifier})
    try:
        split_name(name, kind="verifier")
    except PluginError as error:
        near = suggestion(name, [*known_names("verifier"), *shipped_recipes(), *with_a_colon(name)])
        raise PluginError(f"{str(error).partition('; got')[0]}, or is a recipe; got {name!r}{near}") from None
    # Longer than in training: whoever tries a verifier would rather wait than see it cut off.
    verifier = VerifierConfig(function=name, arguments=arguments or {}, **{"timeout_s": 30.0} | changes)
    return False, parse_config({"verifier": verifier.model_dump()})
