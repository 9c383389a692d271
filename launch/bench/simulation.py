"""Simulates a run on a virtual clock: the real ledger, with engines and a trainer that only take time.

    engines lease groups ──► decode their samples together ──► verifier, `verify_s` later ──► ready groups
       ▲                                                                                          │ a batch
       └── new weights, after a pause ◄── publication ◄── trainer, for the seconds of its tokens ◄─┘

Every sample that runs in an engine gains a token per decoding step, and a step takes longer with more samples and more
context. So an engine needs one number for all of them, the tokens decoded since the start (`work`): a sample that began
at 100 with a length of 20 ends at 120, wherever the clock stands by then.
"""

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from areal_lite.config.section import Section
from areal_lite.launch.bench.modes_figures import measured_steps
from areal_lite.record.length_bias import EDGES, LENGTHS
from areal_lite.sample_queue.ledger import Batch, HeldLease, Ledger, LedgerSettings
from areal_lite.sample_queue.staleness import age_limit
from areal_lite.types import Sample, Score, StopReason, VersionSpan

_LONGEST = 2**20
_TOKENS, _LOGPROBS = np.zeros(_LONGEST, np.int32), np.zeros(_LONGEST, np.float32)
_SCORES = (Score(reward=0.0), Score(reward=1.0))
_DRAWN = 4096
"""Lengths drawn at once."""


class Inputs(Section):
    """What a run is made of, and the seconds that each part takes."""

    engines: int = Field(1, ge=1)
    """rollout workers"""
    slots: int = Field(256, ge=1)
    """samples that an engine decodes at once"""
    decode_s: float = Field(0.01, ge=0)
    """seconds of a decoding step, however few samples run: reading the weights"""
    decode_sample_s: float = Field(0.0, ge=0)
    """seconds more for each running sample"""
    decode_context_s: float = Field(0.0, ge=0)
    """seconds more for each token of the running samples' contexts: reading the KV cache"""
    prefill_s: float = Field(0.0, ge=0)
    """seconds per token of a prompt; after a publication, of every running context"""
    pause_s: float = Field(0.0, ge=0)
    """seconds that a publication stops engines and trainer"""
    verify_s: float = Field(0.0, ge=0)
    """seconds until a generated group is scored"""
    train_s: float = Field(0.0, ge=0)
    """seconds of a trainer step, whatever its tokens"""
    train_token_s: float = Field(0.0, ge=0)
    """seconds more for each token of the batch, prompts included"""
    prompt_tokens: int = Field(0, ge=0)
    """tokens of a prompt"""
    median: float = Field(64.0, gt=0)
    """median length of a completion, in tokens; lengths are log-normal, and each sample's its own"""
    sigma: float = Field(1.0, ge=0)
    """standard deviation of the logarithm of a length"""
    longest: int = Field(2048, ge=1, le=_LONGEST)
    """tokens at which a completion is cut off"""
    lengths: Mapping[Annotated[int, Field(ge=1, le=_LONGEST)], PositiveInt] = Field(default_factory=dict)
    """completions by length, of a run, in place of median and sigma"""
    equal_rewards: float = Field(0.0, ge=0, lt=1)
    """share of groups whose rewards are all equal"""
    gpus: int = Field(0, ge=0)
    """of all engines and ranks, for the cost"""
    price_per_gpu_hour: float = Field(0.0, ge=0)
    """0 = unknown"""

    def _problems(self) -> Iterable[str]:
        if not self.decode_s + self.decode_sample_s + self.decode_context_s:
            yield "a decoding step takes no time: set decode_s, decode_sample_s or decode_context_s above 0"

    def draw(self, rng: np.random.Generator) -> Iterator[Any]:
        """Yield blocks of lengths without end."""
        values, counts = (np.array(list(part)) for part in (self.lengths.keys(), self.lengths.values()))
        while True:
            if self.lengths:
                yield rng.choice(values, _DRAWN, p=counts / counts.sum())
            else:
                drawn = rng.lognormal(math.log(self.median), self.sigma, _DRAWN).round()
                yield np.clip(drawn, 1, self.longest).astype(int)


@dataclass(eq=False, slots=True)
class _Group:
    """A lent group, while an engine decodes it."""

    lease: HeldLease
    size: int
    samples: list[Sample] = field(default_factory=list)
    is_wanted: bool = True
    """False once the ledger has dropped it."""


class Engine:
    """Decodes samples; every running one at the same pace."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._now = self._work = 0.0
        self._stalled_until = 0.0
        self._running: list[tuple[float, int, float, _Group]] = []
        """A heap: work at the end, a number that breaks ties, work at the begin, group."""
        self._waiting: deque[tuple[int, _Group]] = deque()
        """Lengths of the samples without a slot."""
        self._numbers = itertools.count()
        self._context = 0.0
        """Tokens of all running samples, prompts included."""
        self._published = [(-1.0, 0)]
        """Work at each publication, and the new version."""
        self.idle_s = self.paused_s = self.slot_seconds = self.tokens = 0.0

    @property
    def room(self) -> int:
        """Samples that fit beside those it has."""
        return self._inputs.slots - len(self._running) - len(self._waiting)

    @property
    def next_end(self) -> float:
        """When the next sample ends; infinity if none runs."""
        if not self._running:
            return math.inf
        tokens, inputs = self._running[0][0] - self._work, self._inputs
        # Each decoded token makes the contexts of all running samples longer, and the next steps slower.
        growth = inputs.decode_context_s * len(self._running)
        return max(self._now, self._stalled_until) + tokens * (self._step_s + growth * tokens / 2)

    @property
    def _step_s(self) -> float:
        inputs = self._inputs
        return inputs.decode_s + inputs.decode_sample_s * len(self._running) + inputs.decode_context_s * self._context

    def add(self, group: _Group, lengths: Iterable[int]) -> None:
        """Begin a group, after the prefill of its prompt, which its samples share."""
        self._stall(self._inputs.prefill_s * self._inputs.prompt_tokens)
        self._waiting.extend((length, group) for length in lengths)
        self._fill()

    def publish(self, version: int) -> None:
        """Take new weights: running samples continue under them, after their contexts were computed again."""
        self._published.append((self._work, version))
        before = max(self._stalled_until, self._now)
        self._stall(self._inputs.pause_s + self._inputs.prefill_s * self._context)
        self.paused_s += self._stalled_until - before

    def drop_unwanted(self) -> None:
        """Abort the samples of dropped groups."""
        kept = [one for one in self._running if one[3].is_wanted]
        self._context -= sum(
            self._inputs.prompt_tokens + self._work - begun
            for _, _, begun, group in self._running
            if not group.is_wanted
        )
        self._running = kept
        heapq.heapify(kept)
        self._waiting = deque(one for one in self._waiting if one[1].is_wanted)
        self._fill()

    def advance(self, time: float) -> list[_Group]:
        """Decode until a time that is no later than `next_end`; return the groups that are complete."""
        decoding = time - min(max(self._now, self._stalled_until), time)
        running = len(self._running)
        if running:
            tokens = self._decoded(decoding)
            self._work += tokens
            self._context += tokens * running
            self.tokens += tokens * running
            self.slot_seconds += (time - self._now) * running
        else:
            self.idle_s += decoding
        self._now = time
        complete = []
        while self._running and self._running[0][0] <= self._work + 1e-3:
            end, _, begun, group = heapq.heappop(self._running)
            self._context -= self._inputs.prompt_tokens + self._work - begun
            group.samples.append(self._sample(begun, round(end - begun)))
            if len(group.samples) == group.size:
                complete.append(group)
        if len(self._running) < running:
            self._fill()
        return complete

    def _decoded(self, seconds: float) -> float:
        """Return the tokens that each running sample gains: `next_end`'s sum, solved for them."""
        growth, step_s = self._inputs.decode_context_s * len(self._running), self._step_s
        return 2 * seconds / (step_s + math.sqrt(step_s**2 + 2 * growth * seconds)) if seconds else 0.0

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._inputs.slots:
            length, group = self._waiting.popleft()
            heapq.heappush(self._running, (self._work + length, next(self._numbers), self._work, group))
            self._context += self._inputs.prompt_tokens

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, self._now) + seconds

    def _sample(self, begun: float, length: int) -> Sample:
        """Return a completion with the versions of its tokens; of two publications at one token the last counts."""
        place = bisect_right(self._published, begun, key=lambda one: one[0])
        edges, versions = [0], [self._published[place - 1][1]]
        for work, version in self._published[place:]:
            if (edge := math.ceil(work - begun)) >= length:
                break
            if edge == edges[-1]:
                versions[-1] = version
            else:
                edges.append(edge)
                versions.append(version)
        spans = tuple(
            VersionSpan(version=version, start=start, end=end)
            for version, start, end in zip(versions, edges, [*edges[1:], length], strict=True)
        )
        return Sample(token_ids=_TOKENS[:length], logprobs=_LOGPROBS[:length], spans=spans, stop_reason=StopReason.STOP)


class Simulation:
    """One run of `settings.total_steps` steps."""

    def __init__(self, inputs: Inputs, settings: LedgerSettings) -> None:
        self._inputs, self._settings = inputs, settings
        self._now = 0.0
        self._ledger = Ledger(settings, clock=lambda: self._now)
        self._limit = age_limit(settings.max_staleness, on_stale=settings.on_stale)
        self._rng = np.random.default_rng(0)
        self._lengths = (length for block in inputs.draw(self._rng) for length in block.tolist())
        self._engines = [Engine(inputs) for _ in range(inputs.engines)]
        self._ends = [math.inf] * inputs.engines
        """`next_end` of each engine."""
        self._groups: dict[str, _Group] = {}
        """Lent groups by lease."""
        self._verified: deque[tuple[float, _Group]] = deque()
        """When a generated group will be scored."""
        self._batch: Batch | None = None
        self._trained_at = math.inf
        """When the trainer step ends, and the trainer is free again after a publication."""
        self._is_publishing = False
        self._num_prompts = self._num_lent = 0
        self._trainer_idle_s = 0.0
        self._ages, self._first_ages = Counter[int](), list[int]()
        """Trained tokens by age; and the age of each sample's first token."""
        self._tokens_LQ, self._trained_LQ, self._drawn_LQ = np.zeros((3, len(LENGTHS), 4))
        self._marks: list[dict[str, float]] = []
        """Running totals at each publication."""

    def run(self) -> dict[str, Any]:
        """Run all steps; return the figures."""
        while self._ledger.version < self._settings.total_steps:
            self._lend()
            self._take()
            self._advance()
        return self._figures()

    def _lend(self) -> None:
        """Let the engine with the most room lease a group, until there is none to lend or no room."""
        size = self._settings.samples_per_group
        while self._ledger.num_waiting or self._ledger.capacity():
            rooms = [engine.room for engine in self._engines]
            place = rooms.index(max(rooms))
            engine = self._engines[place]
            if engine.room <= 0:
                return
            if not self._ledger.num_waiting:
                self._ledger.admit(f"p{self._num_prompts}")
                self._num_prompts += 1
            (lease,) = self._ledger.lease_rollout(str(place), limit=1)
            group = self._groups[lease.lease_id] = _Group(lease, size)
            lengths = list(itertools.islice(self._lengths, size))
            _count(self._drawn_LQ, np.array(lengths))
            self._num_lent += 1
            self._decode(place)
            engine.add(group, lengths)
            self._ends[place] = engine.next_end

    def _take(self) -> None:
        """Start a trainer step if there is a batch."""
        if self._batch is not None or self._is_publishing:
            return
        self._batch = self._ledger.take(f"step-{self._ledger.version}")
        if self._batch is not None:
            inputs = self._inputs
            lengths = [sample.num_tokens for group in self._batch.groups for sample in group.samples]
            tokens = sum(lengths) + len(lengths) * inputs.prompt_tokens
            self._trained_at = self._now + inputs.train_s + inputs.train_token_s * tokens

    def _advance(self) -> None:
        """Move the clock to the next end of a sample, a verification, a trainer step or a publication."""
        place = min(range(len(self._ends)), key=self._ends.__getitem__)
        scored_at = self._verified[0][0] if self._verified else math.inf
        time = min(self._ends[place], scored_at, self._trained_at)
        assert time < math.inf, f"nothing happens any more: {self._ledger.counts()}"
        if self._batch is None and not self._is_publishing:
            self._trainer_idle_s += time - self._now
        self._now = time
        if time == self._trained_at:
            self._end_step()
        elif time == scored_at:
            self._score(self._verified.popleft()[1])
        else:
            self._decode(place)

    def _decode(self, place: int) -> None:
        """Bring an engine to the present; what it has completed goes to the verifier."""
        engine = self._engines[place]
        for group in engine.advance(self._now):
            if group.is_wanted:
                self._ledger.complete_rollout(group.lease.lease_id, group.samples)
                del self._groups[group.lease.lease_id]
                (group.lease,) = self._ledger.lease_verify("verifier", limit=1)  # the only one that waits
                self._verified.append((self._now + self._inputs.verify_s, group))
        self._ends[place] = engine.next_end

    def _score(self, group: _Group) -> None:
        """Score a generated group; the ledger ignores the scores of one that was dropped meanwhile."""
        is_equal = self._rng.random() < self._inputs.equal_rewards
        scores = [_SCORES[not is_equal and place % 2] for place in range(group.size)]
        self._ledger.complete_verify(group.lease.lease_id, scores)

    def _end_step(self) -> None:
        """End the pause after a publication, or a trainer step: new weights, then that pause."""
        if self._is_publishing:
            self._is_publishing, self._trained_at = False, math.inf
            return
        batch, self._batch = self._batch, None
        assert batch is not None
        self._count_batch(batch)
        self._ledger.complete_step(batch.batch_id)
        self._forget_dropped()
        for place, engine in enumerate(self._engines):
            self._decode(place)
            engine.drop_unwanted()
            engine.publish(self._ledger.version)
            self._ends[place] = engine.next_end
        self._is_publishing, self._trained_at = True, self._now + self._inputs.pause_s
        self._marks.append(self._totals())

    def _forget_dropped(self) -> None:
        """Find the groups whose leases the ledger has ended (`on_stale: drop`)."""
        for lease_id in [lease_id for lease_id in self._groups if self._ledger.find_lease(lease_id) is None]:
            self._groups.pop(lease_id).is_wanted = False

    def _count_batch(self, batch: Batch) -> None:
        lengths, masked = [], []
        for group in batch.groups:
            for sample in group.samples:
                # Versions never fall along a sample, so the tokens over age are its first ones.
                over_age = 0
                for span in sample.spans:
                    tokens, age = span.end - span.start, batch.version - span.version
                    if age > self._limit:
                        over_age += tokens
                    else:
                        self._ages[age] += tokens
                self._first_ages.append(batch.version - sample.spans[0].version)
                lengths.append(sample.num_tokens)
                masked.append(over_age)
        _count(self._tokens_LQ, np.array(lengths))
        _count(self._trained_LQ, np.array(lengths), np.array(masked))

    def _totals(self) -> dict[str, float]:
        engines = self._engines
        return {
            "time": self._now,
            "tokens": sum(engine.tokens for engine in engines),
            "idle": sum(engine.idle_s for engine in engines),
            "paused": sum(engine.paused_s for engine in engines),
            "slots": sum(engine.slot_seconds for engine in engines),
            "trainer_idle": self._trainer_idle_s,
            "trained": float(self._trained_LQ.sum()),
        }

    def _figures(self) -> dict[str, Any]:
        """Return the figures between two publications, as a run's are measured; ages and masks over the whole run."""
        settings, inputs = self._settings, self._inputs
        first, last = measured_steps(settings.total_steps, max_staleness=settings.max_staleness)
        before, after = self._marks[first - 1], self._marks[last - 1]
        gained = {name: after[name] - before[name] for name in after}
        seconds, steps = gained["time"], last - first
        engine_seconds = seconds * inputs.engines
        ages = sorted(self._ages.items())
        gpu_hours = inputs.gpus * seconds / 3600
        return {
            "step_s": seconds / steps,
            "samples_per_s": steps * settings.groups_per_step * settings.samples_per_group / seconds,
            "generated_tokens_per_s": gained["tokens"] / seconds,
            "trained_tokens_per_s": gained["trained"] / seconds,
            "occupancy": gained["slots"] / (engine_seconds * inputs.slots),
            "generator_idle": gained["idle"] / engine_seconds,
            "generator_paused": gained["paused"] / engine_seconds,
            "trainer_idle": gained["trainer_idle"] / seconds,
            "ages": {str(age): tokens for age, tokens in ages},
            "age_mean": sum(age * tokens for age, tokens in ages) / max(1, sum(self._ages.values())),
            "first_token_age_mean": float(np.mean(self._first_ages)),
            "age_max": max(self._ages, default=0),
            "over_bound": sum(n for age, n in ages if age > settings.max_staleness) / max(1, self._ages.total()),
            "masked": 1 - float(self._trained_LQ.sum() / self._tokens_LQ.sum()),
            "masked_by_quarter": (1 - self._trained_LQ.sum(axis=0) / self._tokens_LQ.sum(axis=0)).tolist(),
            "trained_by_length": self._trained_by_length(),
            "gpu_hours_per_step": gpu_hours / steps if gpu_hours else None,
            "gpu_hours_per_million_tokens": 1e6 * gpu_hours / max(1.0, gained["trained"]) if gpu_hours else None,
        }  # fmt: skip

    def _trained_by_length(self) -> dict[str, list[float]]:
        """Return the share of each quarter that trains, by length: of a trained group, over that of a generated one."""
        trained = self._settings.total_steps * self._settings.groups_per_step
        return {
            name: (of_trained / trained / (of_drawn / self._num_lent)).round(3).tolist()
            for name, of_trained, of_drawn in zip(LENGTHS, self._trained_LQ, self._drawn_LQ, strict=True)
            if of_drawn.sum() > 0.005 * self._drawn_LQ.sum()
        }


def _count(cells_LQ: Any, lengths: Any, masked: Any = 0) -> None:
    """Add the tokens of samples to the cells of their lengths, by quarter, without so many first ones of each."""
    edges = lengths[:, None] * np.arange(5) / 4  # token t of a sample of T is in quarter 4 t // T
    edges = np.ceil(edges)
    begins, ends = np.maximum(edges[:, :-1], np.asarray(masked).reshape(-1, 1)), edges[:, 1:]
    np.add.at(cells_LQ, np.searchsorted(EDGES, lengths), np.maximum(ends - begins, 0))


def simulate(inputs: Inputs, settings: LedgerSettings) -> Mapping[str, Any]:
    """Simulate a run; return its figures: seconds, shares of time, tokens by age in steps, GPU hours."""
    return Simulation(inputs, settings).run()
