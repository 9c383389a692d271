"""The section `data`: where prompts come from. Nothing is loaded here."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from areal_lite.config.plugins import known_names, name_problems, without_digests
from areal_lite.config.section import HERE, JsonArguments, Refers, Section
from areal_lite.config.suggestion import suggestion

Split = Literal["train", "eval"]
REFERENCES = "reference_answers"
"""The column that a list of answers becomes."""
CHAT = "prompt_messages"
"""The column with the messages of a prompt that goes through the model's chat template."""
RESERVED_COLUMNS = ("prompt", "completion", "answer", "messages", REFERENCES, CHAT)
"""What a verify function is called with beside a row's columns."""

FILE_SOURCES = {
    "jsonl": "the path of a JSONL file",
    "parquet": "the path of a Parquet file",
    "dataset": "the path of a datasets folder, or a hub id",
}
"""Kinds that read rows from files, and what `path` is; the others make their tasks, and may show how they are done."""
_ARITH = "arith"
"""The kind that makes its tasks, with a section of its own for how. Any other kind is the name of a function."""
_PATH_KEYS = ("path", "eval_path")
_ROW_KEYS = ("prompt_column", "answer_column", "columns", "max_bad_fraction")


def is_hub_id(path: str) -> bool:
    """Whether the path of a dataset is `owner/name` or `owner/name:configuration` on the hub: no folder is there."""
    return not Path(path).exists() and re.fullmatch(r"(?!\.)[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", path) is not None


class ArithConfig(Section):
    """The built-in task: chained sums answered step by step."""

    min_terms: int = Field(2, ge=2)
    """fewest numbers in a chain"""
    max_terms: int = Field(4, ge=2)
    """most numbers in a chain"""
    max_value: int = Field(99, ge=1)
    """largest number in a chain"""
    minus_share: float = Field(0.5, ge=0, le=1)
    """share of minus signs, if the total allows one"""
    train_size: int = Field(8192, ge=1)
    """training problems"""
    eval_size: int = Field(256, ge=1)
    """held-out problems, never among the training ones"""
    seed: int = Field(0, ge=0)
    """seed of both splits"""

    def _problems(self) -> Iterable[str]:
        if (least := self.min_terms) > (most := self.max_terms):
            to_do = "lower the one or raise the other"
            yield f"{HERE}.min_terms must be at most {HERE}.max_terms, got {least} and {most}: {to_do}"


class RowsConfig(Section):
    """Rows of any recipe: where they are."""

    source: str = "arith"
    """jsonl, parquet = a file; dataset = a folder or hub id; arith = built in; or a function's name (reasoning_gym)"""
    path: Annotated[str | None, Refers.FILE] = None
    """training rows: a file, a datasets folder, or a hub id"""
    eval_path: Annotated[str | None, Refers.FILE] = None
    """held-out rows; null = a datasets folder's own split, or none"""
    eval_size: int | None = Field(None, ge=1)
    """held-out rows used at most, evenly spaced; null = 256 of files, all of other sources"""
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    """share of unreadable rows above which loading fails"""
    arith: ArithConfig = ArithConfig()


class SourceConfig(RowsConfig):
    """One source of prompts."""

    arguments: JsonArguments = {}
    """arguments of the function that source names, e.g. {seed: 1}"""
    prompt_column: str = "question"
    """column with the prompt"""
    answer_column: str = "answer"
    """column with the reference answer"""
    columns: dict[str, str] = {}
    """new names of further columns, {new: old}, e.g. {difficulty: level}"""
    template: str = "{prompt}"
    """text around a prompt that is a text, not a list of messages; {prompt} is replaced"""
    chat: bool = False
    """apply the model's chat template to the prompt as a user message; lists of messages always go through it"""
    system: str | None = None
    """system message before each chat that has none"""
    tools: list[str] = []
    """functions that the chat template describes to the model as tools, by signature and docstring"""
    verifier: str | None = None
    """verifier of rows without a column verifier; null = verifier.function"""
    workflow: str | None = None
    """workflow of rows without a column workflow; null = rollout.workflow"""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """longest prompt in tokens; longer ones are left out and counted; null = one that does not fit is an error"""

    def _problems(self) -> Iterable[str]:
        kind = self.source
        is_read = f"with {HERE}.source={kind}"
        if kind not in (*FILE_SOURCES, _ARITH) and any(name_problems("", kind, kind="source")):
            known = [_ARITH, *FILE_SOURCES, *known_names("source")]
            names = f"one of {', '.join(known)}, or name a function as module:function or path.py:function"
            yield f"{HERE}.source must be {names}; got {kind!r}{suggestion(kind, known)}"
            return
        if kind in FILE_SOURCES and self.path is None:
            yield f"{HERE}.source={kind} needs {HERE}.path, got none: give {FILE_SOURCES[kind]}"
        if kind not in FILE_SOURCES:
            to_do = f"set {HERE}.source=jsonl (or parquet, or dataset), or leave it out"
            yield from self.unread(_PATH_KEYS + _ROW_KEYS if kind == _ARITH else _PATH_KEYS, is_read, to_do=to_do)
        if kind in (*FILE_SOURCES, _ARITH):
            yield from self.unread(("arguments",), is_read, to_do="leave them out, they are of a plug-in's function")
        if "{prompt}" not in self.template:
            yield f"{HERE}.template must contain {{prompt}}, got {self.template!r:.80}: add it where the prompt goes"
        first = {old: new for new, old in reversed(self.columns.items())}
        for new, old in self.columns.items():
            if new in RESERVED_COLUMNS:
                yield f"{HERE}.columns.{new} has the name of a verifier argument: choose another name for {old!r}"
            if old in (self.prompt_column, self.answer_column):
                yield f"{HERE}.columns.{new}={old} is the prompt or the answer, which keep their names: leave it out"
            if first[old] != new:
                yield f"{HERE}.columns.{new}={old} is a second name of one column, beside {first[old]!r}: leave one out"


class MixedSourceConfig(SourceConfig):
    """One of several sources."""

    weight: float = Field(1.0, gt=0)
    """share of the prompts, relative to the other sources"""


class DataConfig(SourceConfig):
    """Where prompts come from: one source, or several in `mix`."""

    mix: dict[Annotated[str, Field(pattern="^[A-Za-z0-9_.-]+$")], MixedSourceConfig] = {}
    """several sources by name, each with the keys of this section and a weight"""
    curriculum: float = Field(0.0, ge=0, le=1)
    """share of prompts picked by observed pass rate, those near 1/2 first; 0 = plain shuffling"""

    @property
    def sources(self) -> Mapping[str, SourceConfig]:
        """The sources by name, with which their prompts' ids begin: no slash; one alone is named after its kind."""
        return self.mix or {without_digests(Path(self.source).name.rpartition(":")[2]): self}

    @property
    def chosen_verifiers(self) -> set[str]:
        """The verifiers that sources choose for their rows."""
        return {source.verifier for source in self.sources.values() if source.verifier}

    def place_of(self, name: str) -> str:
        """Return the section of the recipe that a source is set in, for messages."""
        return f"data.mix.{name}" if self.mix else "data"

    def _problems(self) -> Iterable[str]:
        if not self.mix:
            yield from super()._problems()
        else:
            yield from self.unread(SourceConfig.model_fields, "with data.mix", to_do="set it in each source instead")
