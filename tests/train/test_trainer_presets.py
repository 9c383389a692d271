"""Whole steps of the trainer in relations: reference model, adaptive coefficients, critic, lone samples, and a defect
found in other projects' trainers.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from preset_builders import config_of, make_trainer
from test_trainer import REWARDS, step
from torch import nn
from train_builders import make_config, make_rows, make_shard
from transformers import AutoModelForCausalLM

from areal_lite.train import trainer as trainer_module
from areal_lite.train.objective import KLCoefficient
from areal_lite.types import Row, Sample, Shard

NAN = float("nan")


# --- the reference model ----------------------------------------------------------------------------------------------


def test_nothing_is_loaded_and_no_pass_is_added_without_a_kl(
    model_folder: str, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference costs nothing when no KL is asked for. Seen failing with one that is always loaded."""
    loaded: list[str] = []
    load = trainer_module.load_model

    def count(folder: str, *arguments: Any, **options: Any) -> nn.Module:
        loaded.append(folder)
        return load(folder, *arguments, **options)

    monkeypatch.setattr(trainer_module, "load_model", count)
    trainer = make_trainer(model_folder, config_of({"trainer": {"micro_batch_tokens": 4096}}))
    stats = trainer.train_step(make_shard(rows, rewards=REWARDS))
    assert loaded == [model_folder]
    assert (stats["kl_ref"], stats["kl_coef"]) == (None, None)
    # Two updates, and the proximal pass of the second one.
    assert trainer.progress == 3
    with_kl = make_trainer(
        model_folder, config_of({"objective": {"preset": "grpo"}, "trainer": {"micro_batch_tokens": 4096}})
    )
    stats = with_kl.train_step(make_shard(rows, rewards=REWARDS))
    assert loaded == [model_folder, model_folder, model_folder]
    assert with_kl.progress == 5
    assert stats["kl_coef"] == 0.04


def test_the_reference_is_the_initial_policy_and_stays_it(model_folder: str, rows: list[Row]) -> None:
    """The first update sees no distance; after training there is one, and the reference's weights are untouched."""
    trainer = make_trainer(model_folder, config_of({"objective": {"preset": "grpo"}, "trainer": {"minibatches": 1}}))
    rows = [dataclasses.replace(row, minibatch=0) for row in rows]
    first = trainer.train_step(make_shard(rows, rewards=REWARDS))
    second = trainer.train_step(make_shard(rows, rewards=REWARDS, version=6))
    assert first["kl_ref"] == 0.0
    assert second["kl_ref"] is not None
    assert abs(second["kl_ref"]) > 1e-3
    initial = AutoModelForCausalLM.from_pretrained(model_folder)
    assert trainer.reference is not None
    for name, value in initial.named_parameters():
        assert torch.equal(trainer.reference.get_parameter(name), value)
        assert not trainer.reference.get_parameter(name).requires_grad


# --- adaptive coefficients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "factor"), [(1e-6, 2.0), (1e6, 0.5)])
def test_the_kl_coefficient_follows_its_target(
    model_folder: str, reference_folder: str, rows: list[Row], target: float, factor: float
) -> None:
    """Doubled far above the target, halved far below it; the step itself is trained and logged with the old one."""
    # This way round the random tokens of these rows are likelier under the policy: the estimate is positive.
    config = config_of({"objective": {"preset": "grpo", "kl_target": target}}, model_folder)
    trainer = make_trainer(reference_folder, config)
    logged = [trainer.train_step(make_shard(rows, rewards=REWARDS, version=version))["kl_coef"] for version in (5, 6)]
    assert logged == [0.04, 0.04 * factor]


@pytest.mark.parametrize(("dropped", "factor"), [(8, 2.0), (12, 1.0)])
def test_tokens_without_a_weight_have_no_kl(
    model_folder: str, reference_folder: str, rows: list[Row], dropped: int, factor: float
) -> None:
    """Samples that the filter drops count no more than failed ones; where all are dropped, the coefficient stays.

    Seen failing with the mean over all trained tokens.
    """
    objective = {"preset": "grpo", "kl_target": 1e-6, "behaviour_filter": "geometric"}
    config = config_of({"objective": objective, "trainer": {"minibatches": 1}}, model_folder)
    trainer, other = (make_trainer(reference_folder, config) for _ in range(2))
    rows = [dataclasses.replace(row, minibatch=0) for row in rows]
    unlikely = [dataclasses.replace(row.sample, logprobs=row.sample.logprobs - 20) for row in rows]
    far = [dataclasses.replace(row, sample=sample) for row, sample in zip(rows, unlikely, strict=True)]
    failed = np.where(np.arange(12).reshape(3, 4) < dropped, np.nan, REWARDS)
    expected = other.train_step(make_shard(rows, rewards=failed))["kl_ref"]
    shard = make_shard([*far[:dropped], *rows[dropped:]], rewards=REWARDS)
    assert trainer.train_step(shard)["kl_ref"] == (expected and pytest.approx(expected))
    assert trainer.train_step(dataclasses.replace(shard, version=6))["kl_coef"] == 0.04 * factor


def test_an_adaptive_coefficient_stays_near_the_recipes() -> None:
    """The distance to a reference starts at 0. Seen failing without the bounds."""
    for measured, end in ((0.0, 4e-4), (1.0, 4.0)):
        coefficient = KLCoefficient(0.04, target=0.01)
        for _ in range(50):
            coefficient.adapt(measured)
        assert coefficient.value == pytest.approx(end)


# --- the critic -------------------------------------------------------------------------------------------------------


def test_only_the_critic_learns_while_it_warms_up(model_folder: str, rows: list[Row]) -> None:
    """The policy stays bit for bit what it was, the version advances, and the policy learns in the step after.

    Figures of its updates are missing, not 0. Seen failing with a warm-up that trains both, and with 0.
    """
    config = config_of({"objective": {"preset": "ppo"}, "critic": {"lr": 1e-2, "warmup_steps": 6}})
    trainer = make_trainer(model_folder, config)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    first = trainer.train_step(make_shard(rows, rewards=REWARDS))
    assert all(torch.equal(trainer.model.get_parameter(name), value) for name, value in before.items())
    assert (first["step_skipped"], first["tokens_trained"], first["kl_ref"], trainer.version) == (0, 0, None, 6)
    assert first["value_loss"] is not None
    assert {first[name] for name in ("loss", "grad_norm", "entropy", "behav_weight_mean", "age_mean")} == {None}
    second = trainer.train_step(make_shard(rows, rewards=REWARDS, version=6))
    assert not all(torch.equal(trainer.model.get_parameter(name), value) for name, value in before.items())
    assert second["tokens_trained"] > 0


# --- groups of one sample ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["reinforce", "reinforce_pp", "flash_reinforce", "ppo"])
def test_groups_of_one_sample_train(model_folder: str, preset: str) -> None:
    """Nothing is compared within a group: twelve groups of one are as good as three of four."""
    rows = make_rows(groups=12, samples=1)
    objective: dict[str, Any] = {"preset": preset}
    if preset == "flash_reinforce":
        objective["binary_kl_limit"] = 1e3  # these rows were sampled by nobody
    trainer = make_trainer(model_folder, make_config(groups=12, samples=1, objective=objective))
    stats = trainer.train_step(make_shard(rows, rewards=np.arange(12.0)[:, None] % 2))
    assert stats["step_skipped"] == 0
    assert stats["advantage_std"] > 0
    assert stats["grad_norm"] > 0
    assert stats["tokens_trained"] == sum(row.sample.num_tokens for row in rows)


# --- a defect found in other projects' trainers: NaN in a masked slot poisoned a mean ---


VERSION = 5


def is_stale(sample: Sample) -> np.ndarray:
    """Tell which tokens are over the bound of 2, counted from the spans one by one."""
    return np.array([VERSION - s.version > 2 for s in sample.spans for _ in range(s.start, s.end)])


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"preset": "grpo"},
        {"preset": "gspo"},
        {"preset": "cispo"},
        {"preset": "rloo", "behaviour_weight": "sequence"},
        {"preset": "ppo"},
        {"preset": "raft"},
        {"proximal": "behaviour", "entropy_coef": 0.01},
        {"proximal": "behaviour", "kl": "reward", "kl_coef": 0.1},
        {"behaviour_filter": "m2po"},
        {"behaviour_filter": "geometric"},
        {"behaviour_filter": "binary_kl", "binary_kl_limit": 1e3},
    ],
    ids=lambda objective: "-".join(map(str, objective.values())) or "areal",
)
def test_nan_in_a_masked_slot_is_harmless(model_folder: str, objective: dict[str, Any]) -> None:
    """Stale tokens and a failed sample with NaN for logprobs train the very weights that any other number would.

    Seen failing with the mask multiplied instead of chosen in `inside`, and with m2po's mean over all slots.
    """
    rewards = np.array([[1, 0, NAN, 1], [0, 0, 0, 1], [1, 1, 0, 1]])
    rows = make_rows(minibatches=1, old_tokens=2)
    trainer = make_trainer(model_folder, make_config())
    own = trainer.score([(row.prompt_token_ids, row.sample.token_ids.tolist()) for row in rows])

    def filled(number: float) -> Shard:
        """Put a number where nothing is trained, and what the model itself says where something is."""
        changed = []
        for row, scores in zip(rows, own, strict=True):
            failed = np.isnan(rewards[row.group_index, row.sample_index])
            logprobs = np.where(is_stale(row.sample) | failed, number, scores).astype(np.float32)
            changed.append(dataclasses.replace(row, sample=dataclasses.replace(row.sample, logprobs=logprobs)))
        return make_shard(changed, rewards=rewards)

    knobs = {"objective": objective, "trainer": {"minibatches": 1}, "rollout": {"temperature": 1.0}}
    (expected_weights, expected), (weights, got) = (
        step(model_folder, filled(number), **knobs) for number in (-1.0, NAN)
    )
    assert got["step_skipped"] == expected["step_skipped"] == 0
    if objective.get("kl") == "reward" and objective.get("proximal") == "behaviour":
        # Here a stale token's logprob is a cost of its sample: a number counts, a NaN is left out.
        assert np.isfinite(got["loss"])
        assert all(bool(value.isfinite().all()) for value in weights.values())
        return
    torch.testing.assert_close(weights, expected_weights, atol=0, rtol=0)
    assert got["loss"] == expected["loss"]
    assert got["behav_weight_mean"] == expected["behav_weight_mean"]
