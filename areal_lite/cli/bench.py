"""`areal-lite bench`: one command a benchmark. What each measures, and how, is in `launch/bench`."""

from pathlib import Path
from typing import Annotated

import typer

from areal_lite.cli.options import Overrides, Recipe, word_list
from areal_lite.errors import ConfigError

bench = typer.Typer(
    help="Measure: modes against each other, or many short runs of a plan.\n\n"
    "In modes, plan, presets, staleness and gpu-check, Ctrl-C finishes the step, saves, and says how to continue: "
    "called again, they go on where they stopped. The others begin anew."
)

Words = Annotated[list[str], word_list("[RECIPE]... [section.field=value]...", "recipes, and settings of all of them")]
Sizes = Annotated[list[str], typer.Argument(metavar="[WIDTHxLAYERS]...", help="models")]
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="measurements of everything")]
Seconds = Annotated[float, typer.Option(min=1e-3, help="length of a measurement")]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="trainer steps of a measurement")]
Only = Annotated[
    list[str],
    typer.Option(
        default_factory=list, show_default=False, metavar="NAME", help="a name, or a pattern; may be given again"
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="folder of the results")]
RunsOut = Annotated[
    Path | None, typer.Option(metavar="DIR", help="folder of all files; default runs/modes-RECIPE or runs/bench-PLAN")
]


def _split(words: list[str], *, default: list[str], most: int = 1) -> tuple[list[str], list[str]]:
    """Tell recipes from overrides."""
    recipes = [word for word in words if "=" not in word] or default
    if len(recipes) > most:
        raise ConfigError(f"this benchmark measures one recipe, got {' '.join(recipes)}: name one")
    return recipes, [word for word in words if "=" in word]


@bench.command()
def modes(recipe: Recipe, overrides: Overrides, only: Only, repeats: Repeats = 3, out: RunsOut = None) -> int:
    """A recipe in synchronous and asynchronous modes, and what asynchrony gains.

    A short search over the split of threads, then every mode in turn, several times. Writes results.json, modes.md and
    modes.svg. Called again, it goes on where it stopped.
    """
    from areal_lite.launch.bench.modes import bench

    return bench(recipe, overrides, repeats=repeats, only=only, out=out)


@bench.command()
def queue(repeats: Repeats = 5, seconds: Seconds = 2.0, out: Out = Path("runs/bench-queue")) -> int:
    """Groups/s through the sample queue, against Ray's queue and raw ZeroMQ (about 6 minutes)."""
    from areal_lite.launch.bench.queue import QueueBench, bench

    return bench(QueueBench(repeats=repeats, measured_s=seconds), out=out)


@bench.command()
def handover(
    sizes: Sizes = ["64x4", "128x4", "256x4", "512x4", "512x8"],  # noqa: B006  # typer copies it
    repeats: Annotated[int, typer.Option(min=1, help="hand-overs per model")] = 20,
    requests: Annotated[int, typer.Option(min=0, help="requests in flight")] = 16,
    out: Out = Path("runs/bench-handover"),
) -> int:
    """Staging, pause, load and resume over model sizes, against a memory copy (about 4 minutes).

    Hands weights over to an engine that generates: how long it takes to stage them, for how long the engine is paused,
    and how long a plain memory copy of the same bytes takes. Nothing is trained; the models are made for the purpose.
    """
    from areal_lite.launch.bench.handover import HandoverBench, bench, parse_size

    shapes = tuple(map(parse_size, sizes))
    return bench(HandoverBench(sizes=shapes, repeats=repeats, requests=requests), out=out)


@bench.command()
def peers(
    words: Words,
    size: Annotated[
        str | None, typer.Option(metavar="WIDTHxLAYERS", help="a model of random weights; lengths must be drawn")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="runs of each side")] = 2,
    steps: Annotated[
        int | None,
        typer.Option(
            min=4, max=100_000, metavar="N", help="optimiser steps of a run; default 120, of drawn lengths the recipe's"
        ),
    ] = None,
    accuracy: Annotated[float, typer.Option(min=0, max=1, help="held-out accuracy whose time is taken")] = 0.75,
    out: Out = Path("runs/bench-peers"),
) -> int:
    """The arithmetic task in TRL's GRPOTrainer, beside ours (about 14 minutes on 2 idle cores).

    Trains the same model on the same prompts with TRL and with areal-lite, in turns, and compares samples/s and the
    time to an accuracy. TRL is installed into a folder of its own when it is first needed (2 MB). Writes
    results.json and peers.svg. Of longtail_cpu, whose lengths are drawn, speed alone is compared; --size 640x12 gives
    it a larger model.
    """
    from areal_lite.launch.bench.handover import parse_size
    from areal_lite.launch.bench.peers import bench

    (recipe,), overrides = _split(words, default=["arith_cpu"])
    shape = parse_size(size) if size else None
    return bench(recipe, overrides, size=shape, repeats=repeats, steps=steps, accuracy=accuracy, out=out)


@bench.command()
def train(
    words: Words,
    repeats: Repeats = 5,
    steps: Steps = 2,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="rows of the padded loop's micro-batches")] = 8,
    out: Out = Path("runs/bench-train"),
) -> int:
    """Trained tokens/s of the trainer, against a padded transformers loop (about 5 minutes).

    Trains the same batches with the trainer and with the loop that people write: transformers, AdamW, rows padded to
    the longest of a micro-batch of a fixed number of rows: that of --rows, and that with which it is fastest here.
    Completions are as long as the recipes' (default longtail_cpu and arith_cpu). All must compute the same gradients.
    """
    from areal_lite.launch.bench.train import TrainBench, bench

    recipes, overrides = _split(words, default=["longtail_cpu", "arith_cpu"], most=len(words) + 2)
    return bench(TrainBench(repeats=repeats, steps=steps, rows=rows), recipes, overrides, out=out)


@bench.command()
def rollout(
    words: Words,
    repeats: Repeats = 5,
    seconds: Seconds = 10.0,
    every: Annotated[float, typer.Option(min=1e-3, help="seconds between publications")] = 5.0,
    warm: Annotated[float, typer.Option(min=0, help="seconds before each that do not count")] = 4.0,
    out: Out = Path("runs/bench-rollout"),
) -> int:
    """Tokens/s of a rollout worker against vLLM alone, and under publications (about 7 minutes).

    Tokens/s of one engine (default recipe longtail_cpu): alone; filled by the rollout worker with queue and verifier;
    and with publications at a fixed cadence that let running samples finish, or interrupt them. Nothing is trained.
    """
    from areal_lite.launch.bench.rollout import RolloutBench, bench

    (recipe,), overrides = _split(words, default=["longtail_cpu"])
    settings = RolloutBench(repeats=repeats, measured_s=seconds, warm_s=warm, publish_every_s=every)
    return bench(settings, recipe, overrides, out=out)


@bench.command()
def agents(
    words: Words,
    repeats: Repeats = 3,
    seconds: Seconds = 10.0,
    turns: Annotated[int, typer.Option(min=1, help="of the model's in a dialogue")] = 3,
    turn_tokens: Annotated[int, typer.Option(min=1, help="of a turn at most")] = 16,
    out: Out = Path("runs/bench-agents"),
) -> int:
    """Tokens/s of an agent over the endpoint, against the same dialogue as a workflow (about 5 minutes).

    One engine (default recipe arith_cpu with 32 slots), dialogues of a few turns, environments that take 0, 0.1 and 1 s
    for a word. Also how full a slow environment leaves the engine. Nothing is trained.
    """
    from areal_lite.launch.bench.agents import AgentsBench, bench

    (recipe,), overrides = _split(words, default=["arith_cpu"])
    settings = AgentsBench(repeats=repeats, measured_s=seconds, turns=turns, turn_tokens=turn_tokens)
    return bench(settings, recipe, ["rollout.slots=32", *overrides], out=out)


@bench.command("plan")
def run_plan(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="path of a plan")],
    overrides: Overrides,
    only: Only,
    out: RunsOut = None,
) -> int:
    """The runs of a YAML file, one after another."""
    from areal_lite.launch.bench.plan import bench

    return bench(plan, overrides, only=only, out=out)


@bench.command()
def presets(overrides: Overrides, only: Only, out: RunsOut = None) -> int:
    """The runs of the shipped plan presets."""
    return run_plan("presets", overrides, only, out)


@bench.command()
def staleness(overrides: Overrides, only: Only, out: RunsOut = None) -> int:
    """The runs of the shipped plan staleness."""
    return run_plan("staleness", overrides, only, out)


@bench.command("gpu-check")
def gpu_check(
    overrides: Overrides,
    only: Only,
    cpu: Annotated[bool, typer.Option("--cpu", help="rehearse on this machine without a GPU")] = False,
    out: Out = Path("runs/gpu-check"),
) -> int:
    """The first hour on GPUs: a part more with every short run, and what passed.

    Parity of engine and trainer in float32 and bfloat16; NCCL to one and two ranks and to engines of one and two GPUs;
    CUDA IPC; FSDP over two ranks against one; an engine that dies; tokens/s of a 1.7B model. Writes gpu-check.md and
    results.json: what to send us. Called again, it goes on where it stopped.
    """
    from areal_lite.launch.bench.gpu_check import bench

    return bench(overrides, cpu=cpu, only=only, out=out)
