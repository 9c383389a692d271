"""Generate the tables of README, benchmarks/README.md and docs/*.md from docs/*.json, between special comments.

    python docs/tables.py                                        updates all tables and pictures
    python docs/tables.py runs/bench-queue/results.json ...      first copies what a benchmark measured
    python docs/tables.py runs/seed-0 runs/seed-1 runs/seed-2    first copies runs of the demo
    python docs/tables.py runs/calculator-0 ...                  first copies runs of the agent with a calculator
    python docs/tables.py runs/smollm_cpu-0 ...                  first copies runs of the recipe smollm_cpu
    python docs/tables.py score                                  first scores the pairs of math-verifier.json again
    python docs/tables.py memory                                 first estimates the rows of memory.json again

A table stands between `<!-- NAME: docs/tables.py -->` and `<!-- end of NAME -->`. Add a pair for the verifier `math` to
its JSON file by hand, with `expected` as a person judges it, before its score is known.
"""

import dataclasses
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from pictures import draw_modes, picture

from areal_lite.config.reading import read_yaml
from areal_lite.config.recipe import load_config
from areal_lite.launch.bench.gpu_check import page
from areal_lite.launch.bench.gpu_part import table
from areal_lite.launch.bench.harness import surroundings
from areal_lite.launch.bench.modes_figures import MODES
from areal_lite.launch.commands.estimate import HOST, all_figures, peak_gib
from areal_lite.node import source_hash
from areal_lite.record.columns import COLUMNS, Columns, Row, as_markdown, cells, markdown, rows_of
from areal_lite.record.intervals import paired
from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, SHARES, Metric, Reduction
from areal_lite.record.run_files import read_summary
from areal_lite.record.run_folder import RunFolder
from areal_lite.rollout.api_fields import FIELDS

HERE = Path(__file__).parent
OWN: dict[str, Columns] = read_yaml(HERE / "tables.yaml", holding="columns by part")
COMPONENTS: dict[str, Columns] = read_yaml(HERE.parent / "benchmarks/columns.yaml", holding="columns by benchmark")
OUTSIDE = (HERE.parent / "README.md", HERE.parent / "benchmarks/README.md")
Parts = dict[str, str]
"""Name in a page's comments -> what stands between them."""
Make = Callable[[Row], str]
"""From a JSON file to a part."""
PLACE = re.compile(r"(<!-- (?P<name>[\w ]+): docs/tables\.py -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """Read a JSON file of results."""
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return content


def save(name: str, content: Row) -> None:
    """Write what was measured; of `pairs` one a line, so that a changed pair is a changed line."""
    text = json.dumps(content, indent=1)
    if "pairs" in content:
        pairs = ",\n".join(f"  {json.dumps(pair)}" for pair in content["pairs"])
        text = json.dumps(content | {"pairs": []}, indent=1).replace("[]", f"[\n{pairs}\n ]")
    (HERE / f"{name}.json").write_text(text + "\n")


def all_parts() -> Parts:
    """Return every part there is."""
    measured = {name: make(load(source)) for name, (source, make) in PARTS.items()}
    return measured | {"fields": fields(), "metrics": metrics_tables().rstrip()}


def metrics_tables() -> str:
    """Return the tables of `docs/runs.md`, each below its heading."""
    tables = {
        "`areal-lite train`": METRICS,
        "`areal-lite sft`, `reward-model`, `dpo`": OFFLINE_METRICS,
        "Shares of time in `summary.json`": SHARES,
    }
    return "\n".join(f"### {title}\n\n{_metrics_table(metrics)}" for title, metrics in tables.items())


def _metrics_table(metrics: Iterable[Metric]) -> str:
    rows = [["key", "what it is", "unit", "over updates and ranks"], ["---"] * 4]
    for metric in metrics:
        joined = f"mean over {metric.over.replace('_', ' ')}" if metric.over else str(metric.reduction or "")
        rows.append(
            [f"`{metric.name}`", metric.about, metric.unit, "" if metric.reduction is Reduction.ALIKE else joined]
        )
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in rows)


def filled(page: str, parts: Parts) -> str:
    """Return the text of a page with every part in its place."""
    return PLACE.sub(lambda found: f"{found[1]}{parts[found['name']]}\n{found[3]}", page)


def pages() -> list[Path]:
    """Return the files that have places for parts."""
    return [path for path in (*OUTSIDE, *sorted(HERE.glob("*.md"))) if PLACE.search(path.read_text())]


def where(content: Row) -> str:
    """Return the commit and the machine of a measurement."""
    processor = f", {content['processor']}" if content.get("processor") else ""
    return f"Commit {content['commit']}, {content['cores']} cores ({content['machine']}{processor}), no GPU."


def of(columns: Columns, rows: Callable[[Row], Iterable[Row]]) -> Make:
    """Return a function that renders where something was measured, and its rows."""
    return lambda content: f"{where(content)}\n\n{markdown(columns, rows(content))}"


# ---------------------------------------------------------------- performance

RECIPES = {"longtail_cpu": 2.2, "arith_cpu": 1.4}
"""Of `bench modes`, and what the best asynchronous mode is to reach over the best synchronous one."""
REAL = {"real": "smollm_cpu", "sums": "smollm_sums"}
"""Those with a real model, by their names in `tables.yaml`."""
DRILL: Columns = {title: template for title, template in COLUMNS["drill"].items() if title != "losses"}
OF_PAGES: dict[str, Columns] = COMPONENTS | {"drill": DRILL, "soak": COLUMNS["soak"]}


def benchmark(content: Row, *, name: str) -> str:
    """Return the table of a benchmark, from one file or from a file for each case (`NAME, CASE`)."""
    found = [results for key, results in sorted(content.items()) if key.partition(", ")[0] == name]
    rows = [row for one in found for row in one["rows"] if not str(row.get("side")).startswith("fastest")]
    rows.sort(key=lambda row: row.get("parameters", 0))
    heads = "\n".join(dict.fromkeys(map(head, found)))
    return f"{heads}\n\n{markdown(OF_PAGES[name], rows_of(name, rows))}"


def head(results: Row) -> str:
    """Return where and how often a benchmark measured; its JSON file has the versions of packages."""
    repeats = results["settings"].get("repeats", 1)
    return f"{where(results)} {repeats} repeat{'s' * (repeats != 1)}."


def all_targets(content: Row) -> str:
    """Return the table of targets."""
    found = [target for recipe in RECIPES for target in mode_targets(content[f"modes {recipe}"], recipe)]
    for name in ("rollout", "train", "queue"):
        found += content[name]["targets"]
    return markdown("targets", found)


def mode_targets(content: Row, recipe: str) -> list[dict[str, Any]]:
    """Return the targets of a `bench modes`: the gain of the best asynchronous mode, and its pauses."""
    lines = [line for line in content["modes"] if line["mode"].startswith("async")]
    best = max(lines, key=lambda line: line["ratio"]["median"])
    over = f"`{recipe}`: {best['mode']} over {content['best_synchronous']}, samples/s"
    found = [{"measure": over, "at_least": RECIPES[recipe], **best["ratio"]}]
    if recipe == "longtail_cpu":
        share = {name: 100 * value for name, value in best["figures"]["generator_paused"].items()}
        found.append({"measure": f"`{recipe}`: paused share of {best['mode']}, %", "at_most": 3.0, **share})
    return found


def modes_of_one(content: Row, *, recipe: str) -> str:
    """Render what one `bench modes` measured."""
    if (modes := content.get(f"modes {recipe}")) is None:
        return "Not measured yet."
    first, last = modes["measured_steps"]
    shown = [markdown(name, modes["modes"]) for name in ("modes", "shares of modes")]
    return "\n\n".join([f"{where(modes)} Steps {first + 1} to {last}.", *shown])


def modes_of_all(content: Row) -> str:
    """Render README's table: a line per mode, with long answers, with short ones, and with a real model."""
    long, *others = (
        {line["mode"]: line for line in content.get(f"modes {recipe}", {}).get("modes", ())}
        for recipe in (*RECIPES, *REAL.values())
    )
    rows = [
        line
        | {"eta": MODES[mode].eta}
        | {name: of.get(mode) for name, of in zip(("short", *REAL), others, strict=True)}
        for mode, line in long.items()
    ]
    return markdown(OWN["modes"], rows)


# ---------------------------------------------------------------- presets

PRESETS = {"preset" if title == "run" else title: template for title, template in COLUMNS["plan"].items()}


def draw_presets(content: Row) -> None:
    """Draw held-out accuracy over steps, a line per preset."""
    with picture(HERE / "presets.svg", size=(7.5, 4.6), font=10) as (_, axes):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        for number, run in enumerate(content["runs"]):
            if curve := {int(step): value for step, value in run.get("curve", {}).items()}:
                last = curve[max(curve)]
                dash = "--" if number >= 10 else "-"  # colors come again after ten
                label, style = f"{run['name']} {last:.3f}", {"linewidth": 1.6, "marker": "o", "markersize": 3}
                axes.plot(list(curve), list(curve.values()), dash, label=label, **style)
        axes.legend(frameon=False, fontsize=9)
        axes.set(xlabel="trainer step", ylabel="held-out accuracy, greedy")


# ---------------------------------------------------------------- staleness

KINDS = {"naive": ("behaviour", "#c25a00"), "decoupled": ("recompute", "#1f5fa8")}
"""What the page calls a value of `objective.proximal`, and its color."""


def by_eta(content: Row) -> list[Row]:
    """Return a row per eta, with the finished runs of each kind, one run per seed."""
    found: dict[int, dict[str, Any]] = {}
    kinds = {proximal: kind for kind, (proximal, _) in KINDS.items()}
    for run in content["runs"]:
        if run.get("end") is not None:
            row = found.setdefault(run["max_staleness"], {"eta": run["max_staleness"], **{kind: [] for kind in KINDS}})
            row[kinds[run["overrides"]["objective.proximal"]]].append(run)
    return [found[eta] for eta in sorted(found)]


def staleness(content: Row) -> list[Row]:
    """Return the rows of the table: means over the seeds, of each kind; of accuracies lowest and highest too."""
    rows = []
    for row in by_eta(content):
        kinds = {}
        for kind, runs in ((kind, row[kind]) for kind in KINDS if row[kind]):
            means = {key: statistics.mean(run[key] for run in runs) for key in ("end", "age_mean", "seconds")}
            ends = [run["end"] for run in runs]
            kinds[kind] = means | {"accuracy": f"{means['end']:.3f} ({min(ends):.3f} to {max(ends):.3f})"}
        gain = kinds["decoupled"]["end"] - kinds["naive"]["end"] if len(kinds) == len(KINDS) else None
        oldest = max(run["age_max"] for kind in KINDS for run in row[kind])
        rows.append({"eta": row["eta"], "gain": gain, "oldest": oldest, **kinds})
    return rows


def draw_staleness(content: Row) -> None:
    """Draw final accuracy over eta: a dot per run, a line through the means."""
    rows = by_eta(content)
    with picture(HERE / "staleness-ablation.svg", size=(7.5, 4.0), font=10) as (_, axes):
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        for shift, (kind, (_, color)) in zip((-0.07, 0.07), KINDS.items(), strict=True):
            ends = {place + shift: [run["end"] for run in row[kind]] for place, row in enumerate(rows) if row[kind]}
            axes.plot(list(ends), list(map(statistics.mean, ends.values())), color=color, linewidth=2, label=kind)
            for place, found in ends.items():
                axes.scatter([place] * len(found), found, color=color, s=18, alpha=0.75, zorder=3)
        axes.set_xticks(range(len(rows)), [str(row["eta"]) for row in rows])
        axes.set(xlabel="eta, the largest age a trained token may have", ylabel="held-out accuracy at the last step")
        axes.legend(frameon=False)


# ---------------------------------------------------------------- long answers

SCENES = ("memory-bound", "compute-bound", "heavy tail")
"""The first one's figures are shown; of the others the speed alone."""


def long_answers(content: Row) -> list[Row]:
    """Return the rows of `long_answers.py` for each policy and a pipeline of 4: speeds, and shares in percent."""
    default = _default_policy(content)
    rows = []
    for row in content["rows"]:
        if row["ahead"] != 4:
            continue
        if row["policy"] == "mask" and row["eta"] > 12:  # a bound that masks nothing
            continue
        shares = row[SCENES[0]]["shares"].items()
        percent = {length: "/".join(f"{min(share, 1):.0%}"[:-1] for share in quarters) for length, quarters in shares}
        rates = {name: (row[name]["groups_per_time"], default[name]["groups_per_time"]) for name in SCENES}
        speeds = {name: f"{1000 * rate:.3g} ({rate / of_default:.2f})" for name, (rate, of_default) in rates.items()}
        rows.append(row | {"speed": speeds, "percent": percent})
    return rows


def _default_policy(content: Row) -> Row:
    """Return the row of a recipe that sets nothing: `mask` at a bound and a pipeline of 4."""
    return next(row for row in content["rows"] if (row["policy"], row["eta"], row["ahead"]) == ("mask", 4, 4))


def families(content: Row) -> str:
    """Return the table of model families, a row for both dtypes, and the names of those that failed."""
    rows: dict[str, dict[str, Any]] = {}
    for row in content["rows"]:
        rows.setdefault(row["family"], {"family": row["family"]})[row["dtype"]] = row
    failed = {row["family"] for row in content["rows"] if "failed" in row}
    table = markdown(OWN["families"], [row for name, row in rows.items() if name not in failed])
    others = ", ".join(name for name in rows if name in failed)
    note = "Not measured, with the errors in [families.json](families.json)"
    return f"{where(content)}\n\n{table}" + f"\n\n{note}: {others}." * bool(others)


def draw_long_answers(content: Row) -> None:
    """Draw what share of each quarter trains, over the length of the sample; a panel per policy."""
    shown = [(policy, 4) for policy in ("mask", "drop", "wait", "keep")] + [("wait", 20)]
    rows = [row for row in content["rows"] if row["ahead"] == 4 and (row["policy"], row["eta"]) in shown]
    with picture(HERE / "long-answers.svg", size=(9, 3.0), font=9, ncols=len(rows), sharey=True) as (figure, panels):
        for row, axes in zip(rows, panels, strict=True):
            shares = row[SCENES[0]]["shares"]
            for quarter, color in enumerate(("#9ecae1", "#6baed6", "#3182bd", "#08306b")):
                heights = [parts[quarter] for parts in shares.values()]
                places = [place + 0.2 * (quarter - 1.5) for place in range(len(shares))]
                axes.bar(places, heights, 0.2, color=color, label=("first quarter", "second", "third", "last")[quarter])
            axes.set_xticks(range(len(shares)), list(shares), rotation=60)
            name = row["policy"] if row["eta"] == row["ahead"] else f"{row['policy']}, max_staleness {row['eta']}"
            speed = row[SCENES[0]]["groups_per_time"] / _default_policy(content)[SCENES[0]]["groups_per_time"]
            axes.set_title(f"{name}\nspeed {speed:.2f} of the default", fontsize=9)
        panels[0].set_ylabel("trains, of what is generated")
        figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right center")
        panels[len(rows) // 2].set_xlabel("tokens of the sample")


SIMULATED = ("sweep", "ages", "runs")
"""Parts of what `simulated.py` writes."""

# ---------------------------------------------------------------- demo


def demo(content: Row, *, name: str = "demo") -> str:
    """Return the table of some runs: accuracy, throughput and shares of time, a column per seed."""
    runs = [
        run | {"rise": list(run["eval"].values())[-1] - next(iter(run["eval"].values()))} for run in content["runs"]
    ]
    steps = sorted({int(step) for run in runs for step in run["eval"]})[::2]
    lines = {f"accuracy at step {step}": f"{{eval.{step}:.3f}}" for step in steps} | OWN[name]
    titles = ["", *(f"seed {run['seed']}" for run in runs)]
    return f"{where(content)}\n\n{as_markdown([titles, *zip(*cells(lines, runs), strict=True)])}"


def demo_run(folder: Path) -> dict[str, Any]:
    """Return what the page needs of one run folder: its summary, its seed, the rewards of its steps, and the gain.

    The gain is that of the held-out rows from the first to the last evaluation, in pairs, with its 95 % interval.
    """
    rows = RunFolder(folder).read("metrics.jsonl")
    held_out = [event["rewards"] for event in RunFolder(folder).iterate("events.jsonl") if event["kind"] == "eval"]
    if not held_out:
        raise SystemExit(f"{folder} must be a run with evaluations, got none. Fix: set run.eval_every")
    gain = paired(held_out[0], held_out[-1])
    seed = json.loads((folder / "config.json").read_text())["run"]["seed"]
    rewards = {str(row["step"]): row["reward_mean"] for row in rows if "reward_mean" in row}
    return {**read_summary(folder), "seed": seed, "rewards": rewards, "gain": gain and gain._asdict()}


def draw_runs(content: Row, *, name: str = "calculator") -> None:
    """Draw held-out accuracy and the reward of sampled answers over steps, a line per seed."""
    panels = {"held-out accuracy, greedy": "eval", "mean reward of sampled answers": "rewards"}
    with picture(HERE / f"{name}.svg", size=(7.5, 3.0), ncols=len(panels)) as (_, both):
        for axes, (label, key) in zip(both, panels.items(), strict=True):
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            for run in content["runs"]:
                curve = {int(step): value for step, value in run[key].items()}
                axes.plot(list(curve), list(curve.values()), linewidth=1.6, label=f"seed {run['seed']}")
            axes.set(xlabel="trainer step", title=label, ylim=(0, 1))
        both[0].legend(frameon=False, loc="lower right")


# ---------------------------------------------------------------- the verifier math

VERDICTS = {True: "equal", False: "not equal"}


def math_verifier(content: Row) -> str:
    """Return the pairs on which a person and the verifier `math` disagree."""
    pairs = content["pairs"]
    wrong = [
        pair | {key: VERDICTS.get(pair[key], str(pair[key])) for key in ("expected", "scored")}
        for pair in pairs
        if pair["scored"] != pair["expected"]
    ]
    agreed = f"it agrees with the person on {len(pairs) - len(wrong)} of {len(pairs)} pairs, but not on these:"
    return f"{content['library']}: {agreed}\n\n{markdown(OWN['math'], wrong)}"


def scored(pair: Row) -> dict[str, Any]:
    """Score a pair; an error of the verifier becomes its name."""
    from areal_lite.verify.builtin.math import math

    try:
        verdict: bool | str = bool(math()("", pair["completion"], pair["reference"]))
    except Exception as error:
        verdict = type(error).__name__
    return {**pair, "scored": verdict}


# ---------------------------------------------------------------- memory

SIZES = (("Qwen/Qwen2.5-7B", 2), ("Qwen/Qwen2.5-7B", 4), ("Qwen/Qwen2.5-7B", 8), ("Qwen/Qwen3-32B", 8),
         ("Qwen/Qwen3-32B", 16), ("Qwen/Qwen3-30B-A3B", 8), ("Qwen/Qwen3-30B-A3B", 16))  # fmt: skip
"""Models and trainer ranks, each with one sequence of 32,768 tokens per micro-batch."""


def memory(content: Row) -> str:
    """Return the table of `areal-lite estimate`."""
    rows = [
        {
            **now, "full": peak_gib(now["trainer rank"]), "lora": peak_gib(now["lora"]["trainer rank"]),
            "offload": peak_gib(now["offload"]["trainer rank"]), "host": now["offload"]["trainer rank"][HOST],
            "kept": now["trainer rank"]["activations kept by layers"], "other": now["trainer rank"]["activations"],
        }
        for now in content["now"]
    ]  # fmt: skip
    return f"Commit {content['commit']}.\n\n{markdown(OWN['memory'], rows)}"


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


# ---------------------------------------------------------------- GPUs


def gpu_parts(_content: Row) -> str:
    """Return the table of the parts of the check."""
    rows = [{"name": name, **part.model_dump()} for name, part in table().parts.items()]
    return markdown(OWN["gpu parts"], rows)


# ---------------------------------------------------------------- agents


def fields() -> str:
    """Return what a request to each API may hold, as the endpoint itself checks it."""
    rows = {f"`/{api}`": {kind.name: _fields(getattr(row, kind.name)) for kind in dataclasses.fields(row)}
            for api, row in FIELDS.items()}  # fmt: skip
    openai = [row for api, row in rows.items() if api != "`/messages`"]
    common = {kind: set.intersection(*(row[kind] for row in openai)) for kind in openai[0]}
    for row in openai:
        for kind, names in common.items():
            row[kind] -= names
    lines = []
    for title, row in {"All of OpenAI's": common, **rows}.items():
        lines += [title, ""]
        for kind, names in row.items():
            if names:
                lines += textwrap.wrap(f"- {kind}: {', '.join(sorted(names))}", 118, subsequent_indent="  ")
        lines.append("")
    return "\n".join(lines[:-1])


def _fields(names: Iterable[str] | Mapping[str, Sequence[Any]]) -> set[str]:
    """Return each field as it is shown, with the values that pass."""
    values = names if isinstance(names, Mapping) else dict.fromkeys(names, ())
    return {
        f"`{name}`" + (f" ({' or '.join(map(json.dumps, allowed))})" if allowed else "")
        for name, allowed in values.items()
    }


def frameworks(content: Row) -> str:
    """Return the table of framework clients, from the results of `benchmarks/try_frameworks.py`."""
    lines = [["client", "what to write", "plain", "stream", "tools", "structured output"]]
    for row in content["rows"]:
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        without = ", ".join(f"`{name}`" for name in row.get("left_out", ()))
        structured = row.get("structured", "-") + f" (without {without})" * bool(without)
        lines.append(
            [versions, row["write"], *(row.get(check, "-") for check in ("plain", "stream", "tools")), structured]
        )
    return as_markdown(lines)


def reward_watch(content: Row) -> Iterable[Row]:
    """Yield a row per evaluation, of both runs of `examples/reward_watch/gaming.py`."""
    free, held = (run["rows"] for run in content["runs"].values())
    for one, other in zip(free, held, strict=True):
        yield {"step": one["step"], "free": one, "held": other}


# ---------------------------------------------------------------- all of them

PARTS: dict[str, tuple[str, Make]] = {
    "targets": ("performance", all_targets),
    "modes": ("performance", modes_of_all),
    **{
        f"modes {recipe}": ("performance", partial(modes_of_one, recipe=recipe))
        for recipe in (*RECIPES, *REAL.values())
    },
    **{name: ("performance", partial(benchmark, name=name)) for name in OF_PAGES},
    "presets": ("presets", of(PRESETS, lambda content: rows_of("plan", content["runs"]))),
    "staleness": ("staleness-ablation", of(OWN["staleness"], staleness)),
    "long answers": ("long-answers", of(OWN["long answers"], long_answers)),
    **{f"simulated {part}": ("simulation", of(OWN[f"simulated {part}"], itemgetter(part))) for part in SIMULATED},
    "demo": ("demo", demo),
    "calculator": ("calculator", partial(demo, name="calculator")),
    "learning": ("learning", partial(demo, name="learning")),
    "reward watch": ("reward-watch", of(OWN["reward watch"], reward_watch)),
    "families": ("families", families),
    "math": ("math-verifier", math_verifier),
    "memory": ("memory", memory),
    "gpu": ("gpu", page),
    "gpu parts": ("gpu", gpu_parts),
    "frameworks": ("frameworks", frameworks),
}
"""Part -> the JSON file that it is made of, and how."""
PICTURES: dict[str, Callable[[Row], None]] = {
    "presets": draw_presets,
    "staleness-ablation": draw_staleness,
    "long-answers": draw_long_answers,
    "calculator": draw_runs,
    "learning": partial(draw_runs, name="learning"),
}
NAMED = {"calculator": "calculator", "smollm_cpu": "learning"}
"""How the names of run folders begin -> the JSON file of their runs; others are of the demo."""
FILE_OF_PLAN = {"presets": "presets", "staleness": "staleness-ablation"}


def copy_results(words: Sequence[str]) -> None:
    """Copy results into the JSON files."""
    if words == ["score"]:
        pairs = list(map(scored, load("math-verifier")["pairs"]))
        library = f"math-verify {version('math-verify')}"
        save("math-verifier", {"source": source_hash(), "library": library, "pairs": pairs})
        return
    if words == ["memory"]:
        now = [estimated(*size) for size in SIZES]
        save("memory", {**surroundings(), "now": now})
        return
    if folders := [Path(word) for word in words if Path(word).is_dir()]:
        name = next((known for known in NAMED if folders[0].name.startswith(known)), "demo")
        runs = list(map(demo_run, folders))
        sources = {run.get("source") for run in runs}  # a run's own: the code may have changed since
        source = sources.pop() if len(sources) == 1 else None
        save(NAMED.get(name, name), {**surroundings(), "source": source, "runs": runs})
    for results in (json.loads(Path(word).read_text()) for word in words if Path(word).is_file()):
        if "plan" in results:
            save(FILE_OF_PLAN[results["plan"]], results)
            continue
        name = results["benchmark"]
        if name == "gpu-check":
            assert results["device"] == "cuda", "a rehearsal shows nothing of GPUs"
            save("gpu", results)
            continue
        if name == "modes":
            name = f"modes {Path(results['recipe']).stem}"
        elif name == "peers speed":
            name = "peers speed, {parameters}, {lengths}".format(**results["rows"][0])
        # What is left out of a `bench modes` is in the run folders anyway.
        kept = {key: value for key, value in results.items() if key not in ("config", "search", "columns")}
        save("performance", load("performance") | {name: kept})


def main(words: Sequence[str]) -> None:
    """Copy the results that are named, and generate every table and picture."""
    copy_results(words)
    parts = all_parts()
    for path in pages():
        path.write_text(filled(path.read_text(), parts))
    for name, draw in PICTURES.items():
        draw(load(name))
    for recipe in RECIPES:
        draw_modes(load("performance")[f"modes {recipe}"], HERE / f"modes-{recipe}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
