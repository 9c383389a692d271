"""Leases: groups lent to workers, kept alive by heartbeats.

Only the ledger uses it. The table knows which worker holds what until when; the ledger decides what happens to a group
whose lease was lost.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from areal_lite.sample_queue.groups import GroupRecord

_LONGEST_STEP_S = 1.0


class RunningClock:
    """Seconds in which this process ran, if it is read often: between two readings at most one passes.

    While a container is paused or a machine moves, no worker can send a heartbeat, and no lease may end for that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at 0; `clock` gives seconds that never go back."""
        self._clock, self._read_at, self._now = clock, clock(), 0.0

    def __call__(self) -> float:
        """Return the seconds since the start."""
        before, self._read_at = self._read_at, self._clock()
        self._now += min(self._read_at - before, _LONGEST_STEP_S)
        return self._now


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A living lease."""

    lease_id: str
    """`group_id@n`, with n unique over the run."""
    worker: str
    group: GroupRecord
    deadline: float
    """Clock reading at which it expires unless a heartbeat names it before, seconds."""


class LeaseTable:
    """The living leases, soonest deadline first."""

    def __init__(self, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self.num_given = 0
        """Leases given so far, over the whole run."""
        self._timeout_s = timeout_s
        self._clock = clock
        # All time-outs are equal and the clock never goes back, so appending keeps the order of deadlines.
        self._leases: OrderedDict[str, HeldLease] = OrderedDict()
        self._by_worker: dict[str, dict[str, float]] = {}  # when each lease was given, oldest first

    def give(self, worker: str, group: GroupRecord, *, lease_id: str = "") -> HeldLease:
        """Lend a group to a worker, under a new id unless an earlier table gave one."""
        now = self._clock()
        self.num_given += 1
        lease = HeldLease(
            lease_id=lease_id or f"{group.group_id}@{self.num_given}",
            worker=worker,
            group=group,
            deadline=now + self._timeout_s,
        )
        self._leases[lease.lease_id] = lease
        self._by_worker.setdefault(worker, {})[lease.lease_id] = now
        return lease

    def find(self, lease_id: str) -> HeldLease | None:
        """Return a living lease, None for any other."""
        return self._leases.get(lease_id)

    def held_by(self, worker: str) -> tuple[int, float | None]:
        """Return how many leases a worker holds, and when the oldest was given."""
        given_at = self._by_worker.get(worker, {})
        return len(given_at), next(iter(given_at.values()), None)

    def end(self, lease_id: str) -> HeldLease:
        """End a living lease and return it."""
        lease = self._leases.pop(lease_id)
        held = self._by_worker[lease.worker]
        del held[lease_id]
        if not held:
            del self._by_worker[lease.worker]
        return lease

    def renew(self, worker: str, lease_ids: Sequence[str]) -> list[str]:
        """Move the deadlines of a worker's leases; return those that it does not hold any more."""
        deadline = self._clock() + self._timeout_s
        dead = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.worker != worker:
                dead.append(lease_id)
                continue
            self._leases[lease_id] = replace(lease, deadline=deadline)
            self._leases.move_to_end(lease_id)
        return dead

    def end_expired(self) -> list[HeldLease]:
        """End and return the leases whose deadline has passed."""
        now = self._clock()
        expired = itertools.takewhile(lambda lease: lease.deadline <= now, self._leases.values())
        return self._end_all(lease.lease_id for lease in expired)

    def end_all_of(self, worker: str) -> list[HeldLease]:
        """End and return the leases of a worker."""
        return self._end_all(self._by_worker.get(worker, ()))

    def end_where(self, condition: Callable[[HeldLease], bool]) -> list[HeldLease]:
        """End and return the leases for which `condition` holds."""
        return self._end_all(lease.lease_id for lease in self._leases.values() if condition(lease))

    def _end_all(self, lease_ids: Iterable[str]) -> list[HeldLease]:
        return [self.end(lease_id) for lease_id in list(lease_ids)]
