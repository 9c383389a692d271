"""What the project asks of a generation engine; `vllm_engine.py` holds the real one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areal_lite.types import Float32, Prompt, Sample

Interrupt = Literal["recompute", "keep_kv", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is drawn."""

    max_new_tokens: int
    temperature: float
    """0 = greedy."""
    seed: int | None = None
    """Seeds this completion alone; None where nothing is random."""
    stop: tuple[str, ...] = ()
    """Also end behind any of these texts, special tokens included."""
    ignore_end: bool = False
    """Go on behind the end-of-sequence token, up to `max_new_tokens`: for benchmarks, whose lengths are given."""


class GenerationEngine(Protocol):
    """One engine: completions, log-probabilities, pause and resume, weights.

    Versions are stamped by the engine itself, never guessed by its caller (invariant I3).
    """

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it; asked for by workflows of several turns only."""

    @property
    def tokens_generated(self) -> int:
        """Output tokens since the start, running samples included: the sign of life a watchdog looks for."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Complete one prompt; cancelling the task ends the request."""

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Float32:
        """Return [T] log-probabilities of given output tokens at temperature 1 under the present weights."""

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop generating; running samples are kept or, with `drain`, finish first."""

    async def resume(self) -> None:
        """Go on generating."""

    async def stamp(self, version: int) -> None:
        """Label every token from now on with this version."""

    async def weights_call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        """Pass one call of the weight-transfer protocol on (see `weights/`)."""

    async def close(self) -> None:
        """Stop the engine and everything it started; calling it again is harmless."""


def token_limit(prompt: Prompt, *, default: int) -> int:
    """Return the completion tokens that a prompt may get: a data row may set its own limit."""
    return int(prompt.row.get("max_new_tokens", default))
