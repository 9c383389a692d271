"""What goes into the sample queue and what comes out of it: settings, batches of groups, and the queue at a glance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

import msgspec

from areal_lite.config.sections import QueueConfig
from areal_lite.sample_queue.groups import GroupRecord

Name = Annotated[str, msgspec.Meta(max_length=200)]
"""Of a worker or a batch."""
LeaseId = Annotated[str, msgspec.Meta(max_length=2000)]
LeaseIds = Annotated[Sequence[LeaseId], msgspec.Meta(max_length=2**16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class LedgerSettings(QueueConfig):
    """The recipe's `queue` section, and the length of the run."""

    total_steps: int
    """trainer steps of the whole run, resumed ones included"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one trainer step trains."""

    batch_id: str
    version: int
    """Trainer version when it was taken; token ages count from it."""
    groups: tuple[GroupRecord, ...]
    """`groups_per_step` groups, oldest admitted first, each sample with its score."""


class BatchInfo(TypedDict):
    """What the controller learns about a batch it took."""

    version: int
    """Trainer version when it was taken; ages are counted from it."""
    num_groups: int
    num_rows: int
    rewards: dict[str, dict[str, float]]
    """Means over the scored samples, each over those that have the figure: `reward_by_source` (total reward, by the
    first part of the prompt ids), `reward_parts` and `verifier_metrics`."""


class WorkerStatus(TypedDict):
    """One worker as the queue sees it."""

    role: str
    """`rollout` or `verify`, by what it last leased; empty before."""
    heartbeat_age_s: float
    """Seconds since its last heartbeat, or since its first request."""
    leases: int
    oldest_lease_age_s: float
    """0 without leases."""
    progress: int
    """As the worker reported it: tokens, calls, whatever grows while it works."""


class QueueStatus(TypedDict):
    """The queue at a glance, for progress display, watchdog and metrics."""

    version: int
    counts: dict[str, int]
    """Groups by state; terminal ones also by reason."""
    capacity: int
    missing: int
    """Ready groups lacking for the next batch."""
    admission_open: bool
    progress: int
    """Grows with every change of the ledger and with the progress workers report; standing still = nothing moves."""
    too_slow: dict[str, int]
    """Groups that ended as failed(too_slow) since the queue started, by the number of their prompt's tokens."""
    refused: dict[str, int]
    """Messages refused, by reason."""
    workers: dict[str, WorkerStatus]
    gauges: dict[str, float]
    """Traffic of the server: messages, bytes, requests parked now."""
