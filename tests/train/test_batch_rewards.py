"""What a batch earned, by data source and part; and samples that an environment helped to write, in the ledger."""

from typing import Any

import numpy as np
import pytest
from ledger_builders import make_sample, make_settings, play

from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.ledger import Batch, Ledger
from areal_lite.sample_queue.shards import ShardedBatch
from areal_lite.types import Prompt, Sample, Score, StepReward


def scored(**changes: Any) -> Sample:
    return make_sample().scored(Score(**changes))


def taken(**groups: tuple[Sample, ...]) -> ShardedBatch:
    """A batch with one group per keyword, which is the name of its source."""
    found = tuple(
        GroupRecord(prompt_id=f"{source}/0/0", attempt=0, sequence=0, admitted_version=0, samples=samples)
        for source, samples in groups.items()
    )
    return sharded(Batch(batch_id="b", version=0, groups=found))


def sharded(batch: Batch) -> ShardedBatch:
    """Deal a batch to one rank."""
    prompts = [Prompt(prompt_id=group.prompt_id, text="", token_ids=(1,), answer="") for group in batch.groups]
    return ShardedBatch(batch, prompts, num_minibatches=1, num_ranks=1, run_seed=0)


def played(samples: list[Sample], scores: list[Score]) -> Batch:
    """Return the batch of one group that came through a ledger."""
    ledger = Ledger(make_settings(groups_per_step=1, samples_per_group=3))
    play(ledger, "p/0/0", samples, scores)
    batch = ledger.take("b")
    assert batch is not None
    return batch


def test_means_are_over_those_who_have_the_figure() -> None:
    """Worked out by hand; seen failing with failed samples counted as 0, and with means over all samples."""
    batch = taken(
        sums=(scored(reward=1.0, parts={"right": 1.0}), scored(failure="timeout")),
        game=(
            scored(reward=0.5, step_rewards=(StepReward(token=0, value=-0.25),), metrics={"turns": 3.0}),
            scored(reward=0.0, parts={"right": 0.0, "brief": 0.5}, metrics={"turns": 5.0}),
        ),
    )
    assert batch.rewards() == {
        "reward_by_source": {"game": 0.125, "sums": 1.0},  # game: (0.5 - 0.25 + 0) / 2
        "reward_parts": {"brief": 0.5, "right": 0.5},
        "verifier_metrics": {"turns": 4.0},
    }


def test_groups_are_compared_by_totals() -> None:
    """The shard has total rewards, and says that steps have some. Seen failing with the outcomes alone."""
    steps = (StepReward(token=1, value=0.5), StepReward(token=2, value=0.25))
    shard = taken(sums=(scored(reward=1.0, step_rewards=steps), scored(reward=1.0))).shard(0)
    np.testing.assert_array_equal(shard.rewards, np.array([[1.75, 1.0]], np.float32))
    assert shard.has_step_rewards
    assert not taken(sums=(scored(reward=1.0), scored(reward=0.0))).shard(0).has_step_rewards


@pytest.mark.parametrize(("values", "state"), [((0.5, 0.5), "rejected(zero_variance)"), ((0.5, 0.25), "ready")])
def test_equal_outcomes_with_different_steps_teach_something(values: tuple[float, float], state: str) -> None:
    ledger = Ledger(make_settings(reject="zero_variance"))
    scores = [Score(reward=1.0, step_rewards=(StepReward(token=0, value=value),)) for value in values]
    play(ledger, "p/0/0", [make_sample(), make_sample()], scores)
    assert ledger.counts()[state] == 1


def test_scores_reach_the_samples_whole() -> None:
    """Seen failing with only reward and failure carried over."""
    score = Score(reward=1.0, parts={"a": 1.0}, metrics={"b": 2.0}, feedback="well done")
    batch = played([make_sample()] * 3, [score, Score(failure="timeout"), score])
    sample, failed, _ = batch.groups[0].samples
    assert (sample.score, failed.score) == (score, Score(failure="timeout"))


def test_a_lost_sample_leaves_its_group_and_nothing_else() -> None:
    """What could not be generated is masked, keeps its reason whatever the verifier says, and is in no mean."""
    samples = [make_sample(), Sample.lost("workflow:TimeoutError"), make_sample()]
    batch = played(samples, [Score(reward=reward) for reward in (1.0, 0.5, 0.0)])
    expected = [Score(reward=1.0), Score(failure="workflow:TimeoutError"), Score(reward=0.0)]
    assert [sample.score for sample in batch.groups[0].samples] == expected
    np.testing.assert_array_equal(sharded(batch).shard(0).rewards, np.array([[1.0, np.nan, 0.0]], np.float32))
    assert sharded(batch).rewards()["reward_by_source"] == {"p": 0.5}
