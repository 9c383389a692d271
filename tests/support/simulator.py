"""A discrete-event simulation of a whole run around the real ledger, on a virtual clock.

Rollout workers with a number of slots, a verifier worker and one trainer make the requests that the real ones make;
durations are drawn, and nothing is computed. Weight updates reach running generations, so that one sample carries
several version spans. Workers, trainer and the whole job can be lost.

The simulation keeps its own record of the version of every token and of every group trained, and checks them as it
goes: the ledger is not asked whether it is right.

    1. a worker with room asks: groups are admitted and lent, their ends are scheduled
    2. an end comes: the samples get the versions that were published meanwhile, and go to the verifier
    3. the trainer takes a batch when there is one; its step's end is scheduled
    4. the end comes: the version moves for every token decoded from now on
    5. every few seconds heartbeats name the leases still held, and leases without one expire
"""

import copy
import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ledger_builders import FakeClock, make_sample, return_batch

from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.ledger import Batch, HeldLease, Ledger, LedgerSettings
from areal_lite.sample_queue.staleness import age_limit, trainable_mask
from areal_lite.types import Score

HEARTBEAT_S = 3.0
NUM_TOKENS = 8
"""Output tokens of a sample; how long one takes to decode is what varies."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What happens in a run besides the usual."""

    ledger: LedgerSettings
    seed: int = 0
    num_rollout_workers: int = 2
    slots: int = 16
    """Groups a worker holds at once."""
    generation_median_s: float = 2.0
    generation_sigma: float = 0.5
    slow_fraction: float = 0.05
    """Share of groups that take 20 times as long."""
    verify_s: float = 0.1
    train_s: float = 1.0
    equal_reward_fraction: float = 0.0
    """Share of groups whose rewards are all equal."""
    skip_share: Callable[[int], float] = field(default=lambda version: 0.0)
    """Share of trainer steps at a version whose update is skipped for a non-finite norm."""
    worker_loss: float = 0.0
    """Chance per worker and heartbeat to hang or die with everything it holds."""
    trainer_loss: float = 0.0
    """Chance per step that the trainer is lost and the batch goes back."""
    crash_every: int = 0
    """Steps between losses of the whole job, each resumed from the last save, half as many steps ago; 0 = never."""


@dataclass(kw_only=True)
class Report:
    """What happened, in numbers."""

    steps: int = 0
    skipped_steps: int = 0
    oldest_token_taken: int = 0
    """Largest age of any token in a batch: what would have been trained without masking."""
    oldest_token_trained: int = 0
    """Largest age of a token that carried a gradient."""
    tokens_trained: int = 0
    tokens_masked: int = 0
    admitted_while_training: int = 0
    leases_lost: int = 0
    late_results: int = 0
    """Results that came after their lease had ended."""
    resumes: int = 0
    duration_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Worker:
    """One worker process, by name, with the leases it believes it holds."""

    name: str
    slots: int
    held: set[str] = field(default_factory=set)

    @property
    def room(self) -> int:
        """Free slots."""
        return self.slots - len(self.held)


class Simulation:
    """One run; see the module's trace."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.settings = scenario.ledger
        self.random = random.Random(scenario.seed)
        self.clock = FakeClock()
        self.ledger = Ledger(self.settings, clock=self.clock)
        self.report = Report()
        self.num_prompts = 0
        self.truth: dict[str, list[list[int]]] = {}
        """Version of each token of each sample, of groups with samples."""
        self.trained: set[str] = set()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.update_times, self.update_versions = [0.0], [0]
        self.start_processes()
        self.save()

    # Driving

    def run(self, *, max_events: int = 200_000) -> Report:
        """Run until all steps are done.

        Raises:
            AssertionError: An invariant is broken, or the steps are not done after `max_events`.
        """
        self.after(0.0, self.send_heartbeats)
        self.ask_for_work()
        while self.ledger.version < self.settings.total_steps:
            assert self.num_events < max_events, (
                f"no end in sight at version {self.ledger.version}: {self.ledger.counts()}"
            )
            self.clock.now, _, action = heapq.heappop(self.events)
            action()
            self.ask_for_work()
            self.check_books()
        self.ledger.abandon_outstanding()
        self.report.steps = self.ledger.version
        self.report.duration_s = self.clock.now
        self.report.counts = self.ledger.counts()
        return self.report

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action of the present processes."""
        self.num_events += 1
        heapq.heappush(self.events, (self.clock.now + seconds, self.num_events, action))

    def start_processes(self) -> None:
        """New processes, with nothing in their hands."""
        self.rollout_workers = [
            Worker(f"rollout/{index}", self.scenario.slots) for index in range(self.scenario.num_rollout_workers)
        ]
        self.verifier = Worker("verifier/0", self.settings.groups_per_step)
        self.batch: Batch | None = None

    def ask_for_work(self) -> None:
        """Everybody with room asks for work."""
        for worker in self.rollout_workers:
            if worker.room:
                self.ask_for_prompts(worker)
        if self.verifier.room:
            for lease in self.ledger.lease_verify(self.verifier.name, limit=self.verifier.room):
                self.begin(self.verifier, lease, self.scenario.verify_s, self.finish_verification)
        if self.batch is None:
            self.take()

    def ask_for_prompts(self, worker: Worker) -> None:
        leases = self.ledger.lease_rollout(worker.name, limit=worker.room)
        for _ in range(min(worker.room - len(leases), self.ledger.capacity())):
            self.num_prompts += 1
            self.ledger.admit(f"train/0/{self.num_prompts}")
            self.report.admitted_while_training += self.batch is not None
        for lease in leases + self.ledger.lease_rollout(worker.name, limit=worker.room - len(leases)):
            seconds = self.random.lognormvariate(
                math.log(self.scenario.generation_median_s), self.scenario.generation_sigma
            )
            if self.random.random() < self.scenario.slow_fraction:
                seconds *= 20
            self.begin(worker, lease, seconds, self.finish_generation)

    def begin(self, worker: Worker, lease: HeldLease, seconds: float, end: Callable[..., bool]) -> None:
        """Hold a lease until its end; a result comes even if the lease ended before."""
        worker.held.add(lease.lease_id)
        began = self.clock.now

        def finish() -> None:
            self.report.late_results += not end(lease, began)
            worker.held.discard(lease.lease_id)

        self.after(seconds, finish)

    # Results

    def finish_generation(self, lease: HeldLease, began: float) -> bool:
        """Every sample decodes at its own even pace; each token is of the version published last before it."""
        duration = self.clock.now - began
        versions = [
            [self.version_at(began + duration * share * (token + 1) / NUM_TOKENS) for token in range(NUM_TOKENS)]
            for share in [1.0] + [self.random.uniform(0.2, 1.0) for _ in range(self.settings.samples_per_group - 1)]
        ]
        accepted = self.ledger.complete_rollout(lease.lease_id, [make_sample(versions=each) for each in versions])
        if accepted:
            self.truth[lease.group.group_id] = versions
        return accepted

    def version_at(self, time_s: float) -> int:
        return self.update_versions[bisect_right(self.update_times, time_s) - 1]

    def finish_verification(self, lease: HeldLease, began: float) -> bool:
        equal = self.random.random() < self.scenario.equal_reward_fraction
        scores = [Score(reward=float(not equal and place % 2)) for place in range(len(lease.group.samples))]
        return self.ledger.complete_verify(lease.lease_id, scores)

    # Training

    def take(self) -> None:
        self.batch = self.ledger.take(f"batch-{self.ledger.version}")
        if self.batch is not None:
            self.after(self.scenario.train_s, self.finish_step)

    def finish_step(self) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None
        if self.random.random() < self.scenario.trainer_loss:
            return_batch(self.ledger)
            return
        if self.random.random() < self.scenario.skip_share(batch.version):
            self.report.skipped_steps += 1
        else:
            for group in batch.groups:
                self.learn_from(group, batch.version)
        ids = {group.group_id for group in batch.groups}
        assert len(ids) == self.settings.groups_per_step
        assert not ids & self.trained, "a group was trained twice"
        self.trained |= ids
        self.publish(batch.batch_id)

    def learn_from(self, group: GroupRecord, version: int) -> None:
        """I1: what the trainer's mask lets through, against the simulation's own record."""
        for sample, versions in zip(group.samples, self.truth[group.group_id], strict=True):
            limit = age_limit(self.settings.max_staleness, on_stale=self.settings.on_stale)
            mask = trainable_mask(sample.spans, num_tokens=NUM_TOKENS, version=version, max_staleness=limit)
            ages = [version - token for token in versions]
            trained = [age for age, keep in zip(ages, mask.tolist(), strict=True) if keep]
            assert max(trained, default=0) <= limit, "a token over age was trained"
            self.report.oldest_token_taken = max(self.report.oldest_token_taken, *ages)
            self.report.oldest_token_trained = max([self.report.oldest_token_trained, *trained])
            self.report.tokens_trained += len(trained)
            self.report.tokens_masked += len(ages) - len(trained)

    def publish(self, batch_id: str) -> None:
        self.ledger.complete_step(batch_id)
        self.set_version(self.ledger.version)
        period = self.scenario.crash_every
        if period and self.ledger.version % period == period // 2:
            self.save()
        if period and self.ledger.version == period * (self.report.resumes + 1):
            self.crash_and_resume()

    def set_version(self, version: int) -> None:
        """All tokens from now on are of this version."""
        self.update_times.append(self.clock.now)
        self.update_versions.append(version)

    # Losses

    def send_heartbeats(self) -> None:
        for worker in [*self.rollout_workers, self.verifier]:
            if self.random.random() < self.scenario.worker_loss:
                self.kill(worker)
            for lease_id in self.ledger.renew(worker.name, sorted(worker.held)):
                worker.held.remove(lease_id)
        self.report.leases_lost += len(self.ledger.expire())
        self.after(HEARTBEAT_S, self.send_heartbeats)

    def kill(self, worker: Worker) -> None:
        """The process hangs, and answers later, or dies, and the queue is told; one of the same name replaces it."""
        worker.held.clear()
        if self.random.random() < 0.5:
            self.report.leases_lost += len(self.ledger.forget(worker.name))

    def save(self) -> None:
        self.saved: dict[str, Any] = {
            "ledger": copy.deepcopy(self.ledger.state()),
            "trained": set(self.trained),
            "truth": dict(self.truth),
            "num_prompts": self.num_prompts,
        }

    def crash_and_resume(self) -> None:
        """Every process is lost, and with it everything since the save."""
        self.report.resumes += 1
        self.ledger = Ledger.restore(self.settings, self.saved["ledger"], clock=self.clock)
        self.trained, self.truth = set(self.saved["trained"]), dict(self.saved["truth"])
        self.num_prompts = self.saved["num_prompts"]
        self.events.clear()
        self.start_processes()
        self.set_version(self.ledger.version)
        self.after(0.0, self.send_heartbeats)

    # Books

    def check_books(self) -> None:
        """I2, and the bound on what is outstanding."""
        counts = self.ledger.counts()
        ended = sum(counts[state] for state in ("trained", "rejected", "failed", "stale", "abandoned"))
        assert counts["admitted"] == ended + counts["outstanding"]
        assert counts["trained"] == len(self.trained)
        steps_left = self.settings.total_steps - self.ledger.version
        ahead = self.settings.max_staleness if self.settings.max_ahead is None else self.settings.max_ahead
        limit = min(ahead + 1, steps_left) * self.settings.groups_per_step
        assert counts["outstanding"] <= limit, "more outstanding than admission permits"
