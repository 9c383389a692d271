"""Keyword builders and a clock for the tests of the ledger."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.types import Sample, Score, StopReason, VersionSpan


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_settings(**changes: Any) -> LedgerSettings:
    """Two groups of two samples a step, eta 1, mask, ten steps."""
    defaults: dict[str, Any] = {
        "max_staleness": 1,
        "on_stale": "mask",
        "groups_per_step": 2,
        "samples_per_group": 2,
        "total_steps": 10,
    }
    return LedgerSettings(**defaults | changes)


def version_spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Join tokens of one version that stand together."""
    spans, start = [], 0
    for version, tokens in groupby(versions):
        end = start + len(list(tokens))
        spans.append(VersionSpan(version=version, start=start, end=end))
        start = end
    return tuple(spans)


def make_sample(*, versions: Sequence[int] = (0, 0, 0), **changes: Any) -> Sample:
    """One token per entry of `versions`."""
    defaults: dict[str, Any] = {
        "token_ids": np.arange(len(versions), dtype=np.int32),
        "logprobs": np.zeros(len(versions), dtype=np.float32),
        "spans": version_spans(versions),
        "stop_reason": StopReason.STOP,
    }
    return Sample(**defaults | changes)


def make_samples(*versions: Sequence[int]) -> list[Sample]:
    """One sample per argument."""
    return [make_sample(versions=each) for each in versions]


def make_scores(*rewards: float | str) -> list[Score]:
    """A number is a reward, a word the reason why there is none."""
    return [Score(failure=reward) if isinstance(reward, str) else Score(reward=reward) for reward in rewards]


def bring_to_ready(ledger: Ledger, prompt_id: str) -> str:
    """Admit one prompt and bring it to `ready`; its tokens have the present version."""
    tokens = [ledger.version]
    return play(ledger, prompt_id, make_samples(tokens, tokens), make_scores(0.0, 1.0))


def do_step(ledger: Ledger) -> None:
    """Fill what is missing for a batch, and train it."""
    name = f"step-{ledger.version}"
    for number in range(ledger.missing()):
        bring_to_ready(ledger, f"{name}/{number}")
    assert ledger.take(name) is not None
    ledger.complete_step(name)


def play(ledger: Ledger, prompt_id: str, samples: Sequence[Sample], scores: Sequence[Score]) -> str:
    """Admit one prompt, and hand in these samples and their scores; returns the group."""
    group_id = ledger.admit(prompt_id)
    (rollout,) = ledger.lease_rollout("rollout/0", limit=1)
    assert ledger.complete_rollout(rollout.lease_id, samples)
    (verify,) = ledger.lease_verify("verifier/0", limit=1)
    assert ledger.complete_verify(verify.lease_id, scores)
    return group_id
