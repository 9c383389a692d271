"""What is asked of a generation engine, without importing one (`vllm_engine.py`)."""

from dataclasses import dataclass
from typing import Any, Literal

Interrupt = Literal["recompute", "keep_kv", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is drawn."""

    max_new_tokens: int
    temperature: float
    """0 = greedy."""
    seed: int | None = None
    """Of this completion alone; None if nothing is random."""
    stop: tuple[str, ...] = ()
    """Also end after any of these texts, special tokens included."""
    ignore_end: bool = False
    """Continue after the end-of-sequence token, up to `max_new_tokens`: for benchmarks, which set the lengths."""

    @property
    def fields(self) -> dict[str, Any]:
        """Those of vLLM's `SamplingParams`."""
        return {
            "max_tokens": self.max_new_tokens,
            # Not `min_tokens`, which forbids the end token: the log-probabilities would be those of another policy.
            "ignore_eos": self.ignore_end,
            "temperature": self.temperature,
            "seed": self.seed,
            "logprobs": 0,
            "stop": list(self.stop),
            "detokenize": bool(self.stop),
            "skip_special_tokens": False,
        }
