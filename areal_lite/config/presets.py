"""The objective's section: the knobs of one general loss, and the named presets that set them.

A preset is a row of this table; behind `expand_preset` only the knobs count. docs/objective.md explains them.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_lite.config.plugins import name_problems
from areal_lite.config.section import Refers, Section


class LossConfig(Section):
    """Settings of the policy term. Each is a keyword of the loss function: one that it does not take is refused."""

    surrogate: Literal["ratio", "weighted_likelihood", "likelihood"] = "ratio"
    """ratio = clipped PPO; weighted_likelihood = CISPO; likelihood = no advantage (RAFT)"""
    ratio_level: Literal["token", "sequence"] = "token"
    """ratio of each token, or of the sequence"""
    clip_low: float | None = Field(0.2, ge=0, lt=1)
    """lower clip distance of the ratio; null = none"""
    clip_high: float | None = Field(0.2, ge=0)
    """upper clip distance of the ratio; null = none"""


class ObjectiveConfig(LossConfig):
    """One general objective; its defaults are decoupled PPO (arXiv 2505.24298 eq. 5)."""

    preset: Literal["areal", "grpo", "dr_grpo", "dapo", "rloo", "reinforce", "ppo", "gspo", "cispo", "raft"] = "areal"
    """sets every knob that the recipe leaves out; see docs/objective.md"""

    # What a sample is worth.
    reward_scale: float = 1.0
    """shaped reward = clip(reward_scale * reward + reward_bias)"""
    reward_bias: float = 0.0
    """added to the scaled reward"""
    reward_clip: float | None = Field(None, gt=0)
    """shaped rewards lie in -reward_clip .. reward_clip"""
    overlong_buffer: float = Field(0.0, ge=0, lt=1)
    """share of rollout.max_new_tokens in which length costs up to 1 (soft punishment)"""
    baseline: Literal["none", "batch_mean", "group_mean", "leave_one_out", "critic"] = "group_mean"
    """what a return is compared with; critic = GAE on a learned value"""
    scale: Literal["none", "group_std", "batch_std"] = "group_std"
    """what advantages are divided by"""
    advantage_function: str | None = None
    """a known name, module:function or path.py:function in place of algo/advantages.py's sample_advantages: from [N, G]
    returns of groups of samples (NaN = failed) to finite float32 advantages; baseline, scale and eps are keywords"""
    gamma: float = Field(1.0, gt=0, le=1)
    """discount per token"""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """lambda of GAE (baseline: critic)"""

    # Which tokens train.
    sample_filter: Literal["all", "best_of_group", "varied_groups"] = "all"
    """best_of_group: the best sample alone; varied_groups: not where all rewards are equal"""
    mask_truncated: bool = False
    """samples cut off at the token limit do not train"""

    # The policy term.
    loss_function: str | None = None
    """a known name, module:function or path.py:function in place of algo/losses.py's policy_loss: from the [T] tensors
    of a micro-batch that its signature names (T may be 0) to a share of the loss, a scalar, and a dict of sums over the
    loss mask, whose means are logged by name"""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """how tokens add up; constant divides each sequence by rollout.max_new_tokens"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    proximal_kl_coef: float = Field(0.0, ge=0)
    """weight of KL(proximal || current): PPO's penalty form"""

    # Distance to a reference model.
    kl: Literal["none", "reward", "loss"] = "none"
    """where KL(policy || reference) is charged"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = d, k2 = d^2/2, k3 = exp(-d)-1+d"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the reference KL"""
    kl_target: float | None = Field(None, gt=0)
    """nats per token; doubles or halves kl_coef beyond a factor of 1.5; null = fixed"""
    reference_path: Annotated[str | None, Refers.MODEL] = None
    """reference model folder; null = the initial policy"""

    # Off-policy correction.
    proximal: Literal["recompute", "reuse", "behaviour"] = "recompute"
    """proximal policy: one pass per batch, the current one (needs minibatches 1), or behaviour (naive PPO)"""
    behaviour_weight: Literal["token", "sequence", "geometric_mean", "none"] = "token"
    """w = pi_prox/pi_behav of each token, or the product or the geometric mean over the sequence"""
    behaviour_weight_cap: float = Field(5.0, gt=0)
    """largest w"""
    behaviour_weight_above: Literal["mask", "truncate"] = "mask"
    """what happens above the cap: no gradient, or the cap itself"""
    behaviour_filter: Literal["none", "m2po", "geometric"] = "none"
    """m2po: drop tokens until the second moment fits; geometric: drop far-off sequences"""
    m2po_threshold: float = Field(0.04, gt=0)
    """largest mean of (log w)^2 (behaviour_filter: m2po)"""
    geometric_low: float = Field(0.5, gt=0)
    """smallest geometric mean of w (behaviour_filter: geometric)"""
    geometric_high: float = Field(2.0, gt=0)
    """largest geometric mean of w (behaviour_filter: geometric)"""

    def _problems(self) -> Iterable[str]:
        for key in ("loss_function", "advantage_function"):
            yield from name_problems(f"objective.{key}", getattr(self, key), kind=key.replace("_", " "))
        if self.baseline == "critic":
            per_token = "compares whole samples, got objective.baseline=critic, which judges tokens"
            if self.scale == "group_std":
                yield f"objective.scale=group_std {per_token}: set objective.scale to batch_std or none"
            if self.advantage_function is not None:
                yield f"objective.advantage_function {per_token}: leave one of them out"
        if self.surrogate == "likelihood":
            yield from self._likelihood_problems()
        if self.proximal == "behaviour":
            to_do = "set proximal=recompute, or behaviour_filter=none"
            because = "with objective.proximal=behaviour, the policy that it compares with itself"
            yield from self.unread(["behaviour_filter"], because, to_do=to_do)
        if (low := self.geometric_low) >= (high := self.geometric_high):
            yield f"objective.geometric_low must lie below geometric_high, got {low} and {high}"
        yield from self._penalty_problems()

    def _likelihood_problems(self) -> Iterable[str]:
        because = "with objective.surrogate=likelihood, which uses no advantage"
        to_do = "leave it out, or set surrogate to ratio"
        yield from self.unread(("overlong_buffer", "advantage_function"), because, to_do=to_do)
        for key, value in (("kl", "reward"), ("baseline", "critic")):
            if getattr(self, key) == value:
                yield f"objective.{key}={value} is not read {because}: {to_do}"
        if not (self.clip_low is None and self.clip_high is None):
            got = f"clip_low={self.clip_low}, clip_high={self.clip_high}"
            yield f"objective.surrogate=likelihood has no ratio to clip, got {got}: set both to null"
        because = "with objective.surrogate=likelihood, which has no ratio"
        yield from self.unread(["ratio_level"], because, to_do="set ratio_level=token")

    def _penalty_problems(self) -> Iterable[str]:
        """Of the distance to a reference."""
        if self.kl == "none":
            yield from self.unread(("kl_coef", "kl_target", "reference_path"), "without objective.kl")
        elif self.kl_coef == 0:
            yield f"objective.kl={self.kl} needs objective.kl_coef above 0, got 0: set it, or objective.kl to none"
        if self.kl == "loss" and self.kl_estimator == "k1":
            to_do = "set that, or kl=reward"
            yield f"objective.kl=loss needs kl_estimator k2 or k3, got k1, whose gradient is zero on average: {to_do}"


_NO_CLIP: dict[str, Any] = {"clip_low": None, "clip_high": None}
_KL_REWARD: dict[str, Any] = {"kl": "reward", "kl_estimator": "k1", "kl_coef": 0.05}

PRESETS: dict[str, dict[str, Any]] = {
    "areal": {},
    "grpo": {"aggregation": "sequence_mean", "kl": "loss", "kl_estimator": "k3", "kl_coef": 0.04},
    "dr_grpo": {"scale": "none", "aggregation": "constant"},
    "dapo": {"clip_high": 0.28, "mask_truncated": True, "overlong_buffer": 0.2},
    "rloo": {"baseline": "leave_one_out", "scale": "none", "aggregation": "sequence_sum", **_NO_CLIP, **_KL_REWARD},
    "reinforce": {"baseline": "batch_mean", "scale": "none", **_NO_CLIP},
    "ppo": {"baseline": "critic", "scale": "batch_std", **_KL_REWARD},
    "gspo": {"aggregation": "sequence_mean", "ratio_level": "sequence", "behaviour_weight": "geometric_mean"}
    | {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"surrogate": "weighted_likelihood", "clip_low": None, "clip_high": 5.0},
    "raft": {"sample_filter": "best_of_group", "baseline": "none", "scale": "none", "surrogate": "likelihood"}
    | _NO_CLIP,
}
"""What each preset sets of the objective; everything else has the defaults above."""
_QUEUE = {"dapo": {"reject": "zero_variance"}}
"""What presets set of the queue."""


def expand_preset(raw: Any) -> Any:
    """Fill a raw recipe with what its preset says; what the recipe itself says stands.

    >>> expand_preset({"objective": {"preset": "dr_grpo", "scale": "group_std"}})
    {'objective': {'scale': 'group_std', 'aggregation': 'constant', 'preset': 'dr_grpo'}}
    """
    if not isinstance(raw, Mapping):
        return raw
    objective = raw.get("objective")
    preset = str(objective.get("preset", "areal")) if isinstance(objective, Mapping) else "areal"
    expanded = dict(raw)
    for section, presets in (("objective", PRESETS), ("queue", _QUEUE)):
        knobs, given = presets.get(preset, {}), raw.get(section) or {}
        if knobs and isinstance(given, Mapping):
            is_off = given.get("kl") == "none"  # with its KL go the KL's figures of a preset
            kept = {name: value for name, value in knobs.items() if not (is_off and name.startswith("kl"))}
            expanded[section] = kept | dict(given)
    return expanded
