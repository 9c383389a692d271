"""Engines that say what a test wants, and short ways to run episodes on them."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from scripted_engine import ScriptedEngine

from areal_lite.config.recipe import parse_config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows, load_workflows
from areal_lite.types import GIVEN, Prompt, Sample, StopReason, VersionSpan

T = TypeVar("T")

PATIENCE_S = 120.0
EOS = 1
TOKENIZER = build_char_tokenizer(PRINTABLE)
"""A token for each character of ASCII."""
UNCUT = Sampling(max_new_tokens=100, temperature=1.0)


def ids(text: str) -> list[int]:
    """Token ids of a text; `$` stands for the end-of-sequence token."""
    return [EOS if character == "$" else TOKENIZER(character)["input_ids"][0] for character in text]


class Speaker(ScriptedEngine):
    """Says `answers` one after another, or what a function of the context's text makes of it; each ends with EOS.

    The log-probability of a token is minus its place in the context, so that a wrong order shows. `stamps` gives the
    version from a number of generated tokens on, as if weights had been updated right there.
    """

    def __init__(
        self, answers: Sequence[str] | Callable[[str], str], *, stamps: Mapping[int, int] | None = None, **options: Any
    ) -> None:
        super().__init__(tokenizer=options.pop("tokenizer", TOKENIZER), **options)
        self.answers, self.stamps = answers, stamps or {}
        self.contexts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        number = len(self.contexts)
        self.contexts.append(list(prompt_ids))
        self.samplings.append(sampling)
        said = self.answers(self.tokenizer.decode(prompt_ids)) if callable(self.answers) else self.answers[number]
        whole = [*self.tokenizer(said, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        stops = [n for n in range(len(whole)) if self.tokenizer.decode(whole[:n]).endswith(sampling.stop)]
        tokens = whole[: min([sampling.max_new_tokens, *stops])]
        versions = []
        for _ in tokens:
            await self._running.wait()
            self.version = self.stamps.get(self.tokens_generated, self.version)
            versions.append(self.version)
            self.tokens_generated += 1
            await asyncio.sleep(0)
        cut_by = StopReason.STRING if len(tokens) in stops else StopReason.LENGTH
        return Sample(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=-np.arange(len(prompt_ids), len(prompt_ids) + len(tokens), dtype=np.float32),
            spans=tuple(VersionSpan(version=version, start=i, end=i + 1) for i, version in enumerate(versions)),
            stop_reason=StopReason.STOP if len(tokens) == len(whole) else cut_by,
            text=self.text_of(tokens),
        )


class Failing(Speaker):
    """Raises `errors` in its calls one after another, None for a call that is answered; then it only answers."""

    def __init__(self, answers: Any, *errors: Exception | None, **options: Any) -> None:
        super().__init__(answers, **options)
        self.errors, self.num_asked = list(errors), 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        self.num_asked += 1
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return await super().generate(prompt_ids, sampling)


def make_prompt(text: str = "1-9?", *, answer: str = "", **row: Any) -> Prompt:
    return Prompt(prompt_id="train/0/0", text=text, token_ids=tuple(ids(text)), answer=answer, row=row)


def load(workflow: str = "single_turn", *, arguments: Mapping[str, Any] | None = None, **rollout: Any) -> Workflows:
    """Load the workflows of a recipe with this section `rollout`."""
    return load_workflows(
        parse_config({"rollout": {"workflow": workflow, "workflow_arguments": dict(arguments or {}), **rollout}})
    )


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await scenario()

    return asyncio.run(bounded())


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorate an async test: it runs in an event loop of its own."""

    @functools.wraps(test)
    def bounded(*arguments: Any, **fixtures: Any) -> None:
        run(lambda: test(*arguments, **fixtures))

    return bounded


def play(
    engine: ScriptedEngine, workflows: Workflows, prompt: Prompt | None = None, *, sampling: Sampling = UNCUT
) -> Sample:
    """Run one episode with seeds 100, 101, ..."""
    return run(
        lambda: workflows.sample(engine, prompt or make_prompt(), sampling=sampling, seed_of=lambda call: 100 + call)
    )


def spans_of(sample: Sample) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sample.spans]


def given_mask(sample: Sample) -> list[bool]:
    return [span.version == GIVEN for span in sample.spans for _ in range(span.start, span.end)]
