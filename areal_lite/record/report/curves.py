"""What a run learned and how, over steps and over time: charts of `metrics.jsonl`, of one run or of several."""

from collections.abc import Iterable, Iterator, Sequence

from areal_lite.record.report.charts import Chart, Line, bars, lines, smoothed, stacked
from areal_lite.record.report.read import RunFiles, number, numbers, table

__all__ = [
    "age_charts",
    "age_histogram",
    "constants",
    "diagnostics",
    "learning",
    "ledger_charts",
    "metric_line",
    "speed_charts",
]

_X = {"step": "trainer step", "time_s": "seconds, warm-up included"}

_DIAGNOSTICS = (
    ("loss", "loss", "loss"),
    ("grad_norm", "gradient norm", "before clipping"),
    ("entropy", "entropy", "nats per token"),
    ("kl_behav_prox", "KL behaviour to proximal", "nats per token"),
    ("behav_weight_mean", "behaviour weight, mean", "proximal / behaviour"),
    ("behav_weight_masked_fraction", "tokens over the weight's cap", "share"),
    ("clip_fraction", "clipped tokens", "share"),
    ("advantage_std", "advantages, standard deviation", ""),
    ("kl_ref", "KL to the reference", "nats per token"),
    ("kl_coef", "coefficient of that KL", ""),
    ("proximal_kl", "KL to the proximal policy", "nats per token"),
    ("value_loss", "value loss", ""),
    ("value_explained_variance", "explained variance of the critic", "share"),
    ("ptx_loss", "pretraining loss", "nats per token"),
    ("margin", "margin", "chosen - rejected"),
    ("lr", "learning rate", ""),
    ("tokens_trained", "tokens trained", "per step"),
    ("tokens", "tokens trained", "per step"),
    ("tokens_masked_stale", "tokens masked as stale", "per step"),
    ("parity_max_abs_logprob_diff", "engine against trainer, largest difference", "nats"),
)
_WAITING = ("waiting", "leased_rollout", "generated", "leased_verify", "ready", "taken")
_ENDED = ("trained", "rejected", "failed", "stale", "abandoned")


def metric_line(run: RunFiles, key: str, *, x: str = "step", name: str = "", within: str = "") -> Line:
    """Return one figure of every step.

    Args:
        run: Read from its folder.
        key: Of the row, or of the mapping `within` it.
        x: `step` or `time_s`.
        name: Of the curve; the key where empty.
        within: Key of the mapping that holds `key`.
    """
    rows = [table(row.get(within)) if within else row for row in run.metrics]
    figures = [number(row.get(key)) for row in rows]
    return Line(name=name or key, x=[number(row.get(x)) for row in run.metrics], y=figures)


def learning(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Reward and held-out figures, over steps and over time; one run's by source as well, if it has several."""
    for x, title in _X.items():
        yield lines(
            f"reward over {_short(x)}", smoothed(_named(runs, "reward_mean", x)), x=title, y="mean of the batch"
        )
        for figure in ("accuracy", "loss", "margin"):
            yield lines(f"held-out {figure} over {_short(x)}", _held_out(runs, figure, x), x=title, y=figure)
    if len(runs) == 1:
        yield from _by_source(runs[0])


def _by_source(run: RunFiles) -> Iterator[Chart | None]:
    held_out = {step: table(figures["by_source"]) for step, figures in run.evaluations.items()}
    sources = sorted({name for figures in held_out.values() for name in figures})
    for x, title in _X.items():
        rewards = _parts(run, "reward_by_source", x)
        if len(rewards) < 2 and len(sources) < 2:
            break
        yield lines(f"reward by source over {_short(x)}", rewards, x=title, y="mean of the batch")
        curves = [_evaluated(run, {step: row.get(name) for step, row in held_out.items()}, name, x) for name in sources]
        yield lines(f"held-out accuracy by source over {_short(x)}", curves, x=title, y="accuracy")
    yield lines("parts of the reward", _parts(run, "reward_parts", "step"), x=_X["step"], y="mean", legend=True)
    yield lines(
        "further figures of the verifiers", _parts(run, "verifier_metrics", "step"), x=_X["step"], y="mean", legend=True
    )


def diagnostics(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """One small chart per figure of the loss; those that were never measured, or never moved, are left out."""
    for key, title, unit in _DIAGNOSTICS:
        if len(_values(runs, key)) > 1:
            yield lines(title, _named(runs, key, "step"), x=_X["step"], y=unit)


def constants(runs: Sequence[RunFiles]) -> dict[str, float]:
    """Figures of the loss that were the same in every step of every run, by title."""
    values = {title: _values(runs, key) for key, title, _ in _DIAGNOSTICS}
    return {title: next(iter(found)) for title, found in values.items() if len(found) == 1}


def _values(runs: Sequence[RunFiles], key: str) -> set[float]:
    return {value for run in runs for row in run.metrics if (value := number(row.get(key))) is not None}


def age_charts(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """How old tokens were when they trained: all over, and how that moved."""
    histograms = {run.name: _shares(age_histogram(run)) for run in runs}
    note = "age: trainer version when the batch was taken, minus the version that produced the token"
    yield bars("ages of the trained tokens", histograms, x="age, versions", y="share of tokens", note=note)
    if len(runs) > 1:
        yield lines("mean age", _named(runs, "age_mean", "step"), x=_X["step"], y="versions")
        return
    (run,) = runs
    steps = [number(row.get("step")) for row in run.metrics]
    shares = [_shares(numbers(table(row.get("age_histogram")))) for row in run.metrics]
    curves = [Line(name=f"age {age}", x=steps, y=[row.get(age, 0.0) for row in shares]) for age in age_histogram(run)]
    yield stacked("ages over steps", curves, x=_X["step"], y="share of tokens", range=[0, 1])
    bound = number(table(run.config.get("queue")).get("max_staleness"))
    limit = Line(
        name="allowed",
        x=steps,
        y=[bound] * len(steps),
        style={"mode": "lines", "line": {"dash": "dash", "color": "#8d8072"}},
    )
    oldest = [metric_line(run, "age_mean", name="mean"), metric_line(run, "age_max", name="oldest"), limit]
    yield lines("age of a batch", oldest, x=_X["step"], y="versions", rangemode="tozero")


def age_histogram(run: RunFiles) -> dict[str, float]:
    """Trained tokens by age, in order of age."""
    total: dict[str, float] = {}
    for row in run.metrics:
        for age, tokens in numbers(table(row.get("age_histogram"))).items():
            total[age] = total.get(age, 0.0) + tokens
    return {age: total[age] for age in sorted(total, key=lambda age: int(age) if age.isdigit() else -1)}


def ledger_charts(run: RunFiles) -> Iterator[Chart | None]:
    """Groups on their way, and how they ended."""
    under_way = [metric_line(run, state, within="ledger") for state in _WAITING]
    ended = [metric_line(run, state, within="ledger") for state in _ENDED]
    seen = [curve for curve in ended if any(curve.y)]
    yield stacked("groups on their way", under_way, x=_X["step"], y="groups")
    yield lines("groups that ended", seen, x=_X["step"], y="groups so far", rangemode="tozero")


def speed_charts(runs: Sequence[RunFiles]) -> Iterator[Chart | None]:
    """Throughput, and where the trainer's step went."""
    yield lines("samples trained per second", _named(runs, "samples_per_s", "step"), x=_X["step"], rangemode="tozero")
    yield lines(
        "tokens generated per second", _named(runs, "gen_tokens_per_s", "step"), x=_X["step"], rangemode="tozero"
    )
    if len(runs) == 1:
        parts = {"trainer_wait_s": "waiting for a batch", "train_s": "training", "publish_s": "publishing"}
        spent = [metric_line(runs[0], key, name=name) for key, name in parts.items()]
        yield stacked("seconds of a trainer step", spent, x=_X["step"], y="seconds")
    yield lines("occupancy of the rollout slots", _named(runs, "rollout_occupancy", "step"), x=_X["step"], y="share",
                rangemode="tozero")  # fmt: skip


def _short(x: str) -> str:
    return {"step": "steps", "time_s": "time"}[x]


def _named(runs: Sequence[RunFiles], key: str, x: str) -> list[Line]:
    return [metric_line(run, key, x=x, name=run.name) for run in runs]


def _held_out(runs: Iterable[RunFiles], figure: str, x: str) -> list[Line]:
    return [
        _evaluated(run, {step: row.get(figure) for step, row in run.evaluations.items()}, run.name, x) for run in runs
    ]


def _evaluated(run: RunFiles, figures: dict[int, object], name: str, x: str) -> Line:
    places = [float(step) if x == "step" else run.seconds_at(step) for step in figures]
    return Line(name=name, x=places, y=[number(value) for value in figures.values()], style={"mode": "lines+markers"})


def _parts(run: RunFiles, within: str, x: str) -> list[Line]:
    names = sorted({name for row in run.metrics for name in table(row.get(within))})
    return [metric_line(run, name, x=x, within=within) for name in names]


def _shares(histogram: dict[str, float]) -> dict[str, float]:
    total = sum(histogram.values())
    return {name: value / total for name, value in histogram.items()} if total else {}
