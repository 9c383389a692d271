"""A random walk over everything that can happen to a ledger, beside a model that is slow and obvious.

The model keeps each group's place and each token's version in plain dictionaries, and knows nothing of spans, indices
or the ledger's own arithmetic. After every request both must agree on every count.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_builders import FakeClock, make_samples, make_scores, make_settings

from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.ledger import Batch, Ledger
from areal_lite.sample_queue.staleness import trainable_mask

TIMEOUT_S = 10.0
SAMPLES = 3
SCORES = st.sampled_from([(0.0, 1.0, 1.0), (0.0, 1.0, "nan"), (1.0, 1.0, "nan"), (0.0, "timeout", "timeout")])
ROLLOUT_WORKERS = st.sampled_from(["rollout/0", "rollout/1"])
WORKERS = ROLLOUT_WORKERS | st.just("verifier/0")
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "max_staleness": st.sampled_from([1, 2, 0]),
    "groups_per_step": st.sampled_from([2, 3, 1]),
    "total_steps": st.sampled_from([1000, 1000, 1000, 5]),
    "reject": st.sampled_from(["none", "zero_variance"]),
    "max_attempts": st.integers(1, 3),
}
"""Settings of the ledger."""
BACK = {"leased_rollout": "waiting", "leased_verify": "generated", "taken": "ready"}


@dataclass
class ModelGroup:
    """What the model knows of one group."""

    place: int
    """In the order of admission."""
    began: int
    """No token is older than this version."""
    lost: int = 0
    """Workers that died with it, or with an earlier attempt."""
    state: str = "waiting"
    tokens: list[list[int]] = field(default_factory=list)
    """Versions of the tokens of each sample."""
    failed: list[bool] = field(default_factory=list)

    def trainable(self, version: int, eta: int) -> bool:
        """Has a scored sample a token that is young enough?"""
        return any(
            version - token <= eta
            for tokens, bad in zip(self.tokens, self.failed, strict=True)
            if not bad
            for token in tokens
        )

    def oldest(self) -> int:
        """Version of the oldest token, as far as known."""
        return min([token for tokens in self.tokens for token in tokens], default=self.began)


@dataclass
class ModelLease:
    """A lease that the model takes to be alive."""

    worker: str
    group_id: str
    kind: str
    deadline: float


@dataclass
class Model:
    """Everything that survives a save."""

    version: int = 0
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    trained: list[str] = field(default_factory=list)
    admitted: int = 0
    completed: str = ""

    def saved(self) -> "Model":
        """A copy with everything given back."""
        twin = copy.deepcopy(self)
        for group in twin.groups.values():
            if group.state == "leased_rollout":
                group.began = self.version
            group.state = BACK.get(group.state, group.state)
        return twin


class LedgerMachine(RuleBasedStateMachine):
    """Rules are requests of the queue server; invariants are I1, I2 and the bound on what is outstanding.

    Seen failing with: `capacity` one group too large; leases that survive `drop`; a result accepted after expiry;
    `STATE_BEFORE` of a taken group set to `generated`; ready groups taken in order of arrival; `may_take` that always
    agrees; the version not moved for a group generated again; `state()` that forgets ended groups; a mask one step too
    generous; failed samples scored 0; lost groups lent first; lost workers forgotten by `state()`; a
    lease that is undone counted as a lost worker; `max_ahead` ignored, and taken for the bound under `wait`.
    """

    on_stale = "mask"

    @initialize(
        drawn=st.fixed_dictionaries(DRAWN),
        fewer_ahead=st.sampled_from([0, 0, 1]),
        stragglers=st.integers(0, 2),
        steps=st.integers(0, 4),
    )
    def start(self, drawn: dict[str, Any], fewer_ahead: int, stragglers: int, steps: int) -> None:
        self.ahead = max(0, drawn["max_staleness"] - fewer_ahead)
        max_ahead = self.ahead if fewer_ahead else None
        fixed = {"on_stale": self.on_stale, "samples_per_group": SAMPLES, "lease_timeout_s": TIMEOUT_S}
        self.settings = make_settings(max_ahead=max_ahead, **fixed, **drawn)
        self.clock = FakeClock()
        self.ledger = Ledger(self.settings, clock=self.clock)
        self.model = Model()
        self.leases: dict[str, ModelLease] = {}
        self.dead: list[str] = []
        self.batch: Batch | None = None
        self.num_batches = 0
        self.num_prompts = 0
        self.checkpoint = (self.ledger.state(), self.model.saved())
        self.admit(stragglers)
        self.lease("rollout", "rollout/1", stragglers)
        self.work_quickly(steps)

    # Helpers

    def limit(self) -> int:
        """Groups that admission permits."""
        left = self.settings.total_steps - self.model.version
        return max(0, min(self.ahead + 1, left)) * self.settings.groups_per_step

    def in_state(self, state: str) -> list[str]:
        """Group ids in the order of admission."""
        groups = self.model.groups
        return sorted((name for name in groups if groups[name].state == state), key=lambda name: groups[name].place)

    def to_lend(self, state: str) -> list[str]:
        """Group ids, those that lost a worker last."""
        return sorted(self.in_state(state), key=lambda name: self.model.groups[name].lost)

    def end_lease(self, lease_id: str) -> str:
        """The lease is dead; returns its group."""
        self.dead.append(lease_id)
        return self.leases.pop(lease_id).group_id

    def lose(self, lease_id: str) -> None:
        """The group goes back to the state before, or ends with the last worker that it may cost."""
        group_id = self.end_lease(lease_id)
        group = self.model.groups[group_id]
        group.lost += 1
        if group.lost == self.settings.max_attempts:
            self.finish(group_id, "failed(crashes_workers)")
            return
        if group.state == "leased_rollout":
            group.began = self.model.version
        group.state = BACK[group.state]

    def finish(self, group_id: str, label: str) -> None:
        """The group ends."""
        del self.model.groups[group_id]
        self.model.ended[label] += 1

    def admit_to_model(self, group_id: str, *, lost: int = 0) -> None:
        self.model.groups[group_id] = ModelGroup(place=self.model.admitted, began=self.model.version, lost=lost)
        self.model.admitted += 1

    # Rollout and verification

    @rule(worker=ROLLOUT_WORKERS, number=st.integers(1, 2), limit=st.integers(1, 2), steps=st.integers(0, 6))
    def lend(self, worker: str, number: int, limit: int, steps: int) -> None:
        """New leases, held until another rule ends them: they become stragglers while others work."""
        self.admit(number)
        self.lease("rollout", worker, limit)
        self.work_quickly(steps)

    def admit(self, number: int) -> None:
        for _ in range(min(number, self.ledger.capacity())):
            self.num_prompts += 1
            self.admit_to_model(self.ledger.admit(f"p{self.num_prompts}"))

    def lease(self, kind: str, worker: str, limit: int) -> None:
        expected = self.to_lend({"rollout": "waiting", "verify": "generated"}[kind])[:limit]
        records = getattr(self.ledger, f"lease_{kind}")(worker, limit=limit)
        assert [record.group.group_id for record in records] == expected
        for record in records:
            group = self.model.groups[record.group.group_id]
            group.state = f"leased_{kind}"
            if kind == "rollout":
                group.began = self.model.version
            assert record.lease_id not in (*self.leases, *self.dead)
            deadline = self.clock.now + TIMEOUT_S
            self.leases[record.lease_id] = ModelLease(worker, record.group.group_id, kind, deadline)

    @precondition(lambda self: self.held("rollout") or self.in_state("generated"))
    @rule(data=st.data(), verify=st.booleans(), steps=st.integers(0, 2))
    def generate(self, data: st.DataObject, verify: bool, steps: int) -> None:
        """Held generations finish; the versions of their tokens grow from the lease's to the present one."""
        for lease_id in self.held("rollout")[: data.draw(st.integers(1, 4))]:
            began = self.model.groups[self.leases[lease_id].group_id].began
            versions = st.lists(st.integers(began, self.model.version), min_size=1, max_size=4).map(sorted)
            self.complete_rollout(lease_id, [data.draw(versions) for _ in range(SAMPLES)])
        self.lease("verify", "verifier/0", 100)
        if verify:
            self.verify(data)
        self.work_quickly(steps)

    @precondition(lambda self: self.held("verify"))
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        """Held verifications finish."""
        for lease_id in self.held("verify"):
            self.complete_verify(lease_id, data.draw(SCORES))

    def work_quickly(self, steps: int) -> None:
        """Whatever waits is generated, scored and trained; leases held longer stay behind."""
        for _ in range(steps):
            if self.batch is not None:
                self.publish(repeat=False)
            self.admit(self.ledger.capacity())
            held = set(self.leases)
            self.lease("rollout", "rollout/0", 100)
            for lease_id in set(self.held("rollout")) - held:
                self.complete_rollout(lease_id, [[self.model.version]] * SAMPLES)
            self.lease("verify", "verifier/0", 100)
            for lease_id in set(self.held("verify")) - held:
                self.complete_verify(lease_id, (0.0, 1.0, 1.0))
            self.take()

    def held(self, kind: str) -> list[str]:
        """Living leases of one kind."""
        return [name for name, lease in self.leases.items() if lease.kind == kind]

    def complete_rollout(self, lease_id: str, tokens: list[list[int]]) -> None:
        group = self.model.groups[self.end_lease(lease_id)]
        group.tokens, group.failed, group.state = tokens, [False] * len(tokens), "generated"
        assert self.ledger.complete_rollout(lease_id, make_samples(*tokens))

    def complete_verify(self, lease_id: str, scores: tuple[float | str, ...]) -> None:
        group_id = self.end_lease(lease_id)
        assert self.ledger.complete_verify(lease_id, make_scores(*scores))
        if "timeout" in scores:
            self.finish(group_id, "failed(timeout)")
        elif self.settings.reject == "zero_variance" and 0.0 not in scores:
            self.finish(group_id, "rejected(zero_variance)")
        else:
            self.model.groups[group_id].state = "ready"
            self.model.groups[group_id].failed = [score == "nan" for score in scores]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        group_id = self.end_lease(lease_id)
        assert self.ledger.fail(lease_id, "reason")
        self.finish(group_id, "failed(reason)")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def undo_lease(self, data: st.DataObject) -> None:
        """It never reached its worker: the group goes back, and no attempt is lost."""
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        self.ledger.take_back([lease_id])
        self.model.groups[self.leases[lease_id].group_id].lost -= 1
        self.lose(lease_id)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def send_late_result(self, data: st.DataObject) -> None:
        """A duplicate, or the result of a worker that was given up: acknowledged, and nothing changes."""
        lease_id = data.draw(st.sampled_from(self.dead))
        progress = self.ledger.progress
        tokens = [self.model.version]
        assert not self.ledger.complete_rollout(lease_id, make_samples(tokens, tokens, tokens))
        assert not self.ledger.complete_verify(lease_id, make_scores(0.0, 1.0, 1.0))
        assert not self.ledger.fail(lease_id, "late")
        assert self.ledger.progress == progress

    # Time

    @rule(worker=WORKERS, every=st.integers(1, 2), seconds=st.integers(0, 6), steps=st.integers(0, 1))
    def heartbeat(self, worker: str, every: int, seconds: int, steps: int) -> None:
        """A worker names all its leases or every second one, and some that are not its own; then time passes."""
        mine = [name for name, lease in self.leases.items() if lease.worker == worker][::every]
        others = [name for name, lease in self.leases.items() if lease.worker != worker] + self.dead[-2:]
        assert self.ledger.renew(worker, others + mine) == others
        for name in mine:
            self.leases[name].deadline = self.clock.now + TIMEOUT_S
        self.work_quickly(steps)
        self.clock.now += seconds
        due = [name for name, lease in self.leases.items() if lease.deadline <= self.clock.now]
        assert sorted(self.ledger.expire()) == sorted(due)
        for name in due:
            self.lose(name)

    @rule(worker=WORKERS)
    def kill_worker(self, worker: str) -> None:
        held = [name for name, lease in self.leases.items() if lease.worker == worker]
        assert sorted(self.ledger.forget(worker)) == sorted(held)
        for name in held:
            self.lose(name)

    # Training

    def expected_batch(self) -> tuple[list[str], list[str] | None]:
        """Groups that end as stale, and the batch (None: not yet)."""
        eta, size = self.settings.max_staleness, self.settings.groups_per_step
        version, groups = self.model.version, self.model.groups
        ready = sorted(self.in_state("ready"), key=lambda name: groups[name].began)
        if len(ready) < size:
            return [], None
        stale: list[str] = []
        chosen: list[str] = []
        for name in ready:
            if len(chosen) < size:
                trains = self.settings.on_stale == "keep" or groups[name].trainable(version, eta)
                (chosen if trains else stale).append(name)
        if len(chosen) < size:
            return stale, None
        behind = sorted(groups[name].began for name in groups if name not in chosen + stale)
        in_time = all(version + 1 + place // size <= began + eta for place, began in enumerate(behind))
        return stale, chosen if in_time or self.settings.on_stale != "wait" else None

    def take(self) -> None:
        """I1 at the moment of taking, against the model's own record of every token."""
        stale, expected = self.expected_batch()
        self.num_batches += 1
        self.batch = self.ledger.take(f"b{self.num_batches}")
        for name in stale:
            self.finish(name, "stale")
        if expected is None:
            assert self.batch is None
            return
        assert self.batch is not None
        assert [group.group_id for group in self.batch.groups] == expected
        assert self.batch.version == self.model.version
        for name, taken in zip(expected, self.batch.groups, strict=True):
            group = self.model.groups[name]
            group.state = "taken"
            self.check_mask(group, taken)
            if self.settings.on_stale in ("wait", "drop"):
                assert self.model.version - group.oldest() <= self.settings.max_staleness

    def check_mask(self, group: ModelGroup, taken: GroupRecord) -> None:
        """The trainer's mask, made from spans, keeps exactly the tokens that are young enough."""
        eta, version = self.settings.max_staleness, self.model.version
        for tokens, sample in zip(group.tokens, taken.samples, strict=True):
            mask = trainable_mask(sample.spans, version=version, max_staleness=eta)
            assert mask.tolist() == [version - token <= eta for token in tokens]

    @rule(action=st.sampled_from(["repeat", "publish", "publish twice"]))
    def train(self, action: str) -> None:
        """The trainer's next request."""
        if self.batch is None:
            self.take()
        elif action == "repeat":
            assert self.ledger.take(self.batch.batch_id) is self.batch
        else:
            self.publish(repeat=action == "publish twice")

    def publish(self, *, repeat: bool) -> None:
        assert self.batch is not None
        self.ledger.complete_step(self.batch.batch_id)
        if repeat:
            self.ledger.complete_step(self.batch.batch_id)
        self.batch = None
        for name in self.in_state("taken"):
            self.model.trained.append(name)
            self.finish(name, "trained")
        self.model.version += 1
        if self.settings.on_stale == "drop":
            self.drop_in_model()

    def drop_in_model(self) -> None:
        """Discard what is over age."""
        groups = self.model.groups
        for name in sorted(groups, key=lambda name: groups[name].place):
            if groups[name].state == "waiting":
                continue
            if self.model.version - groups[name].oldest() <= self.settings.max_staleness:
                continue
            for lease_id in [key for key, lease in self.leases.items() if lease.group_id == name]:
                self.end_lease(lease_id)
            prompt, attempt = name.split("#")
            lost = groups[name].lost
            if int(attempt) + 1 < self.settings.max_attempts:
                self.finish(name, "stale")
                self.admit_to_model(f"{prompt}#{int(attempt) + 1}", lost=lost)
            else:
                self.finish(name, "failed(too_slow)")

    # Saving

    @precondition(lambda self: self.model.version > self.checkpoint[1].version)
    @rule()
    def save(self) -> None:
        self.checkpoint = (self.ledger.state(), self.model.saved())

    @precondition(lambda self: self.model.version > self.checkpoint[1].version + 1)
    @rule()
    def load(self) -> None:
        """Everything since the checkpoint is forgotten, and every process is new."""
        state, model = self.checkpoint
        self.ledger = Ledger.restore(self.settings, copy.deepcopy(state), clock=self.clock)
        self.model = copy.deepcopy(model)
        self.leases, self.dead, self.batch = {}, [], None

    # Invariants

    @invariant()
    def counts_agree(self) -> None:
        """I2: every admitted group is in exactly one counted state."""
        counts = self.ledger.counts()
        totals = {name: number for name, number in counts.items() if "(" not in name}
        outstanding = totals.pop("outstanding")
        assert totals.pop("admitted") == sum(totals.values()) == self.model.admitted
        assert outstanding == len(self.model.groups)
        for state, number in Counter(group.state for group in self.model.groups.values()).items():
            assert counts[state] == number
        for label, number in self.model.ended.items():
            assert counts[label] == number

    @invariant()
    def bound_on_outstanding(self) -> None:
        """Never more than admission permits, the last steps of the run included."""
        assert len(self.model.groups) <= self.limit()
        assert self.ledger.capacity() == self.limit() - len(self.model.groups)

    @invariant()
    def version_and_training(self) -> None:
        """Nothing is trained twice, and the version is the number of completed steps."""
        assert len(set(self.model.trained)) == len(self.model.trained)
        assert self.ledger.version == self.model.version
        assert len(self.model.trained) == self.model.version * self.settings.groups_per_step

    @invariant()
    def leases_agree(self) -> None:
        for lease_id in (*self.leases, *self.dead):
            assert (self.ledger.find_lease(lease_id) is not None) == (lease_id in self.leases)
        counts = self.ledger.counts()
        assert counts["leased_rollout"] + counts["leased_verify"] == len(self.leases)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            outstanding = len(self.model.groups)
            assert self.ledger.abandon_outstanding() == outstanding
            assert self.ledger.counts()["abandoned"] == outstanding
            assert all(self.ledger.find_lease(lease_id) is None for lease_id in self.leases)


class WaitMachine(LedgerMachine):
    """The same walk under `wait`."""

    on_stale = "wait"


class DropMachine(LedgerMachine):
    """The same walk under `drop`."""

    on_stale = "drop"


class KeepMachine(LedgerMachine):
    """The same walk under `keep`: no group is stale, however old its tokens are."""

    on_stale = "keep"


SETTINGS = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestMask, TestWait, TestDrop = LedgerMachine.TestCase, WaitMachine.TestCase, DropMachine.TestCase
TestKeep = KeepMachine.TestCase
TestMask.settings = TestWait.settings = TestDrop.settings = TestKeep.settings = SETTINGS
