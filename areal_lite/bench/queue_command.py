"""`areal-lite bench queue`: groups per second through the sample queue, Ray's queue and raw ZeroMQ."""

import argparse
import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["add_queue"]

_PACKAGES = ("areal-lite", "ray", "pyzmq", "msgpack", "numpy")


def add_queue(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the benchmark's parser."""
    parser = kinds.add_parser(
        "queue", help="groups/s through the sample queue, against Ray's queue and raw ZeroMQ (about 6 minutes)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every case")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("runs/bench-queue/results.json"))
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    # Heavy, and not needed for `--help`.
    from areal_lite.bench.queue import COLUMNS, QueueBench, cells, run_cases, summarise
    from areal_lite.bench.results import measured_where
    from areal_lite.launch.queue_bench import QueuePeers
    from areal_lite.launch.train import ray_session

    bench, console = QueueBench(repeats=words.repeats, measured_s=words.seconds), Console()
    with ray_session(), console.status("measuring"):
        measured = run_cases(bench, QueuePeers(bench).measure)
    content = {
        **measured_where(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "settings": asdict(bench),
        "rows": summarise(measured),
    }
    words.out.parent.mkdir(parents=True, exist_ok=True)
    words.out.write_text(json.dumps(content, indent=1) + "\n")
    table = Table(
        title="groups from rollout to trainer", title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "carrier" else "right")
    for row in content["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"results: {words.out}", highlight=False, soft_wrap=True)
    return 0
