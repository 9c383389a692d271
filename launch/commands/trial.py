"""A verifier tried outside training: completions from files, scored by the pool that a run would use."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from areal_lite.config.recipe import Config
from areal_lite.config.suggestion import suggestion
from areal_lite.data.encode import load_tokenizer
from areal_lite.data.prompts import rendered, with_names
from areal_lite.data.rows import read_jsonl
from areal_lite.data.sources import load_tasks
from areal_lite.data.tasks import Task
from areal_lite.errors import DataError
from areal_lite.record.paths import find_model_folder
from areal_lite.types import Prompt
from areal_lite.verify.protocol import Reply
from areal_lite.verify.verifier_set import VerifierSet

_log = logging.getLogger(__name__)
_IN_FLIGHT = 64
"""Completions handed to the pool ahead of what its processes serve, so that batches fill."""


Rows = Sequence[tuple[str, Prompt]]
"""What the data has as a row's prompt, empty for a chat, and the prompt that the model is given in a run."""


@dataclass(slots=True, kw_only=True)
class Case:
    """A completion to score, and the verifier's reply once it was."""

    index: int
    """Of its row in the data, from 0."""
    prompt: Prompt
    completion: str
    messages: Sequence[Mapping[str, Any]] = ()
    """Its turns, where it has more than one."""
    reply: Reply | None = None


def load_rows(config: Config, *, is_alone: bool = False) -> Rows:
    """Load the training rows of a recipe, one source after another, as a run does, with ids `verify/0/<index>`.

    Args:
        is_alone: Whether the verifier was named beside no recipe: no row chooses one, and texts may be among chats.

    Raises:
        DataError: As in a run; rows may also name a verifier that does not exist.
    """
    rows: list[tuple[str, Task]] = []
    for name, source in config.data.sources.items():
        where = config.data.place_of(name)
        tasks = load_tasks(source, "train", where=where)
        if is_alone:
            chosen = ("verifier", "workflow")
            tasks = [replace(task, row={key: task.row[key] for key in task.row if key not in chosen}) for task in tasks]
        else:
            tasks = with_names(tasks, source=source, config=config)
        is_chat = source.chat or any(task.messages for task in tasks)
        tokenizer = _tokenizer(config) if is_chat else None
        if is_chat and tokenizer is None:
            _log.warning(
                "these prompts are chats: the verifier gets a line `role: content` for each message, and with a recipe "
                "whose model.path is here what its chat template writes"
            )
        parts = [[task] for task in tasks] if is_alone else [tasks]
        shown = chain.from_iterable(rendered(part, source, tokenizer, where=where) for part in parts)
        rows += zip((task.prompt for task in tasks), shown, strict=True)
    return [
        (text, Prompt(prompt_id=f"verify/0/{index}", text=task.prompt, token_ids=(), answer=task.answer, row=task.row))
        for index, (text, task) in enumerate(rows)
    ]


def _tokenizer(config: Config) -> Any:
    """Return the tokenizer of a recipe's model, None where that is not here; nothing is downloaded."""
    from huggingface_hub import snapshot_download

    path = config.model.path
    try:
        folder = path if Path(path).expanduser().exists() else snapshot_download(path, local_files_only=True)
        return load_tokenizer(find_model_folder(folder, option="model.path", with_weights=False), config.model)
    except Exception:  # the library's, of several kinds, or ours: of a download only parts may be there
        return None


def load_cases(rows: Rows, completions: Path | None) -> list[Case]:
    """Join rows with their completions; a `DataError` for a broken file, or for a line that belongs to no row.

    Args:
        completions: One JSON object a line, with `completion`, a text or a list of them. It belongs to the row of
            number `index` (from 0), or with that `prompt`, or else to the row that stands as far down as the line does.
            None = the data's own answers.
    """
    if completions is None:
        return [Case(index=index, prompt=prompt, completion=prompt.answer) for index, (_, prompt) in enumerate(rows)]
    by_text: dict[str, list[int]] = defaultdict(list)
    for index, (text, prompt) in enumerate(rows):
        for known in {text, prompt.text}:
            by_text[known].append(index)
    cases = []
    for position, (number, row) in enumerate(_read(completions)):
        where = f"{completions}:{number}"
        if "completion" not in row:
            known = f"it has {', '.join(row)}{suggestion('completion', list(row))}"
            raise DataError(f"{where} must have a completion, {known}")
        texts = row["completion"] if isinstance(row["completion"], list) else [row["completion"]]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where} must have a text or a list of texts as completion, got {row['completion']!r:.80}")
        index = row.get("index", position)
        if "index" not in row and "prompt" in row:
            found = by_text[str(row["prompt"])]
            if len(found) != 1:
                raise DataError(
                    f"{where} must have the prompt of one row of the data, got that of {len(found)}: "
                    f"{row['prompt']!r:.80}; give its number (from 0) as index"
                )
            (index,) = found
        if type(index) is not int or not 0 <= index < len(rows):
            raise DataError(f"{where} must belong to one of the {len(rows)} rows of the data, got {index!r} (from 0)")
        cases += [Case(index=index, prompt=rows[index][1], completion=text) for text in texts]
    return cases


def _read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        neighbours = [str(path.with_name(found.name)) for found in path.absolute().parent.glob("*.jsonl")]
        raise DataError(
            f"--completions must name a JSONL file, there is none at {path.absolute()}"
            f"{suggestion(str(path), neighbours)}"
        )
    rows, problems = read_jsonl(path)
    if problems:
        line, problem = problems[0]
        raise DataError(f"{path}:{line} must be a JSON object, {problem}: correct or remove the line")
    return rows


async def score_all(
    config: Config, cases: Sequence[Case], *, on_reply: Callable[[], object] = lambda: None
) -> tuple[float, Mapping[str, Any]]:
    """Score cases with a recipe's verifiers. Ctrl-C ends it: what has no reply by then keeps none.

    Args:
        on_reply: Called after each.

    Returns:
        Seconds of scoring, the start of the processes left out, and the pools' own figures by verifier.

    Raises:
        VerifierError: A verifier cannot be started, or fails too often.
    """
    settings = config.verifier
    verifiers = VerifierSet(settings, also=config.data.chosen_verifiers, run=config.run)
    room = asyncio.Semaphore(settings.processes * settings.concurrency + _IN_FLIGHT)

    async def score(case: Case) -> None:
        async with room:
            (case.reply,) = await verifiers.score(case.prompt, [case.completion], messages=[case.messages])
        on_reply()

    try:
        await verifiers.start()
        began = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*map(score, cases))
        return time.monotonic() - began, verifiers.gauges()["verifiers"]
    finally:
        await verifiers.close()
