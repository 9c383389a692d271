"""The first screen of a run's page: five questions, each with an answer and the figures that it rests on."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from areal_lite.record.intervals import Z
from areal_lite.record.recorder import mean_of_ends
from areal_lite.record.report.curves import paired_change
from areal_lite.record.report.read import RunFiles
from areal_lite.record.run_files import Row, number, numbers, table

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
    ends = [end for end in mean_of_ends(run.metrics, "reward_mean", "reward").values() if end is not None]
    lines = list[str]()
    if points:
        called = run.accuracy_is_called if figure == "accuracy" else figure
        shown = dict.fromkeys((f"{points[0][1]:.3f}", f"{points[-1][1]:.3f}"))
        lines.append(f"held-out {called} {' → '.join(shown)}")
    if ends:
        lines.append("training reward {:.3f} → {:.3f}, means of the first and last tenth".format(*ends))
    found = _change(figure, points[0][0], points[-1][0]) if len(points) > 1 else None
    if found is None:
        fix = ["run.eval_every measures held-out rows"] if run.command == "train" and len(points) < 2 else []
        return Answer("Did it learn?", "not measured", lines), Answer("How sure is that?", "not known", fix)
    low, high, rows = found
    sign = -1 if figure in _FALLING else 1
    best, value = max(points, key=lambda point: sign * point[1])
    lines.append(f"best {value:.3f} at step {best['step']}, last at step {points[-1][0]['step']}")
    least, most = sorted((sign * low, sign * high))
    words, tone = ("yes", "high") if least > 0 else ("no, it got worse", "low") if most < 0 else ("not shown", "")
    facts = [
        f"95 % interval of the change of {(low + high) / 2:+.3f}",
        *rows,
        "one seed: another may differ by more",
    ]
    return Answer("Did it learn?", words, lines, tone), Answer("How sure is that?", f"{low:+.3f} to {high:+.3f}", facts)


def _change(figure: str, first: Row, last: Row) -> tuple[float, float, list[str]] | None:
    """Return the 95 % interval of a change and what it rests on: rows in pairs where they are known, else two means."""
    if figure == "accuracy" and (pairs := paired_change(first, last)) is not None:
        better = f"{pairs.better} better, {pairs.worse} worse"
        return pairs.low, pairs.high, [f"{pairs.rows} held-out rows in pairs", better]
    errors = [number(table(row.get("standard_errors")).get(figure)) or 0.0 for row in (first, last)]
    change, half = last[figure] - first[figure], Z * math.hypot(*errors)
    rows = [f"{last['problems']} held-out rows, not in pairs"] if "problems" in last else []
    return (change - half, change + half, rows) if half else None


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number(row.get(key))) is not None]


def _health(run: RunFiles) -> Answer:
    """Collect what went wrong; what is normal follows."""
    status, last = str(run.summary.get("status") or "active, or killed"), run.metrics[-_LAST:]
    planned = table(run.config.get("run")).get("steps")
    events, ledger = Counter(event["kind"] for event in run.events), numbers(run.last.get("ledger"))
    counts = {
        "warnings (below)": events["warning"], "updates skipped": sum(_values(run.metrics, "step_skipped")),
        "workers lost": events["lost"], "restarts": events["restarted"],
        "groups failed": ledger.get("failed", 0), "groups stale": ledger.get("stale", 0),
    }  # fmt: skip
    problems = [f"{what}: {count:.0f}" for what, count in counts.items() if count]
    texts = {
        "truncated_fraction": "{1:.0%} truncated",
        "entropy": "entropy {0:.3f} → {1:.3f}",
        "grad_norm": "gradient norm {0:.2f} → {1:.2f}",
    }
    ends = {key: (_values(run.metrics[:_LAST], key), _values(last, key)) for key in texts}
    lines = [texts[key].format(fmean(first), fmean(found)) for key, (first, found) in ends.items() if first and found]
    eta = table(run.config.get("queue")).get("max_staleness", "?")
    if ages := _values(run.metrics, "age_max"):
        lines.append(f"oldest token trained: age {max(ages):.0f}, of {eta} allowed")
    parity = [row.get("parity_mean_abs_logprob_diff") for row in run.metrics]
    if known := [value for value in parity if isinstance(value, float)]:
        is_finite = number(max(known)) is not None
        (lines if is_finite else problems).append(f"engine and trainer differ by {max(known):.1g} nats a token")
    is_well = not problems and status in ("done", "interrupted", "active, or killed")
    words, tone = ("yes", "high") if is_well else ("look at this", "low")
    done = f": {run.last.get('step', 0)} of {planned} steps" if planned else ""
    return Answer("Is it healthy?", words, [status + done, *problems, *lines], tone)


def _limit(run: RunFiles, shares: Shares) -> Answer:
    """Name the side that the other one waits for, and how many groups have something to learn from."""
    if not shares:
        return Answer("What limits it?", "", [])
    waits, idle = shares["trainer"].get("waiting", 0.0), shares.get("generators", {}).get("idle", 0.0)
    limit = "training"
    if waits > max(_LIMITED, idle):
        ledgers = [numbers(row.get("ledger")) for row in run.metrics]
        states = ("leased_rollout", "leased_verify", "generated")
        generating, *verifying = (sum(ledger.get(state, 0.0) for ledger in ledgers) for state in states)
        limit = "verification" if sum(verifying) > generating else "generation"
    lines = list[str]()
    for lane, spent in reversed(shares.items()):
        parts = (f"{_percent(spent[state])} {state}" for state in sorted(spent, key=lambda state: -spent[state]))
        lines.append(f"{lane}: {', '.join(parts)}")
    if varied := _values(run.metrics[-_LAST:], "varied_groups_fraction"):
        lines.append(f"{fmean(varied):.0%} of groups teach; in the others all rewards are equal")
    return Answer("What limits it?", limit, lines)


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _cost(run: RunFiles) -> Answer:
    """Return time, samples, tokens, speed, memory, machine and code."""
    hours, rest = divmod(round(number(run.summary.get("wall_s", run.last.get("time_s"))) or 0), 3600)
    totals = {name: values[-1] for name, values in run.axes.items() if name != "hours"}
    lines = [", ".join(f"{total:,.0f} {name}" for name, total in totals.items() if total)]
    units = {"samples_per_s": "samples/s", "gen_tokens_per_s": "tokens/s generated"}
    speeds = {text: speed for key, text in units.items() if (speed := number(run.summary.get(key))) is not None}
    lines.append(", ".join(f"{speed:,.{0 if speed >= 10 else 2}f} {text}" for text, speed in speeds.items()))
    lines[-1] += ", without the start" if speeds else ""
    memory = [numbers(row.get("memory_mb")) for row in run.metrics]
    if peak := max(memory, key=lambda row: sum(row.values()), default={}):
        parts = (f"{name} {peak[name] / 1024:.1f}" for name in sorted(peak, key=lambda name: -peak[name])[:2])
        lines.append(f"at most {sum(peak.values()) / 1024:.1f} GiB of memory ({', '.join(parts)}, ...)")
    commit = run.summary.get("commit")
    lines += [str(run.summary.get("machine") or ""), f"commit {commit}" if commit else ""]
    return Answer("What did it cost?", f"{hours}:{rest // 60:02d}:{rest % 60:02d}", [*filter(None, lines)])
