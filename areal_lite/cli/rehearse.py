"""The commands `areal-lite rehearse`: a cluster's work on this machine alone, and its faults."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.cli.options import word_list
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
