"""Makes docs/performance.json, docs/performance.md and README's tables from what the benchmarks measured.

.venv/bin/areal-lite bench queue
.venv/bin/python docs/performance_table.py runs/bench-queue/results.json

Any number of results at once. Without arguments it makes the pages anew from docs/performance.json, which has the
results of every benchmark by name.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import page

from areal_lite.launch.bench.modes_view import draw_modes, modes_markdown, short_markdown

SMALL = ("rollout", "train", "queue", "handover", "peers")
RECIPES = ("longtail_cpu", "arith_cpu")
README = page.HERE.parent / "README.md"
_GAIN = {"longtail_cpu": 2.2, "arith_cpu": 1.4}
"""What the best asynchronous mode is to reach over the best synchronous one."""
_BIG = ("config", "search")
"""Of a `bench modes`; what the run folders have anyway."""


def parts(content: dict[str, Any]) -> dict[str, str]:
    """Return what goes into the template."""
    made = {"targets": _targets(content)}
    for name in SMALL:
        made |= _small(name, content.get(name))
    for recipe in RECIPES:
        modes = content.get(f"modes {recipe}")
        made[f"modes {recipe}"] = f"{page.where(modes)}\n\n{modes_markdown(modes)}" if modes else _NOTHING
    return made


_NOTHING = "Not measured in this state."


def _small(name: str, content: Mapping[str, Any] | None) -> dict[str, str]:
    if content is None:
        return {f"{name}: where": _NOTHING, name: "", f"{name}: repeats": ""}
    module = import_module(f"areal_lite.launch.bench.{name}")
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    return {
        f"{name}: where": f"{page.where(content)} {versions}.",
        f"{name}: repeats": f"{content['settings'].get('repeats', 1)} repeats",
        name: page.markdown_table(module.COLUMNS, map(_one_line, map(module.cells, content["rows"]))),
    }


def _one_line(cells: Sequence[str]) -> list[str]:
    return [cell.replace("\n", " · ") for cell in cells]


def _targets(content: Mapping[str, Any]) -> str:
    targets = [target for recipe in RECIPES for target in mode_targets(content.get(f"modes {recipe}"), recipe)]
    targets += [target for name in SMALL for target in content.get(name, {}).get("targets", [])]
    return page.markdown_table(("measure", "target", "median", "lowest to highest", "met"), map(_target_row, targets))


def mode_targets(content: Mapping[str, Any] | None, recipe: str) -> list[dict[str, Any]]:
    """Return what a `bench modes` says about the targets: the gain of the best asynchronous mode, and its pauses."""
    if content is None:
        return []
    lines = [line for line in content["modes"] if line["mode"].startswith("async") and line["ratio"]]
    if not lines:
        return []
    best = max(lines, key=lambda line: line["ratio"]["median"])
    over = f"`{recipe}`: {best['mode']} over {content['best_synchronous']}, samples/s"
    found = [{"measure": over, "at_least": _GAIN[recipe], **best["ratio"]}]
    if recipe == "longtail_cpu":
        share = best["figures"]["generator_paused"]
        found.append({"measure": f"`{recipe}`: paused share of {best['mode']}, %", "at_most": 3.0} | _percent(share))
    return found


def _percent(spread: Mapping[str, float]) -> dict[str, float]:
    return {name: 100 * value for name, value in spread.items()}


def _target_row(target: Mapping[str, Any]) -> Sequence[str]:
    least, most, median = target.get("at_least"), target.get("at_most"), target["median"]
    met = (least is None or median >= least) and (most is None or median <= most)
    wanted = f"at least {least:g}" if least is not None else f"at most {most:g}"
    return (
        target["measure"],
        wanted,
        f"{median:.2f}",
        f"{target['low']:.2f} to {target['high']:.2f}",
        "yes" if met else "**no**",
    )


def with_tables(readme: str, content: Mapping[str, Any]) -> str:
    """Return README with the short tables of `bench modes` between their comments."""
    for recipe in RECIPES:
        if modes := content.get(f"modes {recipe}"):
            begin, end = f"<!-- modes {recipe}: docs/performance_table.py -->", f"<!-- end of modes {recipe} -->"
            pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
            table = f"{begin}\n{short_markdown(modes)}\n{end}"
            readme = pattern.sub(lambda _, table=table: table, readme)  # type: ignore[misc]
    return readme


def _name(results: Mapping[str, Any]) -> str:
    name = str(results["benchmark"])
    return f"modes {Path(results['recipe']).stem}" if name == "modes" else name


def main() -> None:
    """Take over the results named on the command line, if any, and make the pages."""
    known = page.load("performance")
    for path in map(Path, sys.argv[1:]):
        results = json.loads(path.read_text())
        known[_name(results)] = {key: value for key, value in results.items() if key not in _BIG}
    page.save("performance", known)
    page.write_page("performance", parts(known))
    README.write_text(with_tables(README.read_text(), known))
    for recipe in RECIPES:
        if modes := known.get(f"modes {recipe}"):
            draw_modes(modes, page.HERE / f"modes-{recipe}.svg")


if __name__ == "__main__":
    main()
