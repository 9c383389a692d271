"""Samples of several turns, rewards for steps, and rollouts whose calls are a tree, through the trainer.

Turns are compared with a second implementation."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ledger_builders import make_sample
from plain_trainer import PlainTrainer
from preset_builders import assert_same, config_of, make_trainer, near_behaviour
from train_builders import make_rows, make_shard

from areal_lite import wire
from areal_lite.sample_queue.groups import GroupRecord
from areal_lite.sample_queue.records import Batch
from areal_lite.sample_queue.shards import ShardedBatch
from areal_lite.train.advantages import batch_advantages
from areal_lite.train.batch import PolicyBatch
from areal_lite.types import GIVEN, Prompt, Row, Sample, Score, Shard, StepReward, StopReason, VersionSpan

NAN = float("nan")
OUTCOMES = np.array([[1, 0, NAN, 1], [0, 0, 0, 1], [1, 1, 1, NAN]], np.float32)
KNOBS: dict[str, dict[str, Any]] = {
    "discount": {"objective": {"gamma": 0.9}},
    "gae-discount": {"objective": {"preset": "ppo", "gamma": 0.9, "gae_lambda": 0.8}},
    "monte-carlo": {"objective": {"preset": "ppo", "gamma": 0.9}, "critic": {"target": "monte_carlo"}},
    "m2po-and-clip": {"objective": {"behaviour_filter": "m2po", "m2po_threshold": 0.01}},
    "geometric": {"objective": {"behaviour_filter": "geometric", "geometric_low": 0.95, "geometric_high": 1.1}},
    "dual-clip": {"objective": {"clip_low": None, "clip_high": None, "clip_dual": 1.01}},
    "shaping": {"objective": {"reward_scale": 3.0, "reward_bias": -1.0, "reward_clip": 1.5, "baseline": "none"}},
    "varied-groups": {"objective": {"sample_filter": "varied_groups", "aggregation": "sequence_mean"}},
    "weight-decay": {"objective": {"preset": "ppo"}, "trainer": {"weight_decay": 5.0}},
    "value-clip": {"objective": {"preset": "ppo"}, "critic": {"value_clip": 0.01}},
}
NAMES = ["areal", "grpo", "rloo", "reinforce", "reinforce_pp", "ppo", *KNOBS]
"""Of the presets one of each baseline and scale; the losses of all are in test_presets.py, weights and KL terms in
test_enumerable_trainer.py."""


def with_turns(row: Row, *, scored: bool) -> Row:
    """Have an environment write two tokens in the middle, and give rewards before, inside and behind its reply."""
    sample = row.sample
    spans = [(sample.spans[0].version, 0, 2), (GIVEN, 2, 4), (sample.spans[-1].version, 4, sample.num_tokens)]
    steps = (StepReward(token=1, value=0.5), StepReward(token=3, value=-0.25), StepReward(token=4, value=0.125))
    logprobs = sample.logprobs.copy()
    logprobs[2:4] = 0.0
    changed = dataclasses.replace(
        sample,
        logprobs=logprobs,
        spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        score=Score(reward=0.0, step_rewards=steps) if scored else None,
    )
    return dataclasses.replace(row, sample=changed)


@pytest.fixture(scope="module")
def rows(model_folder: str) -> list[Row]:
    """Every second row that is long enough has turns; two samples could not be generated, the very last among them."""
    made = []
    for index, row in enumerate(near_behaviour(make_rows(old_tokens=2), model_folder, noise=0.3)):
        is_scored = not np.isnan(OUTCOMES[row.group_index, row.sample_index])
        made.append(with_turns(row, scored=is_scored) if index % 2 == 0 and row.sample.num_tokens > 5 else row)
        if not is_scored:
            made[-1] = dataclasses.replace(row, sample=Sample.lost("workflow:TimeoutError"))
    assert sum(len(row.sample.spans) == 3 for row in made) >= 4
    return made


def totals(rows: list[Row]) -> np.ndarray:
    rewards = OUTCOMES.copy()
    for row in rows:
        rewards[row.group_index, row.sample_index] += sum(step.value for step in row.sample.step_rewards)
    return rewards


def turns_shard(rows: list[Row], *, version: int = 5) -> Shard:
    shard = make_shard(rows, rewards=totals(rows), version=version)
    return dataclasses.replace(shard, has_step_rewards=any(row.sample.step_rewards for row in rows))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_a_second_implementation(
    model_folder: str, reference_folder: str, rows: list[Row], name: str
) -> None:
    """Same losses, policy and critic where an environment's replies lie between the model's tokens.

    The token-by-token trainer walks over the model's tokens alone, and adds each reward where it was earned. Some rows
    are stale, some unscored, some without turns. A critic says 0 in its first step, so it gets a second one.

    Seen failing with the replies as time steps of the discount, with their KL charged, with the steps' rewards left at
    the end of the sample, with advantages as the critic's targets, with the proximal pass left to the updates where the
    plan needs it, with the sample filter passed over, with weight decay of norms and of the critic's bias, without the
    dual clip, and with m2po's choice of the first update, or from the proximal policy, for the second.
    """
    config = config_of(KNOBS.get(name, {"objective": {"preset": name}}), reference_folder)
    trainer, plain = make_trainer(model_folder, config), PlainTrainer(config, model_folder, version=5)
    for version in (5, 6) if config.objective.baseline == "critic" else (5,):
        plain.step(rows, totals(rows))
        stats = trainer.train_step(turns_shard(rows, version=version))
        assert stats["loss"] == pytest.approx(np.mean(plain.losses[-2:]), rel=1e-3, abs=1e-5)
        if stats["value_loss"] is not None:
            assert stats["value_loss"] == pytest.approx(np.mean(plain.value_losses[-2:]), rel=1e-3)
    assert_same(trainer.model, plain.model, atol=5e-4)  # Adam divides small gradients by their size
    if trainer.critic is not None:
        assert_same(trainer.critic.model, plain.critic)


def test_given_tokens_never_train(model_folder: str, rows: list[Row]) -> None:
    """They are outside the loss mask, no age is counted for them, and they are not counted as stale."""
    config = config_of({"objective": {"preset": "areal"}})
    batch = PolicyBatch.from_shard(turns_shard(rows), config=config, device=torch.device("cpu"))
    given = sum(span.end - span.start for row in rows for span in row.sample.spans if span.version == GIVEN)
    assert int((~batch.tokens.own_T).sum()) == given > 0
    assert not batch.tokens.loss_mask_T[~batch.tokens.own_T].any()
    stats = make_trainer(model_folder, config).train_step(turns_shard(rows))
    assert stats["tokens_trained"] + stats["tokens_masked_stale"] == sum(row.sample.num_tokens for row in rows) - given
    assert min(stats["age_histogram"]) >= 0


def advantages_of(steps: tuple[StepReward, ...], rewards: list[float], **objective: Any) -> np.ndarray:
    """Return the advantages of a group of samples of four tokens, each with these steps and an outcome."""
    sample = make_sample(versions=[5] * 4, score=Score(reward=1.0, step_rewards=steps))
    rows = [dataclasses.replace(row, sample=sample) for row in make_rows(groups=1, samples=len(rewards), minibatches=1)]
    shard = dataclasses.replace(make_shard(rows, rewards=np.array([rewards])), has_step_rewards=True)
    queue = {"groups_per_step": 1, "samples_per_group": len(rewards)}
    config = config_of({"objective": objective, "trainer": {"minibatches": 1}, "queue": queue})
    batch = PolicyBatch.from_shard(shard, config=config, device=torch.device("cpu"))
    batch_advantages(batch, config=config, kl_coef=0.0)
    return batch.tokens.advantages_T.numpy()


def test_a_step_reward_is_credited_to_what_led_to_it() -> None:
    """Two samples earn the same in all; tokens behind the step get less of it than tokens before.

    Baseline none, no scale: the advantage is the return from the token on. A step of 1 at token 1 of 4, outcome 2:
    returns 3, 3, 2, 2. Derived by hand.
    """
    advantages_T = advantages_of((StepReward(token=1, value=1.0),), [3.0], baseline="none", scale="none")
    assert advantages_T.tolist() == [3.0, 3.0, 2.0, 2.0]


def test_what_comes_late_is_compared_with_what_comes_late() -> None:
    """Two samples with the same rewarded steps, one with the better outcome: it is better on every token.

    Outcomes 1.1 and 1.0 behind three steps of +0.5 each: the returns from the steps on are 2.6 and 2.5, 2.1 and 2.0,
    1.6 and 1.5, 1.1 and 1.0, at each place half of 0.1 above and below their mean; the totals' deviation is
    0.1 / sqrt(2). Seen failing with the totals' mean as the baseline of all tokens: -20.5 on the last of the better.
    """
    advantages_T = advantages_of(tuple(StepReward(token=token, value=0.5) for token in range(3)), [2.6, 2.5])
    half = 0.05 / (0.1 / np.sqrt(2))
    np.testing.assert_allclose(advantages_T, [half] * 4 + [-half] * 4, rtol=1e-4)


# --- rollouts in several ways, from the ledger's samples to the optimiser's step ---


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


def shards(*, cut: bool, num_ranks: int = 1, **data: int) -> list[Shard]:
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
        Prompt(prompt_id=f"train/0/{n}", text="", token_ids=rows[4 * n].prompt_token_ids, answer="", row=data)
        for n in range(3)
    ]
    taken = Batch(batch_id="b", version=5, groups=tuple(groups))
    batch = ShardedBatch(taken, prompts, num_minibatches=1, num_ranks=num_ranks, run_seed=0)
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


def test_a_sample_is_overlong_by_its_own_limit() -> None:
    """A row's own limit, or for an agent the room behind its prompt; nothing is longer than half of it.

    Seen failing with `rollout.max_new_tokens` as the limit of all: samples of 3 tokens and more were charged.
    """
    config = config_of({"objective": {"overlong_buffer": 0.5}, "rollout": {"max_new_tokens": 4}})
    agents = [replace(row, sample=replace(row.sample, prompt_ids=row.prompt_token_ids)) for row in make_rows()]
    for shard in (*shards(cut=False, max_new_tokens=24), make_shard(agents, rewards=REWARDS)):
        batch = PolicyBatch.from_shard(shard, config=config, device=torch.device("cpu"))
        figures = batch_advantages(batch, config=config, kl_coef=0.0)
        assert figures["reward_shaped_mean"] == pytest.approx(REWARDS.mean())


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
