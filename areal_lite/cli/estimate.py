"""`areal-lite estimate`: what a recipe takes of each GPU, whether that fits, and how fast it can be at most."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from areal_lite.cli.options import Overrides, Recipe, out_file
from areal_lite.config.offline import check_resources
from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ConfigError

APART = "transfers (apart)"
HOST = "in the host's memory (apart)"
FULL = 0.95
"""Share of a GPU's memory that may be planned with; the rest goes to CUDA, NCCL and gaps between tensors."""


def estimate(
    recipe: Recipe,
    overrides: Overrides,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="A100, A100-40GB, B200, H100, H200, L40S or RTX4090")
    ] = "H100",
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="what the cluster has; default as many GPUs as it takes")
    ] = None,
    out: Annotated[Path | None, out_file("--json", metavar="OUT", help="write all figures to this file")] = None,
) -> int:
    """Say what trainer ranks and engines take, whether it fits, and how fast they can be at most.

    Needs neither GPU nor weights: model.path may be a folder with config.json, or a known name such as Qwen/Qwen2.5-7B.
    Ends with 1 if it does not fit.
    """
    config = load_config(recipe, overrides)
    if profile is not None:
        from areal_lite.launch.clusters.profile import load_profile

        found = load_profile(profile)
        check_resources(config, num_cores=config.trainer.ranks, num_gpus=found.nodes * found.gpus_per_node)
    console = Console()
    with console.status("tracing an update on fake tensors (some seconds) ..."):
        figures = all_figures(config, gpu=gpu)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(memory_table(figures))
    problems = list(find_problems(config, figures))
    if config.run.device == "cuda":
        trainer, engines = figures["tokens_per_s"]["trainer"], figures["tokens_per_s"]["engines"]
        console.print(
            f"\nAt most {trainer:,.0f} tokens/s trained and {engines:,.0f} generated, at the peak of {gpu}; runs reach "
            "a third to a half."
        )
        console.print("\n".join(problems) if problems else f"It fits on {gpu}.", soft_wrap=True)
    return int(bool(problems))


def all_figures(config: Config, *, gpu: str) -> dict[str, Any]:
    """Return sizes in GiB by place and part, and bounds on speed, as JSON.

    Raises:
        ConfigError: GPU or model are not known.
    """
    from areal_lite.train import memory

    known = memory.KNOWN["gpus"]
    if gpu not in known:
        raise ConfigError(f"--gpu must be one of {', '.join(known)}, got {gpu}: take one with as much memory")
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
    """Return what a trainer rank takes at the peak of an update; transfers come when activations are gone."""
    return float(sum(value for name, value in figures["trainer rank"].items() if name not in (APART, HOST)))


def memory_table(figures: Mapping[str, Any]) -> Table:
    """Draw GiB by part, a column for a trainer rank and one for a GPU of an engine."""
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
    """Yield what does not fit, with what to change."""
    trainer, rollout, context = config.trainer, config.rollout, config.model.max_context
    rank, engine = figures["trainer rank"], figures["engine"]
    taken = rollout.gpu_memory_fraction * figures["gib"] if config.weights.transport == "ipc" else 0.0
    limit, peak = FULL * figures["gib"] - taken, peak_gib(figures)
    fixed = sum(value for name, value in rank.items() if name.startswith("activations"))
    if peak > limit:
        if not trainer.activation_checkpointing:
            to_do = "set trainer.activation_checkpointing=true"
        elif trainer.micro_batch_tokens >= 2 * context:
            to_do = (
                f"lower trainer.micro_batch_tokens={trainer.micro_batch_tokens}, down to model.max_context={context}"
            )
        elif fixed < limit:
            ranks = math.ceil(trainer.ranks * (peak - fixed) / (limit - fixed))
            to_do = f"raise trainer.ranks={trainer.ranks} to {ranks} or more"
            to_do += "" if trainer.offload else ", or set trainer.offload=true"
        else:
            to_do = f"activations alone take {fixed:.1f}: lower model.max_context={context}, or take a larger GPU"
        yield f"A trainer rank does not fit: it takes {peak:.1f} GiB of {limit:.1f} on {figures['gpu']}; {to_do}."
    if figures["kv_tokens"] < context:
        yield (
            f"An engine does not fit: {max(0.0, engine['KV cache']):.1f} GiB are left for keys and values, "
            f"{figures['kv_tokens']:,} tokens, and one sample has model.max_context={context}; raise "
            f"rollout.tensor_parallel={rollout.tensor_parallel}."
        )
