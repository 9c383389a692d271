"""Simulates how the policies of `queue.on_stale` treat long answers; writes docs/long-answers.json.

    python docs/long_answers.py && python docs/tables.py        about a minute

The ledger is the real one, on a virtual clock. An engine decodes one token of each running sample in `1 + n / half`
units of time: with `half` samples running each is half as fast as one alone. A batch is trained in the time that the
engine takes to decode one with full slots. Lengths are log-normal, and each sample's its own. New weights reach samples
in flight, as in a run; scoring takes no time.
"""

import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.launch.bench.harness import surroundings
from areal_lite.record.length_bias import EDGES, LENGTHS
from areal_lite.sample_queue.ledger import HeldLease, Ledger, LedgerSettings
from areal_lite.sample_queue.staleness import age_limit, trainable_mask
from areal_lite.types import Sample, Score, StopReason, VersionSpan

OLD_FIRST = "wait, old first"
"""`wait` in an engine that, while the trainer waits for them, decodes due groups alone."""
CASES = [
    *((policy, ahead, ahead) for ahead in (1, 4) for policy in ("mask", "drop", "wait", "keep", OLD_FIRST)),
    *((policy, eta, ahead) for eta, ahead in ((4, 1), (12, 4), (20, 4), (32, 4)) for policy in ("mask", "wait")),
]
"""Policy, `queue.max_staleness`, `queue.max_ahead`."""
STEPS, GROUPS, SAMPLES, SLOTS = 300, 8, 8, 64
MEDIAN = 64
"""Tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An engine and the lengths that it decodes."""

    half: float
    sigma: float = 1.0
    """Standard deviation of the logarithm of a length."""
    longest: int = 2048
    """Tokens."""


SCENES = {
    "memory-bound": Scene(half=64.0),
    "compute-bound": Scene(half=1.0),
    "heavy tail": Scene(half=64.0, sigma=1.5, longest=8192),
}
"""A GPU whose batch is far from full; a CPU, where the time grows with the batch; and that GPU with longer answers."""


@dataclass(eq=False)
class Running:
    """A sample in the engine."""

    lease: HeldLease
    length: int
    starts: dict[int, int]
    """First token -> the version that produces it and the tokens after it, up to the next entry."""
    done: float = 0.0

    def sample(self) -> Sample:
        """Return it as the engine would complete it."""
        starts = [start for start in self.starts if start < self.length]
        spans = tuple(
            VersionSpan(version=self.starts[start], start=start, end=end)
            for start, end in pairwise([*starts, self.length])
        )
        nothing = np.zeros(self.length, np.int32)
        return Sample(token_ids=nothing, logprobs=nothing.astype("f4"), spans=spans, stop_reason=StopReason.STOP)


class Simulation:
    """One run."""

    def __init__(self, *, policy: str, eta: int, ahead: int, scene: Scene) -> None:
        self.policy, self.eta, self.scene = policy, eta, scene
        on_stale = policy.partition(",")[0]
        self.limit = age_limit(eta, on_stale=on_stale)
        self.ledger = Ledger(
            LedgerSettings(
                max_staleness=eta, max_ahead=ahead, on_stale=on_stale, total_steps=STEPS, groups_per_step=GROUPS,
                samples_per_group=SAMPLES, lease_timeout_s=1e9,
            )
        )  # fmt: skip
        self.rng = np.random.default_rng(0)
        self.time = self.step_ends = 0.0
        mean = MEDIAN * math.exp(scene.sigma**2 / 2)
        self.step_s = GROUPS * SAMPLES * mean * (1 + SLOTS / scene.half) / SLOTS
        self.batch, self.num_prompts = None, 0
        self.running, self.ended = list[Running](), defaultdict[str, list[Sample]](list)
        self.drawn, self.trained = np.zeros((2, len(LENGTHS), 4))
        self.num_drawn = self.num_trained = 0
        self.ages = Counter()

    def run(self) -> dict:
        """Run all steps; return the figures."""
        ledger = self.ledger
        while ledger.version < STEPS:
            self.fill()
            if self.batch is None and (batch := ledger.take(f"step-{ledger.version}")) is not None:
                self.batch, self.step_ends = batch, self.time + self.step_s
                continue
            self.advance()
        ages = np.array(sorted(self.ages.elements())[::101])
        return {
            "groups_per_time": self.num_trained / self.time,
            "shares": {
                name: (trained / self.num_trained / (drawn / self.num_drawn)).round(3).tolist()
                for name, drawn, trained in zip(LENGTHS, self.drawn, self.trained, strict=True)
                if drawn.sum() > 0.005 * self.drawn.sum()
            },
            "ages": {"mean": float(ages.mean()), "p99": float(np.quantile(ages, 0.99)), "max": max(self.ages)},
            "over_bound": sum(n for age, n in self.ages.items() if age > self.eta) / self.ages.total(),
        }  # fmt: skip

    def fill(self) -> None:
        """Lend groups while there are slots for one, admitting what may be admitted."""
        while len(self.running) + SAMPLES <= SLOTS:
            if not (leases := self.ledger.lease_rollout("w", limit=1)):
                if not self.ledger.capacity():
                    return
                self.ledger.admit(f"p{self.num_prompts}")
                self.num_prompts += 1
            for lease in leases:
                drawn = self.rng.lognormal(math.log(MEDIAN), self.scene.sigma, SAMPLES).round()
                self.num_drawn += 1
                for length in np.clip(drawn, 1, self.scene.longest).astype(int).tolist():
                    self.count(self.drawn, np.ones(length, bool))
                    self.running.append(Running(lease, length, {0: self.ledger.version}))

    def chosen(self) -> list[Running]:
        """Return the samples to decode: only those of due groups, if the trainer waits for them under `OLD_FIRST`."""
        if self.policy != OLD_FIRST or self.batch is not None or self.ledger.missing():
            return self.running
        due = self.ledger.version - self.eta
        return [one for one in self.running if one.lease.group.admitted_version <= due] or self.running

    def advance(self) -> None:
        """Advance the clock to the next end of a sample or of a step."""
        running = self.chosen()
        rate = 1 / (1 + len(running) / self.scene.half)
        seconds = min(((one.length - one.done) / rate for one in running), default=math.inf)
        if self.batch is not None:
            seconds = min(seconds, self.step_ends - self.time)
        assert seconds < math.inf
        self.time += seconds
        for one in running:
            one.done += seconds * rate
        for one in [one for one in running if one.done > one.length - 1e-6]:
            self.running.remove(one)
            self.end(one)
        if self.batch is not None and self.time >= self.step_ends - 1e-9:
            self.publish()

    def end(self, one: Running) -> None:
        """A group whose last sample has ended is scored at once."""
        ended = self.ended[one.lease.lease_id]
        ended.append(one.sample())
        if len(ended) == SAMPLES:
            self.ledger.complete_rollout(one.lease.lease_id, ended)
            (lease,) = self.ledger.lease_verify("v", limit=1)
            self.ledger.complete_verify(lease.lease_id, [Score(reward=float(place % 2)) for place in range(SAMPLES)])

    def publish(self) -> None:
        """The step ends: new weights for every sample in flight; dropped groups leave the engine."""
        batch, self.batch = self.batch, None
        for group in batch.groups:
            self.num_trained += 1
            for sample in group.samples:
                mask = trainable_mask(
                    sample.spans, num_tokens=sample.num_tokens, version=batch.version, max_staleness=self.limit
                )
                self.count(self.trained, mask)
                for span in sample.spans:
                    if (age := batch.version - span.version) <= self.limit:
                        self.ages[age] += span.end - span.start
        self.ledger.complete_step(batch.batch_id)
        for one in self.running:
            one.starts[math.ceil(one.done)] = self.ledger.version  # of two changes at one token the last counts
        gone = set(self.ledger.renew("w", [one.lease.lease_id for one in self.running]))
        self.running = [one for one in self.running if one.lease.lease_id not in gone]

    @staticmethod
    def count(cells: np.ndarray, mask: np.ndarray) -> None:
        """Add a sample's tokens to the cell of its length, by quarter."""
        length = len(mask)
        cells[np.searchsorted(EDGES, length)] += np.bincount(4 * np.flatnonzero(mask) // length, minlength=4)


def main() -> None:
    """Simulate all policies, and write the figures."""
    rows = []
    for policy, eta, ahead in CASES:
        row: dict[str, Any] = {"policy": policy, "eta": eta, "ahead": ahead}
        for name, scene in SCENES.items():
            row[name] = Simulation(policy=policy, eta=eta, ahead=ahead, scene=scene).run()
        rows.append(row)
        speeds = "  ".join(f"{name} {1000 * row[name]['groups_per_time']:.2f}" for name in SCENES)
        print(f"{policy} {eta}, {ahead}: groups per 1,000 units of time: {speeds}", file=sys.stderr, flush=True)
    scenes = {name: asdict(scene) for name, scene in SCENES.items()}
    settings = {
        "steps": STEPS,
        "groups": GROUPS,
        "samples": SAMPLES,
        "slots": SLOTS,
        "median": MEDIAN,
        "scenes": scenes,
    }
    content = {**surroundings(), "settings": settings, "rows": rows}
    (Path(__file__).parent / "long-answers.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
