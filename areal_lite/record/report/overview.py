"""The first screen of a run's page: five questions, each with an answer and the figures that it rests on."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from areal_lite.record.intervals import Z
from areal_lite.record.report.curves import paired_change
from areal_lite.record.report.read import RunFiles
from areal_lite.record.run_files import number, numbers, table

_LAST = 10
"""Latest steps that speak for the present state."""
_LIMITED = 0.2
"""Share of its time that the trainer must wait for generation to be what limits the run."""
_FALLING = ("loss",)
"""Held-out figures that are better when lower."""

Shares = dict[str, dict[str, float]]
"""Share of time by state, of the trainer and of all generators."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One card."""

    question: str
    answer: str
    lines: Sequence[str]
    tone: str = ""
    """high (good), low (bad) or empty."""


def answers(run: RunFiles, shares: Shares) -> list[Answer]:
    """Return the five cards of a run, without those that nothing is known about."""
    learned, sure = _learned(run)
    found = [learned, sure, _health(run), _limit(run, shares), _cost(run)]
    return [one for one in found if one.lines or one.answer]


def _learned(run: RunFiles) -> tuple[Answer, Answer]:
    """Compare the last held-out figure with the first, and say how far chance can explain the difference."""
    figure = next((name for name in ("accuracy", "margin", "loss") if any(name in row for row in run.evaluations)), "")
    points = [(row, value) for row in run.evaluations if (value := number(row.get(figure))) is not None]
    called = run.accuracy_is_called if figure == "accuracy" else figure
    lines = [f"held-out {called} {' → '.join(f'{value:.3f}' for _, value in points[:: max(1, len(points) - 1)][:2])}"]
    rewards = [value for row in run.metrics if (value := number(row.get("reward_mean"))) is not None]
    tenth = min(max(len(rewards) // 10, 1), 10)
    if rewards:
        lines.append(f"training reward {fmean(rewards[:tenth]):.3f} → {fmean(rewards[-tenth:]):.3f}")
    if len(points) < 2:
        lines = lines[1:] if not points else lines
        few = ["one seed", "run.eval_every measures held-out rows"] if run.command == "train" else []
        return Answer("Did it learn?", "not measured", lines), Answer("How sure is that?", "not known", few)
    (first, before), (last, after) = points[0], points[-1]
    sign = -1 if figure in _FALLING else 1
    best, value = max(points, key=lambda point: sign * point[1])
    lines.append(f"best {value:.3f} at step {best['step']}, last at step {last['step']}")
    change = paired_change(first, last) if figure == "accuracy" else None
    errors = [number(table(row.get("standard_errors")).get(figure)) for row in (first, last)]
    if change is not None:
        low, high = change.low, change.high
        rows = [f"{change.rows} held-out rows in pairs", f"{change.better} better, {change.worse} worse"]
    elif None not in errors:
        half = Z * math.hypot(*(error or 0.0 for error in errors))
        low, high, rows = (
            after - before - half,
            after - before + half,
            [f"{last.get('problems', '?')} held-out rows, not in pairs"],
        )
    else:
        return Answer("Did it learn?", f"{after - before:+.3f}", lines), Answer("How sure is that?", "not known", [])
    is_up, is_down = sign * (low if sign > 0 else high) > 0, sign * (high if sign > 0 else low) < 0
    words, tone = ("yes", "high") if is_up else ("no, it got worse", "low") if is_down else ("not shown", "")
    interval = f"{low:+.3f} to {high:+.3f}"
    sure = Answer(
        "How sure is that?", interval, [f"95 % interval of the change of {after - before:+.3f}", *rows, "one seed"]
    )
    return Answer("Did it learn?", words, lines, tone), sure


def _health(run: RunFiles) -> Answer:
    """Collect what went wrong; what is normal follows."""
    status = str(run.summary.get("status") or "active, or killed")
    events = Counter(event["kind"] for event in run.events)
    ledger = numbers(run.last.get("ledger"))
    problems = [f"{events['warning']} warnings, below"] if events["warning"] else []
    if skipped := sum(number(row.get("step_skipped")) or 0 for row in run.metrics):
        problems.append(f"{skipped:.0f} updates skipped")
    problems += [f"{events[kind]} workers {kind}" for kind in ("lost", "restarted") if events[kind]]
    problems += [f"{ledger[state]:.0f} groups {state}" for state in ("failed", "stale") if ledger.get(state)]
    last, lines = run.metrics[-_LAST:], list[str]()
    for key, text in (
        ("truncated_fraction", "{:.0%} truncated"),
        ("entropy", "entropy {:.3f}"),
        ("grad_norm", "gradient norm {:.3g}"),
    ):
        if values := [value for row in last if (value := number(row.get(key))) is not None]:
            lines.append(text.format(fmean(values)))
    ages = [value for row in run.metrics if (value := number(row.get("age_max"))) is not None]
    if ages:
        lines.append(
            f"oldest token {max(ages):.0f} of {table(run.config.get('queue')).get('max_staleness', '?')} versions"
        )
    parity = [value for row in run.metrics if (value := number(row.get("parity_mean_abs_logprob_diff"))) is not None]
    if parity:
        lines.append(f"engine against trainer {max(parity):.1g} nats")
    is_well = not problems and status in ("done", "interrupted", "active, or killed")
    return Answer(
        "Is it healthy?",
        "yes" if is_well else "look at this",
        [status, *problems, *lines],
        "high" if is_well else "low",
    )


def _limit(run: RunFiles, shares: Shares) -> Answer:
    """Name the side that the other one waits for, and how many groups have something to learn from."""
    if not shares:
        return Answer("What limits it?", "", [])
    waits, idle = shares["trainer"].get("waiting", 0.0), shares.get("generators", {}).get("idle", 0.0)
    limit = "training"
    if waits > max(_LIMITED, idle):
        states = ("leased_rollout", "leased_verify", "generated")
        ledgers = [numbers(row.get("ledger")) for row in run.metrics]
        generating, *verifying = (sum(ledger.get(state, 0.0) for ledger in ledgers) for state in states)
        limit = "verification" if sum(verifying) > generating else "generation"
    lines = list[str]()
    for lane, spent in reversed(shares.items()):
        parts = (f"{spent[state]:.0%} {state}" for state in sorted(spent, key=lambda state: -spent[state]))
        lines.append(f"{lane}: {', '.join(parts)}")
    varied = [value for row in run.metrics[-_LAST:] if (value := number(row.get("varied_groups_fraction"))) is not None]
    if varied:
        lines.append(f"{fmean(varied):.0%} of groups teach: their rewards differ")
    return Answer("What limits it?", limit, lines)


def _cost(run: RunFiles) -> Answer:
    """Return time, samples, tokens, memory, machine and code."""
    seconds = number(run.summary.get("wall_s", run.last.get("time_s"))) or 0.0
    lines = list(_amounts(run))
    memory = [numbers(row.get("memory_mb")) for row in run.metrics]
    if peak := max(memory, key=lambda row: sum(row.values()), default={}):
        largest = sorted(peak, key=lambda name: -peak[name])[:2]
        parts = ", ".join(f"{name} {peak[name] / 1024:.1f}" for name in largest)
        lines.append(f"at most {sum(peak.values()) / 1024:.1f} GiB ({parts})")
    lines += [str(run.summary[key]) for key in ("machine",) if run.summary.get(key)]
    lines += [f"commit {run.summary['commit']}"] if run.summary.get("commit") else []
    hours, rest = divmod(round(seconds), 3600)
    return Answer("What did it cost?", f"{hours}:{rest // 60:02d}:{rest % 60:02d}", lines)


def _amounts(run: RunFiles) -> Iterator[str]:
    found: dict[str, Any] = run.axes
    texts = [f"{found[name][-1]:,.0f} {name}" for name in ("steps", "samples", "tokens") if found[name][-1]]
    units = {"samples_per_s": "samples/s", "gen_tokens_per_s": "tokens/s generated"}
    speeds = {text: speed for key, text in units.items() if (speed := number(run.summary.get(key))) is not None}
    for line in (texts, [f"{speed:,.{0 if speed >= 10 else 2}f} {text}" for text, speed in speeds.items()]):
        if line:
            yield ", ".join(line)
