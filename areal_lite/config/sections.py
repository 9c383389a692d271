"""The sections of a recipe, field by field: meaning, unit, range and default.

`config.py` puts them together, checks combinations and reads files; `presets.py` holds the objective's section.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_lite.config.fields import FunctionName

__all__ = [
    "COMMANDS",
    "ArithConfig",
    "CriticConfig",
    "CurriculumConfig",
    "DataConfig",
    "FilterConfig",
    "GymConfig",
    "MixedSourceConfig",
    "ModelConfig",
    "QueueConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TrainerConfig",
    "VerifierConfig",
    "VerifierSettings",
    "WarmStartConfig",
    "WeightsConfig",
    "WorkflowConfig",
]

COMMANDS = {"train": "train", "sft": "sft", "reward_model": "reward-model", "dpo": "dpo"}
"""What a recipe's `command` says, and what one types; a recipe may say the latter too."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, numbers finite; an empty section has its defaults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_empty(cls, value: Any) -> Any:
        return {} if value is None else value


class RunConfig(Section):
    """The run as a whole."""

    dir: str | None = None
    """run folder; default runs/<recipe>-<time>"""
    seed: int = Field(0, ge=0)
    """seeds data order, sampling, model initialisation and minibatch order"""
    steps: int = Field(100, ge=1)
    """trainer steps of the whole run, resumed ones included"""
    resume: str | None = None
    """run folder to continue in, from its newest checkpoint"""
    eval_every: int = Field(0, ge=0)
    """steps between evaluations beside generation; 0 = only start and end"""
    checkpoint_every: int = Field(50, ge=0)
    """steps between checkpoints; 0 = only at the end and on Ctrl-C"""
    keep_checkpoints: int = Field(2, ge=1)
    """newest checkpoints kept on disk"""
    report: bool = True
    """write report.html at the end; areal-lite report makes it at any time"""
    log_samples: int = Field(2, ge=0)
    """groups of each batch written to samples.jsonl"""
    stall_timeout_s: float = Field(120.0, gt=0)
    """seconds without any progress after which the run stops"""
    start_timeout_s: float = Field(300.0, gt=0)
    """seconds that actors may take to start"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where engines and trainer ranks compute"""


class WarmStartConfig(Section):
    """Supervised warm start of the built-in model (only with `model.path: builtin:arith`)."""

    steps: int = Field(300, ge=0)
    """supervised optimiser steps; 0 = random weights, for areal-lite sft"""
    batch_size: int = Field(64, ge=1)
    """worked solutions per step"""
    lr: float = Field(3e-3, gt=0)
    """peak learning rate"""
    seed: int = Field(0, ge=0)
    """seed of initialisation and data order; the same for every run.seed"""
    carelessness: float = Field(0.6, ge=0, le=1)
    """share of carries and borrows that its worked solutions forget; RL unlearns it"""
    hidden_size: int = Field(128, ge=16)
    """width of the model"""
    num_layers: int = Field(4, ge=1)
    """decoder layers"""
    tie_embeddings: bool = True
    """share input and output embeddings"""


class ModelConfig(Section):
    """The policy."""

    path: str = "builtin:arith"
    """Hugging Face model folder, a finished run's folder, or builtin:arith (tiny)"""
    max_context: int = Field(512, ge=8)
    """prompt plus completion tokens the engine and trainer accept"""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the trainer's matrix work and of the engine; auto = float32 on cpu, bfloat16 on cuda"""
    warm_start: WarmStartConfig = WarmStartConfig()


class ArithConfig(Section):
    """The built-in task: chained sums answered step by step."""

    min_terms: int = Field(2, ge=2)
    """fewest numbers in a chain"""
    max_terms: int = Field(4, ge=2)
    """most numbers in a chain"""
    max_value: int = Field(99, ge=1)
    """largest number in a chain"""
    minus_share: float = Field(0.5, ge=0, le=1)
    """share of minus signs, where the total allows one"""
    train_size: int = Field(8192, ge=1)
    """training problems"""
    eval_size: int = Field(256, ge=1)
    """held-out problems, never among the training ones"""
    seed: int = Field(0, ge=0)
    """seed of both splits"""


class GymConfig(Section):
    """Task families that the package reasoning-gym generates (`source: reasoning_gym`)."""

    dataset: str | None = None
    """name of a family, e.g. chain_sum"""
    arguments: dict[str, Any] = {}
    """settings of the family, e.g. {max_terms: 3}"""
    train_size: int = Field(2048, ge=1)
    """training problems"""
    eval_size: int = Field(128, ge=1)
    """held-out problems, none of them among the training ones"""
    seed: int = Field(0, ge=0)
    """seed of both splits"""


class FilterConfig(Section):
    """Which rows of a source are used; the others are counted and left out."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """longest prompt in tokens; null = as fits"""
    ranges: dict[str, tuple[float, float]] = {}
    """columns that must lie in a range, ends included, e.g. {difficulty: [1, 3]}"""


class SourceConfig(Section):
    """One source of prompts."""

    source: FunctionName = "arith"
    """jsonl, parquet = files; dataset = a folder or hub id; arith, reasoning_gym = built in; or a function's name"""
    arguments: dict[str, Any] = {}
    """arguments of the function that source names, e.g. {seed: 1}"""
    path: str | None = None
    """training rows: a file, a datasets folder, or a hub id"""
    eval_path: str | None = None
    """held-out rows; null = a datasets folder's own split, or none"""
    eval_size: int = Field(256, ge=1)
    """held-out rows used at most"""
    prompt_column: str = "question"
    """column with the prompt"""
    answer_column: str = "answer"
    """column with the reference answer"""
    columns: dict[str, str] = {}
    """new names of further columns, {new: old}, e.g. {difficulty: level}"""
    template: str = "{prompt}"
    """text around the prompt; {prompt} is replaced"""
    chat: bool = False
    """apply the model's chat template to the prompt as a user message"""
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    """share of unreadable rows above which loading fails"""
    verifier: str | None = None
    """verifier of rows without a column verifier; null = verifier.function"""
    workflow: str | None = None
    """workflow of rows without a column workflow; null = rollout.workflow"""
    filter: FilterConfig = FilterConfig()
    arith: ArithConfig = ArithConfig()
    reasoning_gym: GymConfig = GymConfig()


class MixedSourceConfig(SourceConfig):
    """One of several sources."""

    weight: float = Field(1.0, gt=0)
    """share of the prompts, relative to the other sources"""


class CurriculumConfig(Section):
    """A preference for prompts that are neither too easy nor too hard."""

    strength: float = Field(0.0, ge=0, le=1)
    """share of prompts picked by observed pass rate; 0 = none, the plain shuffle"""
    candidates: int = Field(8, ge=2)
    """prompts compared for each pick"""
    memory: float = Field(0.5, ge=0, lt=1)
    """weight of the past in a prompt's observed pass rate"""


class DataConfig(SourceConfig):
    """Where prompts come from: one source, or several in `mix`."""

    mix: dict[str, MixedSourceConfig] = {}
    """several sources by name, each with the keys of this section and a weight"""
    curriculum: CurriculumConfig = CurriculumConfig()

    @property
    def sources(self) -> Mapping[str, SourceConfig]:
        """The sources by name, the first part of their prompts' ids; one alone is named after its kind."""
        return self.mix or {self.source.rpartition(":")[2]: self}


class WorkflowConfig(Section):
    """A workflow with a name of its own."""

    function: str
    """a known name, module:function or path.py:function, see docs/workflows.md"""
    arguments: dict[str, Any] = {}
    """keyword arguments of every episode"""


class RolloutConfig(Section):
    """Generation."""

    workers: int = Field(1, ge=1)
    """rollout workers, one engine each"""
    interrupt: Literal["recompute", "keep_kv", "drain"] = "recompute"
    """what a weight update does to running samples: re-prefill, keep their cache, or wait"""
    temperature: float = Field(1.0, gt=0)
    """sampling temperature; the trainer applies the same"""
    top_p: float = 1.0
    """must be 1 in training: tokens outside would have probability 0"""
    top_k: int = 0
    """must be 0 in training: tokens outside would have probability 0"""
    max_new_tokens: int = Field(128, ge=1)
    """completion tokens at most, an environment's replies in between included"""
    workflow: str = "single_turn"
    """how a prompt becomes a sample: a name, module:function or path.py:function"""
    workflow_arguments: dict[str, Any] = {}
    """keyword arguments of every episode of workflow"""
    workflows: dict[str, WorkflowConfig] = {}
    """further workflows by name, for rows and sources that choose their own"""
    turn_timeout_s: float = Field(10.0, gt=0)
    """seconds an environment may take for one reply"""
    slots: int = Field(64, ge=1)
    """samples an engine decodes at once; the worker keeps them filled"""
    threads: int = Field(1, ge=1)
    """CPU threads of one engine"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine"""
    kv_cache_mb: int = Field(256, ge=16)
    """key-value cache of one engine in MiB (cpu)"""
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1)
    """GPU memory an engine may take (cuda)"""


class QueueConfig(Section):
    """The sample queue and its staleness bound."""

    max_staleness: int = 4
    """eta: largest age a token may have and still train; 0 = synchronous"""
    on_stale: Literal["mask", "wait", "drop"] = "mask"
    """what enforces the bound when a batch is taken"""
    groups_per_step: int = Field(16, ge=1)
    """groups of one trainer step"""
    samples_per_group: int = Field(8, ge=1)
    """samples of one prompt (G)"""
    reject: Literal["none", "zero_variance"] = "none"
    """zero_variance: groups whose rewards are all equal do not count towards a batch"""
    max_attempts: int = Field(3, ge=1)
    """attempts at a prompt before it counts as failed(too_slow)"""
    lease_timeout_s: float = Field(10.0, gt=0)
    """seconds without a heartbeat after which work is lent anew"""
    bind: str = "127.0.0.1"
    """address the queue listens on"""
    max_message_mb: int = Field(64, ge=1)
    """largest message accepted, in MiB"""


class VerifierSettings(Section):
    """One verifier and the processes it runs in."""

    function: str
    """a known name, module:function or path.py:function, see docs/verifiers.md"""
    arguments: dict[str, Any] = {}
    """keyword arguments of every call, e.g. {model: runs/rm}"""
    timeout_s: float = Field(5.0, gt=0)
    """hard deadline of one call; of a batch, for each completion in it"""
    processes: int = Field(1, ge=1)
    """killable processes in each verifier worker"""
    concurrency: int = Field(1, ge=1)
    """calls in flight in one process; more than 1 is for async functions"""
    memory_mb: int = Field(1024, ge=16)
    """memory in MiB a process and all it starts may take beyond what it took when ready"""
    retries: int = Field(2, ge=0)
    """further tries of a call that was lost with its process"""
    unavailable_s: float = Field(90.0, ge=0)
    """seconds for which a service that does not answer is asked again, with growing pauses"""
    max_failure_share: float = Field(0.5, ge=0, le=1)
    """share of failures in the last 50 calls above which the run stops; 1 = never"""


class VerifierConfig(VerifierSettings):
    """Scoring."""

    function: str | dict[str, float] = "last_number"  # type: ignore[assignment]  # one of them, or a weighted sum
    """a known name, module:function, path.py:function, or several with weights: {math: 1, format: 0.2}"""
    named: dict[str, VerifierSettings] = {}
    """further verifiers by name, for sums, and for rows and sources that choose their own"""
    eval_function: str | None = None
    """verifier of held-out prompts, called without arguments; null = as in training"""
    workers: int = Field(1, ge=1)
    """verifier workers"""


class CriticConfig(Section):
    """The value model of `objective.baseline: critic`, trained beside the policy."""

    path: str | None = None
    """model folder its body starts from; null = the initial policy"""
    lr: float = Field(1e-4, gt=0)
    """learning rate of its AdamW; the rest is as in trainer"""
    target: Literal["gae", "monte_carlo"] = "gae"
    """what it learns: GAE's return, or the real one"""
    value_clip: float | None = Field(None, gt=0)
    """how far a value may move per step (PPO); null = freely"""
    warmup_steps: int = Field(0, ge=0)
    """trainer steps at the start in which only the critic learns"""


class TrainerConfig(Section):
    """Learning."""

    ranks: int = Field(1, ge=1)
    """trainer processes, FSDP2 ranks"""
    minibatches: int = Field(2, ge=1)
    """optimiser updates per step"""
    micro_batch_tokens: int = Field(4096, ge=1)
    """padded tokens of one forward pass at most"""
    lr: float = Field(1e-4, gt=0)
    """peak learning rate of AdamW"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate after warm-up"""
    warmup_steps: int = Field(0, ge=0)
    """trainer steps of linear warm-up"""
    min_lr_fraction: float = Field(0.1, ge=0, le=1)
    """end of the cosine, as a share of lr"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW first moment decay"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW second moment decay"""
    max_grad_norm: float = Field(1.0, gt=0)
    """gradient norm is clipped to this"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass"""
    threads: int = Field(1, ge=1)
    """CPU threads of one rank"""


class WeightsConfig(Section):
    """The hand-over of weights from trainer to engines."""

    transport: Literal["gloo", "nccl", "ipc"] = "gloo"
    """gloo = CPU; nccl = GPUs; ipc = one shared GPU"""
    timeout_s: float = Field(30.0, gt=0)
    """seconds one transfer may take before its engine is given up"""
    parity_every: int = Field(20, ge=0)
    """publications between logprob parity checks; 0 = never"""
    parity_sequences: int = Field(8, ge=1)
    """stored sequences compared in one parity check"""

    @property
    def staged(self) -> bool:
        """Engines receive while they generate, and are paused for the load alone; else they load as they receive."""
        return self.transport == "gloo"
