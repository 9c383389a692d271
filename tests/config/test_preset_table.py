"""Presets: what the recipe says stands, and meaningless knobs are refused. Their formulas: train/test_presets.py."""

import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from places import DOCS
from test_config import assert_refused, error_of

from areal_lite.algo.losses import policy_loss
from areal_lite.config.presets import PRESETS, LossConfig, ObjectiveConfig
from areal_lite.config.recipe import load_config, parse_config

TEACHER = {"reference_path": "teacher"}


def objective_of(raw: dict[str, Any]) -> ObjectiveConfig:
    return parse_config(raw).objective


def preset_of(name: str) -> dict[str, Any]:
    return {"preset": name} | (TEACHER if name == "distill" else {})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_decoupled_by_default(preset: str) -> None:
    """Others announce the correction and do not apply it. The weight has the unit of the ratio.

    Seen failing with `behaviour_weight: none` as default, and with gspo's weight per token, or a product.
    """
    got = objective_of({"objective": preset_of(preset)})
    unit = {"token": "token", "sequence": "geometric_mean"}[got.ratio_level]
    assert (got.proximal, got.behaviour_weight, got.behaviour_weight_cap) == ("recompute", unit, 5.0)


def test_what_the_recipe_says_stands() -> None:
    """Seen failing with the preset merged over the recipe."""
    assert parse_config({"objective": {"preset": "dapo"}}).queue.reject == "zero_variance"
    got = parse_config({"objective": {"preset": "dapo", "clip_high": 0.5}, "queue": {"reject": "none"}})
    assert (got.objective.clip_low, got.objective.clip_high, got.queue.reject) == (0.2, 0.5, "none")
    assert load_config("arith_cpu", ["objective.preset=grpo", "objective.kl_coef=0.01"]).objective.kl_coef == 0.01


COMBINATIONS = [
    ({"baseline": "critic", "scale": "group_std"}, ["objective.scale=group_std", "batch_std or none"]),
    ({"kl": "loss", "kl_estimator": "k1", "kl_coef": 0.1}, ["k2 or k3, got k1", "zero on average"]),
    ({"kl": "reward"}, ["objective.kl=reward", "objective.kl_coef above 0", "objective.kl to none"]),
    ({"surrogate": "likelihood"}, ["objective.surrogate=likelihood", "clip_low=0.2", "set both to null"]),
    (
        {"preset": "raft", "ratio_level": "sequence"},
        ["objective.ratio_level=sequence", "surrogate=likelihood, which has no ratio", "set ratio_level=token"],
    ),
    (
        {"behaviour_filter": "m2po", "proximal": "behaviour"},
        ["objective.behaviour_filter=m2po", "objective.proximal=behaviour", "behaviour_filter=none"],
    ),
    ({"kl_coef": 0.1}, ["objective.kl_coef=0.1 is not read without objective.kl"]),
    ({"reference_path": "x"}, ["objective.reference_path=x is not read without objective.kl"]),
    ({"preset": "raft", "kl": "reward", "kl_coef": 1.0}, ["objective.kl=reward", "surrogate=likelihood"]),
    ({"preset": "raft", "overlong_buffer": 0.1}, ["objective.overlong_buffer", "surrogate=likelihood"]),
    ({"behaviour_filter": "geometric", "geometric_low": 2.0}, ["objective.geometric_low", "2.0 and 2.0"]),
    ({"gae_lambda": 0.5}, ["objective.gae_lambda=0.5 is not read without objective.baseline=critic"]),
    ({"m2po_threshold": 0.1}, ["m2po_threshold=0.1 is not read without objective.behaviour_filter=m2po"]),
    ({"geometric_low": 0.4}, ["geometric_low=0.4 is not read without objective.behaviour_filter=geometric"]),
    ({"preset": "m2po", "geometric_high": 3.0}, ["geometric_high=3.0", "behaviour_filter=geometric: set that too"]),
    ({"binary_kl_limit": 0.1}, ["binary_kl_limit=0.1 is not read without objective.behaviour_filter=binary_kl"]),
    ({"kl_estimator": "k3"}, ["objective.kl_estimator=k3 is not read without objective.kl"]),
    (
        {"behaviour_weight": "none", "behaviour_weight_cap": 2.0},
        ["behaviour_weight_cap=2.0 is not read with objective.behaviour_weight=none, where every weight is 1"],
    ),
    ({"proximal": "behaviour", "behaviour_weight_floor": 0.1}, ["weight_floor=0.1", "proximal=behaviour", "leave it"]),
    ({"proximal": "behaviour", "behaviour_weight_above": "truncate"}, ["behaviour_weight_above=truncate is not read"]),
    ({"preset": "cispo", "clip_dual": 3.0}, ["objective.clip_dual=3.0", "=weighted_likelihood", "surrogate=ratio"]),
    ({"soft_positive": 2.0}, ["objective.soft_positive=2.0", "with objective.surrogate=ratio", "=soft_ratio"]),
    ({"surrogate": "soft_ratio"}, ["objective.surrogate=soft_ratio clips no ratio", "set both to null"]),
    ({"preset": "dppo", "ratio_level": "sequence"}, ["objective.clip_unit=probability", "ratio_level=sequence"]),
    ({"preset": "raft", "behaviour_filter": "m2po"}, ["objective.behaviour_filter=m2po", "uses no advantage"]),
    ({"preset": "distill"}, ["objective.reward_scale=0", "got no teacher", "objective.reference_path"]),
]


@pytest.mark.parametrize(("knobs", "words"), COMBINATIONS, ids=lambda item: next(iter(item)))
def test_knobs_that_mean_nothing_together_are_refused(knobs: dict[str, Any], words: list[str]) -> None:
    """Seen failing with `_problems` of the objective not called."""
    assert_refused({"objective": knobs}, words)


def test_switching_a_presets_kl_or_weights_off_takes_their_figures_along() -> None:
    """Seen failing with all that a preset sets: its own coefficient, and its own floor, were refused."""
    got = objective_of({"objective": {"preset": "ppo", "kl": "none"}})
    assert (got.kl, got.kl_coef, got.baseline) == ("none", 0.0, "critic")
    for off in ({"proximal": "behaviour"}, {"behaviour_weight": "none"}):
        assert objective_of({"objective": {"preset": "icepop", **off}}).behaviour_weight_floor == 0.0


@pytest.mark.parametrize("preset", PRESETS)
def test_only_comparisons_within_a_group_need_more_than_one_sample(preset: str) -> None:
    """Seen failing with every preset refused at one sample per group."""
    raw = {"objective": preset_of(preset), "queue": {"samples_per_group": 1}}
    if preset in ("reinforce", "reinforce_pp", "flash_reinforce", "ppo", "distill"):
        assert parse_config(raw).samples_per_step == 16
    else:
        message = error_of(raw)
        assert "queue.samples_per_group must be 2 or more with objective." in message
        assert "got 1, which has nothing to be compared with: raise it, or compare within the batch" in message


def test_the_page_explains_every_knob_and_preset() -> None:
    page = (DOCS / "objective.md").read_text()
    words = set(re.findall(r"\w+", page))
    assert [name for name in ObjectiveConfig.model_fields if name not in words] == []
    assert [name for name in PRESETS if f"| `{name}`" not in page] == []


def test_the_ratio_of_cispo_may_be_a_sequences() -> None:
    """Seen failing: refused with "which has no ratio", though it is clipped."""
    assert objective_of({"objective": {"preset": "cispo", "ratio_level": "sequence"}}).ratio_level == "sequence"


def test_every_setting_of_the_loss_is_a_keyword_of_the_shipped_one() -> None:
    """A preset with a new parameter is a setting here, a keyword there. Seen failing with a further field."""
    assert LossConfig.model_fields.keys() <= signature(policy_loss).parameters.keys()


def test_a_preset_may_be_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved recipe needs it no more; its mistakes are named as the recipe's. Seen failing with names alone."""
    monkeypatch.chdir(tmp_path)
    file, mine = Path("mine.yaml"), {"objective": {"preset": "mine.yaml"}}
    file.write_text("objective: {clip_high: 0.4}\nqueue: {max_staleness: 2}\n")
    config = load_config("arith_cpu", ["objective.preset=mine.yaml", "queue.max_staleness=3"])
    assert (config.objective.clip_high, config.queue.max_staleness) == (0.4, 3)
    file.write_text("objective: {clip_hig: 0.4}")
    assert "unknown key objective.clip_hig; did you mean objective.clip_high?" in error_of(mine)
    file.unlink()
    assert parse_config(config.model_dump()) == config
    message = error_of(mine)
    assert message.startswith("objective.preset=mine.yaml: there is no such file")
    assert message.endswith(f"starts in {tmp_path}")


def test_a_preset_names_no_other_one(tmp_path: Path) -> None:
    """Seen failing: the inner one was ignored."""
    file = tmp_path / "mine.yaml"
    file.write_text("objective: {preset: dapo, clip_low: 0.1}")
    message = error_of({"objective": {"preset": str(file)}})
    assert "must not name another one, got objective.preset=dapo. Fix:" in message
