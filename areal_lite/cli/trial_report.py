"""What a try of a verifier came to: figures as plain values, and the tables that show them."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lite.cli.trial import Case
from areal_lite.types import means
from areal_lite.verify.protocol import Reply

_BINS = 10
_LOWEST = 5
_BAR_WIDTH = 40
_TEXT_WIDTH = 160


def summarise(cases: Sequence[Case], *, wall_s: float, gauges: Mapping[str, Any]) -> dict[str, Any]:
    """Turn cases into plain figures.

    Args:
        cases: All, with a reply where they were tried.
        wall_s: Seconds it took, start of the processes left out.
        gauges: The pools' figures by verifier.

    Returns:
        `cases, tried, scored, wall_s, calls_per_s, reward, parts, metrics, failures, verifiers, lowest`; `reward` is
        None where nothing was scored, else `mean, min, max, ones, zeros` (shares) and `histogram`, a list of
        `[from, to, count]` whose bins do not hold their upper end, but for the last. `lowest` holds no best ones.
    """
    tried = [(case, case.reply) for case in sorted(cases, key=lambda case: case.index) if case.reply is not None]
    failures: dict[str, dict[str, Any]] = {}
    for case, reply in tried:
        if reply.failure is not None:
            first = {"count": 0, "trace": reply.detail, "first": _example(case, reply)}
            failures.setdefault(reply.failure, first)["count"] += 1
    scored = [(reply.total or 0.0, case, reply) for case, reply in tried if reply.failure is None]
    rewards = [reward for reward, *_ in scored]
    lowest = sorted((item for item in scored if item[0] < max(rewards)), key=lambda item: item[0])[:_LOWEST]
    return {
        "cases": len(cases),
        "tried": len(tried),
        "scored": len(scored),
        "wall_s": wall_s,
        "calls_per_s": len(tried) / wall_s if wall_s > 0 else 0.0,
        "reward": _rewards(rewards) if rewards else None,
        "parts": means(reply.parts for *_, reply in scored),
        "metrics": means(reply.metrics for *_, reply in scored),
        "failures": dict(sorted(failures.items(), key=lambda item: -item[1]["count"])),
        "verifiers": dict(gauges),
        "lowest": [_example(case, reply) for _, case, reply in lowest],
    }


def _rewards(rewards: Sequence[float]) -> dict[str, Any]:
    shares = {name: fmean(reward == value for reward in rewards) for name, value in (("ones", 1), ("zeros", 0))}
    known = {"mean": fmean(rewards), "min": min(rewards), "max": max(rewards)}
    return {**known, **shares, "histogram": _histogram(rewards)}


def _histogram(values: Sequence[float]) -> list[list[float]]:
    """Count values in bins of equal width, or each by itself where they are few."""
    counts = Counter(values)
    if len(counts) <= _BINS:
        return [[value, value, counts[value]] for value in sorted(counts)]
    import numpy as np

    numbers, edges = np.histogram(values, bins=_BINS)
    return [list(bin) for bin in zip(edges.tolist(), edges[1:].tolist(), numbers.tolist(), strict=False)]


def _example(case: Case, reply: Reply) -> dict[str, Any]:
    return {
        "index": case.index,
        "prompt": case.prompt.text,
        "completion": case.completion,
        "answer": case.prompt.answer,
        "reward": reply.total,
        "feedback": reply.feedback,
    }


def show(summary: Mapping[str, Any], console: Console) -> None:
    """Print a summary; latencies are those of each verifier's last calls."""
    cut = "" if summary["tried"] == summary["cases"] else f" of {summary['cases']}"
    console.print(
        f"{summary['tried']}{cut} completions in {summary['wall_s']:.1f} s: {summary['calls_per_s']:.1f} a second, "
        f"{summary['scored']} scored, {summary['tried'] - summary['scored']} failed",
        highlight=False,
    )
    if reward := summary["reward"]:
        cells = {name: f"{reward[name]:.4g}" for name in ("mean", "min", "max")}
        _print_table("scores", [cells | {"1": f"{reward['ones']:.2%}", "0": f"{reward['zeros']:.2%}"}], console)
        most = max(count for *_, count in reward["histogram"])
        for low, high, count in reward["histogram"]:
            label = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
            console.print(Text(f"{label:>20} {'█' * math.ceil(_BAR_WIDTH * count / most)} {count}"))
    for title in ("parts", "metrics"):
        means = ({"": name, "mean": f"{value:.4g}"} for name, value in summary[title].items())
        _print_table(title, means, console)
    verifiers = ({"": name, **_cells(gauges)} for name, gauges in summary["verifiers"].items() if gauges["calls"])
    _print_table("verifiers", verifiers, console)
    for reason, failure in summary["failures"].items():
        first = failure["first"]
        console.print(Text(f"{failure['count']} failed: {reason}", style="bold red"))
        console.print(Text(f"first at row {first['index']}, completion {_short(first['completion'])}"), soft_wrap=True)
        console.print(Text(failure["trace"] or "(no trace)"), soft_wrap=True)
    lowest = (
        {"reward": f"{example['reward']:.4g}", "row": str(example["index"])}
        | {name: _short(example[name]) for name in ("completion", "answer", "feedback")}
        for example in summary["lowest"]
    )
    _print_table("lowest scores", lowest, console)


def _cells(gauges: Mapping[str, Any]) -> dict[str, str]:
    return {
        "calls": str(gauges["calls"]),
        "failed": str(sum(gauges["failures"].values())),
        "late": str(gauges["timeouts"]),
        "restarts": str(gauges["restarts"]),
        "p50, p95, p99 ms": ", ".join(f"{1000 * gauges[f'latency_p{share}_s']:.1f}" for share in (50, 95, 99)),
    }


def _short(text: str) -> str:
    """Keep the end, where answers stand."""
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_WIDTH else "..." + line[-_TEXT_WIDTH:]


def _print_table(title: str, rows: Iterable[Mapping[str, str]], console: Console) -> None:
    table = Table()
    for row in rows:
        if not table.columns:
            for name in row:
                table.add_column(Text(name), overflow="fold")
        table.add_row(*map(Text, row.values()))
    if table.columns:
        console.print(Text(title, style="bold"))
        console.print(table)
