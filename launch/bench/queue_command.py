"""`areal-lite bench queue`: groups per second through the sample queue, Ray's queue and raw ZeroMQ."""

import argparse
from dataclasses import asdict

from rich.console import Console

from areal_lite.launch.bench.output import add_out, finish

__all__ = ["add_queue"]


def add_queue(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the benchmark's parser."""
    parser = kinds.add_parser(
        "queue", help="groups/s through the sample queue, against Ray's queue and raw ZeroMQ (about 6 minutes)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of every case; default 5")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement; default 2")
    add_out(parser, "queue")
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    # Heavy, and not needed for `--help`.
    from areal_lite.launch.bench.queue import QueueBench, run_cases, summarise, targets
    from areal_lite.launch.bench.queue_actors import QueuePeers
    from areal_lite.launch.run.train import ray_session

    bench, console = QueueBench(repeats=words.repeats, measured_s=words.seconds), Console()
    with ray_session(), console.status("measuring"):
        measured = run_cases(bench, QueuePeers(bench).measure)
    finish(
        "queue",
        title="groups from rollout to trainer",
        settings=asdict(bench),
        rows=(rows := summarise(measured)),
        targets=targets(rows),
        packages=("ray", "pyzmq", "msgpack", "numpy"),
        out=words.out,
        console=console,
    )
    return 0
