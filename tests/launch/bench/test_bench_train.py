"""`bench train`: its arithmetic on figures with known answers, and that both sides compute the same gradients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from train_builders import make_config, make_rows, make_shard, save_tiny_model

from areal_lite.config.recipe import load_config
from areal_lite.errors import ConfigError, TrainerError
from areal_lite.launch.bench.padded_loop import PaddedLoop
from areal_lite.launch.bench.train import (
    WORK,
    Step,
    TrainBench,
    check_recipe,
    measure,
    rows_of,
    rows_tried,
    run_steps,
    targets,
)
from areal_lite.record.columns import cells
from areal_lite.train.trainer import Trainer

pytestmark = pytest.mark.slow

BENCH = TrainBench(repeats=5, steps=2, rows=8)


def make_step(seconds: float, *, grad_norm: float = 2.0, positions: int = 100) -> Step:
    return Step(seconds=seconds, tokens=100, positions=positions, grad_norm=grad_norm)


SIDES = ("areal-lite", "padded")


def test_medians_and_ratios_of_figures_with_known_answers() -> None:
    """Three repeats of two steps of 100 tokens. Ours take 1, 2 and 1 s, the padded loop 2, 8 and 4: ratios 2, 4, 4.

    Ours are 200, 100 and 200 tokens/s, theirs 100, 25 and 50; the ratio of the medians would be 4 too, of the means
    2.86. Seen failing with the ratio of the sums.
    """
    ours = iter([0.5, 0.5, 1.0, 1.0, 0.25, 0.75])
    theirs = iter([1.0, 1.0, 4.0, 4.0, 3.0, 1.0])

    def step(side: str, _number: int) -> Step:
        return make_step(next(ours)) if side == "areal-lite" else make_step(next(theirs), positions=300)

    found = rows_of(run_steps(TrainBench(repeats=3, steps=2, rows=4), SIDES, step))
    case = {"recipe": "longtail_cpu", "work": "one pass", "is_longtail": True}
    mine, other = rows = [
        {"side": side, "micro_batch": size, "peak_mb": peak_mb, **case, **found[side]}
        for side, size, peak_mb in zip(SIDES, ("2048 tokens", "4 rows"), (50.0, 200.0), strict=True)
    ]
    assert mine["tokens_per_s"] == [200.0, 100.0, 200.0]
    assert other["tokens_per_s"] == [100.0, 25.0, 50.0]
    assert mine["over"] == {"padded": [2.0, 4.0, 4.0]}
    expected = ["areal-lite, 2048 tokens\nlongtail, one pass", "200\n100-200", "1.00", "50", "2", "4.00", "-"]
    _, shown, shown_of_other = cells("train", rows)
    assert shown == expected
    assert shown_of_other[2:] == ["3.00", "200", "2", "-", "-"]
    assert [(one["median"], one["low"], one["high"]) for one in targets(rows)] == [(4.0, 2.0, 4.0), (0.0, 0.0, 0.0)]


def test_sides_take_turns_on_the_same_batches() -> None:
    """Seen failing with repeats in one order, and with batch numbers that both sides drew from one counter."""
    order: list[tuple[str, int]] = []

    def step(side: str, number: int) -> Step:
        order.append((side, number))
        return make_step(1.0)

    run_steps(TrainBench(repeats=2, steps=2, rows=4), SIDES, step)
    first = [("areal-lite", 1), ("areal-lite", 2), ("padded", 1), ("padded", 2)]
    assert order == [*first, ("padded", 3), ("padded", 4), ("areal-lite", 3), ("areal-lite", 4)]


@pytest.mark.parametrize("norms", [(2.0, 2.004), (2.0, float("nan"))])
def test_other_gradients_stop_the_bench(norms: tuple[float, float]) -> None:
    """0.2 % apart, or no number at all. Seen failing with `> TOLERANCE`, which NaN passes."""
    of_side = dict(zip(("areal-lite", "padded"), norms, strict=True))
    with pytest.raises(TrainerError, match="do not compute the same"):
        run_steps(BENCH, SIDES, lambda side, _: make_step(1.0, grad_norm=of_side[side]))


def test_sizes_that_the_padded_loop_may_choose_from() -> None:
    assert rows_tried(24) == [1, 2, 4, 8, 16]
    assert rows_tried(32)[-1] == 32


def test_recipes_that_the_padded_loop_cannot_train_are_refused() -> None:
    """Seen failing without the loop over the objective's knobs."""
    check_recipe(load_config("longtail_cpu", ["objective.clip_high=0.28", "objective.proximal=behaviour"]))
    with pytest.raises(ConfigError, match=r"objective\.kl"):
        check_recipe(load_config("longtail_cpu", ["objective.preset=grpo"]))
    with pytest.raises(ConfigError, match=r"trainer\.ranks=1, got 2"):
        check_recipe(load_config("longtail_cpu", ["trainer.ranks=2"]))
    with pytest.raises(ConfigError, match="how long completions are"):
        check_recipe(load_config("mixed_cpu"))


@pytest.mark.parametrize(
    ("words", "rows_per_pass"), [(WORK["one pass"], 4), ([], 3), (["objective.proximal=behaviour"], 1)]
)
def test_both_sides_compute_the_same_gradients(tmp_path: Path, words: list[str], rows_per_pass: int) -> None:
    """AdamW's first moments after a step, compared as vectors, not by their norm alone.

    The behaviour log-probabilities of `make_rows` are random, so that some weights are above the cap. Seen failing with
    the padded loop's mask left out, its rewards not divided by the deviation, and its token count of the micro-batch in
    place of the minibatch's.
    """
    settings = dict(word.split("=") for word in words)
    num_minibatches = int(settings.get("trainer.minibatches", 2))
    config = make_config(
        trainer={"minibatches": num_minibatches},
        objective={"proximal": settings.get("objective.proximal", "recompute")},
    )
    folder = save_tiny_model(tmp_path)
    shard = make_shard(make_rows(minibatches=num_minibatches, version=0), version=0)
    ours, theirs = Trainer(config, model_folder=folder, rank=0), PaddedLoop(config, folder)
    stats = ours.train_step(shard)
    padded = theirs.train_step(shard, rows_per_pass=rows_per_pass)
    assert stats["tokens_trained"] == padded["tokens_trained"]
    assert stats["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)
    mine, other = (_moments(side.model.parameters(), side_optimizer) for side, side_optimizer in _both(ours, theirs))
    assert float((mine - other).norm() / other.norm()) < 1e-4


def _both(ours: Trainer, theirs: PaddedLoop) -> Iterator[tuple[object, torch.optim.Optimizer]]:
    yield ours, ours._learner.optimizer
    yield theirs, theirs.optimizer


def _moments(parameters: Iterator[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([optimizer.state[parameter]["exp_avg"].flatten() for parameter in parameters])


def test_the_command_measures_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For real, in processes of their own, with short completions. Their gradients must agree, or it would stop."""
    monkeypatch.chdir(tmp_path)
    words = [
        "model.warm_start.steps=0", "model.warm_start.hidden_size=32", "model.warm_start.num_layers=1",
        "rollout.max_new_tokens=32", "rollout.workflow_arguments.median=8", "queue.groups_per_step=2",
        "queue.samples_per_group=4",
    ]  # fmt: skip
    settings = TrainBench(repeats=1, steps=1, rows=2, work=("recipe",))
    rows = list(measure(settings, "longtail_cpu", words))
    assert [row["side"] for row in rows] == ["areal-lite", "padded", "fastest"]
    assert all(row["median"] > 0 and row["peak_mb"] > 0 for row in rows)
    assert rows[0]["gradient_difference"] < 1e-3
    assert capsys.readouterr().out.count("tokens/s") == 3
