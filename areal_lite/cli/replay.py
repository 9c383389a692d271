"""`areal-lite replay`: one group of a run, read as a conversation, and scored once more."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from areal_lite.api import open_run
from areal_lite.config.plugins import find_function
from areal_lite.config.recipe import Config, parse_config
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError
from areal_lite.types import GIVEN, Prompt

_COLOURS = {"assistant": "cyan", "user": "green", "environment": "green", "tool": "yellow"}


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="folder of a run")],
    group: Annotated[str, typer.Argument(metavar="GROUP", help="its id in samples.jsonl, or the beginning of one")],
    score: Annotated[bool, typer.Option(help="have the recipe's verifier score the samples once more")] = True,
) -> int:
    """Read a group of a run as conversations, with versions, ages and rewards; and score it once more.

    Samples that an agent scored itself keep that: an agent is not run again. Ends with 1 where the verifier says
    something else today.
    """
    row, console = find_group(folder, group), Console()
    console.print(Text.assemble((f"{row['group']}, trained at step {row['step']}\n", "bold"), row["prompt"]))
    if row["answer"]:
        console.print(Text(f"reference: {row['answer']}", style="dim"))
    for number, sample in enumerate(row["samples"]):
        console.print(Text.assemble((f"\nsample {number}: ", "bold"), told(sample, step=row["step"])), soft_wrap=True)
        for role, text in said(sample):
            console.print(Text.assemble((f"{role}: ", _COLOURS.get(role, "")), text), soft_wrap=True)
    config = parse_config(json.loads((folder / "config.json").read_text()))
    if not score or was_scored_by_agent(config, row):
        return 0
    agreed = True
    for number, before, after in rescored(config, row):
        agreed &= before == after
        console.print(f"sample {number}: {before} then, {after} now", style="" if before == after else "red")
    return int(not agreed)


def was_scored_by_agent(config: Config, row: Mapping[str, Any]) -> bool:
    """Whether the workflow of a group may have scored it."""
    from areal_lite.rollout.agents import is_agent

    rollout, name = config.rollout, row.get("row", {}).get("workflow") or config.rollout.workflow
    if name == rollout.workflow and rollout.workflow_command is not None:
        return True
    name = rollout.workflows[name].function if name in rollout.workflows else name
    return is_agent(find_function(name, kind="workflow"))


def find_group(folder: Path, name: str) -> dict[str, Any]:
    """Return a row of `samples.jsonl`.

    Raises:
        ConfigError: The run has none of that name, or several.
    """
    path = open_run(folder).path / "samples.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = [row for row in rows if row["group"] == name] or [row for row in rows if row["group"].startswith(name)]
    if not rows:
        raise ConfigError(f"a run writes some groups to {path}, this one wrote none: set run.log_samples above 0")
    if not found:
        names = [row["group"] for row in rows]
        raise ConfigError(f"there is no group {name!r} in {path}{suggestion(name, names)}: it holds {_listed(names)}")
    if len(found) > 1:
        names = [row["group"] for row in found]
        raise ConfigError(f"GROUP must begin the id of one group, {name!r} begins {_listed(names)}: write more of it")
    return found[0]


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def told(sample: Mapping[str, Any], *, step: int) -> str:
    """Say in a line what became of a sample of the batch that was taken before `step`."""
    figures = [f"{name} {value:g}" for name, value in {**sample.get("parts", {}), **sample.get("metrics", {})}.items()]
    earned = f"reward {sample['reward']:g}" if sample["reward"] is not None else f"failed: {sample['failure']}"
    spans = [(version, end - start) for version, start, end in sample["spans"] if version != GIVEN]
    ages = [f"{tokens} tokens of version {version} (age {step - 1 - version})" for version, tokens in spans]
    more = [f"{len(sample['branches'])} further branches"] if sample.get("branches") else []
    return "; ".join([earned, *figures, *ages, *more, *([sample["feedback"]] if sample.get("feedback") else [])])


def said(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield who said what, branches behind the first way."""
    if sample.get("messages"):
        yield from ((message["role"], message["content"]) for message in sample["messages"])
    else:
        yield "assistant", sample["text"]
    for number, branch in enumerate(sample.get("branches", ()), start=1):
        yield f"branch {number}", branch["text"]


def rescored(config: Config, row: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Return number, reward then and reward now of the samples that have one."""
    from areal_lite.verify.verifier_set import VerifierSet

    numbers = [number for number, sample in enumerate(row["samples"]) if sample["reward"] is not None]
    chosen: Sequence[Mapping[str, Any]] = [row["samples"][number] for number in numbers]
    prompt = Prompt(
        prompt_id=row["group"], text=row["prompt"], token_ids=(), answer=row["answer"], row=row.get("row", {})
    )

    async def score() -> list[Any]:
        verifiers = VerifierSet(config.verifier, also=config.data.chosen_verifiers)
        try:
            await verifiers.start()
            texts, messages = [one["text"] for one in chosen], [one.get("messages", ()) for one in chosen]
            return await verifiers.score(prompt, texts, messages=messages)
        finally:
            await verifiers.close()

    replies = asyncio.run(score())
    return [
        (number, f"{sample['reward']:g}", f"{reply.total:g}" if reply.total is not None else f"failed: {reply.failure}")
        for number, sample, reply in zip(numbers, chosen, replies, strict=True)
    ]
