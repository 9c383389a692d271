"""Recipes of `areal-lite sft`, `reward-model` and `dpo`; some of their sections are those of `areal-lite train`."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from areal_lite.config.checks import offline_problems
from areal_lite.config.data import RowsConfig
from areal_lite.config.reading import parse_section, read_recipe
from areal_lite.config.recipe import Config
from areal_lite.config.section import HERE, Refers, Section
from areal_lite.config.sections import LaunchConfig, ModelConfig, RunConfig, TrainerConfig
from areal_lite.errors import ConfigError


class OfflineRunConfig(RunConfig):
    """The run as a whole; nothing is generated, so there are no samples to log."""

    eval_every: int = Field(0, ge=0)
    """steps between evaluations; 0 = only at start and end"""
    log_samples: Literal[0] = 0
    """nothing is sampled in an offline run"""


class OfflineTrainerConfig(TrainerConfig):
    """Learning; a step is one optimiser update."""

    minibatches: Literal[1] = 1
    """one optimiser update per step"""
    batch_size: int = Field(32, ge=1)
    """rows (of preferences: pairs) of one step, over all ranks"""
    epochs: float | None = Field(None, gt=0)
    """passes over the rows, in place of run.steps; the last step is filled up with rows of the next pass"""


class OfflineDataConfig(RowsConfig):
    """Where rows come from, and how they become tokens."""

    source: Literal["arith", "jsonl", "parquet", "dataset"] = "arith"
    """arith = built in; jsonl, parquet = a file of rows; dataset = a folder of the datasets library"""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """share of path's rows to hold out if there are no other held-out rows; 0 = no evaluation"""
    prompt_column: str = "prompt"
    """column with the prompt, a text or chat messages"""
    completion_column: str = "completion"
    """column with the completion (sft)"""
    messages_column: str = "messages"
    """column with a whole chat, read if a row has no prompt (sft)"""
    chosen_column: str = "chosen"
    """column with the better completion (reward_model, dpo)"""
    rejected_column: str = "rejected"
    """column with the worse completion (reward_model, dpo)"""
    chat: bool = False
    """put plain texts through the model's chat template too, as user and assistant"""
    too_long: Literal["error", "drop", "cut"] = "error"
    """rows beyond model.max_context: refuse them, leave them out, or cut their completions"""
    carelessness: float = Field(0.0, ge=0, le=1)
    """share of carries and borrows that the built-in solutions forget (source: arith)"""

    def _problems(self) -> Iterable[str]:
        if self.source == "arith":
            yield from self.unread(("path", "eval_path"), "with data.source=arith", to_do="set another data.source")
            return
        if self.path is None:
            yield f"data.source={self.source} needs data.path, got none: give the path of a file or folder"
        yield from self.unread(("carelessness",), f"with data.source={self.source}", to_do="leave it out")


class PreferenceConfig(Section):
    """The loss on pairs (command: dpo)."""

    loss: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """DPO, IPO, or reference-free SimPO"""
    beta: float = Field(0.1, gt=0)
    """how strongly to stay near the reference; with simpo, scale of the mean logprob (default 2.0)"""
    label_smoothing: float = Field(0.0, ge=0, le=0.5)
    """assumed share of pairs whose labels are swapped"""
    length_normalised: bool = False
    """log-ratios per token instead of per completion"""
    simpo_margin: float = Field(0.5, ge=0)
    """margin that simpo asks for, in units of beta times nats per token"""
    reference_path: Annotated[str | None, Refers.MODEL] = None
    """reference model or run folder; null = the model it starts from"""

    @model_validator(mode="before")
    @classmethod
    def _fill_beta(cls, raw: Any) -> Any:
        """SimPO compares means over tokens, which differ far less than the sums that DPO and IPO compare."""
        return {"beta": 2.0, **raw} if isinstance(raw, Mapping) and raw.get("loss") == "simpo" else raw

    def _problems(self) -> Iterable[str]:
        keys, to_do = ["simpo_margin"], "leave it out, or choose another loss"
        if self.loss == "simpo":  # it has no reference, and always takes log-probabilities per token
            keys = ["reference_path", "label_smoothing", "length_normalised"]
        yield from self.unread(keys, f"with {HERE}.loss={self.loss}", to_do=to_do)


class OfflineConfig(Section):
    """A whole recipe of an offline command."""

    command: Literal["sft", "reward_model", "dpo"]
    """command that the recipe is for"""
    run: OfflineRunConfig = OfflineRunConfig()
    launch: LaunchConfig = LaunchConfig()
    model: ModelConfig = ModelConfig()
    data: OfflineDataConfig = OfflineDataConfig()
    preference: PreferenceConfig = PreferenceConfig()
    trainer: OfflineTrainerConfig = OfflineTrainerConfig()

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference model."""
        return self.command == "dpo" and self.preference.loss != "simpo"

    @property
    def compute_dtype(self) -> str:
        """The dtype that `auto` resolves to."""
        return self.model.dtype_on(self.run.device)

    def _problems(self) -> Iterable[str]:
        return offline_problems(self)


def load_any_config(
    recipe: str, overrides: Iterable[str] = (), *, command: str | None = None
) -> Config | OfflineConfig:
    """Read, as `load_config`, a recipe of whichever command it is for, or of the given one, a key of `COMMANDS`."""
    return parse_any_config(read_recipe(recipe, overrides, command=command))


def parse_saved_config(raw: Mapping[str, Any]) -> Config | OfflineConfig:
    """Check a recipe of whichever command; a `ConfigError` has one line per problem."""
    return parse_section(raw, Config) if raw.get("command") in (None, "train") else parse_section(raw, OfflineConfig)


def parse_any_config(raw: Mapping[str, Any]) -> Config | OfflineConfig:
    """Check what a user wrote, as `parse_saved_config`; a saved recipe holds steps beside epochs."""
    config = parse_saved_config(raw)
    if isinstance(config, OfflineConfig) and config.trainer.epochs and "steps" in config.run.model_fields_set:
        raise ConfigError(
            f"either run.steps or trainer.epochs decides how long to train, got run.steps={config.run.steps} and "
            f"trainer.epochs={config.trainer.epochs:g}: leave one out, or set trainer.epochs=null"
        )
    return config
