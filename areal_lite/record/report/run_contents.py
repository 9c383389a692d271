"""The sections of the page of a run, and of a page that compares runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_lite.record.report import curves, times
from areal_lite.record.report.overview import answers
from areal_lite.record.report.page import MOST_COLUMNS, Block, Section, charts_block, figure_text, pairs_block
from areal_lite.record.report.read import RunFiles
from areal_lite.record.report.rewards import reward_charts
from areal_lite.record.report.timeline import timeline
from areal_lite.record.report.watched import watch_charts
from areal_lite.record.run_files import Row, number, numbers, table
from areal_lite.record.run_folder import changed, differences, flattened

_MAX_SAMPLES_BYTES = 1_000_000
"""Of the groups on the page, which are evenly spread over the run; one that is longer is shown whole."""


def run_sections(run: RunFiles) -> Iterator[Section]:
    """Yield the sections of one run: what everybody asks first, and what is looked up folded."""
    warnings = [f"step {event.get('step')}: {event.get('text')}" for event in run.events if event["kind"] == "warning"]
    shares = times.lane_shares(run.published)
    means = times.mean_shares(shares)
    first = [*curves.learning([run]), times.share_chart(means)]
    cards, notes = Block("answers", answers(run, means)), Block("notes", run.notes + warnings)
    yield Section("Overview", [cards, charts_block(first, small=True), notes])
    yield Section("Learning", [charts_block([*reward_charts(run), *curves.by_source(run)], small=True)])
    yield Section("Reward watch", [charts_block(watch_charts(run), small=True)])
    if run.command == "train":
        yield Section("Timeline", [Block("timeline", timeline(run.recent))])
        stride = 1 + len(json.dumps(run.samples)) // _MAX_SAMPLES_BYTES
        yield Section("Samples", [Block("samples", run.samples[::stride])])
        yield from _online_sections(run, shares)
    yield Section("Loss diagnostics", _diagnostics([run]), is_folded=True)
    yield Section("Settings", list(_settings(run)), is_folded=True)


def _online_sections(run: RunFiles, shares: dict[str, dict[str, float]]) -> Iterator[Section]:
    speed = [times.share_chart(shares) if len(shares) > 2 else None, curves.step_times(run)]
    speed += [*curves.metric_charts([run], "Speed and idle time"), curves.memory_chart(run)]
    yield Section("Speed and memory", [charts_block(speed)], is_folded=True)
    yield Section("Age of the tokens", [charts_block(curves.age_charts([run]))], is_folded=True)
    yield Section("Lengths", [charts_block(times.length_charts([run]))], is_folded=True)
    verifiers = Block("table", times.verifier_table(run), "verifiers, as of the last step")
    failures = Block("table", times.failure_table(run), "failures, over all steps")
    ledger = {state.replace("_", " "): int(n) for state, n in numbers(run.last.get("ledger")).items() if n}
    groups = Block("sentence", ledger, "Groups at the last step")
    verifying = [charts_block([times.failure_chart(run)]), verifiers, failures, groups]
    yield Section("Verifiers", verifying, is_folded=True)


def _diagnostics(runs: Sequence[RunFiles]) -> list[Block]:
    return [charts_block(curves.diagnostics(runs), small=True)]


def _headline(run: RunFiles) -> dict[str, str]:
    """Return the headline figures of a run, the most important first: a comparison shows only the first few."""
    summary = run.summary
    held_out = [found for row in run.evaluations if (found := number(row.get("accuracy"))) is not None]
    figures: dict[str, Any] = {
        "status": summary.get("status") or "active, or killed",
        "steps": number(run.last.get("step")),
        f"held-out {run.accuracy_is_called}": f"{held_out[0]:.3f} → {held_out[-1]:.3f}" if held_out else None,
        "reward, first → last steps": _ends(summary, "reward"),
        "samples/s": number(summary.get("samples_per_s")),
        "seconds": number(summary.get("wall_s", run.last.get("time_s"))),
        "loss, first → last steps": _ends(summary, "loss"),
    }
    return {name: figure_text(value) for name, value in figures.items() if value is not None}


def _ends(summary: Row, name: str) -> str | None:
    first, last = (number(summary.get(f"{name}_{end}")) for end in ("first", "last"))
    return None if first is None or last is None else f"{first:.3f} → {last:.3f}"


def _settings(run: RunFiles) -> Iterator[Block]:
    if run.config:
        different = changed(run.config)
        if different is None:
            yield Block("text", "This version cannot read the run's settings; all of them are listed below.")
        shown = (different or {}) | run.changed_settings
        yield pairs_block(shown, caption="what differs from the defaults")
        yield pairs_block(table(run.summary.get("versions")), caption="packages")
        yield Block("folded", json.dumps(run.config, indent=2, ensure_ascii=False), "all settings")


def comparison_sections(runs: Sequence[RunFiles]) -> Iterator[Section]:
    """Yield the sections of a comparison: tables of what differs, and curves over each other."""
    final = [{"run": run.name} | _headline(run) for run in runs]
    names = list(dict.fromkeys(name for row in final for name in row))[:MOST_COLUMNS]
    yield Section("Final figures", [Block("sortable", [{name: row.get(name) for name in names} for row in final])])
    settings = different_settings(runs)
    same = Block("text", "" if settings else "All settings are the same.")
    yield Section("Settings", [*_compared(runs, settings, caption="settings that differ"), same])
    yield Section("Learning", [charts_block(curves.learning(runs))])
    yield Section("Age of the tokens", [charts_block(curves.age_charts(runs))])
    speed = curves.metric_charts(runs, "Speed and idle time")
    yield Section("Speed and lengths", [charts_block([*speed, *times.length_charts(runs)])])
    yield Section("Loss diagnostics", _diagnostics(runs))
    summaries = differences([run.summary for run in runs])
    yield Section("Summary", list(_compared(runs, summaries, caption="figures that differ")))


def different_settings(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs, without fields that only one run has, at their default."""
    rows = differences([flattened(run.config) | run.changed_settings for run in runs])
    chosen = [None if (own := changed(run.config)) is None else own | run.changed_settings for run in runs]
    known = {key for settings in chosen for key in (rows if settings is None else settings)}
    return {key: row for key, row in rows.items() if key in known - {"run.dir", "run.resume"}}


def _compared(runs: Sequence[RunFiles], rows: Mapping[str, list[Any]], *, caption: str) -> Iterator[Block]:
    """Yield tables of about as many runs each."""
    most = -(-len(runs) // -(-len(runs) // (MOST_COLUMNS - 1)))
    for part in (slice(at, at + most) for at in range(0, len(runs), most)):
        names = ["name", *(run.name for run in runs[part])]
        yield Block("table", [dict(zip(names, [key, *row[part]], strict=True)) for key, row in rows.items()], caption)
