"""What may be asked of the sample queue: one table for the service, the server and both clients.

`QueueRequests` lists every request with its fields and its answer. The service implements it; the server
takes from it the requests it knows and the types of their fields; the clients take from it their methods.
Nothing here opens a socket or knows the ledger.

Three requests carry `wait_s`: the server keeps them until there is something to answer or until `wait_s`
seconds are over, so that nobody polls. Every request may be sent twice without harm, save those in
`NOT_REPEATABLE`.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Protocol, TypedDict, get_type_hints

import msgspec

from areal_lite.errors import WireError
from areal_lite.types import Group, Lease, Sample, Score, Shard
from areal_lite.wire import Raw, as_type

Name = Annotated[str, msgspec.Meta(max_length=200)]
"""Of a worker or a batch."""
LeaseId = Annotated[str, msgspec.Meta(max_length=2000)]
LeaseIds = Annotated[Sequence[LeaseId], msgspec.Meta(max_length=2**16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


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


class QueueRequests(Protocol):
    """The requests. All fields are keyword-only; clients raise `QueueTimeout`, `LedgerError` or `WireError`."""

    def lease_rollout(self, *, worker: Name, limit: Count, wait_s: float) -> list[Lease]:
        """Borrow up to `limit` groups to generate, admitting new prompts where the ledger has capacity.

        Empty when nothing came up within `wait_s` seconds, which is always so while admission is closed.
        """

    def lease_verify(self, *, worker: Name, limit: Count, wait_s: float) -> list[Lease]:
        """Borrow up to `limit` generated groups to score; empty when none came up within `wait_s` seconds."""

    def present(self, *, worker: Name, lease: Lease) -> bool:
        """Keep what the queue before this one lent, until admission opens. False: stop working on it."""

    def heartbeat(self, *, worker: Name, lease_ids: LeaseIds, progress: Count) -> list[str]:
        """Keep the named leases alive; return those that are not (any more): stop working on them.

        `progress` is any number of the worker that grows while it works, such as tokens generated.
        """

    def complete_rollout(self, *, lease_id: LeaseId, samples: Sequence[Sample]) -> bool:
        """Hand in the samples of a group. False: the lease was no longer alive, and the samples are ignored."""

    def complete_verify(self, *, lease_id: LeaseId, scores: Sequence[Score]) -> bool:
        """Hand in one score per sample. False: the lease was no longer alive, and the scores are ignored."""

    def reject(self, *, lease_id: LeaseId, reason: str) -> bool:
        """End a leased group as rejected. False: the lease was no longer alive."""

    def fail(self, *, lease_id: LeaseId, reason: str) -> bool:
        """End a leased group as failed. False: the lease was no longer alive."""

    def take(self, *, batch_id: Name, wait_s: float) -> BatchInfo | None:
        """Take the next batch under a name the caller chose; None when none was complete within `wait_s` seconds."""

    def fetch(self, *, batch_id: Name, rank: int) -> Shard:
        """Return one trainer rank's part of the batch taken."""

    def batch_groups(self, *, batch_id: Name, limit: Count) -> list[Group]:
        """Return the first `limit` groups of the batch taken, whole, for display."""

    def return_batch(self, *, batch_id: Name) -> None:
        """Put the batch back (the trainer was lost); nothing happens when it is not the one taken."""

    def complete_step(self, *, batch_id: Name) -> int:
        """The batch is trained and its weights are published: move the version, and return it."""

    def forget(self, *, worker: Name) -> list[str]:
        """Take back every lease of a worker known to be dead, and return their ids; its waiting requests end empty."""

    def open_admission(self) -> None:
        """Start to hand out work to rollout workers: their engines hold the current weights."""

    def close_admission(self) -> None:
        """Stop to hand out work to rollout workers; what they have already goes on."""

    def abandon(self) -> dict[str, int]:
        """End the run: close admission, give up every group not trained yet, and return the final counts."""

    def status(self) -> QueueStatus:
        """Return counts, workers and traffic."""

    def save(self) -> bytes:
        """Return ledger and data cursor as bytes for a checkpoint, to be read by `service.restore`."""


REQUESTS = frozenset(name for name, _ in inspect.getmembers(QueueRequests, inspect.isfunction) if name[0] != "_")
"""Names of all requests."""

NOT_REPEATABLE = frozenset({"lease_rollout", "lease_verify"})
"""A repeated lease request would lend more work; the work of a lost answer comes back when its leases expire."""


def read_fields(op: str, fields: Raw) -> dict[str, Any]:
    """Read the fields of a request that came over the wire.

    Args:
        op: One of `REQUESTS`.
        fields: As they came.

    Returns:
        The fields, ready to be passed as keyword arguments.

    Raises:
        WireError: A field is missing, unknown, or of another type; names request and field.
    """
    kind = _fields_type(op)
    try:
        checked = as_type(fields, kind)
    except WireError as error:
        raise WireError(f"{op} takes the fields ({', '.join(kind.__struct_fields__)}): {error}") from error
    return {name: getattr(checked, name) for name in kind.__struct_fields__}


@cache
def _fields_type(op: str) -> Any:
    hints = get_type_hints(getattr(QueueRequests, op), include_extras=True)
    return msgspec.defstruct(
        op, [(name, hint) for name, hint in hints.items() if name != "return"], forbid_unknown_fields=True
    )


@cache
def answer_type(op: str) -> Any:
    """Return the type of what a request is answered with."""
    return get_type_hints(getattr(QueueRequests, op))["return"]
