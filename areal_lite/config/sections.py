"""The sections of a recipe but `data`, `verifier` and `objective`: every setting, its checks and its default."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from areal_lite.config.plugins import name_problems
from areal_lite.config.section import HERE, JsonArguments, ModelFolder, OwnName, Refers, Section
from areal_lite.network import port_range
from areal_lite.node import bfloat16_instructions

COMMANDS = {"train": "train", "sft": "sft", "reward_model": "reward-model", "dpo": "dpo"}
"""Values of a recipe's `command`, and the commands of areal-lite; a recipe may hold either."""
BUILT_IN = "builtin:arith"
"""The `model.path` of the tiny model that a run makes itself."""
SMOLLM2 = "builtin:smollm2-135m"
SMOLLM2_FOLDER = Path(".cache/areal-lite/models/smollm2-135m")
"""Where `areal-lite model smollm2-135m` leaves it, in the folder that a command starts in."""


class RunConfig(Section):
    """The run as a whole."""

    dir: str | None = None
    """run folder; default runs/<recipe>-<time>"""
    seed: int = Field(0, ge=0, lt=2**64)
    """seeds data order, sampling, model initialisation and minibatch order"""
    steps: int = Field(100, ge=1)
    """trainer steps of the whole run, resumed ones included"""
    resume: str | None = None
    """run folder to resume, from its latest complete checkpoint; areal-lite resume DIR sets it"""
    resume_from: str | None = None
    """an older checkpoint of run.resume, such as step-40"""
    eval_every: int = Field(0, ge=0)
    """steps between evaluations, which run alongside training; 0 = only at start and end"""
    checkpoint_every: int = Field(50, ge=0)
    """steps between checkpoints; 0 = off"""
    checkpoint_every_minutes: float = Field(10.0, ge=0)
    """also save after the step in which this many minutes have passed since the last checkpoint; 0 = off; the end of
    the run and Ctrl-C save anyway"""
    checkpoint_beside: bool = False
    """write checkpoints in the background: training waits only for a copy of weights and moments in host memory, which
    takes as much again"""
    keep_checkpoints: int = Field(2, ge=1)
    """number of latest checkpoints kept on disk"""
    report: bool = True
    """write report.html at the end; areal-lite report writes it at any time"""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """trackers that also receive metrics, samples and the recipe; each needs its package"""
    log_samples: int = Field(2, ge=0)
    """groups of each batch written to samples.jsonl"""
    stall_timeout_s: float = Field(120.0, gt=0)
    """seconds without any progress after which the run stops"""
    start_timeout_s: float = Field(300.0, gt=0)
    """seconds that actors may take to start"""
    max_worker_restarts: int = Field(3, ge=0)
    """restarts of one rollout or verifier worker whose process or engine died; the count starts over after an hour of
    work; 0 = none"""
    max_restarts: int = Field(3, ge=0)
    """restarts from the latest checkpoint, with a new queue and new ranks, after a rank or the queue died or nothing
    progressed for stall_timeout_s; the count starts over at each checkpoint; 0 = the run ends"""
    save_timeout_s: float = Field(600.0, gt=0)
    """seconds that writing a checkpoint may take"""
    save_deadline_s: float = Field(30.0, gt=0)
    """seconds that the current step may take to finish after SIGTERM, SIGHUP or SIGUSR1 before it is abandoned"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where engines and trainer ranks compute"""
    network: str | None = None
    """several nodes: the subnet, interface, or address whose route they use; null = the route to Ray's head"""
    ports: str = "20000-21999"
    """ports that queue and trainer listen on; gloo, NCCL and Ray choose others"""
    env: Annotated[dict[str, str | None], Refers.NOTHING] = {}
    """environment variables of every process of the run; set a secret to null, e.g. {WANDB_API_KEY: null}: it keeps the
    value that it has where the processes start"""
    preflight: bool = True
    """check every node first, if there are several, as areal-lite doctor --cluster does"""
    min_bandwidth_mb_s: float = Field(10.0, ge=0)
    """MB/s that an all-reduce and a broadcast must reach in preflight; 0 = any"""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """port at which Prometheus reads the last step's figures; null = none"""

    def _problems(self) -> Iterable[str]:
        if self.resume_from is not None and self.resume is None:
            yield f"run.resume_from={self.resume_from} needs run.resume, the run folder it is in"
        try:
            port_range(self.ports)
        except ValueError as error:
            yield f"run.ports: {error}"

    @property
    def given_env(self) -> dict[str, str]:
        """The variables of `env` whose values the recipe holds."""
        return {name: value for name, value in self.env.items() if value is not None}


def without_env_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped recipe that may be shown: of `run.env` it has the names alone."""
    run = recipe["run"]
    return {**recipe, "run": {**run, "env": dict.fromkeys(run["env"])}}


class LaunchConfig(Section):
    """What `areal-lite launch` does when the run fails."""

    max_attempts: int = Field(1, ge=1)
    """maximum number of attempts; each resumes from the latest checkpoint"""
    pause_s: float = Field(10.0, ge=0)
    """seconds before the second attempt; doubles with each further one, up to ten minutes"""


class WarmStartConfig(Section):
    """Supervised warm start of the built-in model (only with `model.path: builtin:arith`)."""

    steps: int = Field(300, ge=0)
    """supervised optimiser steps; 0 = random weights, for areal-lite sft"""
    batch_size: int = Field(64, ge=1)
    """worked solutions per step"""
    lr: float = Field(3e-3, gt=0)
    """peak learning rate"""
    carelessness: float = Field(0.6, ge=0, le=1)
    """share of carries and borrows that its worked solutions forget, for RL to correct"""
    hidden_size: int = Field(128, ge=16)
    """width of the model"""
    num_layers: int = Field(4, ge=1)
    """decoder layers"""


def _without_native(dtype: str) -> str:
    """Resolve `native` where the recipe is read: nodes, and a resume elsewhere, must not decide for themselves."""
    if dtype != "native":
        return dtype
    return "bfloat16" if bfloat16_instructions() else "auto"


class ModelConfig(Section):
    """The policy."""

    path: ModelFolder = BUILT_IN
    """Hugging Face folder or hub id (owner/name), a run's folder, builtin:arith (tiny) or builtin:smollm2-135m"""
    max_context: int = Field(512, ge=8)
    """prompt plus completion tokens the engine and trainer accept"""
    compute_dtype: Annotated[Literal["auto", "native", "float32", "bfloat16"], AfterValidator(_without_native)] = "auto"
    """dtype of the trainer's matrix products and of the engine; auto = float32 on cpu, bfloat16 on cuda; native =
    bfloat16 also on a CPU that has instructions for it"""
    chat_arguments: JsonArguments = {}
    """arguments of the model's chat template, e.g. {enable_thinking: false}"""
    warm_start: WarmStartConfig = WarmStartConfig()

    def dtype_on(self, device: str) -> str:
        """Return the dtype that `auto` resolves to."""
        automatic = "float32" if device == "cpu" else "bfloat16"
        return automatic if self.compute_dtype == "auto" else self.compute_dtype


class WorkflowConfig(Section):
    """A workflow with a name of its own."""

    function: str
    """a known name, module:function or path.py:function, see docs/workflows.md"""
    arguments: JsonArguments = {}
    """keyword arguments of every episode"""


class RolloutConfig(Section):
    """Generation."""

    workers: int = Field(1, ge=1)
    """rollout workers, one engine each"""
    servers: tuple[str, ...] = ()
    """addresses of running vLLM servers, one for each worker, whose engines the run uses; empty = each worker starts an
    engine; see docs/models.md"""
    server_key_env: str | None = None
    """name of the environment variable with the servers' API key; null for servers that ask for none"""
    interrupt: Literal["recompute", "keep_kv", "drain"] = "recompute"
    """at a weight update, running samples are prefilled again (recompute), keep their cache (keep_kv), or finish
    first (drain)"""
    temperature: float = Field(1.0, ge=0.01)
    """sampling temperature, at least 0.01, to which vLLM raises lower ones; the trainer applies the same"""
    max_new_tokens: int = Field(128, ge=1)
    """maximum completion tokens, including an environment's replies"""
    workflow: str = "single_turn"
    """how a prompt becomes a sample: a name, module:function or path.py:function"""
    workflow_arguments: JsonArguments = {}
    """keyword arguments of every episode of workflow"""
    workflows: dict[OwnName, WorkflowConfig] = {}
    """further workflows by name, for rows and sources that choose their own"""
    workflow_command: str | None = None
    """instead of workflow, a program as typed in a shell: an agent in any language, see docs/agents.md"""
    command_memory_mb: int = Field(4096, ge=1)
    """memory limit in MiB of each process of workflow_command"""
    command_sandbox: bool = False
    """run workflow_command in bubblewrap: it may read the system, Python and the working folder, write to its own /tmp,
    and reach only the model"""
    tool_parser: str | None = None
    """how an agent's model calls tools: one of vLLM's tool parsers, such as hermes, or module:function, see
    docs/agents.md"""
    reasoning_parser: str | None = None
    """how an agent's model writes its reasoning: one of vLLM's reasoning parsers, such as qwen3"""
    serve_unconstrained: bool = False
    """serve requests for another temperature, a forced tool call or a JSON schema without that constraint, and count
    them; false = refuse them"""
    turn_timeout_s: float = Field(10.0, gt=0)
    """time limit in seconds for one reply of an environment, and for an agent between two calls"""
    slots: int = Field(64, ge=1)
    """samples that an engine decodes at once"""
    max_episodes: int | None = Field(None, ge=1)
    """maximum samples in progress in a worker, including those that wait for an environment; null = 16 times slots, or
    8 with workflow_command, as each is a process"""
    threads: int = Field(1, ge=1)
    """CPU threads of one engine"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine, a server's too; processes on a cpu"""
    kv_cache_mb: int = Field(256, ge=16)
    """key-value cache of one engine in MiB (cpu)"""
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1)
    """share of a GPU's memory that an engine may use (cuda)"""
    engine_arguments: JsonArguments = {}
    """further AsyncEngineArgs of vLLM, such as quantization: fp8; see docs/models.md"""
    replay_routes: bool = False
    """the trainer sends each token to the experts that the engine chose for it, see docs/models.md (cuda)"""

    @property
    def reduced_precision(self) -> list[str]:
        """Engine arguments that make the engine compute in fewer bits than the trainer."""
        chosen = {name: self.engine_arguments.get(name) for name in ("quantization", "kv_cache_dtype")}
        return [f"{name}={value}" for name, value in chosen.items() if value not in (None, "auto")]

    @property
    def most_episodes(self) -> int:
        """What max_episodes comes to."""
        return self.max_episodes or (16 * self.slots if self.workflow_command is None else 8)

    def _problems(self) -> Iterable[str]:
        if self.workflow_command is not None:
            yield from self.unread(("workflow",), f"with {HERE}.workflow_command", to_do="leave one of them out")
        if self.replay_routes and self.interrupt == "keep_kv":
            yield (
                f"{HERE}.replay_routes needs prefix caching, which {HERE}.interrupt=keep_kv switches off: set "
                f"{HERE}.interrupt=recompute, or replay_routes to false"
            )
        if self.workflow not in self.workflows:
            yield from name_problems(f"{HERE}.workflow", self.workflow, kind="workflow")
        for key, one in self.workflows.items():
            yield from name_problems(f"{HERE}.workflows.{key}.function", one.function, kind="workflow")
        if self.workflow in ("single_turn", *self.workflows):
            to_do = f"leave them out, or set arguments in {HERE}.workflows"
            yield from self.unread(("workflow_arguments",), f"with {HERE}.workflow={self.workflow}", to_do=to_do)


class QueueConfig(Section):
    """The sample queue and its staleness bound."""

    max_staleness: int = Field(4, ge=0)
    """eta: largest age a token may have and still train; 0 = synchronous"""
    on_stale: Literal["mask", "wait", "drop", "keep"] = "mask"
    """how the bound is enforced when a batch is taken; keep = not enforced: older tokens train with their weight"""
    max_ahead: int | None = Field(None, ge=0)
    """batches generated ahead of the one in training, at most max_staleness; null = max_staleness"""
    groups_per_step: int = Field(16, ge=1)
    """groups per trainer step"""
    samples_per_group: int = Field(8, ge=1)
    """samples per prompt (G)"""
    reject: Literal["none", "zero_variance"] = "none"
    """zero_variance: groups whose rewards are all equal do not count towards a batch"""
    max_attempts: int = Field(3, ge=1)
    """attempts at a prompt before it counts as failed(too_slow), or workers lost before it counts as
    failed(crashes_workers)"""
    lease_timeout_s: float = Field(10.0, gt=0)
    """seconds without a heartbeat after which work is given to another worker"""
    max_message_mb: int = Field(32, ge=1)
    """largest message accepted, in MiB"""

    def _problems(self) -> Iterable[str]:
        if (self.max_ahead or 0) > self.max_staleness:
            yield f"queue.max_ahead must be at most queue.max_staleness={self.max_staleness}, got {self.max_ahead}"


class CriticConfig(Section):
    """The value model of `objective.baseline: critic`, trained beside the policy."""

    path: Annotated[str | None, Refers.MODEL] = None
    """model folder that initialises its body; null = the initial policy"""
    lr: float = Field(1e-4, gt=0)
    """learning rate of its AdamW; the rest is as in trainer"""
    target: Literal["gae", "monte_carlo"] = "gae"
    """what it learns: GAE's return, or the observed return"""
    value_clip: float | None = Field(None, gt=0)
    """how far a value may move per step (PPO); null = no limit"""
    warmup_steps: int = Field(0, ge=0)
    """trainer steps at the start in which only the critic learns"""


class LoraConfig(Section):
    """Low-rank adapters, which learn in the place of the weights."""

    rank: int = Field(16, ge=1, le=512)
    """rank of the adapters"""
    alpha: float = Field(32.0, gt=0)
    """adapters are scaled by alpha / rank"""
    targets: tuple[str, ...] = ()
    """the linear layers that get one, such as q_proj; empty = all but the output layer"""


class MeshConfig(Section):
    """How many copies of the model the trainer ranks hold, and how many of them hold each together."""

    replicate: int = Field(1, ge=1)
    """copies of the model; weights are gathered within a copy, gradients summed over all: for nodes with slow links
    between"""
    tensor: int = Field(1, ge=1)
    """neighbouring ranks that work on the same rows, each with some heads and columns of every layer"""
    context: int = Field(1, ge=1)
    """neighbouring ranks of a copy that work on the same rows, each with a part of their tokens"""
    expert: int = Field(1, ge=1)
    """neighbouring ranks of a copy that divide the experts of a mixture, and send each other tokens"""

    @property
    def same_rows(self) -> int:
        """Ranks that have the same rows."""
        return self.tensor * self.context


class TrainerConfig(Section):
    """Learning."""

    ranks: int = Field(1, ge=1)
    """trainer processes, FSDP2 ranks"""
    minibatches: int = Field(2, ge=1)
    """optimiser updates per step"""
    micro_batch_tokens: int = Field(4096, ge=1)
    """maximum tokens of one forward pass, including padding"""
    packing: bool = False
    """concatenate the rows of a pass instead of padding them; for flash_attention_2"""
    lr: float = Field(1e-4, gt=0)
    """peak learning rate of AdamW"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate after warm-up; the cosine ends at a tenth of lr"""
    warmup_steps: int = Field(0, ge=0)
    """trainer steps of linear warm-up"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay of matrices; norms and biases have none"""
    max_grad_norm: float = Field(1.0, gt=0)
    """gradient norm is clipped to this"""
    reduce_every: Literal["micro_batch", "update"] = "micro_batch"
    """when ranks sum gradients; update = less traffic, but each rank holds those of the whole model in float32"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass"""
    mesh: MeshConfig = MeshConfig()
    offload: bool = False
    """keep weights, gradients and moments in host memory; a layer is on the GPU only while it computes"""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """attention kernel of transformers for training; auto = its default, or eager where attention logits are capped"""
    lora: LoraConfig | None = None
    """train only low-rank adapters with this rank, alpha and targets; null = train every weight"""
    threads: int = Field(1, ge=1)
    """CPU threads of one rank"""
    collective_timeout_s: float = Field(600.0, gt=0)
    """seconds a rank waits for the others in one operation; must exceed run.stall_timeout_s"""

    def _problems(self) -> Iterable[str]:
        copies, tensor = self.mesh.replicate, self.mesh.tensor
        if self.ranks % (copies * tensor):
            yield f"trainer.mesh must divide trainer.ranks={self.ranks}, got {self.mesh}: set one of them"
        if (context := self.mesh.context) > 1 and (
            (self.ranks // copies) % context or tensor > 1 or self.attention not in ("auto", "sdpa")
        ):
            yield (
                f"trainer.mesh.context must divide the {self.ranks // copies} ranks of a copy, with tensor=1 and "
                f"trainer.attention=sdpa, got {context}, {tensor} and {self.attention}: set it to 1, or set those"
            )
        if (expert := self.mesh.expert) > 1 and ((self.ranks // copies) % expert or tensor > 1):
            yield (
                f"trainer.mesh.expert must divide the {self.ranks // copies} ranks of a copy, with tensor=1, got "
                f"{expert} and {tensor}: set it to 1, or set those"
            )
        if self.packing and context > 1:
            yield f"trainer.packing keeps rows whole, got trainer.mesh.context={context}: set it to 1, or packing=false"
        for name, size in {"tensor": tensor, "expert": expert}.items():
            if size > 1 and self.lora is not None:
                yield f"trainer.lora is not split over ranks, got trainer.mesh.{name}={size}: set 1, or leave lora out"

    @property
    def micro_batches(self) -> dict[str, Any]:
        """How rows are put into forward passes."""
        return {"max_tokens": self.micro_batch_tokens, "packed": self.packing}

    @property
    def row_ranks(self) -> int:
        """Ranks, of those with the same rows one."""
        return self.ranks // self.mesh.same_rows


class WeightsConfig(Section):
    """The hand-over of weights from trainer to engines."""

    transport: Literal["gloo", "nccl", "ipc"] = "gloo"
    """gloo = CPU; nccl = GPUs; ipc = GPUs that an engine and a rank share"""
    timeout_s: float = Field(30.0, gt=0)
    """time limit in seconds for engines to join the transfer group, and of one transfer; those that exceed it are
    replaced"""
    parity_every: int = Field(20, ge=0)
    """publications between logprob parity checks; the first is always checked; 0 = never"""
    parity_limit: Literal["auto"] | Annotated[float, Field(ge=0)] | None = "auto"
    """mean |engine - trainer| in nats that ends a run (99th percentile: 7 times that); auto = by dtype; 0 = only
    report"""

    @property
    def staged(self) -> bool:
        """Engines receive while they generate, and are paused for the load alone; else they load as they receive."""
        return self.transport == "gloo"
