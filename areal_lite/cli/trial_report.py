"""What a try of a verifier came to: figures as plain values, and the tables that show them.

Called by `areal-lite verify`. `summarise` is a pure function; `show` prints what it returned.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    rewards = [_total(outcome) for outcome in scored]
    return {
        "cases": cases,
        "tried": len(ordered),
        "scored": len(scored),
        "wall_s": wall_s,
        "calls_per_s": len(ordered) / wall_s if wall_s > 0 else 0.0,
        "reward": _rewards(rewards) if rewards else None,
        "parts": _means(outcome.reply.parts for outcome in scored),
        "metrics": _means(outcome.reply.metrics for outcome in scored),
        "failures": _failures(ordered),
        "verifiers": dict(gauges),
        "lowest": _lowest(scored),
    }


def _lowest(scored: Sequence[Outcome]) -> list[dict[str, Any]]:
    best = max(map(_total, scored), default=0.0)
    below = [outcome for outcome in scored if _total(outcome) < best]
    return [_example(outcome) for outcome in sorted(below, key=_total)[:_LOWEST]]


def _total(outcome: Outcome) -> float:
    return outcome.reply.total or 0.0


def _rewards(rewards: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": math.fsum(rewards) / len(rewards),
        "min": min(rewards),
        "max": max(rewards),
        "ones": sum(reward == 1 for reward in rewards) / len(rewards),
        "zeros": sum(reward == 0 for reward in rewards) / len(rewards),
        "histogram": _histogram(rewards),
    }


def _histogram(values: Sequence[float]) -> list[list[float]]:
    """Count values in bins of equal width, or each by itself where they are few."""
    distinct = sorted(set(values))
    if len(distinct) <= _BINS:
        counts = Counter(values)
        return [[value, value, counts[value]] for value in distinct]
    low, width = distinct[0], (distinct[-1] - distinct[0]) / _BINS
    bins = Counter(min(_BINS - 1, int((value - low) / width)) for value in values)
    return [[low + width * index, low + width * (index + 1), bins[index]] for index in range(_BINS)]


def _means(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over those that have it."""
    values: dict[str, list[float]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


def _failures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Count failures by reason, the most frequent first, with the first of each."""
    failed = [outcome for outcome in outcomes if outcome.reply.failure is not None]
    first: dict[str, Outcome] = {}
    for outcome in failed:
        first.setdefault(str(outcome.reply.failure), outcome)
    counts = Counter(str(outcome.reply.failure) for outcome in failed)
    return {
        reason: {"count": count, "trace": first[reason].reply.detail, "first": _example(first[reason])}
        for reason, count in counts.most_common()
    }


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
    """Print a summary."""
    cut = "" if summary["tried"] == summary["cases"] else f" of {summary['cases']}"
    console.print(
        f"{summary['tried']}{cut} completions in {summary['wall_s']:.1f} s: {summary['calls_per_s']:.1f} a second, "
        f"{summary['scored']} scored, {summary['tried'] - summary['scored']} failed",
        highlight=False,
    )
    if summary["reward"] is not None:
        _show_rewards(summary["reward"], console)
    _show_means(summary, console)
    _show_verifiers(summary["verifiers"], console)
    _show_failures(summary["failures"], console)
    _show_lowest(summary["lowest"], console)


def _show_rewards(reward: Mapping[str, Any], console: Console) -> None:
    cells = {name: f"{reward[name]:.4g}" for name in ("mean", "min", "max")}
    shares = {"1": f"{reward['ones']:.2%}", "0": f"{reward['zeros']:.2%}"}
    _print_table("scores", [cells | shares], console)
    most = max(count for *_, count in reward["histogram"])
    for low, high, count in reward["histogram"]:
        label = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        console.print(Text(f"{label:>20} {'█' * math.ceil(_BAR_WIDTH * count / most)} {count}"))


def _show_means(summary: Mapping[str, Any], console: Console) -> None:
    for title in ("parts", "metrics"):
        rows = [{"": name, "mean": f"{value:.4g}"} for name, value in summary[title].items()]
        _print_table(title, rows, console)


def _show_verifiers(verifiers: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Show each verifier that was asked; latencies are those of its last calls, in milliseconds."""
    rows = [
        {
            "": name,
            "calls": str(gauges["calls"]),
            "failed": str(sum(gauges["failures"].values())),
            "late": str(gauges["timeouts"]),
            "restarts": str(gauges["restarts"]),
            **{f"p{share} ms": f"{1000 * gauges[f'latency_p{share}_s']:.1f}" for share in (50, 95, 99)},
        }
        for name, gauges in verifiers.items()
        if gauges["calls"]
    ]
    _print_table("verifiers", rows, console)


def _show_failures(failures: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    for reason, failure in failures.items():
        first = failure["first"]
        console.print(Text(f"{failure['count']} failed: {reason}", style="bold red"))
        console.print(Text(f"first at row {first['index']}, completion {_short(first['completion'])}"), soft_wrap=True)
        console.print(Text(failure["trace"] or "(no trace)"), soft_wrap=True)


def _show_lowest(examples: Sequence[Mapping[str, Any]], console: Console) -> None:
    rows = [
        {"reward": f"{example['reward']:.4g}", "row": str(example["index"])}
        | {name: _short(example[name]) for name in ("completion", "answer", "feedback")}
        for example in examples
    ]
    _print_table("lowest scores", rows, console)


def _short(text: str) -> str:
    """Keep the end, where answers stand."""
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_WIDTH else "..." + line[-_TEXT_WIDTH:]


def _print_table(title: str, rows: Sequence[Mapping[str, str]], console: Console) -> None:
    if not rows:
        return
    table = Table()
    for name in rows[0]:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    console.print(Text(title, style="bold"))
    console.print(table)
