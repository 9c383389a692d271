"""The recipe of `areal-lite train`: typed, checked, and complete before anything starts."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import model_validator

from areal_lite.config import sections
from areal_lite.config.checks import recipe_problems
from areal_lite.config.data import DataConfig
from areal_lite.config.presets import ObjectiveConfig, expand_preset
from areal_lite.config.reading import parse_section, read_recipe
from areal_lite.config.section import Section
from areal_lite.config.verifier import RewardWatchConfig, VerifierConfig

PARITY_LIMITS = {"float32": 0.003, "bfloat16": 0.13, "experts": 0.3, "fp8": 0.52}
"""Mean |engine - trainer| in nats: by dtype, of a mixture in bfloat16 whose routers choose for themselves, and of an
engine that computes in FP8. Three times what correct models show, and less than stale weights cost (docs/models.md)."""
PARITY_P99 = 7
"""The limit of the 99th percentile, in limits of the mean."""


class Config(Section):
    """A whole recipe of `areal-lite train`."""

    command: Literal["train"] = "train"
    """command that the recipe is for"""
    run: sections.RunConfig = sections.RunConfig()
    launch: sections.LaunchConfig = sections.LaunchConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: DataConfig = DataConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    queue: sections.QueueConfig = sections.QueueConfig()
    verifier: VerifierConfig = VerifierConfig()
    reward_watch: RewardWatchConfig = RewardWatchConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: sections.CriticConfig = sections.CriticConfig()
    trainer: sections.TrainerConfig = sections.TrainerConfig()
    weights: sections.WeightsConfig = sections.WeightsConfig()

    _expand_preset = model_validator(mode="before")(expand_preset)

    @property
    def samples_per_step(self) -> int:
        """B, samples of one trainer step."""
        return self.queue.groups_per_step * self.queue.samples_per_group

    @property
    def caches_mb(self) -> int:
        """What the key-value caches of all engines take of a machine's memory; 0 where GPUs or servers hold them."""
        is_here = self.run.device == "cpu" and not self.rollout.servers
        return self.rollout.workers * self.rollout.kv_cache_mb if is_here else 0

    @property
    def engine_gpus(self) -> int:
        """GPUs that the run reserves for an engine; 0 on a CPU, and for a server."""
        return self.rollout.tensor_parallel if self.run.device == "cuda" and not self.rollout.servers else 0

    @property
    def compute_dtype(self) -> str:
        """The dtype that `auto` resolves to."""
        return self.model.dtype_on(self.run.device)

    def parity_limit(self, *, is_mixture: bool = False) -> float:
        """Nats by which log-probabilities of engines and trainer may differ on average; 0 = any.

        Args:
            is_mixture: The model has experts.
        """
        if (limit := self.weights.parity_limit) != "auto":
            return limit or 0.0
        kinds: list[str] = [self.compute_dtype]
        kinds += ["experts"] * (is_mixture and self.compute_dtype == "bfloat16" and not self.rollout.replay_routes)
        kinds += ["fp8"] * bool(self.rollout.reduced_precision)
        return max(PARITY_LIMITS[kind] for kind in kinds)

    def _problems(self) -> Iterable[str]:
        return recipe_problems(self)


def load_config(recipe: str, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe, a YAML file or a shipped one's name, and apply overrides as `read_recipe` does.

    Raises:
        ConfigError: The file is missing or unreadable, a key is unknown, a value or combination impossible.
    """
    return parse_config(read_recipe(recipe, overrides, command="train"))


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Turn a nested mapping into a checked `Config`; a `ConfigError` has one line per problem."""
    return parse_section(raw, Config)
