"""`areal-lite bench`: runs a plan and sums it up."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console

from areal_lite.launch.bench.handover_command import add_handover
from areal_lite.launch.bench.modes_command import add_modes
from areal_lite.launch.bench.peers_command import add_peers
from areal_lite.launch.bench.plan import choose_runs, load_plan, planned_runs, shipped_plans
from areal_lite.launch.bench.queue_command import add_queue
from areal_lite.launch.bench.rollout_command import add_rollout
from areal_lite.launch.bench.train_command import add_train

__all__ = ["bench"]


bench = typer.Typer(
    help="Measure: modes against each other, or many short runs of a plan.\n\n"
    "Called again, a benchmark goes on where it stopped. Ctrl-C finishes the step, saves, and says how to go on."
)


def _parsers() -> "argparse._SubParsersAction[argparse.ArgumentParser]":
    kinds = argparse.ArgumentParser(prog="areal-lite bench").add_subparsers(required=True, metavar="BENCHMARK")
    for add in (add_modes, add_queue, add_handover, add_peers, add_train, add_rollout):
        add(kinds)
    plan = kinds.add_parser("plan", help="the runs of a YAML file, one after another, with the same engines")
    plan.add_argument("plan", metavar="PLAN", help="path of a plan")
    for parser in (plan, *(_add_shipped(kinds, name) for name in shipped_plans())):
        _add_plan_options(parser)
    return kinds


def _run(name: str, context: typer.Context) -> int:
    """Hand the words to the benchmark's own parser."""
    parser = _parsers().choices[name]
    words, others = parser.parse_known_args(context.args)
    if others and (not hasattr(words, "overrides") or any(word.startswith("-") or "=" not in word for word in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        words.overrides = [*words.overrides, *others]
    return int(words.command(words))


def _command_of(name: str) -> Callable[[typer.Context], int]:
    def command(context: typer.Context) -> int:
        return _run(name, context)

    return command


def _add_shipped(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=f"the runs of the shipped plan {name}")
    parser.set_defaults(plan=name)
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings of all runs")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the run folders; default runs/bench-<plan>")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="a run's name, or a pattern; may be given again"
    )
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    plan = load_plan(words.plan)
    runs = planned_runs(plan, extra=words.overrides)
    chosen = choose_runs(runs, words.only)
    # Heavy, and not needed to find a mistake in the plan.
    from areal_lite.launch.bench.results import collect_results, results_table
    from areal_lite.launch.bench.runner import Stopped, run_all, training
    from areal_lite.launch.run.train import ray_session

    name, console = Path(words.plan).stem, Console()
    out = (words.out or Path("runs") / f"bench-{name}").resolve()

    def say(text: str) -> None:
        console.print(text, style="bold", highlight=False, markup=False, soft_wrap=True)

    def collect() -> None:
        collect_results(name, plan, runs, out=out)

    try:
        with ray_session():
            failures = run_all(chosen, out=out, train=training(console), say=say, after_each=collect)
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


def _command(words: argparse.Namespace) -> str:
    """Return what was typed."""
    out = [] if words.out is None else ["--out", str(words.out)]
    only = [word for name in words.only for word in ("--only", name)]
    kind = [words.plan] if words.plan in shipped_plans() else ["plan", words.plan]
    return shlex.join(["areal-lite", "bench", *kind, *words.overrides, *out, *only])


for _kind in _parsers()._choices_actions:
    bench.command(
        _kind.dest,
        help=_kind.help,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(_command_of(_kind.dest))
