"""Makes the tables of README and docs/*.md from docs/*.json, between `<!-- NAME: docs/tables.py -->` and its end.

    python docs/tables.py                                        makes all tables and pictures anew
    python docs/tables.py runs/bench-queue/results.json ...      takes over what `areal-lite bench` measured, first
    python docs/tables.py runs/seed-0 runs/seed-1 runs/seed-2    takes over runs of the demo, first
    python docs/tables.py runs/calculator-0 ...                  takes over runs of the agent with a calculator, first
    python docs/tables.py score                                  scores the pairs of math-verifier.json anew, first
    python docs/tables.py memory                                 estimates the rows of memory.json anew, first

A pair of the verifier `math` is added to its JSON file by hand, with `expected` as a person judges it, before its score
is known.
"""

import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from areal_lite.cli.estimate import HOST, all_figures, peak_gib
from areal_lite.config.recipe import load_config
from areal_lite.launch.bench.modes import ages, draw_modes
from areal_lite.launch.bench.view import COLUMNS, Columns, Row, beside, cell, markdown, picture

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
Parts = dict[str, str]
"""Name in a page's comments -> what stands between them."""
PLACE = re.compile(r"(<!-- (?P<name>[\w ]+): docs/tables\.py -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """Read what was measured."""
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return content


def save(name: str, content: Row) -> None:
    """Write what was measured; of `pairs` one a line, so that a changed pair is a changed line."""
    text = json.dumps(content, indent=1)
    if "pairs" in content:
        pairs = ",\n".join(f"  {json.dumps(pair)}" for pair in content["pairs"])
        text = f'{{\n "library": {json.dumps(content["library"])},\n "pairs": [\n{pairs}\n ]\n}}'
    (HERE / f"{name}.json").write_text(text + "\n")


def all_parts() -> Parts:
    """Return every part there is."""
    return {name: text for source, make in SOURCES.items() for name, text in make(load(source)).items()}


def filled(page: str, parts: Parts) -> str:
    """Return the text of a page with every part in its place."""
    return PLACE.sub(lambda found: f"{found[1]}{parts[found['name']]}\n{found[3]}", page)


def pages() -> list[Path]:
    """Return the files that have places for parts."""
    return [path for path in (README, *sorted(HERE.glob("*.md"))) if PLACE.search(path.read_text())]


def where(content: Row) -> str:
    """Say on what, and with which code, something was measured."""
    processor = f", {content['processor']}" if content.get("processor") else ""
    return f"Commit {content['commit']}, {content['cores']} cores ({content['machine']}{processor}), no GPU."


def one_line(values: Sequence[float], spec: str) -> str:
    """Write mean and, in brackets, lowest and highest."""
    if not values:
        return "-"
    mean, low, high = (format(value, spec) for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def together(columns: Columns, *names: str) -> Columns:
    """Return the columns with some of them in one, where the first of them was; pages have room for seven."""
    show = beside(*(columns[name] for name in names))
    return {
        (", ".join(names) if name == names[0] else name): (show if name == names[0] else column)
        for name, column in columns.items()
        if name not in names[1:]
    }


# ---------------------------------------------------------------- performance

RECIPES = {"longtail_cpu": 2.2, "arith_cpu": 1.4}
"""Of `bench modes`, and what the best asynchronous mode is to reach over the best synchronous one."""
NOTHING = "Not measured in this state."
CARRIERS = ("areal-lite", "ray", "zeromq")
BEFORE = {
    "engine": "lost for good",
    "rollout": "lost for good",
    "verifier": "lost for good",
    "queue": "noticed after 65 s, the run ended",
    "trainer": "the run ended",
    "raylet": "the run ended, trainer/0 was blamed",
    "controller": "the same, resumed by hand",
    "sigterm": "to all processes: nothing saved",
    "sighup": "nothing saved",
    "two-writers": "both trained, 96 prompts twice",
    "torn-save": "the same, resumed by hand",
    "bit-flip": "trained on, 29 of 30 times",
}
"""What became of faults until 0.5, as far as they were provoked."""
NARROW = COLUMNS | {
    "drill": {name: show for name, show in COLUMNS["drill"].items() if name != "losses"}
    | {"until 0.5": lambda row: BEFORE.get(row["fault"], "-")},
    "queue": {"samples, clients": COLUMNS["queue"]["samples, clients"]}
    | {f"{name}, groups/s": cell(f"{name}.groups_per_s", ".0f", ranged=True) for name in CARRIERS}
    | {name: cell(f"areal-lite.{name.replace(' ', '.')}", ".2f") for name in ("over ray", "over zeromq")},
}
RATIO: Columns = {"mode": cell("mode"), "x best sync": cell("ratio", ".2f", ranged=True)}
SHARES: Columns = {
    "generators idle": cell("figures.generator_idle", ".0%"),
    "trainer idle": cell("figures.trainer_idle", ".0%"),
}
README_MODES: Columns = {
    "mode": cell("mode"),
    "eta": lambda line: (re.findall(r"eta(\d)", line["mode"]) or ["0" if line["mode"].startswith("sync") else "1"])[0],
    "long answers: x best sync": RATIO["x best sync"],
    "samples/s": cell("figures.samples_per_s", ".1f"),
    **SHARES,
    "short answers: x best sync": cell("short.ratio", ".2f", ranged=True),
}
MODES: tuple[Columns, ...] = (
    RATIO | {
        "samples/s": cell("figures.samples_per_s", ".1f", ranged=True),
        "generated tokens/s": cell("figures.generated_tokens_per_s", ".0f"),
        "trained tokens/s": cell("figures.trained_tokens_per_s", ".0f"),
        "reward": cell("figures.reward_equal_steps", ".3f"),
        "in time": cell("figures.reward_equal_time", ".3f"),
    },
    {
        "mode": cell("mode"),
        "threads": cell("threads"),
        "slots full": cell("figures.occupancy", ".0%"),
        "paused": cell("figures.generator_paused", ".1%"),
        **SHARES,
        "ages 0 1 2 ..., %": ages,
    },
)  # fmt: skip
"""Of one recipe; the spread of each figure is in the JSON file."""
TARGETS: Columns = {
    "measure": cell("measure"),
    "target": lambda row: f"at least {row['at_least']:g}" if _is_least(row) else f"at most {row['at_most']:g}",
    "median": cell("median", ".2f"),
    "lowest to highest": lambda row: f"{row['low']:.2f} to {row['high']:.2f}",
    "met": lambda row: "yes" if is_met(row) else "**no**",
}


def _is_least(row: Row) -> bool:
    return row.get("at_least") is not None


def is_met(row: Row) -> bool:
    """Tell whether the median meets a target."""
    return bool(row["median"] >= row["at_least"] if _is_least(row) else row["median"] <= row["at_most"])


def performance(content: Row) -> Parts:
    """Return the parts of what the benchmarks measured, by name."""
    targets = [target for recipe in RECIPES for target in mode_targets(content.get(f"modes {recipe}"), recipe)]
    made: Parts = {"modes": modes_of_both(content)}
    for name, columns in NARROW.items():
        results = content.get(name, {"rows": [], "targets": [], "settings": {}})
        versions = ", ".join(f"{package} {number}" for package, number in results.get("versions", {}).items())
        repeats = results["settings"].get("repeats", 1)
        head = f"{where(results)} {versions}. {repeats} repeat{'s' * (repeats != 1)}." if versions else NOTHING
        rows = by_carrier(results["rows"]) if name == "queue" else results["rows"]
        made[name] = f"{head}\n\n{markdown(columns, rows)}"
    speed = [results for name, results in sorted(content.items()) if name.startswith("peers ")]
    rows = sorted((row for results in speed for row in results["rows"]), key=lambda row: row["parameters"])
    heads = "\n".join(dict.fromkeys(map(where, speed))) or NOTHING
    made["peers speed"] = f"{heads}\n\n{markdown(COLUMNS['peers speed'], rows)}"
    for name in ("rollout", "train", "queue", "handover", "peers"):
        targets += content.get(name, {}).get("targets", [])
    for name in (f"modes {recipe}" for recipe in RECIPES):
        modes = content.get(name)
        made[name] = modes_of_one(modes) if modes else NOTHING
    return made | {"targets": markdown(TARGETS, targets)}


def by_carrier(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each size and number of clients, with what each carrier did in it by the carrier's name."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        place = {"tokens": row["tokens"], "clients": row["clients"]}
        found.setdefault((row["tokens"], row["clients"]), place)[row["contender"]] = row
    return list(found.values())


def mode_targets(content: Row | None, recipe: str) -> list[dict[str, Any]]:
    """Return what a `bench modes` says about the targets: the gain of the best asynchronous mode, and its pauses."""
    lines = [line for line in (content or {}).get("modes", []) if line["mode"].startswith("async") and line["ratio"]]
    if content is None or not lines:
        return []
    best = max(lines, key=lambda line: line["ratio"]["median"])
    over = f"`{recipe}`: {best['mode']} over {content['best_synchronous']}, samples/s"
    found = [{"measure": over, "at_least": RECIPES[recipe], **best["ratio"]}]
    if recipe == "longtail_cpu":
        share = {name: 100 * value for name, value in best["figures"]["generator_paused"].items()}
        found.append({"measure": f"`{recipe}`: paused share of {best['mode']}, %", "at_most": 3.0, **share})
    return found


def modes_of_one(content: Row) -> str:
    """Render what one `bench modes` measured, and where more asynchrony cannot help."""
    first, last = content["measured_steps"]
    findings = [f"- {text}" for text in content["findings"] if "more asynchrony" in text]
    shown = [markdown(columns, content["modes"]) for columns in MODES]
    return "\n\n".join([f"{where(content)} Steps {first + 1} to {last}.", *shown, "\n".join(findings)]).strip()


def modes_of_both(content: Row) -> str:
    """Render README's table: a line per mode, with lengths as large models have them, and with short answers."""
    long, short = (content.get(f"modes {recipe}") for recipe in RECIPES)
    if not (long and short):
        return NOTHING
    others = {line["mode"]: line for line in short["modes"]}
    return markdown(README_MODES, [line | {"short": others.get(line["mode"], {})} for line in long["modes"]])


# ---------------------------------------------------------------- presets

PRESETS: Columns = {
    "preset": cell("name"),
    "lr": cell("lr", "g"),
    "steps": cell("steps"),
    "start": cell("start", ".3f"),
    "end": cell("end", ".3f"),
    "rise": lambda run: run["status"] if run.get("end") is None else f"{run['end'] - run['start']:+.3f}",
    "seconds": cell("seconds", ".0f"),
    "age: mean": cell("age_mean", ".2f"),
    "age: max": lambda run: f"{run['age_max']} of {run['max_staleness']}" if "age_max" in run else "-",
    "generators idle": cell("rollout_idle", ".0%"),
    "trainer idle": cell("trainer_idle", ".0%"),
    "parity": cell("parity", ".1e"),
}


for _names in (("lr", "steps", "seconds"), ("start", "end", "rise"), ("age: mean", "age: max"),
               ("generators idle", "trainer idle")):  # fmt: skip
    PRESETS = together(PRESETS, *_names)


def presets(content: Row) -> Parts:
    """Return the table of `bench presets`."""
    return {"presets": f"{where(content)}\n\n{markdown(PRESETS, content['runs'])}"}


def draw_presets(content: Row) -> None:
    """Draw held-out accuracy over steps, a line per preset, named at its end."""
    with picture(HERE / "presets.svg", size=(7.5, 4.6), font=10) as (_, axes):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        ends = []
        for run in content["runs"]:
            if curve := {int(step): value for step, value in run.get("curve", {}).items()}:
                (line,) = axes.plot(list(curve), list(curve.values()), linewidth=1.6, marker="o", markersize=3)
                ends.append((curve[max(curve)], max(curve), run["name"], line.get_color()))
        last, ends = max((step for _, step, _, _ in ends), default=1), sorted(ends)
        for (value, step, name, color), place in zip(ends, apart(ends, axes.get_ylim()), strict=True):
            axes.annotate(name, (step, value), (last * 1.03, place), color=color, va="center")
        axes.set_xlim(0, last * 1.2)
        axes.set_xlabel("trainer step")
        axes.set_ylabel("held-out accuracy, greedy")


def apart(ends: Sequence[tuple[float, Any, Any, Any]], limits: tuple[float, float]) -> list[float]:
    """Return where the names of lines go: at their ends, moved apart where these are close together."""
    gap, places = (limits[1] - limits[0]) * 0.045, list[float]()
    for value, *_ in ends:
        places.append(max(value, places[-1] + gap) if places else value)
    shift = sum(place - end[0] for place, end in zip(places, ends, strict=True)) / max(len(ends), 1)
    return [place - shift for place in places]


# ---------------------------------------------------------------- staleness

KINDS = {"naive": ("behaviour", "#c25a00"), "decoupled": ("recompute", "#1f5fa8")}
"""What the page calls a value of `objective.proximal`, and its color."""


def of_kind(runs: Sequence[Row], eta: int, kind: str, key: str = "end") -> list[Any]:
    """Return a figure of the finished runs of a cell, one run per seed."""
    return [
        run[key]
        for run in runs
        if run["max_staleness"] == eta and run["overrides"]["objective.proximal"] == KINDS[kind][0]
    ]


def staleness(content: Row) -> Parts:
    """Return the table of `bench staleness`."""
    runs = [run for run in content["runs"] if run.get("end") is not None]
    rows = []
    for eta in sorted({run["max_staleness"] for run in runs}):
        ends = {kind: of_kind(runs, eta, kind) for kind in KINDS}
        gain = statistics.mean(ends["decoupled"]) - statistics.mean(ends["naive"]) if all(ends.values()) else None
        row: dict[str, Any] = {"eta": str(eta)}
        row |= {f"{kind}: accuracy": one_line(ends[kind], ".3f") for kind in KINDS}
        row["decoupled - naive"] = "-" if gain is None else f"{gain:+.3f}"
        for kind in KINDS:
            row[f"{kind}: mean age"] = one_line(of_kind(runs, eta, kind, "age_mean"), ".2f").partition(" ")[0]
        row["oldest"] = str(max(age for kind in KINDS for age in of_kind(runs, eta, kind, "age_max")))
        for kind in KINDS:
            row[f"{kind}: seconds"] = one_line(of_kind(runs, eta, kind, "seconds"), ".0f").partition(" ")[0]
        rows.append(row)
    columns: Columns = {name: cell(name) for name in rows[0]} if rows else {"eta": cell("eta")}
    for what in ("mean age", "seconds") if rows else ():
        columns = together(columns, *(f"{kind}: {what}" for kind in KINDS))
    return {"staleness": f"{where(content)}\n\n{markdown(columns, rows)}"}


def draw_staleness(content: Row) -> None:
    """Draw final accuracy over eta: a dot per run, a line through the means."""
    runs = [run for run in content["runs"] if run.get("end") is not None]
    etas = sorted({run["max_staleness"] for run in runs})
    with picture(HERE / "staleness-ablation.svg", size=(7.5, 4.0), font=10) as (_, axes):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        for shift, (kind, (_, color)) in zip((-0.07, 0.07), KINDS.items(), strict=True):
            ends = {place + shift: found for place, eta in enumerate(etas) if (found := of_kind(runs, eta, kind))}
            axes.plot(list(ends), list(map(statistics.mean, ends.values())), color=color, linewidth=2, label=kind)
            for place, found in ends.items():
                axes.scatter([place] * len(found), found, color=color, s=18, alpha=0.75, zorder=3)
        axes.set_xticks(range(len(etas)), [str(eta) for eta in etas])
        axes.set_xlabel("eta, the largest age a trained token may have")
        axes.set_ylabel("held-out accuracy at the last step")
        axes.legend(frameon=False)


# ---------------------------------------------------------------- long answers

ENGINE = "memory-bound"
"""Whose figures are shown; of the other one the speed alone."""
PARTS = ("257-1024", "1025-4096")


def long_answers(content: Row) -> Parts:
    """Return the table of what `long_answers.py` simulated; speeds are over that of `mask` at the same `max_ahead`."""
    masks = {row["ahead"]: row for row in reversed(content["rows"]) if row["policy"] == "mask"}

    def speed(engine: str) -> Callable[[Row], str]:
        rate = f"{engine}.groups_per_time"
        value = cell(rate)
        return lambda row: format(float(value(row)) / float(value(masks[row["ahead"]])), ".2f")

    def quarters(name: str) -> Callable[[Row], str]:
        return lambda row: " / ".join(f"{min(share, 1):.0%}"[:-1] for share in row[ENGINE]["shares"][name])

    columns: Columns = {
        "`on_stale`": cell("policy"),
        "`max_staleness`": cell("eta"),
        "`max_ahead`": cell("ahead"),
        "speed": speed(ENGINE),
        "on a CPU": speed("compute-bound"),
        **{f"{name} tokens, %": quarters(name) for name in PARTS},
        "age": cell(f"{ENGINE}.ages.mean", ".1f"),
        "oldest": cell(f"{ENGINE}.ages.max"),
    }
    columns = together(together(columns, "`max_staleness`", "`max_ahead`"), "age", "oldest")
    return {"long answers": f"{where(content)}\n\n{markdown(columns, content['rows'])}"}


def draw_long_answers(content: Row) -> None:
    """Draw what share of each quarter trains, over the length of the sample; a panel per policy."""
    rows = [row for row in content["rows"] if row["ahead"] == 1 and (row["eta"] == 1 or row["policy"] == "wait")]
    rows = [row for row in rows if "," not in row["policy"]]
    with picture(HERE / "long-answers.svg", size=(9, 3.0), font=9, ncols=len(rows), sharey=True) as (figure, panels):
        for row, axes in zip(rows, panels, strict=True):
            shares = row[ENGINE]["shares"]
            for quarter, color in enumerate(("#9ecae1", "#6baed6", "#3182bd", "#08306b")):
                heights = [parts[quarter] for parts in shares.values()]
                places = [place + 0.2 * (quarter - 1.5) for place in range(len(shares))]
                axes.bar(places, heights, 0.2, color=color, label=("first quarter", "second", "third", "last")[quarter])
            axes.set_xticks(range(len(shares)), list(shares), rotation=60)
            name = row["policy"] if row["eta"] == row["ahead"] else f"{row['policy']}, max_staleness {row['eta']}"
            speed = row[ENGINE]["groups_per_time"] / rows[0][ENGINE]["groups_per_time"]
            axes.set_title(f"{name}\nspeed {speed:.2f}", fontsize=9)
        panels[0].set_ylabel("trains, of what is generated")
        figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right center")
        panels[len(rows) // 2].set_xlabel("tokens of the sample")


# ---------------------------------------------------------------- demo

PAUSES = ("pausing", "transferring", "reloading", "stamping")
DEMO: Columns = {
    "rise": lambda run: f"{list(run['eval'].values())[-1] - next(iter(run['eval'].values())):+.3f}",
    "reward, sampled": lambda run: f"{run['reward_first']:.2f} to {run['reward_last']:.2f}",
    "seconds": cell("wall_s", ".0f"),
    "samples/s": cell("samples_per_s", ".0f"),
    "generators idle": cell("rollout_idle_fraction", ".1%"),
    "trainer idle": cell("trainer_idle_fraction", ".1%"),
    "paused": cell("paused_fraction", ".1%"),
    f"= {' + '.join(PAUSES)}": lambda run: " + ".join(f"{run[f'paused_fraction_{part}']:.1%}" for part in PAUSES),
    "median pause": lambda run: f"{run['pause_s_median'] * 1e3:.0f} ms",
    "oldest token trained": lambda run: f"{run['age_max_trained']} of {run['max_staleness']}",
    "parity": cell("parity_max_abs_logprob_diff", ".1e"),
}
"""A row each, with a column per seed."""
DEMO_KEYS = (
    "eval", "steps", "wall_s", "samples_per_s", "gen_tokens_per_s", "trained_tokens_per_s", "age_histogram",
    "age_max_trained", "max_staleness", "rollout_idle_fraction", "trainer_idle_fraction", "rollout_occupancy",
    "paused_fraction", *(f"paused_fraction_{part}" for part in PAUSES), "pause_s_median", "publish_s_median",
    "parity_max_abs_logprob_diff", "versions", "reward_first", "reward_last",
)  # fmt: skip


LINES = tuple(line for line in DEMO if line != "reward, sampled")
AGENT = ("rise", "reward, sampled", "seconds", "samples/s", "oldest token trained")
"""Of DEMO: for the demo, and for the agent."""


def demo(content: Row, name: str = "demo", lines: Sequence[str] = LINES) -> Parts:
    """Return the table of some runs: accuracy, throughput and shares of time, a column per seed."""
    runs = content["runs"]
    steps = sorted({int(step) for run in runs for step in run["eval"]})
    shown = {f"accuracy at step {step}": cell(f"eval.{step}", ".3f") for step in steps}
    shown |= {line: DEMO[line] for line in lines}
    rows = [{"": line} | {f"seed {run['seed']}": show(run) for run in runs} for line, show in shown.items()]
    columns: Columns = {line: cell(line) for line in rows[0]}
    return {name: f"{where(content)}\n\n{markdown(columns, rows)}"}


def demo_run(folder: Path) -> dict[str, Any]:
    """Return what the page needs of one run folder."""
    found, config = (json.loads((folder / name).read_text()) for name in ("summary.json", "config.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = {str(row["step"]): row["reward_mean"] for row in rows if "reward_mean" in row}
    return {"seed": config["run"]["seed"], **{key: found[key] for key in DEMO_KEYS if key in found}, "rewards": rewards}


def draw_calculator(content: Row) -> None:
    """Draw held-out accuracy and the reward of sampled answers over steps, a line per seed."""
    panels = {"held-out accuracy, greedy": "eval", "mean reward of sampled answers": "rewards"}
    size = (7.5, 3.0)
    with picture(HERE / "calculator.svg", size=size, ncols=len(panels)) as (_, both):
        for axes, (label, key) in zip(both, panels.items(), strict=True):
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            for run in content["runs"]:
                curve = {int(step): value for step, value in run[key].items()}
                axes.plot(list(curve), list(curve.values()), linewidth=1.6, label=f"seed {run['seed']}")
            axes.set_xlabel("trainer step")
            axes.set_title(label)
            axes.set_ylim(0, 1)
        both[0].legend(frameon=False, loc="lower right")


# ---------------------------------------------------------------- the verifier math

VERDICTS = {True: "equal", False: "not equal"}
PAIRS: Columns = {
    "reference": lambda pair: f"`{pair['reference']}`",
    "completion": lambda pair: f"`{pair['completion']}`",
    "a person says": lambda pair: VERDICTS.get(pair["expected"], str(pair["expected"])),
    "`math` says": lambda pair: VERDICTS.get(pair["scored"], str(pair["scored"])),
}


def math_verifier(content: Row) -> Parts:
    """Return what people and the verifier `math` say differently."""
    pairs = content["pairs"]
    wrong = [pair for pair in pairs if pair["scored"] != pair["expected"]]
    agreed = f"{content['library']}: they agree on {len(pairs) - len(wrong)} of {len(pairs)} pairs, but on these not."
    return {"math": f"{agreed}\n\n{markdown(PAIRS, wrong)}"}


def scored(pair: Row) -> dict[str, Any]:
    """Score a pair; an error of the verifier's is put down by its name."""
    from areal_lite.verify.builtin.math import math

    try:
        verdict: bool | str = bool(math()("", pair["completion"], pair["reference"]))
    except Exception as error:
        verdict = type(error).__name__
    return {**pair, "scored": verdict}


# ---------------------------------------------------------------- memory

SIZES = (("Qwen/Qwen2.5-7B", 2), ("Qwen/Qwen2.5-7B", 4), ("Qwen/Qwen2.5-7B", 8), ("Qwen/Qwen3-32B", 8),
         ("Qwen/Qwen3-32B", 16))  # fmt: skip
"""Models and trainer ranks, each with one sequence of 32,768 tokens per micro-batch."""
MEMORY: Columns = {
    "model": cell("model"),
    "ranks": cell("ranks"),
    "before": cell("before", ".1f"),
    "now": cell("now", ".1f"),
    "now, LoRA": cell("lora", ".1f"),
    "now, offload": cell("offload", ".1f"),
    "and in the host": cell("host", ".1f"),
    "kept by layers": cell("kept", ".1f"),
    "other activations": cell("other", ".1f"),
}


def memory(content: Row) -> Parts:
    """Return the table of `areal-lite estimate`, before and now."""
    rows = [
        {
            **now, "before": peak_gib(before), "now": peak_gib(now),
            "lora": peak_gib(now["lora"]),
            "offload": peak_gib(now["offload"]), "host": now["offload"]["trainer rank"][HOST],
            "kept": now["trainer rank"]["activations kept by layers"], "other": now["trainer rank"]["activations"],
        }
        for before, now in zip(content["before"], content["now"], strict=True)
    ]  # fmt: skip
    columns = together(MEMORY, "now, offload", "and in the host")
    columns = together(columns, "kept by layers", "other activations")
    return {"memory": f"Now: commit {content['commit']}.\n\n{markdown(columns, rows)}"}


def estimated(model: str, ranks: int) -> dict[str, Any]:
    """Estimate a row of the table."""
    words = {"model.path": model, "trainer.ranks": ranks, "model.max_context": 32768}
    words |= {"rollout.max_new_tokens": 32767, "trainer.micro_batch_tokens": 32768}
    plain, lora, offload = (
        {"trainer rank": all_figures(load_config("gsm8k_1node", [*settings, *more]), gpu="H100")["trainer rank"]}
        for settings in [[f"{name}={value}" for name, value in words.items()]]
        for more in ([], ["trainer.lora.rank=16"], ["trainer.offload=true"])
    )
    return {"model": model, "ranks": ranks, **plain, "lora": lora, "offload": offload}


# ---------------------------------------------------------------- all of them


def families(content: Row) -> Parts:
    """Return the table of model families: nats between engine and trainer."""
    columns: Columns = {
        "family": cell("family"),
        "from the folder": cell("loaded", ".1e"),
        "after a hand-over": cell("handed_over", ".1e"),
        "which moved": cell("moved", ".1f"),
    }
    return {"families": f"{where(content)}\n\n{markdown(columns, content['rows'])}"}


SOURCES = {
    "performance": performance,
    "presets": presets,
    "staleness-ablation": staleness,
    "long-answers": long_answers,
    "demo": demo,
    "calculator": functools.partial(demo, name="calculator", lines=AGENT),
    "families": families,
    "math-verifier": math_verifier,
    "memory": memory,
}
"""JSON file -> what makes its parts."""
FILE_OF_PLAN = {"presets": "presets", "staleness": "staleness-ablation"}


def take_over(words: Sequence[str]) -> None:
    """Put what was measured into the JSON files."""
    if words == ["score"]:
        pairs = list(map(scored, load("math-verifier")["pairs"]))
        save("math-verifier", {"library": f"math-verify {version('math-verify')}", "pairs": pairs})
        return
    if words == ["memory"]:
        from areal_lite.launch.bench.harness import surroundings

        now = [estimated(*size) for size in SIZES]
        save("memory", load("memory") | {"commit": surroundings()["commit"], "now": now})
        return
    if folders := [Path(word) for word in words if Path(word).is_dir()]:
        from areal_lite.launch.bench.harness import surroundings

        name = "calculator" if folders[0].name.startswith("calculator") else "demo"
        save(name, {**surroundings(), "runs": list(map(demo_run, folders))})
    for results in (json.loads(Path(word).read_text()) for word in words if Path(word).is_file()):
        if "plan" in results:
            save(FILE_OF_PLAN[results["plan"]], results)
            continue
        name = results["benchmark"]
        name = f"modes {Path(results['recipe']).stem}" if name == "modes" else name
        if name == "peers speed":  # a file for each size and kind of lengths, which share a table
            name = "peers {parameters}, {lengths}".format(**results["rows"][0])
        # What is left out of a `bench modes` is in the run folders anyway.
        kept = {key: value for key, value in results.items() if key not in ("config", "search")}
        save("performance", load("performance") | {name: kept})


def main(words: Sequence[str]) -> None:
    """Take over what is named, if anything, and make every table and picture."""
    take_over(words)
    parts = all_parts()
    for path in pages():
        path.write_text(filled(path.read_text(), parts))
    draw_presets(load("presets"))
    draw_staleness(load("staleness-ablation"))
    draw_long_answers(load("long-answers"))
    draw_calculator(load("calculator"))
    for recipe in RECIPES:
        if modes := load("performance").get(f"modes {recipe}"):
            draw_modes(modes, HERE / f"modes-{recipe}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
