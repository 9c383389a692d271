"""Settings that make no sense together: one sentence each, with field, value and remedy. Called by `config.py`."""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from areal_lite.config.data import data_problems
from areal_lite.config.plugins import known_names, split_name
from areal_lite.config.sections import CriticConfig, VerifierConfig
from areal_lite.errors import PluginError
from areal_lite.verify.builtin.code import CodeArguments
from areal_lite.verify.names import chosen_by_sources, known_verifier_names, verifier_settings, weights_of

if TYPE_CHECKING:
    from areal_lite.config.recipe import Config

__all__ = ["combination_problems"]


def combination_problems(config: "Config") -> Iterable[str]:
    """Yield one sentence (field, value, remedy) per impossible combination."""
    queue, rollout, trainer = config.queue, config.rollout, config.trainer
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
    yield from _workflow_problems(config)
    yield from data_problems(
        config.data,
        verifiers=known_verifier_names(config.verifier),
        workflows={*config.rollout.workflows, *known_names("workflow")},
    )
    yield from _verifier_problems(config.verifier)
    yield from _timeout_problems(config)
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


def _workflow_problems(config: "Config") -> Iterable[str]:
    """Yield one sentence per workflow that cannot be meant."""
    rollout = config.rollout
    for name, where in (
        (rollout.workflow, "rollout.workflow"),
        *((one.function, f"rollout.workflows.{key}.function") for key, one in rollout.workflows.items()),
    ):
        if name == "single_turn" or (where == "rollout.workflow" and name in rollout.workflows):
            continue
        try:
            split_name(name, kind="workflow")
        except PluginError as error:
            yield f"{where}: {error}"
    for key in rollout.workflows:
        if ":" in key:
            yield f"a name in rollout.workflows must have no colon, which no data row may use, got {key!r}: rename it"
    if rollout.workflow_arguments and rollout.workflow in ("single_turn", *rollout.workflows):
        yield (
            f"rollout.workflow_arguments are not read with rollout.workflow={rollout.workflow}: leave them out, or set "
            "arguments in rollout.workflows"
        )
    if rollout.turn_timeout_s >= config.run.stall_timeout_s and _has_turns(config):
        yield (
            f"rollout.turn_timeout_s must be less than run.stall_timeout_s, got {rollout.turn_timeout_s:g} and "
            f"{config.run.stall_timeout_s:g}: a run that waits for one reply so long counts as stalled; lower the one "
            "or raise the other"
        )


def _has_turns(config: "Config") -> bool:
    sources = config.data.sources.values()
    return config.rollout.workflow != "single_turn" or any(source.workflow for source in sources)


def _verifier_problems(verifier: VerifierConfig) -> Iterable[str]:
    """Yield one sentence per verifier that cannot be found, or whose settings nothing reads."""
    functions = [verifier.function] if isinstance(verifier.function, str) else list(verifier.function)
    if not functions:
        yield "verifier.function must name a verifier, got {}: name one, or several with their weights"
    named = {f"verifier.named.{name}.function": settings.function for name, settings in verifier.named.items()}
    wanted = [("verifier.function", name) for name in functions if name not in verifier.named]
    if verifier.eval_function is not None and verifier.eval_function not in verifier.named:
        wanted.append(("verifier.eval_function", verifier.eval_function))
    for key, name in [*wanted, *named.items()]:
        try:
            split_name(name, kind="verifier")
        except PluginError as error:
            yield f"{key}: {error}"
    for name in verifier.named:
        if ":" in name:
            yield f"verifier.named: a name must have no colon, got {name!r}: rows may choose a name, but never code"
    if verifier.arguments and not isinstance(verifier.function, str):
        yield (
            f"verifier.arguments is for one function, got several in verifier.function ({', '.join(functions)}): give "
            "each its own in verifier.named"
        )
    if isinstance(verifier.function, str) and verifier.function in verifier.named and verifier.arguments:
        yield (
            f"verifier.arguments is not read with verifier.function={verifier.function}, which is one of "
            "verifier.named and has its own: put them there"
        )


def _timeout_problems(config: "Config") -> Iterable[str]:
    """Yield one sentence per verifier `code` that the pool could end before its own limits do."""
    verifier = config.verifier
    names = {*weights_of(verifier), *verifier.named, *chosen_by_sources(config.data)}
    if verifier.eval_function is not None:
        names.add(verifier.eval_function)
    for name in sorted(names):
        settings = verifier_settings(verifier, name)
        # Arguments of a wrong type are found when the verifier is prepared.
        with contextlib.suppress(ValueError):
            if settings.function != "code":
                continue
            least = CodeArguments(**settings.arguments).least_timeout_s
            if settings.timeout_s < least:
                where = f"verifier.named.{name}" if name in verifier.named else "verifier"
                yield (
                    f"{where}.timeout_s must be at least total_s + 2 * wall_s + 2 = {least:g} for the verifier code, "
                    f"got {settings.timeout_s:g}, which would end slow programs before their limits do: raise it "
                    f"(verify: --timeout), or lower wall_s and total_s in its arguments"
                )


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
