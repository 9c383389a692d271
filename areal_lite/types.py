"""What travels between the processes: prompts, samples, groups, shards of a batch.

Frozen, keyword-only dataclasses that check themselves on construction. `wire.py` turns each of them
into bytes and back. Nothing here knows Ray, vLLM or torch.

Shape letters: `G` samples of a prompt, `N` groups of a batch, `T` output tokens of one sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)
GIVEN = -1
"""The version of tokens that no model produced, such as an environment's reply. They never train."""


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model produced the end-of-sequence token, which is the last of `token_ids`."""
    STRING = "stop_string"
    """It completed a stop string, whose tokens are the last of `token_ids`."""
    LENGTH = "length"
    """The token limit was reached, without an end-of-sequence token."""


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
    """A verifier's result for one sample: a reward, or the reason why there is none (never both)."""

    reward: float | None = None
    """For the outcome."""
    step_rewards: tuple[StepReward, ...] = ()
    """For intermediate steps, beside `reward`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name."""
    feedback: str = ""
    """Text for people."""
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
        """Sum of outcome and step rewards: the number by which samples of a group are compared."""
        if self.reward is None or not self.step_rewards:
            return self.reward
        return self.reward + sum(step.value for step in self.step_rewards)


def means(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return means by name, each over the mappings that have the name, such as the parts of scores."""
    values: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(each.items() for each in figures):
        values.setdefault(name, []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in sorted(values.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of a prompt, scored or not; with an environment it has several turns."""

    token_ids: Int32
    """[T] output tokens, end-of-sequence included: it is trained like any other. With an environment's replies."""
    logprobs: Float32
    """[T] log-probability of each token under the behaviour policy, temperature applied, in nats; 0 where `GIVEN`."""
    spans: tuple[VersionSpan, ...]
    """The version that produced each token, as stamped by the engine, or `GIVEN`; covers 0..T without gaps."""
    stop_reason: StopReason
    text: str = ""
    """Decoded completion, special tokens left out."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The turns after the prompt as `{"role": ..., "content": ...}`; empty for a plain completion."""
    score: Score | None = None
    """The verifier's result, or why it could not be generated; None before verification."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt of an agent's own call, where it replaces the data row's; else empty."""
    branches: tuple["Sample", ...] = ()
    """Further sequences of the same rollout, where an agent's calls form a tree. Each has `prompt_ids`, which repeat
    the tokens that train in another sequence, and no score: the rollout's reward counts for all of them."""
    routes: npt.NDArray[Any] | None = None
    """[R, L, K] uint8 or uint16: the K experts of each of L layers that the engine chose for the R tokens before the
    last one, of prompt and completion or of their end; None without `rollout.replay_routes`."""
    role: ClassVar[str] = "assistant"
    """The role of this turn in an episode."""
    is_given: ClassVar[bool] = False
    """Whether this turn of an episode is the environment's."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if num_tokens == 0 or len(self.logprobs) != num_tokens:
            raise ValueError(
                f"a sample must have one logprob per token and at least one token, got {num_tokens} tokens "
                f"and {len(self.logprobs)} logprobs"
            )
        edge = 0
        for span in self.spans:
            edge = span.end if span.start == edge else -1  # after a gap no span fits
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
        """Return a placeholder for a sample that could not be generated: one given token, which never trains.

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
        """Return the sample with this score in place of its own."""
        return replace(self, score=score)

    @property
    def sequences(self) -> tuple["Sample", ...]:
        """Itself and its branches: each becomes a row of a batch."""
        return (self, *self.branches)

    @property
    def is_lost(self) -> bool:
        """Whether it could not be generated: the model produced none of its tokens."""
        return all(span.version == GIVEN for span in self.spans)

    @property
    def num_tokens(self) -> int:
        """T, the number of output tokens, given ones included."""
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token that the model produced, in any sequence; None in a lost sample."""
        versions = (span.version for one in self.sequences for span in one.spans if span.version != GIVEN)
        return min(versions, default=None)

    @property
    def step_rewards(self) -> tuple[StepReward, ...]:
        """Rewards of intermediate steps."""
        return () if self.score is None else self.score.step_rewards

    @property
    def total_reward(self) -> float | None:
        """Sum of outcome and step rewards; None before verification and where that failed."""
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
    """One group lent to a worker; alive while the worker's heartbeats name it."""

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
    """Whether another row holds the sample itself."""
    minibatch: int
    """Which optimiser update of the step this row belongs to."""
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int | None = None
    """The data row's own limit; None = the recipe's."""
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One trainer rank's part of a batch: its own rows, and every group's rewards."""

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
