"""The groups of a run: their states, and the table that counts every one of them.

Only the ledger uses it. The table moves groups between states and counts them; the ledger decides when a group moves
and why.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from areal_lite.errors import LedgerError
from areal_lite.types import Sample
from areal_lite.wire import as_type

_MAX_REASON = 200
"""Characters of a reason: it is a key of the counts."""
_MAX_REASONS = 200
"""Reasons that are counted by themselves; all further ones count as `other`."""


class GroupState(StrEnum):
    """Where a group stands between prompt and gradient."""

    WAITING = "waiting"
    """Admitted; no worker has it, and it has no tokens yet."""
    LEASED_ROLLOUT = "leased_rollout"
    """A rollout worker is generating its samples."""
    GENERATED = "generated"
    """It has samples without rewards."""
    LEASED_VERIFY = "leased_verify"
    """A verifier worker is scoring its samples."""
    READY = "ready"
    """It has rewards and may be taken into a batch."""
    TAKEN = "taken"
    """The trainer is learning from it."""
    TRAINED = "trained"
    """Its trainer step is complete."""
    REJECTED = "rejected"
    """It was valid but teaches nothing, for the counted reason."""
    FAILED = "failed"
    """It could not be generated or scored, for the counted reason."""
    STALE = "stale"
    """It grew too old to train."""
    ABANDONED = "abandoned"
    """The run ended before it was trained."""


OUTSTANDING = tuple(itertools.takewhile(lambda state: state is not GroupState.TRAINED, GroupState))
"""The states of groups that count against admission."""

ENDED = tuple(itertools.dropwhile(lambda state: state is not GroupState.TRAINED, GroupState))
"""The terminal states."""

STATE_BEFORE: Mapping[GroupState, GroupState] = {
    GroupState.LEASED_ROLLOUT: GroupState.WAITING,
    GroupState.LEASED_VERIFY: GroupState.GENERATED,
    GroupState.TAKEN: GroupState.READY,
}
"""The state that a group returns to when its worker, or the trainer, is lost."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupRecord:
    """One outstanding group."""

    prompt_id: str
    attempt: int
    """0 for the first attempt at the prompt."""
    sequence: int
    """Place in the order of admission, unique over the run."""
    admitted_version: int
    """Version when it was admitted or, later, when its current generation started: none of its tokens is older."""
    num_lost: int = 0
    """Leases of its prompt that ended with their worker."""
    state: GroupState = GroupState.WAITING
    samples: tuple[Sample, ...] = ()
    """G samples from `generated` on, with rewards from `ready` on."""

    @property
    def group_id(self) -> str:
        """`prompt_id#attempt`."""
        return f"{self.prompt_id}#{self.attempt}"

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token, or the oldest it can be while the samples are not known."""
        versions = [sample.oldest_version for sample in self.samples]
        return min((version for version in versions if version is not None), default=self.admitted_version)


def _leave_order(group: GroupRecord) -> tuple[int, int]:
    """Return the sort key of the order in which groups leave a state; it stays the same while the group is in it.

    Groups are lent in the order of admission, those that came back from a lost worker after the others, as they may
    have killed it. Ready groups leave by age; one that was generated again is as young as its new tokens. Groups that
    are lent or taken leave in any order.
    """
    if group.state in (GroupState.WAITING, GroupState.GENERATED):
        return group.num_lost, group.sequence
    if group.state is GroupState.READY:
        return group.admitted_version, group.sequence
    return 0, group.sequence


class GroupTable:
    """Every group of a run: the outstanding ones by state, the ended ones as counts by state and reason."""

    def __init__(self) -> None:
        self.num_admitted = 0
        self.num_moves = 0
        """Admissions and changes of state so far."""
        self._by_id: dict[str, GroupRecord] = {}
        self._by_state: dict[GroupState, list[GroupRecord]] = {state: [] for state in OUTSTANDING}  # in `_leave_order`
        self._by_version: dict[int, set[GroupRecord]] = {}
        self._ended: Counter[tuple[GroupState, str]] = Counter()

    @property
    def num_outstanding(self) -> int:
        """Admitted groups that have not ended."""
        return len(self._by_id)

    def add(self, prompt_id: str, *, attempt: int, version: int, num_lost: int = 0) -> GroupRecord:
        """Admit a group; it is `waiting`.

        Raises:
            LedgerError: The same attempt at this prompt is outstanding already.
        """
        group = GroupRecord(
            prompt_id=prompt_id,
            attempt=attempt,
            sequence=self.num_admitted,
            admitted_version=version,
            num_lost=num_lost,
        )
        if self.find(group.group_id) is not None:
            raise LedgerError(
                f"a prompt can be admitted again only after its group has ended, got {prompt_id!r}, which is "
                "outstanding: give every prompt of every epoch its own prompt_id"
            )
        self.num_admitted += 1
        self.num_moves += 1
        self._enter(group)
        return group

    def move(self, group: GroupRecord, state: GroupState) -> None:
        """Bring an outstanding group into another outstanding state."""
        self._leave(group)
        group.state = state
        self._enter(group)
        self.num_moves += 1

    def restart_generation(self, group: GroupRecord, *, version: int) -> None:
        """Note that the tokens of a group without samples will be of this version or later."""
        self._leave(group)
        group.admitted_version = version
        self._enter(group)

    def end(self, group: GroupRecord, state: GroupState, *, reason: str = "") -> None:
        """Bring an outstanding group into a terminal state: it is counted and forgotten."""
        assert state in ENDED
        self._leave(group)
        group.state = state
        key = (state, reason[:_MAX_REASON])
        self._ended[key if key in self._ended or len(self._ended) < _MAX_REASONS else (state, "other")] += 1
        self.num_moves += 1

    def in_state(self, state: GroupState) -> Sequence[GroupRecord]:
        """Return the groups in one outstanding state, first those that leave it next; a list that changes with it."""
        return self._by_state[state]

    def outstanding(self) -> Iterable[GroupRecord]:
        """Return every outstanding group, in no particular order."""
        return self._by_id.values()

    def by_version(self) -> Mapping[int, Collection[GroupRecord]]:
        """Return the outstanding groups by the version they were admitted at, in no particular order."""
        return self._by_version

    def find(self, group_id: str) -> GroupRecord | None:
        """Return an outstanding group, None for any other."""
        return self._by_id.get(group_id)

    def counts(self) -> dict[str, int]:
        """Return groups per state, ended ones also by reason, and `admitted` and `outstanding`."""
        counts = {str(state): len(groups) for state, groups in self._by_state.items()}
        counts |= {str(state): 0 for state in ENDED}
        for (state, reason), number in self._ended.items():
            counts[state] += number
            if reason:
                counts[f"{state}({reason})"] = number
        return counts | {"admitted": self.num_admitted, "outstanding": self.num_outstanding}

    def state(self, *, version: int) -> dict[str, Any]:
        """Return everything as plain values and samples; what is lent or taken is written as returned.

        Args:
            version: Current version: a group that must be generated again starts from it.
        """
        return {
            "num_admitted": self.num_admitted,
            "ended": [[str(state), reason, number] for (state, reason), number in self._ended.items()],
            "outstanding": [_group_state(group, version=version) for group in self.outstanding()],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "GroupTable":
        """Build the table that `state` describes."""
        table = cls()
        table.num_admitted = state["num_admitted"]
        for name, reason, number in state["ended"]:
            table._ended[GroupState(name), reason] = number
        for fields in state["outstanding"]:
            samples = as_type(fields["samples"], tuple[Sample, ...])
            group = GroupRecord(**fields | {"state": GroupState(fields["state"]), "samples": samples})
            table._enter(group)
        return table

    def _enter(self, group: GroupRecord) -> None:
        self._by_id[group.group_id] = group
        bisect.insort(self._by_state[group.state], group, key=_leave_order)
        self._by_version.setdefault(group.admitted_version, set()).add(group)

    def _leave(self, group: GroupRecord) -> None:
        del self._by_id[group.group_id]
        of_state = self._by_state[group.state]
        removed = of_state.pop(bisect.bisect_left(of_state, _leave_order(group), key=_leave_order))
        assert removed is group
        of_version = self._by_version[group.admitted_version]
        of_version.remove(group)
        if not of_version:
            del self._by_version[group.admitted_version]


def _group_state(group: GroupRecord, *, version: int) -> dict[str, Any]:
    is_lent = group.state is GroupState.LEASED_ROLLOUT
    return {
        "prompt_id": group.prompt_id,
        "attempt": group.attempt,
        "sequence": group.sequence,
        "num_lost": group.num_lost,
        "admitted_version": version if is_lent else group.admitted_version,
        "state": str(STATE_BEFORE.get(group.state, group.state)),
        "samples": list(group.samples),
    }
