"""Checks that compare sections of a recipe with each other, or with the cores of a machine. Pure.

They run whenever a recipe is parsed, so that all commands refuse the same recipe with the same sentence. A rule about
one section is part of that section. `launch/run/recipe_check.py` compares a recipe with the files and functions that it
names.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from areal_lite.config.plugins import known_names
from areal_lite.config.suggestion import suggestion

if TYPE_CHECKING:
    from areal_lite.config.offline import OfflineConfig
    from areal_lite.config.recipe import Config

_COMPARED = ("group_mean", "leave_one_out", "group_std", "best_of_group", "varied_groups", "zero_variance")
"""Choices that compare the samples of a group."""


def recipe_problems(config: "Config") -> Iterable[str]:
    """Yield a sentence for each pair of sections of a `train` recipe that do not fit together."""
    yield from _batch_problems(config)
    for key, source in config.data.sources.items():
        for kind in ("verifier", "workflow"):
            if (name := getattr(source, kind)) is not None:
                yield from row_name_problems(config, kind, name, place=f"{config.data.place_of(key)}.{kind} must be")
    yield from _device_problems(config)
    yield from _server_problems(config)
    yield from _precision_problems(config)
    yield from _timeout_problems(config)
    yield from _watch_problems(config)
    if (longest := config.rollout.max_new_tokens) >= (context := config.model.max_context):
        got = f"{longest} and {context}: raise model.max_context"
        yield f"rollout.max_new_tokens must leave room for a prompt in model.max_context, got {got}"
    if config.objective.baseline != "critic":
        yield from config.unread(["critic"], "without objective.baseline=critic", at="")
    if config.trainer.packing and config.critic.path is not None:
        yield "trainer.packing was tried with the policy's family alone, got a critic.path too: set one of them"


def _batch_problems(config: "Config") -> Iterable[str]:
    """How the samples of a step are compared and divided."""
    queue, samples = config.queue, config.samples_per_step
    minibatches, ranks = config.trainer.minibatches, config.trainer.row_ranks
    if samples % minibatches:
        yield (
            "queue.groups_per_step * queue.samples_per_group must be divisible by trainer.minibatches, got "
            f"{queue.groups_per_step} * {queue.samples_per_group} = {samples} and {minibatches}: set "
            "trainer.minibatches to a divisor"
        )
    if samples // minibatches < ranks:
        yield (
            f"every trainer rank needs a sample in each minibatch, got {samples} samples, {minibatches} "
            f"minibatches and {ranks} ranks: raise queue.groups_per_step or lower trainer.ranks"
        )
    choices = {f"objective.{key}": getattr(config.objective, key) for key in ("baseline", "scale", "sample_filter")}
    choices |= {"queue.reject": queue.reject}
    compared = [f"{key}={value}" for key, value in choices.items() if value in _COMPARED]
    if queue.samples_per_group < 2 and compared:
        yield (
            f"queue.samples_per_group must be 2 or more with {' and '.join(compared)}, got 1, which has nothing "
            "to be compared with: raise it, or compare within the batch (objective.preset=reinforce_pp)"
        )
    if config.objective.proximal == "reuse" and minibatches != 1:
        yield (
            f"objective.proximal=reuse is exact only with one optimiser update, got trainer.minibatches="
            f"{minibatches}: set it to 1, or objective.proximal to recompute"
        )
    if config.objective.proximal != "behaviour" and minibatches == 1:
        because = "with trainer.minibatches=1, where the proximal policy is the current one"
        to_do = "raise trainer.minibatches, or leave it out"
        yield from config.objective.unread(["proximal_kl_coef"], because, at="objective.", to_do=to_do)


def _timeout_problems(config: "Config") -> Iterable[str]:
    """Time limits that must end first, because they name the stuck process."""
    turn_s, stall_s = config.rollout.turn_timeout_s, config.run.stall_timeout_s
    limit_s = config.trainer.collective_timeout_s
    chosen = {config.rollout.workflow, *(source.workflow or "single_turn" for source in config.data.sources.values())}
    is_alone = chosen == {"single_turn"} and config.rollout.workflow_command is None
    if not is_alone and turn_s >= stall_s:
        yield (
            f"rollout.turn_timeout_s must be less than run.stall_timeout_s, got {turn_s:g} and {stall_s:g}: a run "
            "that waits for one reply so long counts as stalled; lower the one or raise the other"
        )
    for name, first_s in {"run.stall_timeout_s": stall_s, "weights.timeout_s": config.weights.timeout_s}.items():
        if config.trainer.ranks > 1 and limit_s <= first_s:
            why = "or ranks give up before it is known who is late; raise it"
            yield f"trainer.collective_timeout_s must be more than {name}={first_s:g}, got {limit_s:g}: {why}"


def _watch_problems(config: "Config") -> Iterable[str]:
    """What keeps watched rewards from being compared with the trained one over held-out rows."""
    if not config.reward_watch.verifiers:
        return
    if (name := config.verifier.eval_function) is not None:
        yield (
            f"verifier.eval_function must be null with reward_watch, which needs the trained reward of held-out rows, "
            f"got {name}: name it in reward_watch.verifiers instead"
        )
    if config.run.eval_every == 0:
        yield "run.eval_every must be above 0 with reward_watch, which compares evaluations, got 0: set it, e.g. to 10"


def _precision_problems(config: "Config") -> Iterable[str]:
    """Engines in a precision whose parity limit was never measured."""
    unknown = [one for one in config.rollout.reduced_precision if "fp8" not in one]
    if unknown and config.weights.parity_limit == "auto" and config.weights.parity_every:
        yield (
            f"weights.parity_limit must be a number with rollout.engine_arguments {', '.join(unknown)}, got auto: "
            "set the mean difference of log-probabilities in nats that you accept, or 0 to report only"
        )


def _device_problems(config: "Config") -> Iterable[str]:
    device, transport = config.run.device, config.weights.transport
    workers, parallel, ranks = config.rollout.workers, config.rollout.tensor_parallel, config.trainer.ranks
    if device == "cpu" and transport != "gloo":
        yield f"weights.transport={transport} needs run.device=cuda, got cpu: set weights.transport=gloo"
    if device == "cuda" and transport == "gloo":
        yield "weights.transport=gloo is of the CPU, got run.device=cuda: set weights.transport=nccl (or ipc)"
    if transport == "ipc" and (parallel > 1 or workers > ranks):
        yield (
            "over weights.transport=ipc each engine shares the one GPU of a rank, got rollout.tensor_parallel="
            f"{parallel}, rollout.workers={workers} and trainer.ranks={ranks}: set 1, raise trainer.ranks, or set "
            "weights.transport=nccl"
        )


def _server_problems(config: "Config") -> Iterable[str]:
    """What a run cannot have where vLLM servers generate that somebody else starts."""
    rollout = config.rollout
    if not (servers := rollout.servers):
        yield from rollout.unread(["server_key_env"], "without rollout.servers", at="rollout.")
        return
    yield from rollout.unread(["replay_routes"], "with rollout.servers", at="rollout.", to_do="set it to false")
    if wrong := [server for server in servers if not re.fullmatch(r"https?://[\w.-]+(:\d+)?", server)]:
        yield f"rollout.servers must be addresses such as http://10.0.0.5:8000, got {wrong[0]!r}: correct it"
    if len(set(servers)) < len(servers) or rollout.workers != len(servers):
        yield (
            f"rollout.servers must name a server for each worker, got {', '.join(servers)} for rollout.workers="
            f"{rollout.workers}: set as many workers as there are servers, and each server once"
        )
    if config.weights.transport == "ipc":
        yield "weights.transport=ipc is for engines on a rank's GPU, got rollout.servers: set nccl, or leave them out"


def offline_problems(config: "OfflineConfig") -> Iterable[str]:
    """Yield a sentence for each pair of sections of any other recipe that do not fit together."""
    because = f"with command={config.command}"
    if config.command != "sft" and config.data.source == "arith" and config.data.carelessness == 0:
        yield "data.carelessness makes the rejected solutions of data.source=arith, got 0: set it, as to 0.6"
    if (rows := config.trainer.batch_size) < (ranks := config.trainer.row_ranks):
        got = f"trainer.batch_size={rows} for {ranks} ranks: raise the one or lower the other"
        yield f"every trainer rank needs a row in each step, got {got}"
    if config.command != "dpo":
        yield from config.unread(["preference"], because, at="", to_do="remove it, or correct the command")
    if config.command == "reward_model":
        because += ", which scores rows with a new head"
        yield from config.trainer.unread(("packing", "lora"), because, at="trainer.", to_do="leave it out")
        yield from config.trainer.mesh.unread(("context",), because, at="trainer.mesh.", to_do="leave it out")


def row_name_problems(config: "Config", kind: str, name: Any, *, place: str, at: str = "") -> Iterable[str]:
    """Yield what is wrong with a row's verifier or workflow, if anything. Data must not choose code.

    Args:
        kind: `verifier` or `workflow`.
        place: Begins the message: `data.verifier must be`.
        at: Which row it is.
    """
    own = config.verifier.choosable if kind == "verifier" else {*config.rollout.workflows, *known_names("workflow")}
    option = "verifier.named" if kind == "verifier" else "rollout.workflows"
    known = sorted(own)
    if name not in known and ":" in str(name):
        to_do = f"data must not choose code; give the function a name in {option}, and write that"
        yield f"{place} a known name, got {name!r}{at}: {to_do}"
    elif name not in known:
        near = suggestion(str(name), known)
        yield f"{place} one of {', '.join(known)}, got {name!r}{at}{near or '.'} Fix: correct it, or add it to {option}"


def core_warning(config: "Config | OfflineConfig", *, num_cores: int) -> str:
    """Return a warning where a run on a CPU would be slow, as it has more processes of a kind than cores; else nothing.

    Whether GPUs suffice is known once every process has a place: see `launch/run/plan.py`.
    """
    counts = {"trainer.ranks": config.trainer.ranks}
    if config.command == "train" and not config.rollout.servers:
        counts |= {f"rollout.{key}": getattr(config.rollout, key) for key in ("workers", "tensor_parallel")}
    many = [f"{key}={count}" for key, count in counts.items() if count > num_cores]
    if config.run.device != "cpu" or not many:
        return ""
    return f"{' and '.join(many)} on {num_cores} CPU cores: they will wait for each other; set {num_cores} or fewer"
