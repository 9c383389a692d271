"""The ledger: one state machine per group, the staleness bound, and exact conservation.

    waiting ─► leased_rollout ─► generated ─► leased_verify ─► ready ─► taken ─► trained
       ▲            │ lost            ▲            │ lost         ▲        │ trainer lost
       └────────────┘                 └────────────┘              └────────┘
    terminal besides trained: rejected(reason) · failed(reason) · stale · abandoned

At any moment `admitted = trained + rejected + failed + stale + abandoned + outstanding`. The queue server drives it in
a run, a simulator on a virtual clock. It has no socket, no thread and no lock: calls come one at a time. It knows
prompts only by their ids.

Requests about leased work carry the lease id and are safe to repeat: the first valid result wins, and `False` means
that the lease had ended, so the result was ignored.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_lite.errors import LedgerError
from areal_lite.sample_queue import decisions, staleness
from areal_lite.sample_queue.groups import STATE_BEFORE, GroupRecord, GroupState, GroupTable
from areal_lite.sample_queue.leases import HeldLease, LeaseTable, RunningClock
from areal_lite.sample_queue.records import Batch, LedgerSettings
from areal_lite.types import Lease, Sample, Score

__all__ = ["Batch", "HeldLease", "Ledger", "LedgerSettings"]

logger = logging.getLogger(__name__)


_LEASES_SINCE = 2**32
"""More leases than a ledger can give after its state was written: a successor gives none of their ids again."""


class Ledger:
    """Admits, lends, collects and hands out groups, and keeps the state of each."""

    def __init__(self, settings: LedgerSettings, *, clock: Callable[[], float] | None = None, version: int = 0) -> None:
        """Start with no groups.

        Args:
            settings: The bound, the policy and the sizes.
            clock: Seconds that never go back, for leases; None = a `RunningClock`.
            version: Completed trainer steps.
        """
        self._settings = settings
        self._version = version
        self._groups = GroupTable()
        self.clock = clock or RunningClock()
        """Of the leases."""
        self._leases = LeaseTable(timeout_s=settings.lease_timeout_s, clock=self.clock)
        self._batch: Batch | None = None
        self._completed_batch_id = ""

    @property
    def version(self) -> int:
        """Completed trainer steps."""
        return self._version

    @property
    def progress(self) -> int:
        """Number of changes of any group's state, for watchdogs."""
        return self._groups.num_moves

    @property
    def num_waiting(self) -> int:
        """Groups that no worker has yet."""
        return len(self._groups.in_state(GroupState.WAITING))

    # Admission

    def capacity(self) -> int:
        """Return how many more groups may be admitted now."""
        ahead = self._settings.max_ahead
        return staleness.admission_capacity(
            self._groups.num_outstanding,
            version=self._version,
            total_steps=self._settings.total_steps,
            max_ahead=self._settings.max_staleness if ahead is None else ahead,
            groups_per_step=self._settings.groups_per_step,
        )

    def admit(self, prompt_id: str) -> str:
        """Admit the first attempt at a prompt; return its group id.

        Raises:
            LedgerError: There is no capacity, or the prompt is outstanding already.
        """
        if self.capacity() == 0:
            raise LedgerError(
                f"a group may be admitted only while capacity() > 0, got 0 at version {self._version} with "
                f"{self._groups.num_outstanding} groups outstanding: ask again after the next trainer step"
            )
        return self._groups.add(prompt_id, attempt=0, version=self._version).group_id

    # Leases

    def lease_rollout(self, worker: str, *, limit: int) -> list[HeldLease]:
        """Lend up to `limit` waiting groups for generation, those last that came back from a lost worker."""
        leases = self._lend(worker, limit, GroupState.WAITING, GroupState.LEASED_ROLLOUT)
        for lease in leases:
            self._groups.restart_generation(lease.group, version=self._version)
        return leases

    def lease_verify(self, worker: str, *, limit: int) -> list[HeldLease]:
        """Lend up to `limit` generated groups for verification, in the order of admission."""
        return self._lend(worker, limit, GroupState.GENERATED, GroupState.LEASED_VERIFY)

    def knows(self, group_id: str) -> bool:
        """Return whether a group is outstanding."""
        return self._groups.find(group_id) is not None

    def adopt(self, worker: str, lease: Lease) -> bool:
        """Let a worker keep a lease of the ledger that this one replaces.

        A group to verify comes with its samples, which this ledger may not have. `False`: the group has ended, moved
        ahead or is over age, or another worker has it; the worker should stop working on it.
        """
        group, samples = self._groups.find(lease.group.group_id), lease.group.samples
        lendable = (GroupState.WAITING, GroupState.GENERATED) if samples else (GroupState.WAITING,)
        is_known = self._leases.find(lease.lease_id) is not None
        if group is None or group.state not in lendable or lease.version > self._version or is_known:
            return False
        if samples:
            self._check_samples(group, samples)
        versions = [sample.oldest_version for sample in samples]
        oldest = min((version for version in versions if version is not None), default=lease.version)
        is_over_age = staleness.is_over_age(oldest, version=self._version, max_staleness=self._settings.max_staleness)
        if is_over_age and self._settings.on_stale == "drop":
            return False
        group.samples = samples
        self._groups.move(group, GroupState.LEASED_VERIFY if samples else GroupState.LEASED_ROLLOUT)
        self._groups.restart_generation(group, version=oldest)
        self._leases.give(worker, group, lease_id=lease.lease_id)
        return True

    def renew(self, worker: str, lease_ids: Sequence[str]) -> list[str]:
        """Take a heartbeat: the worker still holds these leases, and no others.

        Returns:
            Those that are not its own (any more): it should stop working on them.
        """
        return self._leases.renew(worker, lease_ids)

    def expire(self) -> list[str]:
        """End the leases whose heartbeats stopped, as `forget` does. Returns their ids."""
        return self._give_back(self._leases.end_expired())

    def forget(self, worker: str) -> list[str]:
        """End all leases of a worker known to be dead; their groups go back to the state before. Returns lease ids.

        A group whose prompt has lost `max_attempts` workers ends as `failed(crashes_workers)`.
        """
        return self._give_back(self._leases.end_all_of(worker))

    def take_back(self, lease_ids: Sequence[str]) -> None:
        """Undo leases that never reached their worker: no attempt at their prompts is lost."""
        self._give_back([self._leases.end(lease_id) for lease_id in lease_ids], is_lost=False)

    def find_lease(self, lease_id: str) -> HeldLease | None:
        """Return a living lease, None for any other."""
        return self._leases.find(lease_id)

    def held_by(self, worker: str) -> tuple[int, float | None]:
        """Return how many leases a worker holds, and when the oldest was given (clock reading, seconds)."""
        return self._leases.held_by(worker)

    # Results

    def complete_rollout(self, lease_id: str, samples: Sequence[Sample]) -> bool:
        """Take the samples of a generated group.

        Raises:
            ValueError: There are not G samples, or one is stamped with a version that does not exist yet.
        """
        group = self._leased(lease_id, GroupState.LEASED_ROLLOUT)
        if group is None:
            return False
        self._check_samples(group, samples)
        self._leases.end(lease_id)
        group.samples = tuple(samples)
        self._groups.move(group, GroupState.GENERATED)
        return True

    def complete_verify(self, lease_id: str, scores: Sequence[Score]) -> bool:
        """Take the scores of a group: it becomes ready, rejected or failed.

        Raises:
            ValueError: There is not one score per sample, or one does not fit its sample.
        """
        group = self._leased(lease_id, GroupState.LEASED_VERIFY)
        if group is None:
            return False
        if len(scores) != len(group.samples):
            raise ValueError(
                f"expected one score per sample of {group.group_id}: {len(group.samples)}, got {len(scores)}"
            )
        samples = tuple(
            sample.scored(score) if sample.score is None else sample
            for sample, score in zip(group.samples, scores, strict=True)
        )
        state, reason = decisions.verdict(samples, reject=self._settings.reject)
        # Last, as a score that does not fit its sample has raised by now: the group must not be lost with it.
        self._leases.end(lease_id)
        group.samples = samples
        if state is GroupState.READY:
            self._groups.move(group, state)
        else:
            self._groups.end(group, state, reason=reason)
        return True

    def fail(self, lease_id: str, reason: str) -> bool:
        """End a leased group as `failed(reason)`: it could not be generated or scored."""
        lease = self._leases.find(lease_id)
        if lease is None:
            return False
        self._leases.end(lease_id)
        self._groups.end(lease.group, GroupState.FAILED, reason=reason)
        return True

    # Batches

    def take(self, batch_id: str) -> Batch | None:
        """Take the next batch; the same batch again for the id of the one that is taken.

        Exactly `groups_per_step` ready groups, oldest admitted first. Ready groups without a trainable token end as
        `stale` on the way. Under `on_stale: wait` the batch must also leave no group behind that a later step could
        only train over age.

        Returns:
            The batch, or None while it is not possible yet.

        Raises:
            LedgerError: Another batch is taken, or the one with this id is complete.
        """
        if self._batch is not None:
            self._check_taken(batch_id, self._batch)
            return self._batch
        if batch_id == self._completed_batch_id:
            raise LedgerError(f"every batch needs an id of its own, got {batch_id!r}, which is complete: use a new id")
        chosen = self._choose()
        return None if chosen is None else self._take_out(batch_id, chosen)

    def complete_step(self, batch_id: str) -> None:
        """Count the taken batch as trained and move the version, because its weights are being published.

        Under `on_stale: drop` the groups that the new version puts over age end as `stale`, and their prompts wait for
        another attempt, or end as `failed(too_slow)` after `max_attempts`. Repeating the request changes nothing.

        Raises:
            LedgerError: No batch of this id is taken.
        """
        if batch_id == self._completed_batch_id:
            return
        if self._batch is None:
            raise LedgerError(f"a step is completed after its batch was taken, got {batch_id!r}: call take first")
        self._check_taken(batch_id, self._batch)
        for group in list(self._groups.in_state(GroupState.TAKEN)):
            self._groups.end(group, GroupState.TRAINED)
        self._batch = None
        self._completed_batch_id = batch_id
        self._version += 1
        if self._settings.on_stale == "drop":
            self._drop_over_age()

    def abandon_outstanding(self) -> int:
        """End every outstanding group as `abandoned`, because the run ends; return how many there were."""
        self._leases.end_where(lambda lease: True)
        self._batch = None
        outstanding = list(self._groups.outstanding())
        for group in outstanding:
            self._groups.end(group, GroupState.ABANDONED)
        return len(outstanding)

    # Counts and state

    def counts(self) -> dict[str, int]:
        """Return groups per state, ended ones also as `state(reason)`, and `admitted` and `outstanding`."""
        return self._groups.counts()

    def missing(self) -> int:
        """Return how many ready groups the next batch still needs."""
        return max(0, self._settings.groups_per_step - len(self._groups.in_state(GroupState.READY)))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values and samples that never change.

        The outstanding groups, nearly all of it, come last. Leases do not survive: their groups are as returned.
        """
        return {
            "version": self._version,
            "num_leases": self._leases.num_given,
            "completed_batch_id": self._completed_batch_id,
            "batch": self._batch and [self._batch.batch_id, [group.group_id for group in self._batch.groups]],
            "groups": self._groups.state(version=self._version),
        }

    @classmethod
    def restore(
        cls,
        settings: LedgerSettings,
        state: Mapping[str, Any],
        *,
        clock: Callable[[], float] | None = None,
        keep_batch: bool = False,
    ) -> "Ledger":
        """Build the ledger that `state` describes, under these settings; the taken batch is returned unless kept."""
        ledger = cls(settings, clock=clock, version=state["version"])
        ledger._groups = GroupTable.restore(state["groups"])
        ledger._leases.num_given = state["num_leases"]
        ledger._completed_batch_id = state["completed_batch_id"]
        if keep_batch:
            ledger._leases.num_given += _LEASES_SINCE
        if keep_batch and state["batch"] is not None:
            batch_id, group_ids = state["batch"]
            found = map(ledger._groups.find, group_ids)
            ledger._take_out(batch_id, [group for group in found if group is not None])
        return ledger

    # Inside

    def _lend(self, worker: str, limit: int, before: GroupState, lent: GroupState) -> list[HeldLease]:
        groups = self._groups.in_state(before)[: max(0, limit)]
        for group in groups:
            self._groups.move(group, lent)
        return [self._leases.give(worker, group) for group in groups]

    def _leased(self, lease_id: str, state: GroupState) -> GroupRecord | None:
        lease = self._leases.find(lease_id)
        if lease is not None and lease.group.state is not state:
            raise LedgerError(
                f"lease {lease_id} is for {lease.group.state}, got a result for {state}: check the request"
            )
        return None if lease is None else lease.group

    def _check_samples(self, group: GroupRecord, samples: Sequence[Sample]) -> None:
        if len(samples) != self._settings.samples_per_group:
            raise ValueError(
                f"expected {self._settings.samples_per_group} samples of {group.group_id}, got {len(samples)}: "
                "a group is completed as a whole"
            )
        newest = max(span.version for sample in samples for sequence in sample.sequences for span in sequence.spans)
        if newest > self._version:
            raise ValueError(
                f"expected tokens of versions up to {self._version} in {group.group_id}, got version {newest}: "
                "the ledger's version must move before engines resume on new weights"
            )

    def _give_back(self, leases: Sequence[HeldLease], *, is_lost: bool = True) -> list[str]:
        for lease in leases:
            before = STATE_BEFORE[lease.group.state]
            lease.group.num_lost += is_lost
            if lease.group.num_lost >= self._settings.max_attempts:
                logger.warning("%s lost its worker, as all attempts at its prompt did", lease.lease_id)
                self._groups.end(lease.group, GroupState.FAILED, reason="crashes_workers")
                continue
            if before is GroupState.WAITING:
                self._groups.restart_generation(lease.group, version=self._version)
            self._groups.move(lease.group, before)
        return [lease.lease_id for lease in leases]

    def _take_out(self, batch_id: str, groups: Sequence[GroupRecord]) -> Batch:
        for group in groups:
            self._groups.move(group, GroupState.TAKEN)
        self._batch = Batch(batch_id=batch_id, version=self._version, groups=tuple(groups))
        return self._batch

    def _choose(self) -> list[GroupRecord] | None:
        """Pick the groups of the next batch, or None; ends the groups that turn out to be stale."""
        size = self._settings.groups_per_step
        limit = staleness.age_limit(self._settings.max_staleness, on_stale=self._settings.on_stale)
        if self.missing():
            return None
        chosen: list[GroupRecord] = []
        for group in list(self._groups.in_state(GroupState.READY)):
            if decisions.has_trainable_token(group, version=self._version, max_staleness=limit):
                chosen.append(group)
            else:
                self._groups.end(group, GroupState.STALE)
            if len(chosen) == size:
                return chosen if self._may_take(chosen) else None
        return None

    def _may_take(self, chosen: Sequence[GroupRecord]) -> bool:
        return self._settings.on_stale != "wait" or decisions.may_take(
            chosen, self._groups.by_version(), version=self._version, max_staleness=self._settings.max_staleness
        )

    def _drop_over_age(self) -> None:
        """End the groups that are over age, and start the next attempts."""
        is_over_age = functools.partial(
            staleness.is_over_age, version=self._version, max_staleness=self._settings.max_staleness
        )
        # No token is older than its group's admission, so the other groups cannot be over age.
        admitted = self._groups.by_version().items()
        old = [group for version, groups in admitted if is_over_age(version) for group in groups]
        # A waiting group has no tokens yet.
        over_age = [
            group for group in old if group.state is not GroupState.WAITING and is_over_age(group.oldest_version)
        ]
        over_age.sort(key=lambda group: group.sequence)
        if over_age:
            ended = set(over_age)
            self._leases.end_where(lambda lease: lease.group in ended)
        for group in over_age:
            if group.attempt + 1 < self._settings.max_attempts:
                self._groups.end(group, GroupState.STALE)
                self._groups.add(
                    group.prompt_id, attempt=group.attempt + 1, version=self._version, num_lost=group.num_lost
                )
            else:
                self._groups.end(group, GroupState.FAILED, reason="too_slow")

    @staticmethod
    def _check_taken(batch_id: str, batch: Batch) -> None:
        if batch_id != batch.batch_id:
            raise LedgerError(
                f"one batch is taken at a time, got {batch_id!r} while {batch.batch_id!r} is taken: complete that first"
            )
