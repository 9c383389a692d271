"""The objective's section: the knobs of one general loss, and the named presets that set them.

A preset is a YAML file: a shipped one in the folder `presets`, or the user's. After `expand_preset` only settings
count; docs/objective.md explains them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_lite.config.plugins import name_problems
from areal_lite.config.reading import read_yaml
from areal_lite.config.section import Refers, Section
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError

_READ_BY = {
    "clip_unit": ("ratio", "weighted_likelihood"),
    "clip_dual": ("ratio",),
    "soft_positive": ("soft_ratio",),
    "soft_negative": ("soft_ratio",),
}
"""Settings of the policy term that only these surrogates read."""

_FILTERS = {
    "m2po_threshold": "m2po",
    "geometric_low": "geometric",
    "geometric_high": "geometric",
    "binary_kl_limit": "binary_kl",
}
"""Settings that only this behaviour filter reads."""


class LossConfig(Section):
    """Settings of the policy term. Each is a keyword of the loss function: one that it does not take is refused."""

    surrogate: Literal["ratio", "soft_ratio", "weighted_likelihood", "likelihood"] = "ratio"
    """ratio = clipped PPO; soft_ratio = SAPO; weighted_likelihood = CISPO; likelihood = no advantage (RAFT)"""
    ratio_level: Literal["token", "sequence"] = "token"
    """ratio of each token, or of the sequence"""
    clip_low: float | None = Field(0.2, ge=0, lt=1)
    """lower clip distance of the ratio; null = none"""
    clip_high: float | None = Field(0.2, ge=0)
    """upper clip distance of the ratio; null = none"""
    clip_unit: Literal["ratio", "probability"] = "ratio"
    """of the clip distances; probability = how far the token's probability may move (DPPO)"""
    clip_dual: float | None = Field(None, gt=1)
    """largest ratio of a token with a negative advantage (surrogate: ratio); null = any"""
    soft_positive: float = Field(1.0, gt=0)
    """how fast the gradient fades as the ratio leaves 1, at a positive advantage (surrogate: soft_ratio)"""
    soft_negative: float = Field(1.05, gt=0)
    """the same at a negative advantage"""


class ObjectiveConfig(LossConfig):
    """One general objective; its defaults are decoupled PPO (arXiv 2505.24298 eq. 5)."""

    preset: str = "areal"
    """defaults for what the recipe leaves out: a shipped preset, or a YAML file; see docs/objective.md"""

    # What a sample is worth.
    reward_scale: float = 1.0
    """shaped reward = clip(reward_scale * reward + reward_bias)"""
    reward_bias: float = 0.0
    """added to the scaled reward"""
    reward_clip: float | None = Field(None, gt=0)
    """shaped rewards lie in -reward_clip .. reward_clip"""
    overlong_buffer: float = Field(0.0, ge=0, lt=1)
    """last share of a sample's token limit, over which a length penalty grows to 1 (soft overlong punishment)"""
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
    """best_of_group: only the best sample; varied_groups: only groups whose rewards are not all equal"""
    mask_truncated: bool = False
    """samples cut off at the token limit do not train"""

    # The policy term.
    loss_function: str | None = None
    """a known name, module:function or path.py:function in place of algo/losses.py's policy_loss: from the [T] tensors
    of a micro-batch that its signature names (T may be 0) to a share of the loss, a scalar, and a dict of sums over the
    loss mask, whose means are logged by name"""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """how token losses are summed; constant divides each sequence by rollout.max_new_tokens"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    proximal_kl_coef: float = Field(0.0, ge=0)
    """weight of KL(proximal || current): PPO's penalty form"""

    # Distance to a reference model.
    kl: Literal["none", "reward", "loss"] = "none"
    """where KL(policy || reference) is penalised"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = d, k2 = d^2/2, k3 = exp(-d)-1+d"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the reference KL"""
    kl_target: float | None = Field(None, gt=0)
    """target KL in nats per token; if the KL is off by a factor of 1.5, kl_coef doubles or halves; null = fixed"""
    reference_path: Annotated[str | None, Refers.MODEL] = None
    """reference model folder; null = the initial policy"""

    # Off-policy correction.
    proximal: Literal["recompute", "reuse", "behaviour"] = "recompute"
    """proximal policy: from one pass per batch, the current policy (needs minibatches 1), or behaviour (naive PPO)"""
    behaviour_weight: Literal["token", "sequence", "geometric_mean", "none"] = "token"
    """w = pi_prox/pi_behav of each token, or the product or the geometric mean over the sequence"""
    behaviour_weight_cap: float = Field(5.0, gt=0)
    """largest w"""
    behaviour_weight_above: Literal["mask", "truncate"] = "mask"
    """what happens above the cap: no gradient, or the cap itself"""
    behaviour_weight_floor: float = Field(0.0, ge=0)
    """smallest w; a token below it has no gradient"""
    behaviour_filter: Literal["none", "m2po", "geometric", "binary_kl"] = "none"
    """m2po: drop tokens that moved the way their advantage pushes until the second moment fits; geometric, binary_kl:
    drop far-off sequences"""
    m2po_threshold: float = Field(0.04, gt=0)
    """largest mean of their (log pi_current / pi_behaviour)^2 (behaviour_filter: m2po)"""
    geometric_low: float = Field(0.5, gt=0)
    """smallest geometric mean of w (behaviour_filter: geometric)"""
    geometric_high: float = Field(2.0, gt=0)
    """largest geometric mean of w (behaviour_filter: geometric)"""
    binary_kl_limit: float = Field(0.003, gt=0)
    """largest mean over a sequence of the divergence, in nats, between sampling its token or another one
    (behaviour_filter: binary_kl)"""

    def _problems(self) -> Iterable[str]:
        if self.preset not in PRESETS and not self.preset.endswith((".yaml", ".yml")):
            near = suggestion(self.preset, PRESETS)
            yield f"objective.preset: must be one of {', '.join(PRESETS)}, or a YAML file, got {self.preset!r}{near}"
        for key in ("loss_function", "advantage_function"):
            yield from name_problems(f"objective.{key}", getattr(self, key), kind=key.replace("_", " "))
        if self.baseline == "critic":
            per_token = "compares whole samples, got objective.baseline=critic, which judges tokens"
            if self.scale == "group_std":
                yield f"objective.scale=group_std {per_token}: set objective.scale to batch_std or none"
            if self.advantage_function is not None:
                yield f"objective.advantage_function {per_token}: leave one of them out"
        else:
            yield from self.unread(["gae_lambda"], "without objective.baseline=critic")
        yield from self._surrogate_problems()
        if self.proximal == "behaviour":
            to_do = "set proximal=recompute, or behaviour_filter=none"
            because = "with objective.proximal=behaviour, the policy that it compares with itself"
            yield from self.unread(["behaviour_filter"], because, to_do=to_do)
        for key, user in _FILTERS.items():
            if self.behaviour_filter != user:
                yield from self.unread([key], f"without objective.behaviour_filter={user}")
        for key, value in (("behaviour_weight", "none"), ("proximal", "behaviour")):
            if getattr(self, key) == value:
                because = f"with objective.{key}={value}, where every weight is 1"
                keys = [f"behaviour_weight_{name}" for name in ("cap", "above", "floor")]
                yield from self.unread(keys, because, to_do="leave it out")
        if self.behaviour_weight_floor >= self.behaviour_weight_cap:
            got = f"{self.behaviour_weight_floor} and {self.behaviour_weight_cap}"
            yield f"objective.behaviour_weight_floor must lie below behaviour_weight_cap, got {got}"
        if (low := self.geometric_low) >= (high := self.geometric_high):
            yield f"objective.geometric_low must lie below geometric_high, got {low} and {high}"
        yield from self._penalty_problems()

    def _surrogate_problems(self) -> Iterable[str]:
        because = f"with objective.surrogate={self.surrogate}"
        for key, users in _READ_BY.items():
            if self.surrogate not in users:
                yield from self.unread([key], because, to_do=f"leave it out, or set surrogate={users[0]}")
        if self.clip_unit == "probability" and self.ratio_level == "sequence":
            yield "objective.clip_unit=probability is of a token, got objective.ratio_level=sequence: set one of them"
        if self.surrogate in ("likelihood", "soft_ratio") and not (self.clip_low is None and self.clip_high is None):
            got = f"clip_low={self.clip_low}, clip_high={self.clip_high}"
            yield f"{because.removeprefix('with ')} clips no ratio, got {got}: set both to null"
        if self.surrogate == "likelihood":
            yield from self._likelihood_problems(because)

    def _likelihood_problems(self, because: str) -> Iterable[str]:
        because, to_do = f"{because}, which uses no advantage", "leave it out, or set surrogate to ratio"
        yield from self.unread(("overlong_buffer", "advantage_function"), because, to_do=to_do)
        for key, value in (("kl", "reward"), ("baseline", "critic"), ("behaviour_filter", "m2po")):
            if getattr(self, key) == value:
                yield f"objective.{key}={value} is not read {because}: {to_do}"
        because = "with objective.surrogate=likelihood, which has no ratio"
        yield from self.unread(["ratio_level"], because, to_do="set ratio_level=token")

    def _penalty_problems(self) -> Iterable[str]:
        """Of the distance to a reference."""
        if self.kl == "none":
            yield from self.unread(("kl_coef", "kl_target", "kl_estimator", "reference_path"), "without objective.kl")
        elif self.kl_coef == 0:
            yield f"objective.kl={self.kl} needs objective.kl_coef above 0, got 0: set it, or objective.kl to none"
        if self.reward_scale == 0 and self.reference_path is None:
            yield (
                "objective.reward_scale=0 leaves the distance to a teacher to learn from, got no teacher: set "
                "objective.reference_path to its folder (and objective.kl to loss)"
            )
        if self.kl == "loss" and self.kl_estimator == "k1":
            to_do = "set that, or kl=reward"
            yield f"objective.kl=loss needs kl_estimator k2 or k3, got k1, whose gradient is zero on average: {to_do}"


_FOLDER = Path(__file__).with_suffix("")
PRESETS = sorted(path.stem for path in _FOLDER.glob("*.yaml"))
"""Names of the shipped presets: a file each."""


def read_preset(name: str) -> dict[str, Any]:
    """Return what a preset, a shipped one or a YAML file, sets: settings by section. Unknown names set nothing here.

    Raises:
        ConfigError: The file is missing, no mapping of sections, or names a preset itself.
    """
    is_file = name.endswith((".yaml", ".yml"))
    if not is_file and name not in PRESETS:
        return {}
    if is_file and not Path(name).is_file():
        raise ConfigError(
            f"objective.preset={name}: there is no such file. Fix: correct the path; a relative one starts in "
            f"{Path.cwd()}"
        )
    sections = read_yaml(Path(name) if is_file else _FOLDER / f"{name}.yaml", holding="sections, such as objective")
    if not all(isinstance(section, Mapping) for section in sections.values()):
        fix = "indent settings below their section, such as objective:"
        raise ConfigError(f"the preset {name} must have sections with settings, got {sections}. Fix: {fix}")
    if "preset" in sections.get("objective", {}):
        raise ConfigError(
            f"objective.preset={name}: a preset must not name another one, got objective.preset="
            f"{sections['objective']['preset']}. Fix: copy that one's settings into the file"
        )
    return sections


def expand_preset(raw: Any) -> Any:
    """Fill a raw recipe with its preset's settings; those of the recipe itself win.

    >>> expand_preset({"objective": {"preset": "dr_grpo", "scale": "group_std"}})
    {'objective': {'scale': 'group_std', 'aggregation': 'constant', 'preset': 'dr_grpo'}}
    """
    objective = raw.get("objective") if isinstance(raw, Mapping) else None
    if not isinstance(objective, Mapping) or ObjectiveConfig.model_fields.keys() <= objective.keys():
        return raw  # no preset is named, or this is a saved recipe, which holds every setting
    expanded = dict(raw)
    for section, settings in read_preset(str(objective.get("preset", "areal"))).items():
        given = raw.get(section) or {}
        if settings and isinstance(given, Mapping):
            # Without KL or weights, their figures in the preset mean nothing.
            off = ["kl"] if given.get("kl") == "none" else []
            if given.get("behaviour_weight") == "none" or given.get("proximal") == "behaviour":
                off.append("behaviour_weight_")
            kept = {name: value for name, value in settings.items() if not name.startswith(tuple(off))}
            expanded[section] = kept | dict(given)
    return expanded
