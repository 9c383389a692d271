"""What the project asks of a generation engine, and a deterministic stand-in for unit tests.

`RolloutWorker` drives a `GenerationEngine`; `vllm_engine.py` holds the real one.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from areal_lite.types import Float32, Prompt, Sample, StopReason, VersionSpan

__all__ = ["GenerationEngine", "Interrupt", "Sampling", "ScriptedEngine", "token_limit"]

Interrupt = Literal["recompute", "keep_kv", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is drawn."""

    max_new_tokens: int
    temperature: float
    """0 = greedy."""
    seed: int | None = None
    """Seeds this completion alone; None where nothing is random."""
    ignore_end: bool = False
    """Go on behind the end-of-sequence token, up to `max_new_tokens`: for benchmarks, whose lengths are given."""


class GenerationEngine(Protocol):
    """One engine: completions, log-probabilities, pause and resume, weights.

    Versions are stamped by the engine itself, never guessed by its caller (invariant I3).
    """

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it; asked for by workflows of several turns only."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Output tokens since the start, running samples included: the sign of life a watchdog looks for."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Complete one prompt; cancelling the task ends the request."""
        ...

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Float32:
        """Return [T] log-probabilities of given output tokens at temperature 1 under the present weights."""
        ...

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop generating; running samples are kept or, with `drain`, finish first."""
        ...

    async def resume(self) -> None:
        """Go on generating."""
        ...

    async def stamp(self, version: int) -> None:
        """Label every token from now on with this version."""
        ...

    async def weights_call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        """Pass one call of the weight-transfer protocol on (see `weights/`)."""
        ...

    async def close(self) -> None:
        """Stop the engine and everything it started; calling it again is harmless."""
        ...


def token_limit(prompt: Prompt, *, default: int) -> int:
    """Return the completion tokens that a prompt may get: a data row may set its own limit."""
    return int(prompt.row.get("max_new_tokens", default))


class ScriptedEngine:
    """Stand-in for unit tests: tokens come from the seed alone, one every `token_s` seconds.

    It honours pause, resume and version stamps the way `recompute` does, so that version spans can be
    checked without a model.
    """

    def __init__(self, *, token_s: float = 0.0, eos_id: int = 1, vocab_size: int = 10, tokenizer: Any = None) -> None:
        self.tokens_generated = 0
        self.tokenizer = tokenizer
        self.version = 0
        self.calls: list[str] = []
        self._token_s, self._eos_id, self._vocab_size = token_s, eos_id, vocab_size
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Draw tokens until the end-of-sequence token or the limit."""
        draw = random.Random(f"{sampling.seed}/{list(prompt_ids)}")
        tokens: list[int] = []
        versions: list[int] = []
        while len(tokens) < sampling.max_new_tokens and (sampling.ignore_end or self._eos_id not in tokens):
            await self._running.wait()
            await asyncio.sleep(self._token_s)
            tokens.append(draw.randrange(1, self._vocab_size))
            versions.append(self.version)
            self.tokens_generated += 1
        return Sample(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), -np.log(self._vocab_size - 1), dtype=np.float32),
            spans=_spans(versions),
            stop_reason=StopReason.STOP
            if tokens[-1] == self._eos_id and not sampling.ignore_end
            else StopReason.LENGTH,
            text=" ".join(map(str, tokens))
            if self.tokenizer is None
            else self.tokenizer.decode(tokens, skip_special_tokens=True),
        )

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Float32:
        """Return the uniform log-probabilities that `generate` draws from."""
        return np.full(len(output_ids), -np.log(self._vocab_size - 1), dtype=np.float32)

    async def pause(self, interrupt: Interrupt) -> None:
        """Hold every running sample before its next token."""
        self.calls.append(f"pause({interrupt})")
        self._running.clear()

    async def resume(self) -> None:
        """Let the samples go on."""
        self.calls.append("resume")
        self._running.set()

    async def stamp(self, version: int) -> None:
        """Label tokens from now on."""
        self.calls.append(f"stamp({version})")
        self.version = version

    async def weights_call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        """Note the call."""
        self.calls.append(method)

    async def close(self) -> None:
        """Note the call."""
        self.calls.append("close")


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    edges = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]] + [len(versions)]
    return tuple(VersionSpan(version=versions[start], start=start, end=end) for start, end in itertools.pairwise(edges))
