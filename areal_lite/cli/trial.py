"""A verifier tried outside training: completions from files, scored by the pool that a run would use."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from areal_lite.config.data import SourceConfig
from areal_lite.config.recipe import Config
from areal_lite.config.suggestion import suggestion
from areal_lite.data.encode import load_tokenizer
from areal_lite.data.prompts import rendered, with_names
from areal_lite.data.rows import check_columns, read_jsonl
from areal_lite.data.sources import load_tasks, with_inner
from areal_lite.data.tasks import Task, in_ranges, make_task
from areal_lite.errors import DataError
from areal_lite.record.paths import find_model_folder
from areal_lite.types import Prompt
from areal_lite.verify.protocol import Reply

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
    reply: Reply | None = None


def load_prompts(path: Path, *, columns: Mapping[str, Sequence[str]], config: Config, rows_choose: bool) -> Rows:
    """Read the data's rows, one JSON object a line, with ids `verify/0/<index>`.

    Args:
        columns: What the columns with `prompt` and `answer`, the reference, may be called: the first that there is.
        config: Its `data.columns` names further columns; it has the verifiers that rows may choose.
        rows_choose: Whether rows choose their verifiers, as in a run; if not, what they say of it is left out.

    Raises:
        DataError: The file is missing or broken, lacks a column, or chooses a verifier that is not there.
    """
    dotted = [*chain.from_iterable(columns.values()), *config.data.columns.values()]
    rows = [(number, with_inner(row, dotted)) for number, row in _read(path, option="--data")]
    there = {name for _, row in rows for name in row}
    found = {
        f"{kind}_column": next((name for name in names if name in there), names[0]) for kind, names in columns.items()
    }
    check_columns(path, rows, columns={f"--{kind.replace('_', '-')}": name for kind, name in found.items()})
    new_names = {old: new for new, old in config.data.columns.items()}
    left_out = {"workflow"} if rows_choose else {"workflow", "verifier"}
    tasks = []
    for number, row in rows:
        kept = {new: value for name, value in row.items() if (new := new_names.get(name, name)) not in left_out}
        try:
            tasks.append(make_task(kept, origin=f"{path}:{number}", **found))
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}") from error
    if rows_choose:
        tasks = with_names(tasks, source=config.data.model_copy(update={"workflow": None}), config=config)
    return _rows(_rendered(tasks, config.data, config, "data", is_alone=not rows_choose))


def recipe_prompts(config: Config) -> Rows:
    """Load the same of the training rows of a recipe, one source after another, as a run does."""
    tasks = []
    for name, source in config.data.sources.items():
        where = config.data.place_of(name)
        rows = in_ranges(load_tasks(source, "train", where=where), source.filter.ranges, where=where)
        tasks += _rendered(with_names(rows, source=source, config=config), source, config, where)
    return _rows(tasks)


def _rendered(
    tasks: Sequence[Task], source: SourceConfig, config: Config, where: str, *, is_alone: bool = False
) -> list[tuple[str, Task]]:
    """Return rows with what the model is given; where each `is_alone`, beside no recipe, texts may be among chats."""
    is_chat = source.chat or any(task.messages for task in tasks)
    tokenizer = _tokenizer(config) if is_chat else None
    if is_chat and tokenizer is None:
        _log.warning(
            "these prompts are chats: the verifier gets a line `role: content` for each message, and with a recipe "
            "whose model.path is here what its chat template writes"
        )
    parts = [[task] for task in tasks] if is_alone else [tasks]
    shown = chain.from_iterable(rendered(part, source, tokenizer, where=where) for part in parts)
    return list(zip((task.prompt for task in tasks), shown, strict=True))


def _tokenizer(config: Config) -> Any:
    """Return the tokenizer of a recipe's model, None where that is not here; nothing is downloaded."""
    from huggingface_hub import snapshot_download

    path = config.model.path
    try:
        folder = path if Path(path).expanduser().exists() else snapshot_download(path, local_files_only=True)
        return load_tokenizer(find_model_folder(folder, option="model.path", is_compared=False), config.model)
    except Exception:  # the library's, of several kinds, or ours: of a download only parts may be there
        return None


def _rows(tasks: Sequence[tuple[str, Task]]) -> Rows:
    return [
        (said, Prompt(prompt_id=f"verify/0/{index}", text=task.prompt, token_ids=(), answer=task.answer, row=task.row))
        for index, (said, task) in enumerate(tasks)
    ]


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
    for index, (said, prompt) in enumerate(rows):
        for text in {said, prompt.text}:
            by_text[text].append(index)
    cases = []
    for position, (number, row) in enumerate(_read(completions, option="--completions")):
        where = f"{completions}:{number}"
        index = _row_index(row, position, by_text, num_rows=len(rows), where=where)
        cases += [Case(index=index, prompt=rows[index][1], completion=text) for text in _completions(row, where)]
    return cases


def _read(path: Path, *, option: str) -> list[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        neighbours = [str(path.with_name(found.name)) for found in path.absolute().parent.glob("*.jsonl")]
        raise DataError(
            f"{option} must name a JSONL file, there is none at {path.absolute()}{suggestion(str(path), neighbours)}"
        )
    rows, problems = read_jsonl(path)
    if problems:
        line, problem = problems[0]
        raise DataError(f"{path}:{line} must be a JSON object, {problem}: correct or remove the line")
    return rows


def _row_index(
    row: Mapping[str, Any], position: int, by_text: Mapping[str, list[int]], *, num_rows: int, where: str
) -> int:
    index = row.get("index", position)
    if "index" not in row and "prompt" in row:
        found = by_text.get(str(row["prompt"]), [])
        if len(found) != 1:
            raise DataError(
                f"{where} must have the prompt of one row of the data, got that of {len(found)}: "
                f"{row['prompt']!r:.80}; give its number (from 0) as index"
            )
        (index,) = found
    if type(index) is not int or not 0 <= index < num_rows:
        raise DataError(f"{where} must belong to one of the {num_rows} rows of the data, got row {index!r} (from 0)")
    return index


def _completions(row: Mapping[str, Any], where: str) -> list[str]:
    if "completion" not in row:
        raise DataError(f"{where} must have a completion, it has {', '.join(row)}{suggestion('completion', list(row))}")
    texts = row["completion"] if isinstance(row["completion"], list) else [row["completion"]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where} must have a text or a list of texts as completion, got {row['completion']!r:.80}")
    return texts


@dataclass
class Trial:
    """One try; what is known so far may be read at any time, also after `run` was cancelled."""

    config: Config
    cases: Sequence[Case]
    gauges: Mapping[str, Any] = field(default_factory=dict)
    """The pools' own figures by verifier, once `run` has ended."""
    wall_s: float = 0.0
    """Seconds of scoring, once `run` has ended; the start of the processes is left out."""

    async def run(self, *, on_reply: Callable[[], object]) -> None:
        """Score all cases; `on_reply` is called after each. A `VerifierError` where a verifier cannot be started."""
        from areal_lite.verify.verifier_set import VerifierSet

        settings = self.config.verifier
        verifiers = VerifierSet(settings, start_timeout_s=self.config.run.start_timeout_s)
        room = asyncio.Semaphore(settings.processes * settings.concurrency + _IN_FLIGHT)

        async def score(case: Case) -> None:
            async with room:
                (case.reply,) = await verifiers.score(case.prompt, [case.completion])
            on_reply()

        try:
            await verifiers.start()
            began = time.monotonic()
            try:
                await asyncio.gather(*map(score, self.cases))
            finally:
                self.wall_s, self.gauges = time.monotonic() - began, verifiers.gauges()["verifiers"]
        finally:
            await verifiers.close()
