"""Charts of `metrics.jsonl` over steps, of one run or of several; the page can switch to samples, tokens and hours."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from areal_lite.record.intervals import Paired, Z, paired
from areal_lite.record.lanes import steps_before_gaps
from areal_lite.record.length_bias import by_quarter
from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, Metric
from areal_lite.record.report.charts import Chart, Line, as_shares, bars, lines, smoothed, stacked
from areal_lite.record.report.read import RunFiles
from areal_lite.record.run_files import Row, number, numbers, table

STEPS = "trainer step"
"""The axis that the page can switch."""


def of_steps(run: RunFiles, key: str, *, name: str = "", within: str = "") -> Line:
    """Return one figure of every step: a key of its row, or of a mapping `within` it."""
    values = [number((table(row.get(within)) if within else row).get(key)) for row in run.metrics]
    return Line(name=name or key, x=[number(row.get("step")) for row in run.metrics], y=values, run=run.name)


def learning(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw reward and held-out figures."""
    curves = smoothed(_named(runs, "reward_mean"))
    note = "faint: each step; bold: moving average of ten steps" if len(curves) > len(runs) else ""
    yield lines("training reward", curves, x=STEPS, y="mean of the batch", note=note)
    for figure in ("accuracy", "loss", "margin"):
        curves = [evaluated(run, figure, name=run.name) for run in runs]
        called = {run.accuracy_is_called for run in runs} if figure == "accuracy" else {figure}
        title = called.pop() if len(called) == 1 else "mean reward"
        yield lines(f"held-out {title}", curves, x=STEPS, y=title)


def by_source(run: RunFiles) -> Iterator[Chart | None]:
    """Draw reward and held-out figures by source, if there are several, and the parts of the reward."""
    sources = sorted({name for figures in run.evaluations for name in table(figures.get("by_source"))})
    rewards, title = _parts(run, "reward_by_source"), f"held-out {run.accuracy_is_called} by source"
    if max(len(rewards), len(sources)) > 1:
        yield lines("reward by source", rewards, x=STEPS, y="mean of the batch")
        curves = [evaluated(run, name, within="by_source") for name in sources]
        yield lines(title, curves, x=STEPS, y=run.accuracy_is_called)
    parts = {"reward_parts": "parts of the reward", "verifier_metrics": "further figures of the verifiers"}
    for key, title in parts.items():
        yield lines(title, _parts(run, key), x=STEPS, y="mean", legend=True)


def diagnostics(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw a small chart per figure of the loss that was measured and has changed."""
    for metric, values in _measured(runs, "Loss diagnostics"):
        if len(values) > 1:
            yield lines(metric.curve, _named(runs, metric.name), x=STEPS, y=metric.unit)
    own = [_parts(run, "loss_metrics", prefix=f"{run.name}: " if len(runs) > 1 else "") for run in runs]
    curves = list(chain.from_iterable(own))
    yield lines("figures of the loss function", curves, x=STEPS, y="mean per trained token", legend=True)


def metric_charts(runs: Sequence[RunFiles], section: str) -> Iterator[Chart | None]:
    """Draw a chart per metric of a section that was not always 0."""
    for metric, values in _measured(runs, section):
        if any(values):
            yield lines(metric.curve, _named(runs, metric.name), x=STEPS, y=metric.unit, rangemode="tozero")


def memory_chart(run: RunFiles) -> Chart | None:
    """Draw the memory of each process over the run."""
    curves = _parts(run, "memory_mb")
    return lines("memory of each process", curves, x=STEPS, y="MiB", rangemode="tozero", legend=True)


def _measured(runs: Sequence[RunFiles], section: str) -> Iterator[tuple[Metric, set[float]]]:
    """Yield the metrics of a section, each with the set of its values in all runs."""
    declared = [OFFLINE_METRICS if run.command != "train" else METRICS for run in runs]
    for name, metric in {metric.name: metric for metrics in declared for metric in metrics}.items():
        if metric.curve and metric.section == section:
            yield metric, {value for run in runs for row in run.metrics if (value := number(row.get(name))) is not None}


def age_charts(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Draw how old tokens were when they trained, in total and over steps."""
    note = "age: trainer version when the batch was taken, minus the version that produced the token"
    if len(runs) > 1:
        histograms = {run.name: as_shares(age_histogram(run)) for run in runs}
        yield bars("ages of the trained tokens", histograms, x="age, versions", y="share of tokens", note=note)
        yield lines("mean age", _named(runs, "age_mean"), x=STEPS, y="versions")
        return
    (run,) = runs
    yield _trained_quarters(run)
    steps = [number(row.get("step")) for row in run.metrics]
    shares = [as_shares(numbers(row.get("age_histogram"))) for row in run.metrics]
    curves = [Line(name=f"age {age}", x=steps, y=[row.get(age, 0.0) for row in shares]) for age in age_histogram(run)]
    yield stacked("ages over steps", curves, x=STEPS, y="share of tokens", range=[0, 1], note=note)


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


def step_times(run: RunFiles) -> Chart | None:
    """Draw where the time of a trainer step went; `other` is what is left of the time since the step before."""
    parts = {"trainer_wait_s": "waiting for a batch", "train_s": "training", "publish_s": "publishing"}
    spent = [of_steps(run, key, name=name) for key, name in parts.items()]
    other, cut = list[float | None](), steps_before_gaps(run.events)
    for before, row in pairwise([{}, *run.metrics]):
        ends = [number(one.get("time_s")) for one in (before, row)]
        known = [number(row.get(key)) or 0.0 for key in parts]
        is_known = None not in ends and before.get("step") not in cut  # not the time of a start
        other.append(max(0.0, ends[1] - ends[0] - sum(known)) if is_known else None)  # type: ignore[operator]
    note = "other: saving, parity checks and evaluations that training waits for; start-up is left out"
    spent.append(replace(spent[0], name="other", y=other))
    return stacked("seconds of a trainer step", spent, x=STEPS, y="seconds", note=note)


def _named(runs: Sequence[RunFiles], key: str) -> list[Line]:
    return [of_steps(run, key, name=run.name) for run in runs]


def evaluated(run: RunFiles, figure: str, *, name: str = "", within: str = "") -> Line:
    """Return a held-out figure with bars: of its change since the first point, in pairs, where each row is known."""
    found = run.evaluations
    values = [number((table(row.get(within)) if within else row).get(figure)) for row in found]
    changes = [None if within or figure != "accuracy" else paired_change(found[0], row) for row in found]
    if any(changes[1:]):
        errors = [None, *(change and change.high - change.difference for change in changes[1:])]
        note = "bars: 95 % interval of the change since the first point, over the same rows in pairs"
    else:
        errors = [number(table(row.get("standard_errors")).get(figure)) for row in found]
        errors = [error and Z * error for error in errors]
        note = "bars: 95 % confidence interval over the held-out rows"
    bars = {"error_y": {"array": errors}} if any(errors) else {}
    style = {"mode": "lines+markers", **bars}
    note = note if bars else ""
    return Line(name=name or figure, x=[row["step"] for row in found], y=values, style=style, run=run.name, note=note)


def paired_change(before: Row, after: Row) -> Paired | None:
    """Compare two evaluations of a run over the rows that both have scored."""
    return paired(numbers(before.get("rewards")), numbers(after.get("rewards")))


def _parts(run: RunFiles, within: str, *, prefix: str = "") -> list[Line]:
    names = sorted({name for row in run.metrics for name in table(row.get(within))})
    return [of_steps(run, name, name=f"{prefix}{name}", within=within) for name in names]
