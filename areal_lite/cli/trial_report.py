"""What a try of a verifier came to: figures as plain values, and the tables that show them.

`summarise` is a pure function; `show` prints what it returned.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lite.cli.trial import Outcome

__all__ = ["show", "summarise"]

_BINS = 10
_LOWEST = 5
_BAR_WIDTH = 40
_TEXT_WIDTH = 160


def summarise(outcomes: Sequence[Outcome], *, cases: int, wall_s: float, gauges: Mapping[str, Any]) -> dict[str, Any]:
    """Turn outcomes into plain figures.

    Args:
        outcomes: Those there are, in any order.
        cases: How many there should be.
        wall_s: Seconds they took, start of the processes left out.
        gauges: The pools' figures by verifier.

    Returns:
        `cases, tried, scored, wall_s, calls_per_s, reward, parts, metrics, failures, verifiers, lowest`; `reward` is
        None where nothing was scored, else `mean, min, max, ones, zeros` (shares) and `histogram`, a list of
        `[from, to, count]` whose bins do not hold their upper end, but for the last. `lowest` holds no best ones.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.case.index)
    scored = [outcome for outcome in ordered if outcome.reply.reward is not None]
    rewards = [outcome.reply.total or 0.0 for outcome in scored]
    below_best = [pair for pair in zip(rewards, scored, strict=True) if pair[0] < max(rewards)]
    lowest = sorted(below_best, key=lambda pair: pair[0])[:_LOWEST]
    return {
        "cases": cases,
        "tried": len(ordered),
        "scored": len(scored),
        "wall_s": wall_s,
        "calls_per_s": len(ordered) / wall_s if wall_s > 0 else 0.0,
        "reward": _rewards(rewards) if rewards else None,
        "parts": _means([outcome.reply.parts for outcome in scored]),
        "metrics": _means([outcome.reply.metrics for outcome in scored]),
        "failures": _failures(ordered),
        "verifiers": dict(gauges),
        "lowest": [_example(outcome) for _, outcome in lowest],
    }


def _rewards(rewards: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": fmean(rewards),
        "min": min(rewards),
        "max": max(rewards),
        "ones": fmean(reward == 1 for reward in rewards),
        "zeros": fmean(reward == 0 for reward in rewards),
        "histogram": _histogram(rewards),
    }


def _histogram(values: Sequence[float]) -> list[list[float]]:
    """Count values in bins of equal width, or each by itself where they are few."""
    counts = Counter(values)
    if len(counts) <= _BINS:
        return [[value, value, counts[value]] for value in sorted(counts)]
    import numpy as np

    numbers, edges = np.histogram(values, bins=_BINS)
    return [list(bin) for bin in zip(edges.tolist(), edges[1:].tolist(), numbers.tolist(), strict=False)]


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over those that have it."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: fmean(table[name] for table in tables if name in table) for name in names}


def _failures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Count failures by reason, the most frequent first, with the first of each."""
    counts = Counter(outcome.reply.failure for outcome in outcomes if outcome.reply.failure is not None)
    found = {}
    for reason, count in counts.most_common():
        first = next(outcome for outcome in outcomes if outcome.reply.failure == reason)
        found[reason] = {"count": count, "trace": first.reply.detail, "first": _example(first)}
    return found


def _example(outcome: Outcome) -> dict[str, Any]:
    case, reply = outcome.case, outcome.reply
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
        **{f"p{share} ms": f"{1000 * gauges[f'latency_p{share}_s']:.1f}" for share in (50, 95, 99)},
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
