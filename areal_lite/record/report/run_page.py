"""The sections of the page about one run."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from areal_lite.record.report.curves import age_charts, constants, diagnostics, learning, ledger_charts, speed_charts
from areal_lite.record.report.html import Section, folded, pairs_table, rows_table, sentence, tiles
from areal_lite.record.report.read import RunFiles, number, numbers, table
from areal_lite.record.report.settings import changed
from areal_lite.record.report.timeline import timeline
from areal_lite.record.report.times import (
    failure_table,
    lane_shares,
    length_charts,
    share_chart,
    verifier_charts,
    verifier_table,
)

__all__ = ["MAX_GROUPS", "run_sections"]

MAX_GROUPS = 800
"""Sampled groups in the page, evenly chosen over the run: about a megabyte."""

_TIMELINE = (
    '<div class="bar" id="timeline-buttons"><button data-do="earlier">◀ earlier</button>'
    '<button data-do="later">later ▶</button><button data-do="in">zoom in</button>'
    '<button data-do="out">zoom out</button><button data-do="all">whole run</button>'
    '<span id="timeline-span"></span></div><figure><div class="chart" id="timeline-chart"></div><figcaption>'
    "Drag over a stretch to zoom in. A line of a rollout lane is one slot of the engine; its colour is the version of "
    "the weights that generated (eight colours, then again from the first); where it changes within a line, one sample "
    "goes on under new weights. Dotted: a publication begins. Zoomed out, a column shows what took most of it; "
    "verifications are drawn at least one column wide.</figcaption></figure>"
)
_SAMPLES = (
    '<div class="bar" id="sample-bar"><button data-do="previous">◀</button><button data-do="next">▶</button>'
    '<label>step <input type="range" id="sample-at" min="0" value="0"></label><label>show <select id="sample-filter">'
    '<option value="all">all groups</option><option value="mixed">different rewards</option>'
    '<option value="versions">several versions</option><option value="failures">failed verifications</option>'
    '<option value="turns">several turns</option></select></label><label>source <select id="sample-source">'
    '</select></label><span id="sample-where"></span></div><div id="sample-group"></div>'
)


def run_sections(run: RunFiles) -> Iterator[Section]:
    """Yield what there is to show; a section without content says so by being empty."""
    yield Section(title="Overview", before=tiles(_headline(run)) + _notes(run))
    is_offline = run.command != "train"
    yield Section(title="Learning", charts=list(learning([run])))
    yield Section(title="Age of the tokens", charts=list(age_charts([run])))
    if not is_offline:
        lanes = timeline(run.events)
        yield Section(title="Timeline", before=_TIMELINE if lanes else "", data={"timeline": lanes} if lanes else {})
        shares = share_chart(lane_shares(run.events))
        yield Section(title="Speed and idle time", charts=[shares, *speed_charts([run])])
        yield Section(title="Lengths", charts=list(length_charts([run])))
        tables = rows_table(verifier_table(run), caption="verifiers, as of the last step")
        failures = rows_table(failure_table(run), caption="failures, over all steps")
        yield Section(title="Verifiers", charts=list(verifier_charts(run)), after=tables + failures)
        yield Section(title="Groups", charts=list(ledger_charts(run)), after=_ledger(run))
    same = sentence("The same in every step", constants([run]))
    yield Section(title="Loss diagnostics", charts=list(diagnostics([run])), after=same, small=True)
    groups = _evenly(run.samples, MAX_GROUPS)
    yield Section(title="Samples", before=_SAMPLES if groups else "", data={"samples": groups} if groups else {})
    yield Section(title="Settings", before=_settings(run))


def _headline(run: RunFiles) -> dict[str, str]:
    summary, last = run.summary, run.metrics[-1] if run.metrics else {}
    evaluations = [found for row in run.evaluations.values() if (found := number(row.get("accuracy"))) is not None]
    figures: dict[str, Any] = {
        "status": run.status,
        "steps": number(last.get("step")),
        "seconds": number(last.get("time_s")),
    }
    if evaluations:
        figures["held-out accuracy"] = f"{evaluations[0]:.3f} → {evaluations[-1]:.3f}"
    for name in ("reward", "loss"):
        ends = [number(summary.get(f"{name}_{end}")) for end in ("first", "last")]
        if None not in ends:
            figures[f"{name}, ten steps each"] = " → ".join(f"{end:.3f}" for end in ends)
    for key in ("samples_per_s", "gen_tokens_per_s", "trained_tokens_per_s"):
        figures[key.removesuffix("_per_s").replace("_", " ") + "/s"] = number(summary.get(key))
    for key, name in (("rollout_idle_fraction", "generators idle"), ("trainer_idle_fraction", "trainer idle"),
                      ("paused_fraction", "paused")):  # fmt: skip
        if (share := number(summary.get(key))) is not None:
            figures[name] = f"{share:.1%}"
    if "age_max_trained" in summary:
        figures["oldest token of allowed"] = f"{summary['age_max_trained']} of {summary.get('max_staleness', '?')}"
    return {name: _short(value) for name, value in figures.items() if value is not None}


def _short(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _notes(run: RunFiles) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _ledger(run: RunFiles) -> str:
    last = numbers(table(run.metrics[-1].get("ledger"))) if run.metrics else {}
    return sentence("At the last step", {state.replace("_", " "): int(groups) for state, groups in last.items()})


def _settings(run: RunFiles) -> str:
    if not run.config:
        return ""
    different = changed(run.config)
    first = (
        "<p>This version cannot read the run's settings: they are below as they are.</p>"
        if different is None
        else pairs_table(different, caption="what differs from the defaults")
    )
    text = escape(json.dumps(run.config, indent=2, ensure_ascii=False))
    versions = pairs_table(table(run.summary.get("versions")), caption="packages")
    return first + folded("all settings", f"<pre>{text}</pre>") + versions


def _evenly(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    stride = -(-len(rows) // most)
    return rows[:: stride or 1]
