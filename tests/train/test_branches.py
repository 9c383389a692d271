"""Rollouts whose calls are a tree, from the ledger's samples to the optimiser's step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from preset_builders import assert_same, config_of, make_trainer
from train_builders import make_rows

from areal_lite import wire
from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.records import Batch
from areal_lite.sample_queue.shards import ShardedBatch
from areal_lite.train.advantages import batch_advantages
from areal_lite.train.batch import PolicyBatch
from areal_lite.types import Prompt, Sample, Score, Shard, StopReason, VersionSpan

REWARDS = np.array([[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 0, 1]], np.float32)
CUT = 2
"""Tokens of a sample's first way, where it is cut in two."""


def part(sample: Sample, start: int, end: int, **changed: Any) -> Sample:
    return Sample(
        token_ids=sample.token_ids[start:end],
        logprobs=sample.logprobs[start:end],
        spans=(VersionSpan(version=5, start=0, end=end - start),),
        stop_reason=sample.stop_reason if start else StopReason.STOP,
        **changed,
    )


def shards(*, cut: bool, num_ranks: int = 1) -> list[Shard]:
    """Deal twelve samples; with `cut`, every third one as two ways, the second behind the tokens of the first."""
    rows = make_rows()
    groups = []
    for group in range(3):
        samples = []
        for row in rows[4 * group : 4 * group + 4]:
            score = Score(reward=float(REWARDS[row.group_index, row.sample_index]))
            sample, length = row.sample, row.sample.num_tokens
            if cut and row.sample_index % 3 == 0 and length > CUT:
                before = (*row.prompt_token_ids, *sample.token_ids[:CUT].tolist())
                branch = part(sample, CUT, length, prompt_ids=before)
                sample = part(sample, 0, CUT, prompt_ids=row.prompt_token_ids, branches=(branch,))
            samples.append(replace(sample, score=score))
        record = GroupRecord(prompt_id=f"train/0/{group}", attempt=0, sequence=group, admitted_version=5)
        # Through the wire, as the queue gets them.
        record.samples = wire.decode(wire.encode(samples), tuple[Sample, ...])
        groups.append(record)
    prompts = [
        Prompt(prompt_id=f"train/0/{n}", text="", token_ids=rows[4 * n].prompt_token_ids, answer="") for n in range(3)
    ]
    batch = ShardedBatch(
        Batch(batch_id="b", version=5, groups=tuple(groups)),
        prompts,
        num_minibatches=1,
        num_ranks=num_ranks,
        run_seed=0,
    )
    num_rows = sum(len(sample.sequences) for group in groups for sample in group.samples)
    assert num_rows == sum(len(batch.shard(rank).rows) for rank in range(num_ranks))
    return [batch.shard(rank) for rank in range(num_ranks)]


def with_same_prompts(shard: Shard) -> Shard:
    """Samples of a group have one prompt in `make_rows` only where they are cut; here all have their own."""
    own = {(row.group_index, row.sample_index): row.prompt_token_ids for row in make_rows()}
    rows = (
        row if row.sample.prompt_ids else replace(row, prompt_token_ids=own[row.group_index, row.sample_index])
        for row in shard.rows
    )
    return replace(shard, rows=tuple(rows))


def test_a_rollout_in_two_ways_trains_as_the_whole(model_folder: str) -> None:
    """Every token once, with the rollout's advantage: loss and weights are those of the uncut samples.

    Seen failing with the data row's prompt before branches, and with branches that are left out.
    """
    config = config_of({"objective": {"preset": "areal"}, "trainer": {"minibatches": 1}})
    whole, cut = (make_trainer(model_folder, config) for _ in range(2))
    (expected,), (got,) = shards(cut=False), shards(cut=True)
    assert len(got.rows) > len(expected.rows) == REWARDS.size
    expected_stats, stats = whole.train_step(with_same_prompts(expected)), cut.train_step(with_same_prompts(got))
    for name in ("loss", "grad_norm", "tokens_trained", "reward_mean", "advantage_std"):
        assert stats[name] == pytest.approx(expected_stats[name], rel=1e-5, abs=1e-6), name
    assert_same(cut.model, whole.model, atol=1e-5)


@pytest.mark.parametrize("objective", [{}, {"gamma": 0.9}, {"overlong_buffer": 0.5}])
def test_a_branch_says_nothing_about_its_group(objective: dict[str, Any]) -> None:
    """The advantages of uncut samples are the same whether others of their group branch behind the same start.

    Seen failing with branches in the places of their rollouts.
    """
    config = config_of({"objective": {"preset": "grpo", **objective}})
    (shard,) = shards(cut=True)
    bare = replace(shard, rows=tuple(row for row in shard.rows if not row.is_branch))
    found = []
    for rows in (shard, bare):
        batch = PolicyBatch.from_shard(rows, config=config, device=torch.device("cpu"))
        batch_advantages(batch, config=config, kl_coef=0.0)
        firsts_T = batch.firsts_B[batch.tokens.rows_T]
        found.append(batch.tokens.advantages_T[firsts_T])
    torch.testing.assert_close(found[0], found[1])


def test_the_ways_of_a_rollout_stay_together() -> None:
    """One rank and one update have them all. Seen failing with ways dealt one by one."""
    owners: dict[tuple[int, int], set[int]] = {}
    for rank, shard in enumerate(shards(cut=True, num_ranks=3)):
        for row in shard.rows:
            owners.setdefault((row.group_index, row.sample_index), set()).add(rank)
    assert len(owners) == REWARDS.size
    assert all(len(ranks) == 1 for ranks in owners.values())


def test_the_oldest_token_of_any_way_counts() -> None:
    (shard,) = shards(cut=True)
    sample = next(row.sample for row in shard.rows if row.sample.branches)
    (branch,) = sample.branches
    old = replace(branch, spans=(VersionSpan(version=1, start=0, end=branch.num_tokens),))
    assert replace(sample, branches=(old,)).oldest_version == 1
    with pytest.raises(ValueError, match="prompt_ids of its own"):
        replace(sample, branches=(replace(old, prompt_ids=()),))
