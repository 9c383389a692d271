"""What the sample queue takes and returns: settings, batches of groups, and its status."""

from dataclasses import dataclass
from typing import TypedDict

from areal_lite.config.sections import QueueConfig
from areal_lite.sample_queue.groups import GroupRecord


class LedgerSettings(QueueConfig):
    """The recipe's `queue` section, and the length of the run."""

    total_steps: int
    """trainer steps of the whole run, those before a resume included"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one trainer step trains."""

    batch_id: str
    version: int
    """Trainer version when it was taken; token ages count from it."""
    groups: tuple[GroupRecord, ...]
    """`groups_per_step` groups, oldest admitted first, each sample with its score."""


Rewards = dict[str, dict[str, float]]
"""Means over the scored samples of a batch, each over those that have the figure: `reward_by_source` (total reward, by
the first part of the prompt ids), `reward_parts` and `verifier_metrics`."""


class WorkerStatus(TypedDict):
    """One worker."""

    role: str
    """`rollout` or `verify`, by its last lease; empty before the first."""
    heartbeat_age_s: float
    """Seconds since its last heartbeat, or since its first request."""
    leases: int
    oldest_lease_age_s: float
    """0 without leases."""


class QueueStatus(TypedDict):
    """The state of the queue, for progress display, watchdog and metrics."""

    version: int
    counts: dict[str, int]
    """Groups by state; terminal ones also by reason."""
    capacity: int
    missing: int
    """Ready groups that the next batch still needs."""
    progress: int
    """Grows with every change of the ledger and with the progress that workers report."""
    workers: dict[str, WorkerStatus]
    parked: int
    """Requests that wait for an answer now."""
