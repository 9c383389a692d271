"""The commands `areal-lite rehearse` and `drill`: a cluster's work on this machine alone, and its faults."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.cli.options import Overrides, Recipe, word_list
from areal_lite.cli.train import show

rehearse = typer.Typer(help="Rehearse a cluster on this machine; as root, on Linux, without a GPU.")

_Words = Annotated[
    list[str], word_list("[RECIPE] [section.field=value]...", "default arith_cpu, few steps, processes on every node")
]


@rehearse.command()
def nodes(
    words: _Words,
    nodes: Annotated[int, typer.Option(min=2, max=200, metavar="N", help="machines to simulate")] = 3,
    kill_node: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", show_default=False, help="then the second node loses its power")
    ] = None,
    cut_link: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", show_default=False, help="then the second node loses its link")
    ] = None,
    slow: Annotated[
        float | None, typer.Option(min=0.1, metavar="MBIT", show_default=False, help="rate of every link, in Mbit/s")
    ] = None,
) -> int:
    """Train on several nodes: real Ray nodes in network namespaces of this machine.

    Each has a network, processes, a host name and a /tmp of its own. Where a node or its link is lost, the job ends on
    all nodes, and goes on in a second attempt once that node is whole again. Ends with what was seen.
    """
    from areal_lite.cli.launch import run_job
    from areal_lite.launch.clusters.job import job_name
    from areal_lite.launch.rehearse.nodes import Fault, rehearsal, settings_of

    words = _train(words, settings_of(nodes))
    faults = [Fault(how, step) for how, step in (("kill", kill_node), ("cut", cut_link)) if step]
    faults.sort(key=lambda fault: fault.step)
    with rehearsal(job_name(words), words, num_nodes=nodes, faults=faults, slow_mbit=slow) as job:
        code = run_job(job)
    assert job.run_folder is not None
    _print_summary(job.run_folder)
    return code


@rehearse.command()
def slurm(
    words: _Words, nodes: Annotated[int, typer.Option(min=2, max=200, metavar="N", help="machines to simulate")] = 2
) -> int:
    """Train under Slurm: its real daemons on nodes of this machine, and one batch job.

    Shows the job's states between what it says, and ends with what was seen.
    """
    from areal_lite.launch.clusters.job import job_name
    from areal_lite.launch.rehearse.nodes import settings_of
    from areal_lite.launch.rehearse.slurm import make_slurm, run_job

    words = _train(words, settings_of(nodes))
    name = job_name(words)
    with make_slurm(nodes) as made:
        code = run_job(made, name, words)
    _print_summary(Path("runs") / name)
    return code


def drill(
    recipe: Recipe,
    overrides: Overrides,
    faults: Annotated[str | None, typer.Option(metavar="NAME,...", help="names or patterns; default all")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="new folder; default runs/drill-<time>")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.1, metavar="N", help="a soak instead of single faults")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="of what is drawn at random")] = 0,
) -> int:
    """Break runs of a recipe on this machine, and see what is lost.

    Each fault is provoked in a short real run: engine, rollout, verifier, queue, trainer, raylet, gcs, controller (each
    killed), hang-engine, hang-trainer, sigterm, sighup, two-writers, torn-save, bit-flip, disk-full, node,
    slow-network; the last three need root, and are left out without. A run that ends is continued by areal-lite
    resume. The table says when a fault was noticed, when the run was back, how many steps were trained again, and
    whether every group was accounted for; at queue.max_staleness=0, whether losses are those of an undisturbed run.
    With --minutes, faults are drawn at random in one run, by default the six kills of the run's own processes.

    Ctrl-C shows what was seen so far.
    """
    from areal_lite.launch.bench.plan import choose
    from areal_lite.launch.rehearse.drill import FAULTS, KILLS, drill

    default = KILLS if minutes else FAULTS
    names = default if faults is None else choose(FAULTS, faults.split(","), what="fault of a drill")
    out = out or Path("runs") / f"drill-{time.strftime('%Y%m%d-%H%M%S')}"
    return drill(recipe, overrides, names=names, out=out, minutes=minutes, seed=seed)


def _train(words: list[str], settings: list[str]) -> list[str]:
    recipe, overrides = (words[0], words[1:]) if words and "=" not in words[0] else ("arith_cpu", words)
    return ["train", recipe, *settings, *overrides]


def _print_summary(run_folder: Path) -> None:
    from areal_lite.launch.rehearse.books import balance
    from areal_lite.record.run_folder import read_summary

    summary = read_summary(run_folder)
    if "ledger" in summary:  # else the run never began
        keys = ("status", "steps", "attempts", "parity_max_abs_logprob_diff", "groups")
        show({**summary, "groups": balance(summary["ledger"])[1]}, keys, Console())
