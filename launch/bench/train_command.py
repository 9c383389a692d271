"""`areal-lite bench train`: trained tokens per second of the trainer, against a padded transformers loop."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.output import add_out, finish
from areal_lite.launch.bench.train import (
    LONGTAIL,
    Measured,
    Side,
    TrainBench,
    check_recipe,
    run_steps,
    summarise,
    targets,
    work_settings,
)

if TYPE_CHECKING:
    from areal_lite.types import Shard

__all__ = ["add_train", "measure"]

_RECIPES = ("longtail_cpu", "arith_cpu")


def add_train(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the benchmark's parser."""
    parser = kinds.add_parser(
        "train",
        help="trained tokens/s of the trainer, against a padded transformers loop (about 5 minutes)",
        description="Train the same batches with the trainer and with the loop that people write: transformers, AdamW, "
        "rows padded to the longest of a micro-batch of a fixed number of rows: that of --rows, and that with which it "
        "is fastest here. Completions are as long as the recipes' are. All must compute the same gradients. "
        "Takes about 5 minutes.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="RECIPE, section.field=value",
        help=f"recipes (default {' and '.join(_RECIPES)}), and settings of all of them, e.g. trainer.threads=2",
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=5, help="measurements of each side; default 5")
    parser.add_argument("--steps", metavar="N", type=int, default=2, help="trainer steps of a measurement; default 2")
    parser.add_argument(
        "--rows", metavar="N", type=int, default=8, help="rows of the padded loop's micro-batches; default 8"
    )
    add_out(parser, "train")
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    for option, value in (("--repeats", words.repeats), ("--steps", words.steps), ("--rows", words.rows)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}")
    overrides = [word for word in words.overrides if "=" in word]
    recipes = [word for word in words.overrides if "=" not in word] or list(_RECIPES)
    for recipe in recipes:
        check_recipe(load_config(recipe, overrides))
    bench, console = TrainBench(repeats=words.repeats, steps=words.steps, rows=words.rows), Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    measured = [measure(bench, recipe, overrides, console=console, say=say) for recipe in recipes]
    rows = summarise([one for recipe in measured for one in recipe])
    finish(
        "train",
        title="trained tokens per second",
        settings=asdict(bench) | {"overrides": overrides},
        rows=rows,
        targets=targets(rows),
        packages=("torch", "transformers"),
        out=words.out,
        console=console,
    )
    return 0


def measure(
    bench: TrainBench, recipe: str, overrides: Sequence[str], *, console: Console, say: Callable[[str], None]
) -> list[Measured]:
    """Measure a recipe's lengths with each kind of work.

    Args:
        bench: Settings.
        recipe: Path or name.
        overrides: Words of the command line.
        console: Shows the making of the model.
        say: Gets a line per measurement.
    """
    # Heavy, and not needed to find a mistake in a recipe.
    from areal_lite.launch.bench.train_actors import make_batches
    from areal_lite.launch.run.train import prepare_model

    configs = {work: load_config(recipe, [*overrides, *work_settings(work)]) for work in bench.work}
    first = bench.work[0]
    model_folder = prepare_model(configs[first], console=console)
    drawn = {
        work: make_batches(config, model_folder=model_folder, count=bench.steps) for work, config in configs.items()
    }
    name, rows = Path(recipe).stem, dict[Side, int]({"padded": bench.rows})
    if bench.searches:
        rows["fastest"] = _fastest_rows(bench, configs[first], model_folder, drawn[first])
        say(f"{name}: the padded loop is fastest with micro-batches of {_in_words(rows['fastest'])}")
    measured = []
    for work, config in configs.items():
        one = Measured(
            recipe=name,
            work=work,
            is_longtail=config.rollout.workflow == LONGTAIL,
            micro_batch={
                "areal-lite": f"{config.trainer.micro_batch_tokens} tokens",
                **{side: _in_words(count) for side, count in rows.items()},
            },
        )
        _compare(bench, one, config, model_folder, drawn[work], rows=rows)
        measured.append(one)
        for row in summarise([one]):
            say(f"{name}, {work}: {row['side']} {row['median']:.0f} tokens/s, {row['peak_mb']:.0f} MB")
    return measured


def _in_words(num_rows: int) -> str:
    return f"{num_rows} row{'s' if num_rows > 1 else ''}"


def _fastest_rows(bench: TrainBench, config: Config, model_folder: Path, batches: "Sequence[Shard]") -> int:
    """Give the padded loop the size that suits it best, in a process that is not measured."""
    from areal_lite.launch.bench.train_actors import train_peers

    sizes = bench.rows_tried(config.samples_per_step // config.trainer.minibatches)
    with train_peers(["padded"], config, model_folder=model_folder, batches=batches[:1]) as peers:
        peer = peers["padded"]
        peer.step(0, rows_per_pass=sizes[-1])
        seconds = dict.fromkeys(sizes, math.inf)
        # There and back, each size's best: what else the machine does should favour none.
        for size in [*sizes, *reversed(sizes), *sizes]:
            seconds[size] = min(seconds[size], peer.step(0, rows_per_pass=size).seconds)
    return min(sizes, key=seconds.__getitem__)


def _compare(
    bench: TrainBench,
    one: Measured,
    config: Config,
    model_folder: Path,
    batches: "Sequence[Shard]",
    *,
    rows: Mapping[Side, int],
) -> None:
    from areal_lite.launch.bench.train_actors import train_peers

    with train_peers(one.micro_batch, config, model_folder=model_folder, batches=batches) as peers:
        for side, peer in peers.items():
            peer.step(0, rows_per_pass=rows.get(side))
        run_steps(bench, one, lambda side, number: peers[side].step(number, rows_per_pass=rows.get(side)))
        one.peak_mb = {side: peer.peak_mb() for side, peer in peers.items()}
