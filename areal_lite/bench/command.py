"""`areal-lite bench`: runs a plan and sums it up."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from areal_lite.bench.plan import choose_runs, load_plan, planned_runs, shipped_plans
from areal_lite.config import Config

if TYPE_CHECKING:
    from areal_lite.launch.actor_keeper import ActorKeeper

__all__ = ["add_bench"]


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    bench = commands.add_parser(
        "bench",
        help="run many short runs one after another, with the same engines, and compare them",
        description="Run a plan: many short runs one after another, which share their engines where they can. Called "
        "again, it goes on where it stopped. Ctrl-C finishes the step, saves, and says how to go on.",
    )
    bench.add_argument("plan", metavar="PLAN", help=f"path of a YAML file, or one of: {', '.join(shipped_plans())}")
    bench.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings of all runs")
    bench.add_argument("--out", metavar="DIR", type=Path, help="folder of the run folders; default runs/bench-<plan>")
    bench.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="a run's name, or a pattern; may be given again"
    )
    bench.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    plan = load_plan(words.plan)
    runs = planned_runs(plan, extra=words.overrides)
    chosen = choose_runs(runs, words.only)
    # Heavy, and not needed to find a mistake in the plan.
    from areal_lite.bench.results import collect_results, results_table
    from areal_lite.bench.runner import Stopped, run_all
    from areal_lite.launch.actor_keeper import ActorKeeper
    from areal_lite.launch.train import ray_session

    name, console = Path(words.plan).stem, Console()
    out = (words.out or Path("runs") / f"bench-{name}").resolve()

    def say(text: str) -> None:
        console.print(text, style="bold", highlight=False, markup=False, soft_wrap=True)

    def collect() -> None:
        collect_results(name, plan, runs, out=out)

    try:
        with ray_session(), ActorKeeper() as keeper:
            failures = run_all(chosen, out=out, train=_trainer(console, keeper), say=say, after_each=collect)
    except (Stopped, KeyboardInterrupt):
        collect()
        say("stopped. To go on:")
        console.print(f"  {_command(words)}", highlight=False, markup=False, soft_wrap=True)
        return 130
    content = collect_results(name, plan, runs, out=out)
    console.print(results_table(content["runs"]))
    say(f"results: {out / 'results.json'}")
    if failures:
        say(f"failed: {', '.join(failures)}; the same command tries them again:")
        console.print(f"  {_command(words)}", highlight=False, markup=False, soft_wrap=True)
    return 1 if failures else 0


def _trainer(console: Console, keeper: "ActorKeeper") -> Callable[[Config], object]:
    """Return what trains one recipe, with the keeper's actors."""
    from areal_lite.bench.runner import Stopped
    from areal_lite.launch.controller import Interrupted
    from areal_lite.launch.train import train

    def train_one(config: Config) -> object:
        try:
            return train(config, recipe_name="bench", console=console, keeper=keeper)
        except Interrupted as stop:
            raise Stopped from stop

    return train_one


def _command(words: argparse.Namespace) -> str:
    """Return what was typed."""
    out = [] if words.out is None else ["--out", str(words.out)]
    only = [word for name in words.only for word in ("--only", name)]
    return shlex.join(["areal-lite", "bench", words.plan, *words.overrides, *out, *only])
