"""`areal-lite replay`: one group of a run, shown as a conversation and scored again."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from areal_lite.api import Run, open_run
from areal_lite.config.recipe import Config, parse_config
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.options import argument
from areal_lite.launch.commands.scores import describe, earned
from areal_lite.launch.commands.trial import Case, score_all
from areal_lite.record.run_files import iterate_rows, numbers, table
from areal_lite.types import GIVEN, Prompt, StopReason
from areal_lite.verify.protocol import Reply

_COLOURS = {"assistant": "cyan", "user": "green", "environment": "green", "tool": "yellow"}


def replay(
    folder: Annotated[Path, argument("RUN_DIR", "folder of a run")],
    group: Annotated[str, argument("GROUP", "id of a group in samples.jsonl, or the start of an id")],
    score: Annotated[bool, typer.Option(help="score the samples again with the recipe's verifier")] = True,
) -> int:
    """Show a group of samples as conversations, and score them again.

    Print each sample with its reward and the versions and ages of its tokens. Then score the samples with the recipe's
    verifier, and exit with 1 if a reward differs. Samples that an agent or a workflow scored are not scored again.
    """
    run, console = open_run(folder), Console()
    row, config = find_group(run, group), parse_config(run.config)
    console.print(Text.assemble((f"{row['group']}, trained at step {row['step']}\n", "bold"), row.get("prompt") or ""))
    if row.get("answer"):
        console.print(Text(f"reference: {row['answer']}", style="dim"))
    for number, sample in enumerate(row["samples"]):
        console.print(
            Text.assemble((f"\nsample {number}: ", "bold"), headline(sample, step=row["step"])), soft_wrap=True
        )
        for role, text in turns(sample):
            console.print(Text.assemble((f"{role}: ", _COLOURS.get(role, "")), text), soft_wrap=True)
    if not score:
        return 0
    agreed, own = True, scored_by_workflow(run, row["group"])
    for number in sorted(own):
        console.print(f"sample {number}: not scored again, its workflow scored it")
    for case in rescored(config, row, skip=own):
        if case.reply is None:
            raise KeyboardInterrupt
        before, after = (earned(reply) for reply in (saved_reply(row["samples"][case.index]), case.reply))
        agreed &= before == after
        console.print(f"sample {case.index}: {before} then, {after} now", style="" if before == after else "red")
    return int(not agreed)


def scored_by_workflow(run: Run, group: str) -> set[int]:
    """Return the numbers of a group's samples that no verifier scored."""
    events = iterate_rows(run.path / "events.jsonl")
    found = [event for event in events if event["kind"] == "verify" and event["group_id"] == group]
    return {number for event in found for number in event.get("scored_by_workflow") or ()}


def find_group(run: Run, name: str) -> dict[str, Any]:
    """Return a row of `samples.jsonl`.

    Raises:
        ConfigError: The run has none of that name, or several.
    """
    rows = run.samples
    found = [row for row in rows if row["group"] == name] or [row for row in rows if row["group"].startswith(name)]
    if len(found) != 1:
        names = [row["group"] for row in found or rows]
        listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        near = f"{suggestion(name, names)}; there are {listed or 'none'}: correct it, or raise run.log_samples"
        raise ConfigError(
            f"GROUP must begin the id of one group in {run.path}/samples.jsonl, {name!r} begins {len(found)}"
            + (f": {listed}: write more of it" if found else near)
        )
    return found[0]


def saved_reply(sample: Mapping[str, Any]) -> Reply:
    """Return what the verifier gave a sample during the run."""
    figures: Any = {name: numbers(sample.get(name)) for name in ("parts", "metrics")}
    return Reply(sample.get("reward"), failure=sample.get("failure"), **figures)


def headline(sample: Mapping[str, Any], *, step: int) -> str:
    """Describe a sample of the batch that was taken before `step` in one line."""
    words = [describe(saved_reply(sample))]
    if sample.get("stop_reason") == StopReason.LENGTH:
        words.append("cut off at the token limit")
    for version, start, end in sample["spans"]:
        if version != GIVEN:
            words.append(f"{end - start} tokens of version {version} (age {step - 1 - version})")
    if sample.get("branches"):
        words.append(f"{len(sample['branches'])} further branches")
    if sample.get("feedback"):
        words.append(sample["feedback"])
    return "; ".join(words)


def turns(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield role and text of each turn; further branches come last."""
    if sample.get("messages"):
        yield from ((message["role"], message["content"]) for message in sample["messages"])
    else:
        yield "assistant", sample["text"]
    for number, branch in enumerate(sample.get("branches", ()), start=1):
        yield f"branch {number}", branch["text"]


def rescored(config: Config, row: Mapping[str, Any], *, skip: Collection[int]) -> Sequence[Case]:
    """Score the samples that have a reward again, but for those to skip, and return them by number."""
    prompt = Prompt(
        prompt_id=row["group"],
        text=row.get("prompt") or "",
        token_ids=(),
        answer=row.get("answer") or "",
        row=table(row.get("row")),
    )
    cases = [
        Case(index=number, prompt=prompt, completion=sample["text"], messages=sample.get("messages") or ())
        for number, sample in enumerate(row["samples"])
        if sample.get("reward") is not None and number not in skip
    ]
    if cases:
        asyncio.run(score_all(config, cases))
    return cases
