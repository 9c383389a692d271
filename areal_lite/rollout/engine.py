"""What is asked of a generation engine, without importing one (`vllm_engine.py`)."""

from dataclasses import dataclass
from typing import Literal

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
