"""Charts of a run with `reward_watch`: what it gains and loses on the way from its reference model.

The axis is that of Gao et al. (arXiv 2210.10760): the root of the KL divergence.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from statistics import fmean

from areal_lite.config.plugins import find_function
from areal_lite.record.report.charts import Chart, Line, lines
from areal_lite.record.report.curves import STEPS, evaluated, of_steps
from areal_lite.record.report.read import RunFiles
from areal_lite.record.report.rewards import groups_by_step, pass_chart, windows
from areal_lite.record.reward_watch import WATCHED
from areal_lite.record.run_files import number, table

_DISTANCE = "root of a sample's KL to the reference, in nats"
_UNKNOWN = "Over steps, as no KL to the reference was measured; a tiny objective.kl_coef measures it."


def watch_charts(run: RunFiles) -> Iterator[Chart | None]:
    """Draw trained and watched rewards, and how varied the samples are; nothing for a run without a watch."""
    names = sorted({name for row in run.evaluations for name in table(row.get("watched"))})
    distances = _distances(run)
    for chart in chain(_rewards(run, names), _variety(run, names)) if names else ():
        yield chart and _against(chart, distances)


def _rewards(run: RunFiles, names: list[str]) -> Iterator[Chart | None]:
    yield lines("held-out trained reward", [evaluated(run, "accuracy", name="trained")], x=STEPS, y="mean")
    curves = [evaluated(run, f"{WATCHED}{name}", name=name, within="metrics") for name in names]
    yield lines("held-out watched rewards", curves, x=STEPS, y="mean", legend=True)
    curves = [of_steps(run, f"{WATCHED}{name}", name=name, within="verifier_metrics") for name in names]
    yield lines("watched rewards in training", curves, x=STEPS, y="mean of the watched samples", legend=True)


def _variety(run: RunFiles, names: list[str]) -> Iterator[Chart | None]:
    yield lines("entropy", [of_steps(run, "entropy")], x=STEPS, y="nats per token")
    yield lines("mean length", [of_steps(run, "length_mean")], x=STEPS, y="tokens")
    shares: dict[float, list[float]] = {}
    for row in run.samples:
        texts = [sample.get("text") for sample in row.get("samples") or ()]
        shares.setdefault(row["step"], []).append(len(set(texts)) / max(len(texts), 1))
    curve = Line(name="distinct", x=list(shares), y=[fmean(found) for found in shares.values()])
    note = "share of different texts in a group, of the groups that samples.jsonl keeps"
    yield lines("distinct samples", [curve], x=STEPS, y="share", rangemode="tozero", note=note)
    yield _calibration(run)
    for name in names:
        yield pass_chart(windows(groups_by_step(run, watched=name)), title=f"pass@k by {name}")


def _calibration(run: RunFiles) -> Chart | None:
    """Draw how sure the policy is of its choices beside how often they are right; None without `multiple_choice`."""
    watched = table(table(run.config.get("reward_watch")).get("verifiers"))
    sections = [table(section) for section in (run.config.get("verifier"), *watched.values())]
    found = [section for section in sections if section.get("function") == "multiple_choice"]
    if not found:
        return None
    try:
        score = find_function("multiple_choice", kind="verifier")(**table(found[0].get("arguments")))
    except ValueError:  # arguments of another version
        return None
    sure, right = dict[float, list[float]](), dict[float, list[float]]()
    for row in run.samples:
        texts = [str(sample.get("text")) for sample in row.get("samples") or ()]
        letters = Counter(letter for text in texts if (letter := score.chosen(text, score.choices)))
        for letter, count in letters.most_common(1):
            with suppress(ValueError):  # a reference that only the row's own choices explain
                is_right = score("", letter, str(row.get("answer")))
                right.setdefault(row["step"], []).append(is_right)
                sure.setdefault(row["step"], []).append(count / len(texts))
    curves = [
        Line(name=name, x=list(of_step), y=[fmean(values) for values in of_step.values()])
        for name, of_step in (("share of its samples", sure), ("right", right))
    ]
    note = "the commonest choice of a group, of the groups that samples.jsonl keeps; calibrated where both are equal"
    return lines("calibration", curves, x=STEPS, y="share", rangemode="tozero", legend=True, note=note)


def _distances(run: RunFiles) -> dict[float, float]:
    """Return the root of a sample's KL by step, where it is known: the mean of its tokens times the mean length."""
    found = dict[float, float]()
    for row in run.metrics:
        nats, tokens = number(row.get("kl_ref")), number(row.get("length_mean"))
        if nats is not None and tokens is not None:
            found[row["step"]] = math.sqrt(max(nats * tokens, 0.0))
    starts_there = table(run.config.get("objective")).get("reference_path") is None
    return {0: 0.0, **found} if found and starts_there else found


def _against(chart: Chart, distances: dict[float, float]) -> Chart:
    """Return a chart over steps as one over distances; where none is known, say so below it."""
    if not distances:
        return replace(chart, note=f"{chart.note}. {_UNKNOWN}" if chart.note else _UNKNOWN)
    data = [trace | {"x": [distances.get(step) for step in trace["x"]]} for trace in chart.data]
    return replace(chart, data=data, layout=chart.layout | {"xaxis": {"title": {"text": _DISTANCE}}})
