"""The recipe: typed, checked, and complete before anything starts.

A recipe is a YAML file with the sections below. `load_config` reads one, applies `section.field=value`
overrides and returns a frozen `Config`; every mistake is one `ConfigError` that names field, value and
remedy. `resource_problems` holds the checks that need to know the machine.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from areal_lite.errors import ConfigError

__all__ = ["Config", "Section", "load_config", "parse_config", "recipe_folder", "resource_problems", "shipped_recipes"]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, numbers finite; an empty section has its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _fill_empty(cls, value: Any) -> Any:
        return {} if value is None else value


class RunConfig(Section):
    """The run as a whole."""

    dir: str | None = Field(None, description="run folder; default runs/<recipe>-<time>")
    seed: int = Field(0, ge=0, description="seeds data order, sampling, model initialisation and minibatch order")
    steps: int = Field(100, ge=1, description="trainer steps of the whole run, resumed ones included")
    resume: str | None = Field(None, description="run folder to continue in, from its newest checkpoint")
    eval_every: int = Field(0, ge=0, description="steps between evaluations beside generation; 0 = only start and end")
    checkpoint_every: int = Field(50, ge=0, description="steps between checkpoints; 0 = only at the end and on Ctrl-C")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept on disk")
    log_samples: int = Field(2, ge=0, description="groups of each batch written to samples.jsonl")
    stall_timeout_s: float = Field(120.0, gt=0, description="seconds without any progress after which the run stops")
    start_timeout_s: float = Field(300.0, gt=0, description="seconds that actors may take to start")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where engines and trainer ranks compute")


class WarmStartConfig(Section):
    """Supervised warm start of the built-in model (only with `model.path: builtin:arith`)."""

    steps: int = Field(300, ge=1, description="supervised optimiser steps")
    batch_size: int = Field(64, ge=1, description="worked solutions per step")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    seed: int = Field(0, ge=0, description="seed of initialisation and data order; the same for every run.seed")
    carelessness: float = Field(
        0.6, ge=0, le=1, description="share of carries and borrows that its worked solutions forget; RL unlearns it"
    )
    hidden_size: int = Field(128, ge=16, description="width of the model")
    num_layers: int = Field(4, ge=1, description="decoder layers")
    tie_embeddings: bool = Field(True, description="share input and output embeddings")


class ModelConfig(Section):
    """The policy."""

    path: str = Field("builtin:arith", description="Hugging Face model folder, or builtin:arith (tiny, warm-started)")
    max_context: int = Field(512, ge=8, description="prompt plus completion tokens the engine and trainer accept")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of the trainer's matrix work and of the engine; auto = float32 on cpu, bfloat16 on cuda",
    )
    warm_start: WarmStartConfig = WarmStartConfig()


class ArithConfig(Section):
    """The built-in task: chained sums answered step by step."""

    min_terms: int = Field(2, ge=2, description="fewest numbers in a chain")
    max_terms: int = Field(4, ge=2, description="most numbers in a chain")
    max_value: int = Field(99, ge=1, description="largest number in a chain")
    minus_share: float = Field(0.5, ge=0, le=1, description="share of minus signs, where the total allows one")
    train_size: int = Field(8192, ge=1, description="training problems")
    eval_size: int = Field(256, ge=1, description="held-out problems, never among the training ones")
    seed: int = Field(0, ge=0, description="seed of both splits")


class DataConfig(Section):
    """Where prompts come from."""

    source: Literal["arith", "jsonl"] = Field("arith", description="arith = built in; jsonl = a file of rows")
    path: str | None = Field(None, description="training rows, one JSON object a line (source: jsonl)")
    eval_path: str | None = Field(None, description="held-out rows; none = no evaluation")
    eval_size: int = Field(256, ge=1, description="held-out rows used at most")
    prompt_column: str = Field("question", description="column with the prompt")
    answer_column: str = Field("answer", description="column with the reference answer")
    template: str = Field("{prompt}", description="text around the prompt; {prompt} is replaced")
    chat: bool = Field(False, description="apply the model's chat template to the prompt as a user message")
    max_bad_fraction: float = Field(0.01, ge=0, le=1, description="share of unreadable rows above which loading fails")
    arith: ArithConfig = ArithConfig()


class RolloutConfig(Section):
    """Generation."""

    workers: int = Field(1, ge=1, description="rollout workers, one engine each")
    interrupt: Literal["recompute", "keep_kv", "drain"] = Field(
        "recompute", description="what a weight update does to running samples: re-prefill, keep their cache, or wait"
    )
    temperature: float = Field(1.0, gt=0, description="sampling temperature; the trainer applies the same")
    top_p: float = Field(1.0, description="must be 1 in training: tokens outside would have probability 0")
    top_k: int = Field(0, description="must be 0 in training: tokens outside would have probability 0")
    max_new_tokens: int = Field(128, ge=1, description="completion tokens at most")
    slots: int = Field(64, ge=1, description="samples an engine decodes at once; the worker keeps them filled")
    threads: int = Field(1, ge=1, description="CPU threads of one engine")
    tensor_parallel: int = Field(1, ge=1, description="GPUs of one engine")
    kv_cache_mb: int = Field(256, ge=16, description="key-value cache of one engine in MiB (cpu)")
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1, description="GPU memory an engine may take (cuda)")


class QueueConfig(Section):
    """The sample queue and its staleness bound."""

    max_staleness: int = Field(4, description="eta: largest age a token may have and still train; 0 = synchronous")
    on_stale: Literal["mask", "wait", "drop"] = Field(
        "mask", description="what enforces the bound when a batch is taken"
    )
    groups_per_step: int = Field(16, ge=1, description="groups of one trainer step")
    samples_per_group: int = Field(8, ge=1, description="samples of one prompt (G)")
    reject: Literal["none", "zero_variance"] = Field(
        "none", description="zero_variance: groups whose rewards are all equal do not count towards a batch"
    )
    max_attempts: int = Field(3, ge=1, description="attempts at a prompt before it counts as failed(too_slow)")
    lease_timeout_s: float = Field(10.0, gt=0, description="seconds without a heartbeat after which work is lent anew")
    bind: str = Field("127.0.0.1", description="address the queue listens on")
    max_message_mb: int = Field(64, ge=1, description="largest message accepted, in MiB")


class VerifierConfig(Section):
    """Scoring."""

    function: str = Field(
        "areal_lite.verify.builtin:last_number",
        description="module:function or path.py:function, see docs/verifiers.md",
    )
    timeout_s: float = Field(5.0, gt=0, description="hard deadline of one call")
    processes: int = Field(1, ge=1, description="killable processes of one verifier worker")
    workers: int = Field(1, ge=1, description="verifier workers")


class ObjectiveConfig(Section):
    """Decoupled PPO (arXiv 2505.24298 eq. 5)."""

    preset: Literal["areal"] = Field("areal", description="group-normalised advantages, decoupled PPO, token mean")
    clip_low: float = Field(0.2, ge=0, lt=1, description="lower clip distance of the proximal ratio")
    clip_high: float = Field(0.2, ge=0, description="upper clip distance of the proximal ratio")
    proximal: Literal["recompute", "reuse", "behaviour"] = Field(
        "recompute",
        description="proximal policy: one pass when the batch is taken, the current one (needs minibatches "
        "1), or the behaviour policy (naive PPO)",
    )
    behaviour_weight_cap: float = Field(
        5.0, gt=0, description="tokens whose weight pi_prox/pi_behav exceeds it are masked"
    )


class TrainerConfig(Section):
    """Learning."""

    ranks: int = Field(1, ge=1, description="trainer processes, FSDP2 ranks")
    minibatches: int = Field(2, ge=1, description="optimiser updates per step")
    micro_batch_tokens: int = Field(4096, ge=1, description="padded tokens of one forward pass at most")
    lr: float = Field(1e-4, gt=0, description="peak learning rate of AdamW")
    schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="trainer steps of linear warm-up")
    min_lr_fraction: float = Field(0.1, ge=0, le=1, description="end of the cosine, as a share of lr")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first moment decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW second moment decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    threads: int = Field(1, ge=1, description="CPU threads of one rank")


class WeightsConfig(Section):
    """The hand-over of weights from trainer to engines."""

    transport: Literal["gloo", "nccl", "ipc"] = Field(
        "gloo", description="gloo = CPU; nccl = GPUs; ipc = one shared GPU"
    )
    timeout_s: float = Field(30.0, gt=0, description="seconds one transfer may take before its engine is given up")
    parity_every: int = Field(20, ge=0, description="publications between logprob parity checks; 0 = never")
    parity_sequences: int = Field(8, ge=1, description="stored sequences compared in one parity check")


class Config(Section):
    """A whole recipe."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    queue: QueueConfig = QueueConfig()
    verifier: VerifierConfig = VerifierConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()

    @property
    def samples_per_step(self) -> int:
        """B, samples of one trainer step."""
        return self.queue.groups_per_step * self.queue.samples_per_group

    @property
    def compute_dtype(self) -> str:
        """The dtype behind `auto`."""
        if self.model.compute_dtype != "auto":
            return self.model.compute_dtype
        return "float32" if self.run.device == "cpu" else "bfloat16"

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = list(_combination_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _combination_problems(config: Config) -> Iterable[str]:
    """Yield one sentence (field, value, remedy) per impossible combination."""
    queue, rollout, trainer, data = config.queue, config.rollout, config.trainer, config.data
    if queue.max_staleness < 0:
        yield f"queue.max_staleness must be 0 (synchronous) or more, got {queue.max_staleness}"
    if config.samples_per_step % trainer.minibatches:
        yield (
            f"queue.groups_per_step * queue.samples_per_group must be divisible by trainer.minibatches, got "
            f"{queue.groups_per_step} * {queue.samples_per_group} = {config.samples_per_step} and "
            f"{trainer.minibatches}: set trainer.minibatches to a divisor"
        )
    if config.samples_per_step // trainer.minibatches < trainer.ranks:
        yield (
            f"every trainer rank needs a sample in each minibatch, got {config.samples_per_step} samples, "
            f"{trainer.minibatches} minibatches and {trainer.ranks} ranks: raise "
            "queue.groups_per_step or lower trainer.ranks"
        )
    if config.objective.proximal == "reuse" and trainer.minibatches != 1:
        yield (
            f"objective.proximal=reuse is exact only with one optimiser update, got trainer.minibatches="
            f"{trainer.minibatches}: set it to 1, or objective.proximal to recompute"
        )
    if rollout.top_p != 1.0 or rollout.top_k != 0:
        yield (
            f"training samples with temperature only, got top_p={rollout.top_p}, top_k={rollout.top_k}: a "
            "token outside the set would have probability 0 for the trainer; set top_p=1 and top_k=0"
        )
    if rollout.max_new_tokens >= config.model.max_context:
        yield (
            f"rollout.max_new_tokens must leave room for a prompt in model.max_context, got {rollout.max_new_tokens} "
            f"and {config.model.max_context}: raise model.max_context"
        )
    if data.source == "jsonl" and data.path is None:
        yield "data.source=jsonl needs data.path, got none: give the path of a JSONL file"
    for key in ("path", "eval_path"):
        if data.source == "arith" and (path := getattr(data, key)) is not None:
            yield f"data.{key}={path} is not read with data.source=arith: set data.source=jsonl"
    if data.arith.min_terms > data.arith.max_terms:
        yield (
            f"data.arith.min_terms must be at most data.arith.max_terms, got {data.arith.min_terms} and "
            f"{data.arith.max_terms}: lower the one or raise the other"
        )
    if "{prompt}" not in data.template:
        yield f"data.template must contain {{prompt}}, got {data.template!r}: put {{prompt}} where the prompt goes"
    if queue.samples_per_group < 2:
        yield (
            f"queue.samples_per_group must be 2 or more, got {queue.samples_per_group}: rewards are compared within a "
            "group, and a sample alone has nothing to learn from"
        )
    if config.run.device == "cpu" and rollout.tensor_parallel > 1:
        yield (
            f"rollout.tensor_parallel={rollout.tensor_parallel} needs run.device=cuda, got cpu: set it to 1, and use "
            "rollout.workers for more engines"
        )
    if config.run.device == "cpu" and config.weights.transport != "gloo":
        yield f"weights.transport={config.weights.transport} needs run.device=cuda, got cpu: set weights.transport=gloo"
    if config.run.device == "cuda" and config.weights.transport == "gloo":
        yield "weights.transport=gloo is the CPU transport, got run.device=cuda: set weights.transport=nccl (or ipc)"


def resource_problems(config: Config, *, num_cores: int, num_gpus: int) -> tuple[list[str], list[str]]:
    """Compare a recipe with what the machine or cluster has.

    Args:
        config: The recipe.
        num_cores: CPU cores.
        num_gpus: GPUs.

    Returns:
        Errors (nothing may start) and warnings (it will be slow), one sentence each.
    """
    errors, warnings = [], []
    if config.run.device == "cuda":
        shared = config.weights.transport == "ipc"
        rollout_gpus = config.rollout.workers * config.rollout.tensor_parallel
        needed = max(rollout_gpus, config.trainer.ranks) if shared else rollout_gpus + config.trainer.ranks
        if needed > num_gpus:
            errors.append(
                f"the recipe needs {needed} GPUs (rollout.workers {config.rollout.workers} x rollout.tensor_parallel "
                f"{config.rollout.tensor_parallel}, trainer.ranks {config.trainer.ranks}), got {num_gpus}: lower them, "
                "or join more nodes to the Ray cluster"
            )
    elif config.trainer.ranks > num_cores:
        warnings.append(
            f"trainer.ranks={config.trainer.ranks} on {num_cores} CPU cores: ranks will wait for each other; "
            f"set trainer.ranks={num_cores} or fewer"
        )
    return errors, warnings


def recipe_folder() -> Path:
    """Folder of the shipped recipes."""
    return Path(__file__).parent / "launch" / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def load_config(recipe: str, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe and apply overrides.

    Args:
        recipe: Path of a YAML file, or the name of a shipped recipe.
        overrides: `section.field=value` words; the value is read as YAML.

    Raises:
        ConfigError: The file is missing or unreadable, a key is unknown, a value or combination impossible.
    """
    path = Path(recipe)
    if not path.is_file():
        path = recipe_folder() / f"{recipe}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"a recipe is a YAML file or one of {', '.join(shipped_recipes())}; there is no {recipe!r}"
            + _suggestion(recipe, shipped_recipes())
        )
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold sections ({', '.join(Config.model_fields)}), got a {type(raw).__name__}")
    for word in overrides:
        _apply_override(raw, word)
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Turn a nested mapping into a checked `Config`.

    Raises:
        ConfigError: With one line per problem.
    """
    unknown = list(_unknown_keys(raw, Config, prefix=""))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def _explain(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{field}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _apply_override(raw: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override is section.field=value, got {word!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} must be YAML, got {text!r}: write it as '{key}=\"...\"'") from error
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        child = node[parent]
        if not isinstance(child, dict):
            raise ConfigError(f"{word!r} reaches into {parent!r}, which is a value, not a section")
        node = child
    node[last] = value


def _unknown_keys(raw: Mapping[str, Any], section: type[BaseModel], prefix: str) -> Iterable[str]:
    for key, value in raw.items():
        field = section.model_fields.get(str(key))
        if field is None:
            yield f"unknown key {prefix}{key}" + _suggestion(f"{prefix}{key}", _all_keys(Config))
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, Mapping):
            yield from _unknown_keys(value, kind, prefix=f"{prefix}{key}.")


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
