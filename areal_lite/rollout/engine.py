"""What an engine is asked for; `vllm_engine.py` holds it."""

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
    """Seeds this completion alone; None where nothing is random."""
    stop: tuple[str, ...] = ()
    """Also end behind any of these texts, special tokens included."""
    ignore_end: bool = False
    """Go on behind the end-of-sequence token, up to `max_new_tokens`: for benchmarks, whose lengths are given."""
