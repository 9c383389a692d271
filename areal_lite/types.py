"""What travels between the processes: prompts, samples, groups, shards of a batch.

Frozen, keyword-only dataclasses that check themselves on construction. `wire.py` turns each of them
into bytes and back. Nothing here knows Ray, vLLM or torch.

Shape letters: `G` samples of a prompt, `N` groups of a batch, `T` output tokens of one sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)
GIVEN = -1
"""In place of a version: tokens that no model produced, such as an environment's reply. They never train."""


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model produced the end-of-sequence token, which is the last of `token_ids`."""
    STRING = "stop_string"
    """It completed a stop string, whose tokens are the last of `token_ids`."""
    LENGTH = "length"
    """The token limit was reached; no end-of-sequence token is present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Output tokens `start .. end - 1` were produced by the weights of `version`, or are `GIVEN`."""

    version: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end or self.version < GIVEN:
            raise ValueError(
                f"a version span must have version >= 0 (or {GIVEN} = given) and 0 <= start < end, got "
                f"version={self.version}, start={self.start}, end={self.end}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task from the data source.

    Example: `Prompt(prompt_id="train/0/17", text="7+25=?", token_ids=[...], answer="32", row={})`
    """

    prompt_id: str
    """`source/epoch/index`, stable across runs and resumes."""
    text: str
    token_ids: tuple[int, ...]
    answer: str
    """Reference answer handed to the verifier; empty when the data has none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the data row, handed to the verifier as keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReward:
    """Process supervision: what the step that ends with output token `token` earned, in units of reward."""

    token: int
    """0..T-1."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A verifier's word on one sample: a reward, or the reason there is none (never both)."""

    reward: float | None = None
    """For the outcome."""
    step_rewards: tuple[StepReward, ...] = ()
    """For steps on the way, beside `reward`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward was made of, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name."""
    feedback: str = ""
    """Words for a person."""
    failure: str | None = None
    """Why there is no reward: the verifier gave none, or the sample could not be generated."""

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.failure is None):
            raise ValueError(f"a score must be a reward or a failure, got {self.reward!r} and {self.failure!r}")
        earned = (self.reward or 0.0, self.total or 0.0, *(step.value for step in self.step_rewards))
        if not all(abs(value) <= _LARGEST for value in earned):
            raise ValueError(
                f"a score must hold rewards that float32 can, got {self.reward!r} with {self.step_rewards}: a verifier "
                "that gave no such number is a failure, such as Score(failure='nan')"
            )

    @property
    def total(self) -> float | None:
        """What the sample earned in all, outcome and steps: the number that groups are compared by."""
        if self.reward is None or not self.step_rewards:
            return self.reward
        return self.reward + sum(step.value for step in self.step_rewards)


def means(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return means by name of figures that not everybody has, such as the parts of scores."""
    values: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(each.items() for each in figures):
        values.setdefault(name, []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in sorted(values.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of a prompt, before or after it was scored; of several turns, where an environment answered."""

    token_ids: Int32
    """[T] output tokens, end-of-sequence included: it is trained like any other. With an environment's replies."""
    logprobs: Float32
    """[T] log-probability of each token under the behaviour policy, temperature applied, in nats; 0 where `GIVEN`."""
    spans: tuple[VersionSpan, ...]
    """Which version produced which tokens, as stamped by the engine, or `GIVEN`; covers 0..T without gaps."""
    stop_reason: StopReason
    text: str = ""
    """Decoded completion, special tokens left out."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The turns behind the prompt as `{"role": ..., "content": ...}`; empty for a plain completion."""
    score: Score | None = None
    """The verifier's word on it, or why it could not be generated; None before verification."""
    prompt_ids: tuple[int, ...] = ()
    """What it was generated behind, where that is not the data row's prompt but an agent's own."""
    branches: tuple["Sample", ...] = ()
    """Further ways through the same rollout, where an agent's calls are a tree: each with its own `prompt_ids`, which
    hold all that trains elsewhere, and no score. The rollout's reward is that of every way."""
    routes: npt.NDArray[Any] | None = None
    """[R, L, K] uint8 or uint16: the K experts of each of L layers that the engine chose for the R tokens before the
    last one, of prompt and completion or of their end; None without `rollout.replay_routes`."""
    role: ClassVar[str] = "assistant"
    """Who speaks, where it is a turn of an episode."""
    is_given: ClassVar[bool] = False
    """Whether it is an environment's turn."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if num_tokens == 0 or len(self.logprobs) != num_tokens:
            raise ValueError(
                f"a sample must have one logprob per token and at least one token, got {num_tokens} tokens "
                f"and {len(self.logprobs)} logprobs"
            )
        edge = 0
        for span in self.spans:
            edge = span.end if span.start == edge else -1  # behind a gap nothing fits
        if edge != num_tokens:
            raise ValueError(f"version spans must cover all {num_tokens} tokens without gaps, got {self.spans}")
        if self.spans[-1].version == GIVEN and (self.score is None or self.score.failure is None):
            raise ValueError(f"a sample must end with a token that the model produced, got a given one: {self.spans}")
        if any(not branch.prompt_ids or branch.branches or branch.score for branch in self.branches):
            raise ValueError(
                "a branch must have prompt_ids of its own, no branches and no score: those are the sample's"
            )
        if self.routes is not None and (self.routes.ndim != 3 or self.routes.dtype not in (np.uint8, np.uint16)):
            raise ValueError(
                f"routes must be [tokens, layers, experts] uint8 or uint16, got {self.routes.dtype} of shape "
                f"{self.routes.shape}"
            )
        if any(not 0 <= step.token < num_tokens for step in self.step_rewards):
            raise ValueError(f"step rewards must be at tokens 0..{num_tokens - 1}, got {self.step_rewards}")

    @classmethod
    def lost(cls, failure: str) -> "Sample":
        """Return what stands in a group for a sample that could not be generated: one given token, which never trains.

        Args:
            failure: Why, short and countable.
        """
        return cls(
            token_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            spans=(VersionSpan(version=GIVEN, start=0, end=1),),
            stop_reason=StopReason.STOP,
            score=Score(failure=failure),
        )

    def scored(self, score: Score) -> "Sample":
        """Return the sample with a verifier's word on it in place of any it had."""
        # Not `dataclasses.replace`, which takes twice as long.
        return Sample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self.spans,
            stop_reason=self.stop_reason,
            text=self.text,
            messages=self.messages,
            score=score,
            prompt_ids=self.prompt_ids,
            branches=self.branches,
            routes=self.routes,
        )

    @property
    def sequences(self) -> tuple["Sample", ...]:
        """Itself and its branches: one row of a batch each."""
        return (self, *self.branches)

    @property
    def is_lost(self) -> bool:
        """Whether it could not be generated: nothing in it is the model's."""
        return all(span.version == GIVEN for span in self.spans)

    @property
    def num_tokens(self) -> int:
        """T, the number of output tokens, given ones included."""
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token that the model produced, on any way; None in a lost sample."""
        versions = (span.version for way in self.sequences for span in way.spans if span.version != GIVEN)
        return min(versions, default=None)

    @property
    def step_rewards(self) -> tuple[StepReward, ...]:
        """What the steps on the way earned."""
        return () if self.score is None else self.score.step_rewards

    @property
    def total_reward(self) -> float | None:
        """What the sample earned in all; None before verification and where that failed."""
        return None if self.score is None else self.score.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One attempt at a prompt with its G samples: the unit of admission, leases and baselines."""

    group_id: str
    """`prompt_id#attempt`."""
    prompt: Prompt
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A loan of one group to a worker, alive while the worker's heartbeats name it."""

    lease_id: str
    """Unique over the run; every later request about this work carries it."""
    group: Group
    """Without samples for rollout, with them for verification."""
    version: int
    """Ledger version when the lease was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample of a taken batch, or one of its branches, with its place in the batch."""

    group_index: int
    """0..N-1, the row of `Shard.rewards`."""
    sample_index: int
    """0..G-1, the column of `Shard.rewards`."""
    is_branch: bool = False
    """Whether it is a further way of a rollout that has another row."""
    minibatch: int
    """Which optimiser update of the step this row belongs to."""
    prompt_token_ids: tuple[int, ...]
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one trainer rank gets of a batch: its own rows, and every group's rewards."""

    batch_id: str
    rank: int
    version: int
    """Trainer version when the batch was taken; a token's age is counted from it."""
    rewards: Float32
    """[N, G] total rewards of the whole batch; NaN where the verifier failed."""
    rows: tuple[Row, ...]
    has_step_rewards: bool = False
    """Whether any sample of the whole batch has step rewards: ranks must agree on what they compute together."""

    def __post_init__(self) -> None:
        shape: Sequence[int] = self.rewards.shape
        if len(shape) != 2:
            raise ValueError(f"rewards must be [groups, samples], got shape {tuple(shape)}")
        for row in self.rows:
            if not (row.group_index < shape[0] and row.sample_index < shape[1]):
                raise ValueError(
                    f"row ({row.group_index}, {row.sample_index}) lies outside rewards of shape {tuple(shape)}"
                )
