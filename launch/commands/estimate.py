"""`areal-lite estimate`: the GPU memory of a recipe, whether it fits, and its peak throughput."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from areal_lite.config.checks import check_resources
from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.options import Overrides, Recipe, out_file

APART = "transfers (apart)"
HOST = "in the host's memory (apart)"
FULL = 0.95
"""Usable share of a GPU's memory; the rest goes to CUDA, NCCL and gaps between tensors."""


def estimate(
    recipe: Recipe,
    overrides: Overrides,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="A100, A100-40GB, B200, H100, H200, L40S or RTX4090")
    ] = "H100",
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="check against this cluster profile's GPUs; default: enough GPUs")
    ] = None,
    out: Annotated[Path | None, out_file("--json", metavar="OUT", help="write all figures to this file")] = None,
) -> int:
    """Estimate GPU memory and peak throughput.

    Needs neither GPU nor weights: model.path may be a folder with config.json, or a known name such as Qwen/Qwen2.5-7B.
    Exits with 1 if something does not fit.
    """
    config = load_config(recipe, overrides)
    if profile is not None:
        from areal_lite.launch.clusters.job import load_profile

        found = load_profile(profile)
        check_resources(config, num_cores=config.trainer.ranks, num_gpus=found.nodes * found.gpus_per_node)
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
        console.print("\n".join(problems) if problems else f"It fits on {gpu}.", soft_wrap=True)
    return int(bool(problems))


def all_figures(config: Config, *, gpu: str) -> dict[str, Any]:
    """Return sizes in GiB by place and part, and bounds on speed, as JSON.

    Raises:
        ConfigError: The GPU or the model is unknown.
    """
    from areal_lite.train import memory

    known = memory.KNOWN["gpus"]
    if gpu not in known:
        raise ConfigError(f"--gpu must be one of {', '.join(known)}, got {gpu}. Fix: choose one with as much memory")
    architecture, card = memory.architecture_of(config), known[gpu]
    size = memory.rank_size(architecture, config)
    engine = memory.engine_parts(architecture, size, config, gib=card["gib"])
    token = memory.kv_bytes_per_token(architecture, config)
    offloaded = {HOST: size.host} if config.trainer.offload else {}
    return {
        "model": config.model.path, "parameters": size.num_parameters, "gpu": gpu, "gib": card["gib"],
        "trainer rank": in_gib({**size.parts, APART: memory.handover_bytes(size, config)} | offloaded),
        "engine": in_gib(engine),
        "kv_tokens": max(0, int(engine["KV cache"] / token)),
        "tokens_per_s": {
            "trainer": memory.trainer_tokens_per_s(architecture, size, config, tflops=card["tflops"]),
            "engines": memory.engine_tokens_per_s(architecture, size, config, **card),
        },
    }  # fmt: skip


def in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    """Turn bytes into GiB."""
    return {name: value / 2**30 for name, value in parts.items()}


def peak_gib(figures: Mapping[str, Any]) -> float:
    """Return a trainer rank's GiB at the peak of an update; transfers happen when activations are free."""
    return float(sum(value for name, value in figures["trainer rank"].items() if name not in (APART, HOST)))


def memory_table(figures: Mapping[str, Any]) -> Table:
    """Return a table of GiB by part, for a trainer rank and for a GPU of an engine."""
    table = Table(
        "GiB", box=None, pad_edge=False, header_style="bold", title_justify="left",
        title=f"{figures['model']}: {figures['parameters'] / 1e9:,.3g} billion parameters",
    )  # fmt: skip
    rank, engine = figures["trainer rank"], figures["engine"]
    for place in ("trainer rank", "engine, each GPU"):
        table.add_column(place, justify="right")
    for name in dict.fromkeys((*rank, *engine)):
        table.add_row(name, *(f"{part[name]:.2f}" if name in part else "" for part in (rank, engine)))
    table.add_row("at the peak", f"{peak_gib(figures):.2f}", f"{sum(engine.values()):.2f}", style="bold")
    return table


def find_problems(config: Config, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each place that does not fit, with what to change."""
    rollout, context, engine = config.rollout, config.model.max_context, figures["engine"]
    taken = rollout.gpu_memory_fraction * figures["gib"] if config.weights.transport == "ipc" else 0.0
    limit, peak = FULL * figures["gib"] - taken, peak_gib(figures)
    if peak > limit:
        to_do = _shrink_rank(config, figures["trainer rank"], peak=peak, limit=limit)
        yield f"A trainer rank does not fit: it needs {peak:.1f} of {limit:.1f} GiB on {figures['gpu']}. Fix: {to_do}."
    if figures["kv_tokens"] < context:
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
