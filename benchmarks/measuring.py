"""Shared by the benchmarks: measurements in turns, targets, model sizes, and the script around `main`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from areal_lite.config.presets import ObjectiveConfig
from areal_lite.config.reading import read_yaml
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.launch.bench.harness import say, show_table, turns, write_results
from areal_lite.node import package_versions
from areal_lite.record.columns import Columns, Row, spread

Case = TypeVar("Case")
Figure = TypeVar("Figure")

COLUMNS: dict[str, Columns] = read_yaml(Path(__file__).with_name("columns.yaml"), holding="columns by benchmark")
_KNOWN_ELSEWHERE = {"preset", "clip_low", "clip_high", "behaviour_weight_cap", "proximal"}

Words = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]... [section.field=value]...")]
Repeats = Annotated[int, typer.Option(min=1, help="measurements of each case")]
Seconds = Annotated[float, typer.Option(min=1e-3, help="length of a measurement")]
Out = Annotated[Path, typer.Option(help="folder of the results")]


def run(main: Callable[..., None]) -> None:
    """Call `main` with the command line's arguments; an error of areal-lite ends the script with its message alone."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except ArealLiteError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


def split_words(words: Sequence[str] | None, *, default: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the recipes, `default` where none is named, and the settings that follow them.

    Raises:
        ConfigError: Several recipes, where the default is one.
    """
    given = words or []
    recipes = [word for word in given if "=" not in word] or list(default)
    if len(default) == 1 and len(recipes) > 1:
        raise ConfigError(f"expected one recipe, got {', '.join(recipes)}. Fix: run the benchmark once for each")
    return recipes, [word for word in given if "=" in word]


class Size(NamedTuple):
    """The shape of a built-in model."""

    width: int
    """Hidden size."""
    layers: int

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}"


def parse_size(text: str) -> Size:
    """Read `WIDTHxLAYERS`; a `ConfigError` for anything else."""
    width, _, layers = text.partition("x")
    if not (width.isdecimal() and layers.isdecimal() and int(width) >= 64 and int(width) % 64 == 0 and int(layers) > 0):
        raise ConfigError(f"a model must be WIDTHxLAYERS, the width a multiple of 64, got {text!r}. Fix: try 256x4")
    return Size(int(width), int(layers))


def in_turns(cases: Iterable[Case], *, repeats: int, measure: Callable[[Case], Figure]) -> dict[Case, list[Figure]]:
    """Measure every case once per repeat, in the order of `turns`."""
    measured: dict[Case, list[Figure]] = {case: [] for case in cases}
    for repeat, case in turns(measured, repeats):
        words = ", ".join(map(str, case)) if isinstance(case, tuple) else str(case)
        say(f"repeat {repeat + 1} of {repeats}: {words}", style="")
        measured[case].append(measure(case))
    return measured


def target(measure: str, values: Sequence[float], *, at_least: float) -> dict[str, Any]:
    """Return an entry for `targets`: the target, and what was measured."""
    return {"measure": measure, "at_least": at_least, "at_most": None, **spread(values)}


def check_comparable(config: Config, benchmark: str, wanted: Mapping[str, Any]) -> None:
    """Refuse, by a `ConfigError`, a recipe whose work the other side cannot do.

    Args:
        wanted: Settings that it must have, in addition to the default objective.
    """
    default = ObjectiveConfig()
    names = sorted(type(default).model_fields.keys() - _KNOWN_ELSEWHERE)
    wanted = {**wanted, **{f"objective.{name}": getattr(default, name) for name in names}}
    found = {key: reduce(getattr, key.split("."), config) for key in wanted}
    if others := [f"{key}={value}, got {found[key]}" for key, value in wanted.items() if found[key] != value]:
        raise ConfigError(
            f"the benchmark {benchmark} compares recipes with {'; '.join(others)}. Fix: set it after the recipe, or "
            "name another recipe, such as arith_cpu"
        )


def finish(
    benchmark: str, title: str, rows: Sequence[Row], *, settings: Mapping[str, Any], out: Path, targets: Any = ()
) -> None:
    """Write `results.json` with the rows and their columns; show the rows and the targets."""
    figures = {"settings": dict(settings), "rows": list(rows), "targets": list(targets), "columns": COLUMNS[benchmark]}
    write_results({"benchmark": benchmark, "versions": package_versions(), **figures}, out=out)
    show_table(COLUMNS[benchmark], rows, title=title)
    if targets:
        show_table("targets", targets, title="targets")
    say(f"results: {out / 'results.json'}", style="")
