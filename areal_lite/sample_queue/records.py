"""What goes into the ledger and what comes out of it: its settings, and batches of groups."""

from dataclasses import dataclass
from typing import Literal

from areal_lite.sample_queue.groups import GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """What the ledger needs of the recipe's `queue` section, and the length of the run."""

    max_staleness: int
    """eta: the largest age a token may have and still train; 0 = synchronous."""
    on_stale: Literal["mask", "wait", "drop", "keep"]
    """What enforces the bound when a batch is taken; keep = nothing, it holds at admission only."""
    groups_per_step: int
    samples_per_group: int
    """G."""
    total_steps: int
    """Trainer steps of the whole run, resumed ones included."""
    max_ahead: int | None = None
    """Batches that may be outstanding beside the one in hand; None = eta, and never more."""
    max_attempts: int = 3
    """Attempts at a prompt under `drop` before it is failed(too_slow); lost workers before failed(crashes_workers)."""
    lease_timeout_s: float = 10.0
    """Seconds without a heartbeat after which a lease expires."""
    reject: Literal["none", "zero_variance"] = "none"
    """zero_variance: groups whose rewards are all equal are rejected."""

    def __post_init__(self) -> None:
        if self.reject == "zero_variance" and self.samples_per_group == 1:
            raise ValueError(
                "reject=zero_variance needs groups of at least 2 samples, got samples_per_group=1, where every group "
                "would be rejected: raise queue.samples_per_group or set queue.reject=none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one trainer step trains."""

    batch_id: str
    version: int
    """Trainer version when it was taken; token ages count from it."""
    groups: tuple[GroupRecord, ...]
    """`groups_per_step` groups, oldest admitted first, each sample with its score."""
