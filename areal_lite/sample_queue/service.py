"""The requests of the sample queue, and what each does to the ledger and the data cursor.

The queue server calls it, from one thread, one request at a time; the clients have a method of the same name for each.
It admits prompts on demand, joins the ledger's groups with them, and keeps track of the workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_lite.data.cursor import Cursor
from areal_lite.errors import CheckpointError, LedgerError, WireError
from areal_lite.sample_queue.ledger import HeldLease, Ledger, LedgerSettings
from areal_lite.sample_queue.records import QueueStatus, Rewards, WorkerStatus
from areal_lite.sample_queue.shards import ShardedBatch
from areal_lite.types import Group, Lease, Sample, Score, Shard
from areal_lite.wire import decode, encode_in_parts

_PART_BYTES = 2**23
"""Of a part of a save, unless one group has more."""
_DEAD_AFTER_S = 600.0
"""A worker without a heartbeat for so long is dead, even if nobody reported it, or its last request came after that."""


@dataclass(slots=True)
class _Worker:
    seen_at: float
    role: str = ""
    progress: int = 0


class QueueService:
    """Every public method is a request: its fields are keyword-only, and their types are checked as they arrive.

    Three carry `wait_s`: the server parks them until there is something to answer or `wait_s` seconds are over, so that
    no client polls. Here they answer at once. For one thread.
    """

    def __init__(
        self,
        ledger: Ledger,
        cursor: Cursor,
        *,
        num_minibatches: int,
        num_ranks: int,
        seed: int,
    ) -> None:
        """Start with admission closed.

        Args:
            ledger: New, or restored.
            cursor: New, or restored.
            num_minibatches: Optimiser updates per trainer step.
            num_ranks: Trainer ranks that will fetch.
            seed: Of the run; together with the version it orders the rows of a batch.
        """
        self.ledger, self._cursor = ledger, cursor  # the server asks the ledger itself about leases
        self._deal = partial(ShardedBatch, num_minibatches=num_minibatches, num_ranks=num_ranks, run_seed=seed)
        self._clock = ledger.clock
        self.num_parked = 0
        """Requests that the server holds back now, shown in `status`."""
        self._admission_open = self._has_opened = False
        self._workers: dict[str, _Worker] = {}
        self._reported_progress = 0
        self._batch: ShardedBatch | None = None
        self._saving: Iterator[bytes] = iter(())
        self._saved = -1, b""
        """The last part of a save, and its number."""

    # Workers

    def lease_rollout(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        """Borrow up to `limit` groups to generate, admitting new prompts where the ledger has capacity.

        Empty when nothing came up within `wait_s` seconds; always empty while admission is closed.
        """
        self._find_worker(worker).role = "rollout"
        if not self._admission_open:
            return []
        for _ in range(min(limit - self.ledger.num_waiting, self.ledger.capacity())):
            self.ledger.admit(self._cursor.next().prompt_id)
        return [self._whole(held) for held in self.ledger.lease_rollout(worker, limit=limit)]

    def lease_verify(self, *, worker: str, limit: int, wait_s: float) -> list[Lease]:
        """Borrow up to `limit` generated groups to score; empty when none came up within `wait_s` seconds."""
        self._find_worker(worker).role = "verify"
        if not self._has_opened:  # a worker may be about to present what it holds
            return []
        return [self._whole(held) for held in self.ledger.lease_verify(worker, limit=limit)]

    def present(self, *, worker: str, lease: Lease) -> bool:
        """Keep a lease from the queue that this one replaced, until admission opens. False: stop working on it."""
        if self._admission_open:
            return False
        self._find_worker(worker).role = "verify" if lease.group.samples else "rollout"
        # The prompt may have been drawn after the state was saved from which this queue started: draw up to it again.
        while not self.ledger.knows(lease.group.group_id) and self.ledger.capacity():
            self.ledger.admit(self._cursor.next().prompt_id)
        return self.ledger.adopt(worker, lease)

    def heartbeat(self, *, worker: str, lease_ids: Sequence[str], progress: int) -> list[str]:
        """Keep the named leases alive; return those that are not: stop working on them.

        `progress` is any number of the worker that grows while it works, such as tokens generated.
        """
        seen = self._find_worker(worker)
        seen.seen_at = self._clock()
        # A worker that was restarted under its old name counts from 0 again.
        self._reported_progress += progress - seen.progress if progress >= seen.progress else progress
        seen.progress = progress
        return self.ledger.renew(worker, lease_ids)

    def complete_rollout(self, *, lease_id: str, samples: Sequence[Sample]) -> bool:
        """Hand in the samples of a group. False: the lease was no longer alive, and the samples are ignored."""
        return self.ledger.complete_rollout(lease_id, samples)

    def complete_verify(self, *, lease_id: str, scores: Sequence[Score]) -> bool:
        """Hand in one score per sample. False: the lease was no longer alive, and the scores are ignored."""
        held = self.ledger.find_lease(lease_id)
        counts = self.ledger.complete_verify(lease_id, scores)
        pass_rate = _pass_rate(scores)
        if counts and held is not None and pass_rate is not None:
            self._cursor.observe(held.group.prompt_id, pass_rate)
        return counts

    def fail(self, *, lease_id: str, reason: str) -> bool:
        """End a leased group as failed. False: the lease was no longer alive."""
        return self.ledger.fail(lease_id, reason)

    def forget(self, *, worker: str) -> list[str]:
        """Take back every lease of a worker known to be dead, and return their ids; its waiting requests end empty."""
        self._workers.pop(worker, None)
        return self.ledger.forget(worker)

    def _find_worker(self, worker: str) -> _Worker:
        return self._workers.setdefault(worker, _Worker(seen_at=self._clock()))

    def _whole(self, held: HeldLease) -> Lease:
        """Return a lease with its prompt, as it travels."""
        group = held.group
        prompt = self._cursor.get(group.prompt_id)
        return Lease(
            lease_id=held.lease_id,
            group=Group(group_id=group.group_id, prompt=prompt, samples=group.samples),
            version=self.ledger.version,
        )

    # Trainer

    def take(self, *, batch_id: str, wait_s: float) -> Rewards | None:
        """Take the next batch under a name the caller chose; None when none was complete within `wait_s` seconds."""
        batch = self.ledger.take(batch_id)
        if batch is None:
            return None
        if self._batch is None:
            self._batch = self._deal(batch, [self._cursor.get(group.prompt_id) for group in batch.groups])
        return self._batch.rewards()

    def fetch(self, *, batch_id: str, rank: int) -> Shard:
        """Return one trainer rank's part of the batch taken."""
        return self._find_batch(batch_id).shard(rank)

    def batch_groups(self, *, batch_id: str, limit: int) -> list[Group]:
        """Return the first `limit` groups of the batch taken, whole, for display."""
        return self._find_batch(batch_id).groups(limit)

    def complete_step(self, *, batch_id: str) -> int:
        """The batch is trained and its weights are published: move the version, and return it."""
        self.ledger.complete_step(batch_id)
        # A request that is repeated late must not touch the next batch.
        if self._batch is not None and self._batch.batch.batch_id == batch_id:
            self._batch = None
        return self.ledger.version

    def _find_batch(self, batch_id: str) -> ShardedBatch:
        if self._batch is None or self._batch.batch.batch_id != batch_id:
            present = "none" if self._batch is None else repr(self._batch.batch.batch_id)
            raise LedgerError(f"only the batch that is taken can be read, got {batch_id!r} while {present} is: take it")
        return self._batch

    # Run

    def open_admission(self) -> None:
        """Start to lend work to rollout workers: their engines hold the current weights."""
        self._admission_open = self._has_opened = True

    def close_admission(self) -> None:
        """Stop lending work to rollout workers; they keep what they have."""
        self._admission_open = False

    def abandon(self) -> dict[str, int]:
        """End the run: close admission, give up every group not trained yet, and return the final counts."""
        self._admission_open = False
        self.ledger.abandon_outstanding()
        self._batch = None
        return self.ledger.counts()

    def status(self) -> QueueStatus:
        """Return counts and workers."""
        now = self._clock()
        workers: dict[str, WorkerStatus] = {}
        for name, worker in list(self._workers.items()):
            num_leases, oldest = self.ledger.held_by(name)
            if worker.seen_at <= now - _DEAD_AFTER_S and not num_leases:
                del self._workers[name]
                continue
            workers[name] = WorkerStatus(
                role=worker.role,
                heartbeat_age_s=now - worker.seen_at,
                leases=num_leases,
                oldest_lease_age_s=0.0 if oldest is None else now - oldest,
            )
        return QueueStatus(
            version=self.ledger.version,
            counts=self.ledger.counts(),
            capacity=self.ledger.capacity(),
            missing=self.ledger.missing(),
            progress=self.ledger.progress + self._reported_progress,
            workers=workers,
            parked=self.num_parked,
        )

    def save_part(self, *, part: int) -> bytes:
        """Return some of the bytes of ledger and data cursor, which `service.restore` reads; empty after the last ones.

        All parts are of the moment of part 0, which also begins another save. Heartbeats are answered between two.

        Raises:
            LedgerError: It is neither 0, nor the last part, nor the next one.
        """
        if part == 0:
            state = {"cursor": self._cursor.state(), "ledger": self.ledger.state()}
            groups, state["ledger"]["groups"]["outstanding"] = state["ledger"]["groups"]["outstanding"], []
            self._saving, self._saved = encode_in_parts(state, groups), (-1, b"")
        if part == self._saved[0] + 1:
            self._saved = part, _joined(self._saving, _PART_BYTES)
        if part != self._saved[0]:
            raise LedgerError(f"the parts of a save are read in order, got {part} after {self._saved[0]}: begin with 0")
        return self._saved[1]


def _joined(parts: Iterator[bytes], size: int) -> bytes:
    """Join the next parts, up to at least so many bytes."""
    joined = bytearray()
    while len(joined) < size and (part := next(parts, b"")):
        joined += part
    return bytes(joined)


def _pass_rate(scores: Sequence[Score]) -> float | None:
    """Return the mean total reward of the scored samples, each clipped to 0..1; None where no sample was scored.

    Rewards need not be 0 or 1, and no threshold fits all: partial credit counts as a partial pass, and clipping keeps
    one extreme reward from hiding the others.
    """
    totals = [score.total for score in scores if score.total is not None]
    return sum(min(max(total, 0.0), 1.0) for total in totals) / len(totals) if totals else None


def restore(
    saved: bytes,
    *,
    settings: LedgerSettings,
    cursor: Cursor,
    keep_batch: bool = False,
) -> Ledger:
    """Build the ledger from what `QueueClient.save` returned, and move the cursor to its place.

    Args:
        saved: Bytes of a checkpoint.
        settings: Of the run that continues.
        cursor: Over the same data; its place is moved.
        keep_batch: Whether the trainer is still alive, and has the batch that was taken.

    Raises:
        CheckpointError: Another version of areal-lite wrote the bytes, or the cursor is over other data.
    """
    state = read_state(saved)
    cursor.load(state["cursor"])
    return Ledger.restore(settings, state["ledger"], keep_batch=keep_batch)


def read_state(saved: bytes) -> Any:
    """Read what `QueueClient.save` returned; a `CheckpointError` where another version of areal-lite wrote it."""
    try:
        return decode(saved)
    except WireError as error:
        raise CheckpointError(
            f"the queue's state in the checkpoint must come from this version of areal-lite, got {error}: resume with "
            "the version that started the run, or start a new run from the checkpoint's model"
        ) from error
