"""Scores, as `verify`, `eval` and `replay` show them: one summary of plain figures, and one way to print it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from areal_lite.errors import DataError
from areal_lite.launch.commands.trial import Case
from areal_lite.record.intervals import mean_interval, paired
from areal_lite.record.run_files import has_shape, read_json, shape
from areal_lite.types import means
from areal_lite.verify.protocol import Reply

_RESULT = shape(index=int, prompt=str, completion=str, reward=float | None)
_LOWEST = 5
_TEXT_WIDTH = 160


def earned(reply: Reply) -> str:
    """Return what a completion earned: `reward 0.5`, or `failed: timeout`."""
    return f"failed: {reply.failure}" if reply.total is None else f"reward {reply.total:g}"


def describe(reply: Reply) -> str:
    """Return a reply in one line: `reward 0.5; format 1`."""
    figures = [f"{name} {value:g}" for name, value in {**reply.parts, **reply.metrics}.items()]
    return "; ".join([earned(reply), *figures])


def summarise(cases: Sequence[Case], *, wall_s: float = 0.0, gauges: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Turn cases into plain figures.

    Args:
        cases: All, with a reply if they were scored.
        wall_s: Seconds of scoring, without the start of the verifiers' processes; 0 = unknown.
        gauges: Figures of each verifier's pool, by its name.

    Returns:
        `cases, tried, scored, wall_s, calls_per_s, reward, parts, metrics, failures, verifiers, lowest, results`.
        `reward` is None where nothing was scored, else `mean, interval, min, max, ones, zeros`: `interval` is that of
        95 % of the mean, or None (`mean_interval`), `ones` and `zeros` are shares. `lowest` has no case with the best
        reward.
        `results` holds every case with a reply, and its total reward.
    """
    results: list[dict[str, Any]] = []
    for case in sorted(cases, key=lambda case: case.index):
        if case.reply is not None:
            prompt = case.prompt
            results.append(
                {"index": case.index, "prompt": prompt.text, "completion": case.completion, "answer": prompt.answer}
                | asdict(case.reply)
                | {"reward": case.reply.total}
            )
    failures: dict[str, dict[str, Any]] = {}
    for row in results:
        if row["failure"] is not None:
            first = {"count": 0, "trace": row["detail"], "first": row}
            failures.setdefault(row["failure"], first)["count"] += 1
    scored = [row for row in results if row["failure"] is None]
    rewards = [row["reward"] for row in scored]
    return {
        "cases": len(cases),
        "tried": len(results),
        "scored": len(scored),
        "wall_s": wall_s,
        "calls_per_s": len(results) / wall_s if wall_s > 0 else 0.0,
        "reward": _rewards(rewards) if rewards else None,
        "parts": means(row["parts"] for row in scored),
        "metrics": means(row["metrics"] for row in scored),
        "failures": dict(sorted(failures.items(), key=lambda item: -item[1]["count"])),
        "verifiers": dict(gauges),
        "lowest": [row for row in sorted(scored, key=itemgetter("reward"))[:_LOWEST] if row["reward"] < max(rewards)],
        "results": results,
    }


def _rewards(rewards: Sequence[float]) -> dict[str, Any]:
    shares = {name: rewards.count(value) / len(rewards) for name, value in (("ones", 1.0), ("zeros", 0.0))}
    known = {"mean": fmean(rewards), "interval": mean_interval(rewards)}
    return known | {"min": min(rewards), "max": max(rewards), **shares}


def show_comparison(*files: Path, console: Console) -> None:
    """Print the paired difference between two files of `areal-lite eval --json`, and the rows that changed.

    Raises:
        DataError: A file cannot be read, or they have fewer than two rows in common.
    """
    before, after = map(_rewards_by_row, files)
    old, new = ({row: found["reward"] for row, found in side.items()} for side in (before, after))
    if (pairs := paired(old, new)) is None:
        raise DataError(
            f"--compare needs two evaluations of the same rows, got {files[0]} and {files[1]} with fewer than two "
            "scored prompts in common. Fix: evaluate both models with the same recipe"
        )
    means = (fmean(rewards[row] for row in old if row in new) for rewards in (old, new))
    console.print(
        f"{' → '.join(f'{mean:.3f}' for mean in means)}: {pairs.difference:+.3f}, 95 % interval {pairs.low:+.3f} to "
        f"{pairs.high:+.3f} ({pairs.rows} rows in pairs: {pairs.better} better, {pairs.worse} worse)"
    )
    if alone := len(old.keys() ^ new.keys()):
        console.print(f"{alone} rows were left out: scored in one of the files alone")
    changed = sorted((row for row in old if row in new and old[row] != new[row]), key=lambda row: new[row] - old[row])
    shown = (
        {"row": str(after[row]["index"]), "reward": f"{old[row]:.4g} → {new[row]:.4g}"}
        | {name: _short(side[row]["completion"]) for name, side in (("before", before), ("after", after))}
        for row in [*changed[:_LOWEST], *changed[_LOWEST:][-_LOWEST:]]
    )
    _print_table("rows that changed most", shown, console)


def _rewards_by_row(path: Path) -> dict[str, dict[str, Any]]:
    """Return the scored rows of a file of `--json`, by number and prompt."""
    rows: Any = read_json(path, notes := list[str]()).get("results")
    if notes or not isinstance(rows, list) or not all(has_shape(row, _RESULT) for row in rows):
        raise DataError(
            f"--compare must name files that areal-lite eval --json wrote, got {path}"
            f"{''.join(f': {note}' for note in notes)}. Fix: write it again"
        )
    found = {f"{row['index']} {row['prompt']}": row for row in rows}
    if len(found) < len(rows):
        raise DataError(
            f"--compare needs one completion a row, got {len(rows)} of {len(found)} rows in {path}. Fix: compare files "
            "of areal-lite eval --json"
        )
    return {name: row for name, row in found.items() if row["reward"] is not None}


def show(summary: Mapping[str, Any], console: Console) -> None:
    """Print a summary: scores, means of parts and metrics, verifiers, failures with a trace, the lowest scores."""
    if reward := summary["reward"]:
        cells = {name: f"{reward[name]:.4g}" for name in ("mean", "min", "max")}
        _print_table("scores", [cells | {"1": f"{reward['ones']:.2%}", "0": f"{reward['zeros']:.2%}"}], console)
    figures = {**summary["parts"], **summary["metrics"]}
    _print_table("parts and metrics", ({"": name, "mean": f"{mean:.4g}"} for name, mean in figures.items()), console)
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
    """Latencies are those of a verifier's last calls."""
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
    if rows := list(rows):
        table = Table(*(Column(Text(name), overflow="fold") for name in rows[0]))
        for row in rows:
            table.add_row(*map(Text, row.values()))
        console.print(Text(title, style="bold"))
        console.print(table)
