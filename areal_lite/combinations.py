"""Settings that make no sense together: one sentence each, with field, value and remedy. Called by `config.py`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from areal_lite.sections import CriticConfig

if TYPE_CHECKING:
    from areal_lite.config import Config

__all__ = ["combination_problems"]


def combination_problems(config: "Config") -> Iterable[str]:
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
    yield from _objective_problems(config)
    if config.run.device == "cpu" and rollout.tensor_parallel > 1:
        yield (
            f"rollout.tensor_parallel={rollout.tensor_parallel} needs run.device=cuda, got cpu: set it to 1, and use "
            "rollout.workers for more engines"
        )
    if config.run.device == "cpu" and config.weights.transport != "gloo":
        yield f"weights.transport={config.weights.transport} needs run.device=cuda, got cpu: set weights.transport=gloo"
    if config.run.device == "cuda" and config.weights.transport == "gloo":
        yield "weights.transport=gloo is the CPU transport, got run.device=cuda: set weights.transport=nccl (or ipc)"


def _objective_problems(config: "Config") -> Iterable[str]:
    """Yield one sentence per objective that its own knobs make meaningless."""
    objective, group_size = config.objective, config.queue.samples_per_group
    compared = [
        f"objective.{name}={value}"
        for name, value in (
            ("baseline", objective.baseline),
            ("scale", objective.scale),
            ("sample_filter", objective.sample_filter),
        )
        if value in ("group_mean", "leave_one_out", "group_std", "best_of_group", "varied_groups")
    ]
    if group_size < 2 and compared:
        yield (
            f"queue.samples_per_group must be 2 or more with {compared[0]}, got {group_size}: rewards are compared "
            "within a group, and a sample alone has nothing to learn from"
        )
    if config.queue.reject == "zero_variance" and group_size < 2:
        yield "queue.reject=zero_variance needs queue.samples_per_group of 2 or more, got 1: set queue.reject=none"
    if objective.proximal == "reuse" and config.trainer.minibatches != 1:
        yield (
            f"objective.proximal=reuse is exact only with one optimiser update, got trainer.minibatches="
            f"{config.trainer.minibatches}: set it to 1, or objective.proximal to recompute"
        )
    if objective.baseline == "critic" and objective.scale == "group_std":
        yield (
            "objective.scale=group_std compares whole samples of a prompt, got objective.baseline=critic, which judges "
            "tokens: set objective.scale to batch_std or none"
        )
    if objective.kl == "loss" and objective.kl_estimator == "k1":
        yield (
            "objective.kl=loss needs objective.kl_estimator k2 or k3, got k1, whose gradient is zero on average: set "
            "kl_estimator, or charge the KL in the reward"
        )
    if objective.surrogate == "likelihood":
        for key, is_used in (
            ("kl=reward", objective.kl == "reward"),
            ("baseline=critic", objective.baseline == "critic"),
            ("overlong_buffer", objective.overlong_buffer > 0),
        ):
            if is_used:
                yield (
                    f"objective.{key} acts through the advantage, which objective.surrogate=likelihood does not use: "
                    "leave it out, or set surrogate to ratio"
                )
    yield from _unread_problems(config)
    if objective.kl != "none" and objective.kl_coef == 0:
        yield f"objective.kl={objective.kl} needs objective.kl_coef above 0, got 0: set it, or objective.kl to none"
    if objective.proximal_kl_target is not None and objective.proximal_kl_coef == 0:
        yield (
            "objective.proximal_kl_target needs a first objective.proximal_kl_coef above 0, got 0: doubling it changes "
            "nothing; set it to 1"
        )
    if objective.surrogate == "likelihood" and not (objective.clip_low is None and objective.clip_high is None):
        yield (
            f"objective.surrogate=likelihood has no ratio to clip, got clip_low={objective.clip_low}, "
            f"clip_high={objective.clip_high}: set both to null"
        )
    if objective.surrogate != "ratio" and objective.ratio_level == "sequence":
        yield (
            f"objective.ratio_level=sequence needs objective.surrogate=ratio, got {objective.surrogate}: set "
            "ratio_level=token"
        )
    if objective.behaviour_filter != "none" and objective.proximal == "behaviour":
        yield (
            f"objective.behaviour_filter={objective.behaviour_filter} compares proximal with behaviour policy, got "
            "objective.proximal=behaviour, where they are the same: set proximal=recompute, or behaviour_filter=none"
        )
    if objective.ptx_coef > 0 and objective.ptx_path is None:
        yield "objective.ptx_coef needs objective.ptx_path, got none: give the path of a text file"
    if objective.geometric_low >= objective.geometric_high:
        yield (
            f"objective.geometric_low must lie below geometric_high, got {objective.geometric_low} and "
            f"{objective.geometric_high}"
        )


def _unread_problems(config: "Config") -> Iterable[str]:
    """Yield one sentence per setting that nothing reads because what it belongs to is off."""
    objective = config.objective
    for switch, is_off, keys in (
        ("objective.kl", objective.kl == "none", ("kl_coef", "kl_target", "reference_path")),
        ("objective.ptx_coef", objective.ptx_coef == 0, ("ptx_path",)),
    ):
        for key in keys:
            if is_off and (value := getattr(objective, key)):
                yield f"objective.{key}={value} is not read without {switch}: set that too, or leave it out"
    if objective.baseline != "critic" and config.critic != CriticConfig():
        yield "the section critic is not read without objective.baseline=critic: set that too, or leave it out"
