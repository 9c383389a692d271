"""The groups of a run: their states, and the table that counts every one of them.

Only the ledger uses it. The table moves groups between states and counts them; the ledger decides when a group moves
and why.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    turn: int | None = None
    """Number of its entry in the order of its state; None without one: an entry with another number is void."""

    @property
    def group_id(self) -> str:
        """`prompt_id#attempt`."""
        return f"{self.prompt_id}#{self.attempt}"

    @property
    def age_order(self) -> tuple[int, int]:
        """Sort key, oldest first. A group that was generated again is as young as its new tokens."""
        return self.admitted_version, self.sequence

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token, or the oldest it can be while the samples are not known."""
        versions = [sample.oldest_version for sample in self.samples]
        return min((version for version in versions if version is not None), default=self.admitted_version)


_LEAVE_ORDER: Mapping[GroupState, Callable[[GroupRecord], tuple[int, int]]] = {
    GroupState.WAITING: lambda group: (group.num_lost, group.sequence),
    GroupState.GENERATED: lambda group: (group.num_lost, group.sequence),
    GroupState.READY: lambda group: group.age_order,
}
"""For states that groups leave in an order: the sort key of that order."""


class GroupTable:
    """Every group of a run: the outstanding ones by state, the ended ones as counts by state and reason."""

    def __init__(self) -> None:
        self.num_admitted = 0
        self.num_moves = 0
        """Admissions and changes of state so far."""
        self._by_state: dict[GroupState, dict[str, GroupRecord]] = {state: {} for state in OUTSTANDING}
        self._by_version: dict[int, set[GroupRecord]] = {}
        # A heap for each such state, of (sort key, turn, group). An entry counts only while the group's `turn` is its
        # own: a group that leaves out of turn has none, or another one if it came back, and its old entry is skipped.
        self._orders: dict[GroupState, list[tuple[tuple[int, int], int, GroupRecord]]] = {}
        self._turns = itertools.count()
        self._ended: Counter[tuple[GroupState, str]] = Counter()

    @property
    def num_outstanding(self) -> int:
        """Admitted groups that have not ended."""
        return sum(len(groups) for groups in self._by_state.values())

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

    def in_state(self, state: GroupState) -> Collection[GroupRecord]:
        """Return the groups in one outstanding state, in no particular order."""
        return self._by_state[state].values()

    def outstanding(self) -> Iterable[GroupRecord]:
        """Yield every outstanding group, in no particular order."""
        return itertools.chain.from_iterable(groups.values() for groups in self._by_state.values())

    def by_version(self) -> Mapping[int, Collection[GroupRecord]]:
        """Return the outstanding groups by the version they were admitted at, in no particular order."""
        return self._by_version

    def pop_first(self, state: GroupState, *, limit: int) -> list[GroupRecord]:
        """Return up to `limit` groups that leave a state next; the caller moves them, or calls `put_back`.

        Groups are lent in the order of admission, those that came back from a lost worker after the others, as they may
        have killed it; ready ones leave by age. The cost does not depend on how many groups there are.
        """
        order = self._orders.get(state, [])
        popped: list[GroupRecord] = []
        while order and len(popped) < limit:
            _, turn, group = heapq.heappop(order)
            if turn == group.turn:
                group.turn = None
                popped.append(group)
        return popped

    def find(self, group_id: str) -> GroupRecord | None:
        """Return an outstanding group, None for any other."""
        return next((groups[group_id] for groups in self._by_state.values() if group_id in groups), None)

    def put_back(self, groups: Sequence[GroupRecord]) -> None:
        """Keep groups that `pop_first` returned in their state."""
        for group in groups:
            group.turn = next(self._turns)
            entry = (_LEAVE_ORDER[group.state](group), group.turn, group)
            heapq.heappush(self._orders.setdefault(group.state, []), entry)

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
        self._by_state[group.state][group.group_id] = group
        self._by_version.setdefault(group.admitted_version, set()).add(group)
        if group.state in _LEAVE_ORDER:
            self.put_back([group])

    def _leave(self, group: GroupRecord) -> None:
        group.turn = None
        del self._by_state[group.state][group.group_id]
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
