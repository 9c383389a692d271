"""`areal-lite estimate`: the memory of a recipe, whether it fits, and its peak throughput on GPUs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.reading import set_value
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.config.sections import BUILT_IN
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.options import Gpu, Json, Overrides, ProfileFile, Recipe
from areal_lite.node import memory_bytes

PLACES = ("trainer rank", "engine", "other processes")
"""What takes memory; other processes than ranks and engines count where all share one machine's."""
APART = "transfers (apart)"
HOST = "in the host's memory (apart)"
OF_AN_UPDATE = ("gathered parameters", "gradients", "activations", "activations kept by layers")
"""What a trainer rank has during an update alone; transfers happen between updates."""
Change = Mapping[str, Any]
"""New values by key."""
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
    card, architecture = memory.known_gpu("H100" if is_cpu else gpu), memory.architecture_of(config)
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
    """Return the GiB of a place at its peak: in an update, or between two, when weights are transferred."""
    return max(_without(parts, APART, HOST), _without(parts, *OF_AN_UPDATE, HOST))


def _without(parts: Mapping[str, float], *names: str) -> float:
    return float(sum(value for name, value in parts.items() if name not in names))


def need_gib(config: Config, figures: Mapping[str, Any]) -> float:
    """Return the GiB of all processes of a run on one machine without GPUs, each at its peak."""
    rank, ranks = figures["trainer rank"], config.trainer.ranks
    between = ranks * _without(rank, *OF_AN_UPDATE, APART, HOST) + rank[APART]  # rank 0 alone has transfers
    num_engines = 0 if config.rollout.servers else config.rollout.workers
    engines = num_engines * peak_gib(figures["engine"])
    return float(max(ranks * _without(rank, APART, HOST), between)) + engines + peak_gib(figures["other processes"])


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
        if not _rank_fits(config, figures):
            yield f"It does not fit: {need_in_words(config, figures)}. Fix: {_fix_of_rank(config, figures)}."
        return
    if not _rank_fits(config, figures):
        needed, limit = peak_gib(figures["trainer rank"]), _limit_gib(config, figures)
        yield (
            f"A trainer rank does not fit: it needs {needed:.1f} of {limit:.1f} GiB on {figures['gpu']}. "
            f"Fix: {_fix_of_rank(config, figures)}."
        )
    if not _engine_fits(config, figures):
        yield (
            f"An engine does not fit: {max(0.0, figures['engine']['KV cache']):.1f} GiB are left for the KV cache, "
            f"{figures['kv_tokens']:,} tokens, but a sample may have model.max_context={config.model.max_context}. "
            f"Fix: {_fix_of_engine(config, figures)}."
        )


def _limit_gib(config: Config, figures: Mapping[str, Any]) -> float:
    """Return the GiB of a GPU that a trainer rank can have; over ipc it shares the GPU with an engine."""
    taken = config.rollout.gpu_memory_fraction if config.weights.transport == "ipc" else 0.0
    return float((FULL - taken) * figures["gib"])


def _rank_fits(config: Config, figures: Mapping[str, Any]) -> bool:
    if config.run.device == "cpu":
        return need_gib(config, figures) <= float(figures["gib"])
    return peak_gib(figures["trainer rank"]) <= _limit_gib(config, figures)


def _engine_fits(config: Config, figures: Mapping[str, Any]) -> bool:
    return bool(config.rollout.servers) or figures["kv_tokens"] >= config.model.max_context


def _fix_of_rank(config: Config, figures: Mapping[str, Any]) -> str:
    """Return the cheapest change with which a rank fits: smaller passes, recomputation, then more ranks or offload."""
    trainer, context = config.trainer, config.model.max_context
    passes, rows = list[dict[str, Any]]([{}]), trainer.micro_batch_tokens // context
    while rows := rows // 2:
        passes.append({"trainer.micro_batch_tokens": rows * context})
    if not trainer.activation_checkpointing:
        passes += [{"trainer.activation_checkpointing": True, **change} for change in passes]
    fixes = [_with_passes(config, figures, [{}], passes)]
    if fixes == [None] and config.run.device == "cuda":
        ranks = [{"trainer.ranks": trainer.ranks * 2**doublings} for doublings in range(1, 7)]
        fixes = [_with_passes(config, figures, changes, passes) for changes in (ranks, [{"trainer.offload": True}])]
    other = "set weights.transport=nccl, " if config.weights.transport == "ipc" else ""
    other += f"lower model.max_context={context}, train adapters alone (trainer.lora), or take a smaller model"
    return ", or ".join(filter(None, fixes)) or other


def _with_passes(
    config: Config, figures: Mapping[str, Any], changes: Iterable[Change], passes: Sequence[Change]
) -> str | None:
    """Return the first change that is enough, with the first passes that fit it: each try takes half a second."""
    for change in changes:
        if _first_that_fits(config, figures, [{**change, **passes[-1]}], _rank_fits):
            return _first_that_fits(config, figures, [{**change, **one} for one in passes], _rank_fits)
    return None


def _fix_of_engine(config: Config, figures: Mapping[str, Any]) -> str:
    """Return how many GPUs an engine needs, which share its parameters and its cache."""
    numbers = [config.rollout.tensor_parallel * 2**doublings for doublings in range(1, 7)]
    gpus = [{"rollout.tensor_parallel": number} for number in numbers]
    other = f"raise rollout.gpu_memory_fraction, or lower rollout.slots={config.rollout.slots} or model.max_context"
    return _first_that_fits(config, figures, gpus, _engine_fits) or other


def _first_that_fits(
    config: Config,
    figures: Mapping[str, Any],
    changes: Iterable[Change],
    fits: Callable[[Config, Mapping[str, Any]], bool],
) -> str | None:
    """Return the first of these changes that is not refused and makes the recipe fit, in words."""
    for change in changes:
        raw = config.model_dump()
        for key, value in change.items():
            set_value(raw, key, value)
        with suppress(ConfigError):
            tried = parse_config(raw)
            if fits(tried, all_figures(tried, gpu=figures["gpu"])):
                return " and ".join(_in_words(key, attrgetter(key)(config), value) for key, value in change.items())
    return None


def _in_words(key: str, before: Any, after: Any) -> str:
    if after is True:
        return f"set {key}=true"
    return f"{'raise' if after > before else 'lower'} {key}={before} to {after}"
