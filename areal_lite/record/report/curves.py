"""Charts of `metrics.jsonl` over steps and over time, of one run or of several."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from areal_lite.record.lanes import steps_before_gaps
from areal_lite.record.length_bias import by_quarter
from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, Metric
from areal_lite.record.report.charts import Chart, Line, as_shares, bars, lines, smoothed, stacked
from areal_lite.record.report.read import RunFiles
from areal_lite.record.run_files import number, numbers, table

STEPS = "trainer step"
_AXES = {"step": (STEPS, "steps"), "time_s": ("seconds since the start, start-up included", "time")}
_WAITING = {
    "waiting": "waiting for a rollout worker", "leased_rollout": "at a rollout worker",
    "generated": "waiting for a verifier", "leased_verify": "at a verifier", "ready": "ready", "taken": "in a batch",
}  # fmt: skip
_ENDED = ("trained", "rejected", "failed", "stale", "abandoned")


def _line(run: RunFiles, key: str, *, x: str = "step", name: str = "", within: str = "") -> Line:
    """Return one figure of every step: a key of its row, or of a mapping `within` it. Over time, gaps are left out."""
    cut = steps_before_gaps(run.events) if x == "time_s" else set()
    rows = [row for found in run.metrics for row in ([found, {}] if found["step"] in cut else [found])]
    values = [number((table(row.get(within)) if within else row).get(key)) for row in rows]
    return Line(name=name or key, x=[number(row.get(x)) for row in rows], y=values)


def learning(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw reward and held-out figures over steps and over time; for one run also by source, if it has several."""
    for x, (axis, over) in _AXES.items():
        curves = smoothed(_named(runs, "reward_mean", x))
        note = "faint: each step; bold: moving average of ten steps" if len(curves) > len(runs) else ""
        yield lines(f"reward over {over}", curves, x=axis, y="mean of the batch", note=note)
        for figure in ("accuracy", "loss", "margin"):
            curves = [_evaluated(run, figure, x, name=run.name) for run in runs]
            called = {run.accuracy_is_called for run in runs} if figure == "accuracy" else {figure}
            title = called.pop() if len(called) == 1 else "mean reward"
            yield lines(f"held-out {title} over {over}", curves, x=axis, y=title)
    if len(runs) == 1:
        yield from _by_source(runs[0])


def _by_source(run: RunFiles) -> Iterator[Chart | None]:
    sources = sorted({name for figures in run.evaluations for name in table(figures.get("by_source"))})
    for x, (axis, over) in _AXES.items():
        rewards = _parts(run, "reward_by_source", x)
        if len(rewards) < 2 and len(sources) < 2:
            break
        yield lines(f"reward by source over {over}", rewards, x=axis, y="mean of the batch")
        curves = [_evaluated(run, name, x, within="by_source") for name in sources]
        title = run.accuracy_is_called
        yield lines(f"held-out {title} by source over {over}", curves, x=axis, y=title)
    parts = {"reward_parts": "parts of the reward", "verifier_metrics": "further figures of the verifiers"}
    for key, title in parts.items():
        yield lines(title, _parts(run, key, "step"), x=STEPS, y="mean", legend=True)


def diagnostics(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw a small chart per figure of the loss that was measured and has changed."""
    for metric, values in _measured(runs, "Loss diagnostics"):
        if len(values) > 1:
            yield lines(metric.curve, _named(runs, metric.name), x=STEPS, y=metric.unit)
    own = [_parts(run, "loss_metrics", "step", prefix=f"{run.name}: " if len(runs) > 1 else "") for run in runs]
    curves = list(chain.from_iterable(own))
    yield lines("figures of the loss function", curves, x=STEPS, y="mean per trained token", legend=True)


def constants(runs: Sequence[RunFiles]) -> dict[str, float]:
    """Return the figures of the loss that were the same in every step of every run, by title."""
    return {metric.curve: values.pop() for metric, values in _measured(runs, "Loss diagnostics") if len(values) == 1}


def metric_charts(runs: Sequence[RunFiles], section: str) -> Iterator[Chart | None]:
    """Draw a chart per metric of a section that was not always 0."""
    for metric, values in _measured(runs, section):
        if any(values):
            yield lines(metric.curve, _named(runs, metric.name), x=STEPS, y=metric.unit, rangemode="tozero")


def memory_chart(run: RunFiles) -> Chart | None:
    """Draw the memory of each process over the run."""
    curves = _parts(run, "memory_mb", "step")
    return lines("memory of each process", curves, x=STEPS, y="MiB", rangemode="tozero", legend=True)


def _measured(runs: Sequence[RunFiles], section: str) -> Iterator[tuple[Metric, set[float]]]:
    """Yield the metrics of a section, each with the set of its values in all runs."""
    declared = [OFFLINE_METRICS if run.command != "train" else METRICS for run in runs]
    for name, metric in {metric.name: metric for metrics in declared for metric in metrics}.items():
        if metric.curve and metric.section == section:
            yield metric, {value for run in runs for row in run.metrics if (value := number(row.get(name))) is not None}


def age_charts(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw how old tokens were when they trained, in total and over steps."""
    histograms = {run.name: as_shares(age_histogram(run)) for run in runs}
    note = "age: trainer version when the batch was taken, minus the version that produced the token"
    yield bars("ages of the trained tokens", histograms, x="age, versions", y="share of tokens", note=note)
    if len(runs) > 1:
        yield lines("mean age", _named(runs, "age_mean"), x=STEPS, y="versions")
        return
    (run,) = runs
    yield _trained_quarters(run)
    steps = [number(row.get("step")) for row in run.metrics]
    shares = [as_shares(numbers(row.get("age_histogram"))) for row in run.metrics]
    curves = [Line(name=f"age {age}", x=steps, y=[row.get(age, 0.0) for row in shares]) for age in age_histogram(run)]
    yield stacked("ages over steps", curves, x=STEPS, y="share of tokens", range=[0, 1])
    bound = number(table(run.config.get("queue")).get("max_staleness"))
    dashed = {"mode": "lines", "line": {"dash": "dash", "color": "#8d8072"}}
    limit = Line(name="eta", x=steps, y=[bound] * len(steps), style=dashed)
    oldest = [_line(run, "age_mean", name="mean"), _line(run, "age_max", name="oldest"), limit]
    yield lines("age of a batch", oldest, x=STEPS, y="versions", rangemode="tozero")


def _trained_quarters(run: RunFiles) -> Chart | None:
    counts = by_quarter(run.metrics)
    shares = {
        name: {length: trained[place] / max(tokens[place], 1) for length, (tokens, trained) in counts.items()}
        for place, name in enumerate(("first quarter", "second", "third", "last"))
    }
    note = "share of the tokens that the staleness bound lets train; tokens of dropped groups are not counted"
    return bars("share of the tokens that train", shares, x="tokens of the sample", y="share of tokens", note=note)


def age_histogram(run: RunFiles) -> dict[str, float]:
    """Return the trained tokens by age, in order of age."""
    total = Counter[str]()
    for row in run.metrics:
        total.update(numbers(row.get("age_histogram")))
    return {age: total[age] for age in sorted(total, key=lambda age: int(age) if age.isdigit() else -1)}


def ledger_charts(run: RunFiles) -> Iterator[Chart | None]:
    """Draw the groups in progress, and the groups that ended."""
    in_flight = [_line(run, state, within="ledger", name=name) for state, name in _WAITING.items()]
    ended = [curve for state in _ENDED if any((curve := _line(run, state, within="ledger")).y)]
    yield stacked("groups in progress", in_flight, x=STEPS, y="groups")
    yield lines("groups that ended", ended, x=STEPS, y="groups so far", legend=True, rangemode="tozero")


def step_times(run: RunFiles) -> Chart | None:
    """Draw where the time of a trainer step went."""
    parts = {"trainer_wait_s": "waiting for a batch", "train_s": "training", "publish_s": "publishing"}
    spent = [_line(run, key, name=name) for key, name in parts.items()]
    return stacked("seconds of a trainer step", spent, x=STEPS, y="seconds")


def _named(runs: Sequence[RunFiles], key: str, x: str = "step") -> list[Line]:
    return [_line(run, key, x=x, name=run.name) for run in runs]


def _evaluated(run: RunFiles, figure: str, x: str, *, name: str = "", within: str = "") -> Line:
    found = run.evaluations
    values = [number((table(row.get(within)) if within else row).get(figure)) for row in found]
    errors = [number(table(row.get("standard_errors")).get(figure)) for row in found]
    bars = {"error_y": {"array": [error and 1.96 * error for error in errors]}} if any(errors) else {}
    style = {"mode": "lines+markers", **bars}
    return Line(name=name or figure, x=[row[x] for row in found], y=values, style=style)


def _parts(run: RunFiles, within: str, x: str, *, prefix: str = "") -> list[Line]:
    names = sorted({name for row in run.metrics for name in table(row.get(within))})
    return [_line(run, name, x=x, name=f"{prefix}{name}", within=within) for name in names]
