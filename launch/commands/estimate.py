"""`areal-lite estimate`: the memory of a recipe, whether it fits, and its peak throughput on GPUs."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config, load_config
from areal_lite.config.sections import BUILT_IN
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.options import Gpu, Json, Overrides, ProfileFile, Recipe
from areal_lite.node import memory_bytes

PLACES = ("trainer rank", "engine", "other processes")
"""What takes memory; other processes than ranks and engines count where all share one machine's."""
APART = "transfers (apart)"
HOST = "in the host's memory (apart)"
FULL = 0.95
"""Usable share of a GPU's memory; the rest goes to CUDA, NCCL and gaps between tensors."""


def estimate(
    recipe: Recipe,
    overrides: Overrides,
    gpu: Gpu = "H100",
    profile: ProfileFile = None,
    out: Json = None,
) -> int:
    """Estimate memory and, on GPUs, peak throughput.

    This needs neither a GPU nor weights: model.path may be a folder with config.json, or a known name such as
    Qwen/Qwen2.5-7B. Exit with 1 if something does not fit.
    """
    config = load_config(recipe, overrides)
    if profile is not None:
        from areal_lite.launch.clusters.fit import gpu_problems
        from areal_lite.launch.clusters.job import load_profile

        for problem in gpu_problems(load_profile(profile), config, with_ranks=True):
            raise ConfigError(problem)
    console = Console()
    figures = all_figures(config, gpu=gpu)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(memory_table(figures))
    problems = list(find_problems(config, figures))
    if config.run.device == "cuda":
        trainer, engines = figures["tokens_per_s"]["trainer"], figures["tokens_per_s"]["engines"]
        # The trainer's tokens include prompts.
        generated = trainer * config.rollout.max_new_tokens / config.model.max_context
        side = "trainer ranks limit" if generated < engines else "engines limit"
        console.print(
            f"\nAt the peak of {gpu}, ranks train at most {trainer:,.0f} tokens/s, {generated:,.0f} of them generated; "
            f"engines generate at most {engines:,.0f}: the {side}. Runs reach a third to a half."
        )
    place = gpu if config.run.device == "cuda" else f"this machine ({need_in_words(config, figures)})"
    console.print("\n".join(problems) if problems else f"It fits on {place}.", soft_wrap=True)
    return int(bool(problems))


def all_figures(config: Config, *, gpu: str) -> dict[str, Any]:
    """Return sizes in GiB by place and part, and bounds on speed, as JSON.

    Raises:
        ConfigError: The GPU or the model is unknown.
    """
    from areal_lite.train import memory

    is_cpu = config.run.device == "cpu"
    card, architecture = memory.known_gpu(gpu), memory.architecture_of(config)
    size = memory.rank_size(architecture, config)
    engine = memory.engine_parts(architecture, size, config, gib=card["gib"])
    token = memory.kv_bytes_per_token(architecture, config)
    apart = {APART: memory.handover_bytes(size, config)}
    apart |= {HOST: size.host} if config.trainer.offload else {}
    places = {"trainer rank": {**size.parts, **apart}, "engine": engine}
    if is_cpu:
        for place, parts in memory.cpu_parts(size, config).items():
            places[place] = parts | places.get(place, {})
    return {
        "model": config.model.path, "parameters": size.num_parameters,
        "gpu": "this machine" if is_cpu else gpu, "gib": memory_bytes() / 2**30 if is_cpu else card["gib"],
        **{place: in_gib(parts) for place, parts in places.items()},
        "kv_tokens": max(0, int(engine["KV cache"] / token)),
        "tokens_per_s": {
            "trainer": memory.trainer_tokens_per_s(architecture, size, config, tflops=card["tflops"]),
            "engines": memory.engine_tokens_per_s(architecture, size, config, **card),
        },
    }  # fmt: skip


def in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    """Turn bytes into GiB."""
    return {name: value / 2**30 for name, value in parts.items()}


def peak_gib(parts: Mapping[str, float]) -> float:
    """Return the GiB of a place at its peak; a rank's transfers happen when its activations are free."""
    return float(sum(value for name, value in parts.items() if name not in (APART, HOST)))


def need_gib(config: Config, figures: Mapping[str, Any]) -> float:
    """Return the GiB of all processes of a run on one machine without GPUs, each at its peak."""
    rank, engine, others = (peak_gib(figures[place]) for place in PLACES)
    num_engines = 0 if config.rollout.servers else config.rollout.workers
    return config.trainer.ranks * rank + num_engines * engine + others


def need_in_words(config: Config, figures: Mapping[str, Any]) -> str:
    """Return what all processes need, and what this machine has."""
    return f"all processes need {need_gib(config, figures):.1f} of {figures['gib']:.1f} GiB"


def memory_here(config: Config | OfflineConfig) -> list[str]:
    """Return what a run with a real model and without GPUs needs of this machine; a `ConfigError` if it has less."""
    if not isinstance(config, Config) or config.run.device != "cpu" or config.model.path == BUILT_IN:
        return []
    from areal_lite.record.paths import with_absolute_paths

    config = with_absolute_paths(config, ("model",), with_weights=False)
    figures = all_figures(config, gpu="H100")
    for problem in find_problems(config, figures):
        raise ConfigError(problem)
    return [need_in_words(config, figures)]


def memory_table(figures: Mapping[str, Any]) -> Table:
    """Return a table of GiB by part, for a trainer rank and for a GPU of an engine."""
    table = Table(
        "GiB", box=None, pad_edge=False, header_style="bold", title_justify="left",
        title=f"{figures['model']}: {figures['parameters'] / 1e9:,.3g} billion parameters",
    )  # fmt: skip
    columns = [figures[place] for place in PLACES if place in figures]
    for title in PLACES if len(columns) == len(PLACES) else ("trainer rank", "engine, each GPU"):
        table.add_column(title, justify="right")
    for name in dict.fromkeys(name for parts in columns for name in parts):
        table.add_row(name, *(f"{parts[name]:.2f}" if name in parts else "" for parts in columns))
    table.add_row("at the peak", *(f"{peak_gib(parts):.2f}" for parts in columns), style="bold")
    return table


def find_problems(config: Config, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each place that does not fit, with what to change."""
    if config.run.device == "cpu":
        if need_gib(config, figures) > figures["gib"]:
            yield f"It does not fit: {need_in_words(config, figures)}. Fix: {_shrink_on_cpu(config, figures)}."
        return
    rollout, context, engine = config.rollout, config.model.max_context, figures["engine"]
    taken = rollout.gpu_memory_fraction * figures["gib"] if config.weights.transport == "ipc" else 0.0
    limit, peak = FULL * figures["gib"] - taken, peak_gib(figures["trainer rank"])
    if peak > limit:
        to_do = _shrink_rank(config, figures["trainer rank"], peak=peak, limit=limit)
        yield f"A trainer rank does not fit: it needs {peak:.1f} of {limit:.1f} GiB on {figures['gpu']}. Fix: {to_do}."
    if figures["kv_tokens"] < context and not rollout.servers:
        yield (
            f"An engine does not fit: {max(0.0, engine['KV cache']):.1f} GiB are left for the KV cache, "
            f"{figures['kv_tokens']:,} tokens, but a sample may have model.max_context={context}. "
            f"Fix: {_shrink_engine(config, engine)}."
        )


def _shrink_rank(config: Config, rank: Mapping[str, float], *, peak: float, limit: float) -> str:
    """Return the cheapest change that can make a rank fit. More ranks shrink states, smaller passes activations.

    Args:
        rank: GiB by part.
        peak: GiB that it needs.
        limit: GiB that it has.
    """
    trainer, context = config.trainer, config.model.max_context
    activations = sum(value for name, value in rank.items() if name.startswith("activations"))
    states = peak - activations
    one_row = activations * min(1.0, context / trainer.micro_batch_tokens)
    if states < limit and not trainer.activation_checkpointing:
        return "set trainer.activation_checkpointing=true"
    if one_row >= limit:
        return f"activations alone take {one_row:.1f}: lower model.max_context={context}, or take a larger GPU"
    lower = f"lower trainer.micro_batch_tokens={trainer.micro_batch_tokens} to"
    if states + one_row <= limit:
        passes = int(trainer.micro_batch_tokens * (limit - states) / activations) // context
        return f"{lower} {passes * context} or less"
    also = ""
    if activations >= limit:
        activations, also = one_row, f"{lower} {context}, and "
    ranks = math.ceil(trainer.ranks * states / (limit - activations))
    more = f"{also}raise trainer.ranks={trainer.ranks} to {ranks} or more"
    return more if trainer.offload else f"{more}, or set trainer.offload=true"


def _shrink_on_cpu(config: Config, figures: Mapping[str, Any]) -> str:
    """Return the cheapest change that makes a run fit where all processes share one memory."""
    trainer, context, rank = config.trainer, config.model.max_context, figures["trainer rank"]
    kept = rank["activations kept by layers"]
    over = (need_gib(config, figures) - figures["gib"]) / trainer.ranks
    rows = int((kept - over) / kept * trainer.micro_batch_tokens) // context
    if rows >= 1:
        return f"lower trainer.micro_batch_tokens={trainer.micro_batch_tokens} to {rows * context} or less"
    if not trainer.activation_checkpointing:
        return f"set trainer.activation_checkpointing=true and trainer.micro_batch_tokens={context}"
    return "take a smaller model, or train adapters alone (trainer.lora)"


def _shrink_engine(config: Config, engine: Mapping[str, float]) -> str:
    """Return what can make an engine fit, given GiB by part. More GPUs shrink only parameters and cache."""
    rollout, budget = config.rollout, sum(engine.values())
    rest, parameters = engine["activations"] + engine["transfers"], engine["parameters"]
    if rest >= budget:
        lower = f"lower rollout.slots={rollout.slots}"
        return f"activations and transfers alone take {rest:.1f}: raise rollout.gpu_memory_fraction, or {lower}"
    gpus = 2 * rollout.tensor_parallel
    while parameters * rollout.tensor_parallel / gpus + rest >= budget:
        gpus *= 2
    return f"raise rollout.tensor_parallel={rollout.tensor_parallel} to {gpus} or more"
