"""Plans, and running them with a stand-in for training: which runs start, resume, or are skipped; and what every
benchmark shares.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring
import pytest

from areal_lite.config.presets import PRESETS
from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ArealLiteError, CheckpointError, ConfigError, StallError
from areal_lite.launch.bench.harness import PlannedRun, run_all, where_it_begins
from areal_lite.launch.bench.plan import Plan, choose, collect_results, load_plan, planned_runs, shipped_plans
from areal_lite.record.columns import cells, spread
from areal_lite.record.paths import with_absolute_paths
from areal_lite.record.writer import SoleWriter

STEPS = 4


def make_plan(**fields: Any) -> Plan:
    return Plan.model_validate({"recipe": "arith_cpu", "settings": {"run.steps": STEPS}} | fields)


# ---------------------------------------------------------------- plans


def test_named_runs_change_the_recipe_in_order() -> None:
    """Recipe, then the plan's settings, then the run's, then the command line's: the last word wins.

    Seen failing with the command line's before the run's.
    """
    plan = make_plan(
        settings={"trainer.lr": 1e-3, "run.steps": 7}, runs={"a": {}, "b": {"trainer.lr": 1e-2, "run.steps": 8}}
    )
    plain, changed = planned_runs(plan, extra=["run.steps=9", "run.seed=3"])
    assert (plain.name, plain.config.trainer.lr, plain.facts) == ("a", 1e-3, {"overrides": {}})
    assert (changed.name, changed.config.trainer.lr) == ("b", 1e-2)
    assert changed.facts == {"overrides": {"trainer.lr": 1e-2, "run.steps": 8}}
    assert {(run.config.run.steps, run.config.run.seed) for run in (plain, changed)} == {(9, 3)}
    assert plain.config.queue == load_config("arith_cpu").queue


def test_a_grid_crosses_its_axes_and_seeds_come_last() -> None:
    """After the first third of the time there is a whole table. Seen failing with seeds as the innermost axis."""
    grid = {"queue.max_staleness": [0, 4], "objective.proximal": {"naive": "behaviour", "decoupled": "recompute"}}
    plan = make_plan(grid=grid, seeds=[0, 5])
    cells = ["max_staleness-0_naive", "max_staleness-0_decoupled", "max_staleness-4_naive", "max_staleness-4_decoupled"]
    runs = planned_runs(plan)
    assert [run.name for run in runs] == [f"{cell}_seed-{seed}" for seed in (0, 5) for cell in cells]
    last = runs[-1]
    assert last.facts["overrides"] == {"run.seed": 5, "queue.max_staleness": 4, "objective.proximal": "recompute"}
    assert (last.config.run.seed, last.config.queue.max_staleness) == (5, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a plan needs runs, a grid or seeds"),
        ({"runs": {"a/b": {}}}, "a run must have a unique name .*, got 'a/b'"),
        ({"grid": {"run.steps": [1, 1]}}, "a run must have a unique name"),
        ({"runs": {"a": {"trainer.lrr": 1}}}, "run a: unknown key trainer.lrr; did you mean trainer.lr"),
        ({"runs": {"a": {}, "b": {"trainer.lr": -1}}}, "run b: trainer.lr: .*greater than 0, got -1"),
        ({"runs": {"a": {"run.dir": "/somewhere"}}}, r"run a: run.dir and run.resume are set by the benchmark"),
        ({"runs": {}, "grid": {"queue.max_staleness": {}}}, r"grid.queue.max_staleness must have values, got none"),
    ],
)
def test_every_mistake_in_a_plan_is_found_before_anything_starts(fields: dict[str, Any], message: str) -> None:
    """Seen failing with an axis without values: nothing ran, and the table was empty."""
    with pytest.raises(ConfigError, match=message):
        planned_runs(make_plan(**fields))


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("- a")
    with pytest.raises(ConfigError, match=r"must hold a plan \(recipe, settings, runs, grid, seeds\), got a list"):
        load_plan(str(path))
    with pytest.raises(ConfigError, match=r"one of presets, staleness, got 'preset'; did you mean presets\?"):
        load_plan("preset")


def test_runs_are_chosen_by_name_or_pattern() -> None:
    names = ["a", "b-1", "b-2"]
    assert choose(names, [], what="run") == names
    assert choose(names, ["b-*", "a"], what="run") == names
    assert choose(names, ["b-2"], what="run") == ["b-2"]
    with pytest.raises(ConfigError, match=r"no run of the plan matches 'c': there are a, b-1, b-2"):
        choose(names, ["a", "c"], what="run of the plan")


def test_shipped_plans_are_what_the_pages_say() -> None:
    """Every preset that needs no teacher at eta 2 from one warm start; six etas, two kinds, three seeds."""
    assert shipped_plans() == ["presets", "staleness"]
    presets = planned_runs(load_plan("presets"))
    assert {run.config.objective.preset for run in presets} == set(PRESETS) - {"distill"}
    assert {run.name for run in presets} == set(PRESETS) - {"distill"}
    assert {run.config.samples_per_step for run in presets} == {128}
    assert {run.config.queue.max_staleness for run in presets} == {2}
    assert len({(run.config.model.model_dump_json(), run.config.data.model_dump_json()) for run in presets}) == 1
    staleness = planned_runs(load_plan("staleness"))
    cells = {(run.config.queue.max_staleness, run.config.objective.proximal, run.config.run.seed) for run in staleness}
    assert len(staleness) == len(cells) == 6 * 2 * 3
    assert {eta for eta, _, _ in cells} == {0, 1, 2, 4, 8, 16}


# ---------------------------------------------------------------- running


class FakeTraining:
    """Stands for `launch.train`: writes the files of a run, or raises.

    `ends` maps a run's name to an error, raised once, after a checkpoint when the name is in `saved`.
    """

    def __init__(self, ends: dict[str, BaseException] | None = None, *, saved: Sequence[str] = ()) -> None:
        self.ends, self.saved = ends or {}, saved
        self.calls: list[str] = []

    def __call__(self, config: Config, **changes: str) -> None:
        config = config.model_copy(update={"run": config.run.model_copy(update=changes)})
        folder = Path(config.run.resume or config.run.dir or "")
        self.calls.append(("resume " if config.run.resume else "") + folder.name)
        assert config.run.resume or not (folder / "old").exists(), "a restarted run has an empty folder"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(with_absolute_paths(config).model_dump()))
        error = self.ends.pop(folder.name, None)
        if error is None or folder.name in self.saved:
            (folder / "checkpoints" / "step-000002").mkdir(parents=True, exist_ok=True)
            (folder / "checkpoints" / "step-000002" / "meta.json").write_text("{}")
        write_summary(folder, "done" if error is None else f"failed: {error}")
        if error is not None:
            (folder / "old").touch()
            raise error


def write_summary(folder: Path, status: str) -> None:
    content = {
        "status": status, "steps": STEPS, "wall_s": 12.0, "samples_per_s": 3.0, "age_max_trained": 2,
        "rollout_idle_fraction": 0.25, "trainer_idle_fraction": 0.5, "paused_fraction": 0.0, "reward_first": 0.1,
        "reward_last": 0.2, "parity_max_abs_logprob_diff": 1e-6, "versions": {"torch": "1"},
        "eval": {"0": 0.25, str(STEPS): 0.75}, "age_histogram": {"0": 1, "2": 3},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(content))


def three_runs(**settings: Any) -> list[PlannedRun]:
    return planned_runs(make_plan(runs={"a": settings, "b": {}, "c": {}}))


def bench(runs: list[PlannedRun], out: Path, training: Callable[..., object]) -> dict[str, str]:
    return run_all(runs, out=out, train=training, after_each=lambda: None)


def test_runs_are_run_in_order_each_in_its_folder_and_never_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining()
    assert bench(three_runs(), tmp_path, training) == {}
    assert training.calls == ["a", "b", "c"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["run 1 of 3: a", "run 2 of 3: b", "run 3 of 3: c"]
    assert "min left" in lines[1]
    assert bench(three_runs(), tmp_path, training) == {}
    assert training.calls == ["a", "b", "c"]
    assert capsys.readouterr().out == "3 of 3 runs are already done\n"


def test_called_again_a_saved_run_is_resumed_and_an_unsaved_one_restarted(tmp_path: Path) -> None:
    """A failed run does not stop the others; the entry of one that was cut off has no accuracy after its last step.

    A timed run restarts: its figures are those of one start. Seen failing with the error raised where it occurs, with
    every run that is not done resumed, and with `bench modes` counting the hours without its run.
    """
    training = FakeTraining({"a": ZeroDivisionError("ours"), "b": StallError("late: rollout/0")}, saved=["b"])
    failures = bench(three_runs(), tmp_path, training)
    assert failures == {"a": "ZeroDivisionError: ours", "b": "StallError: late: rollout/0"}
    entry, *_ = collect_results("mine", make_plan(), three_runs(**{"run.steps": 99}), out=tmp_path)["runs"]
    assert entry["status"] == "not run", "it has other settings"
    assert [where_it_begins(run, tmp_path / run.name) for run in three_runs()] == ["dir", "resume", ""]
    timed = [dataclasses.replace(run, is_timed=True) for run in three_runs()]
    assert [where_it_begins(run, tmp_path / run.name) for run in timed] == ["dir", "dir", ""]
    training.calls.clear()
    assert bench(three_runs(), tmp_path, training) == {}
    assert training.calls == ["a", "resume b"]


def test_the_folder_of_a_run_that_another_command_trains_is_left_alone(tmp_path: Path) -> None:
    """Seen failing with `bench plan` typed again, which deleted it."""
    bench(three_runs(), tmp_path, FakeTraining({"a": StallError("x")}))
    with SoleWriter(tmp_path / "a"), pytest.raises(CheckpointError, match="is in use by process"):
        bench(three_runs(), tmp_path, FakeTraining())
    assert (tmp_path / "a" / "old").exists()


def test_a_folder_of_other_settings_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Whether its run is done or not; nothing of it is deleted. Seen failing with the comparison left out."""
    bench(three_runs(), tmp_path, FakeTraining({"a": StallError("x")}))
    training = FakeTraining()
    with pytest.raises(ConfigError, match=r"/a must hold a run of the plan's settings.*trainer.lr was 3e-05, is 0.5"):
        bench(three_runs(**{"trainer.lr": 0.5}), tmp_path, training)
    assert training.calls == []
    assert (tmp_path / "a" / "old").exists()


def test_a_folder_that_holds_no_run_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    bench(three_runs(), tmp_path, FakeTraining())
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


# ---------------------------------------------------------------- results


def test_results_hold_every_run_of_the_plan(tmp_path: Path) -> None:
    """Mean age of one token of age 0 and three of age 2: 1.5. A run that was not begun has its status alone."""
    plan = make_plan(runs={"a": {"run.seed": 3}, "b": {}})
    runs = planned_runs(plan)
    bench(runs[:1], tmp_path, FakeTraining())
    content = collect_results("mine", plan, runs, out=tmp_path)
    assert content == json.loads((tmp_path / "results.json").read_text())
    first, second = content["runs"]
    wanted = {"name": "a", "overrides": {"run.seed": 3}, "seed": 3, "status": "done", "steps": STEPS, "start": 0.25,
              "end": 0.75, "curve": {"0": 0.25, "4": 0.75}, "seconds": 12.0, "age_mean": 1.5, "age_max": 2,
              "rollout_idle": 0.25, "trainer_idle": 0.5, "parity": 1e-6}  # fmt: skip
    assert {key: first[key] for key in wanted} == wanted
    assert (second["name"], second["status"]) == ("b", "not run")
    assert content["plan"] == "mine"
    assert content["cores"] > 0
    assert content["versions"] == {"torch": "1"}
    done = ["a", "3e-05, 4, 12", "0.250, 0.750, +0.500", "1.50, 2 of 4", "25%, 50%", "1.0e-06"]
    waiting = ["b", "3e-05, -, -", "-, -, not run", "-, - of 4", "-, -", "-"]
    assert list(cells("plan", content["runs"]))[1:] == [done, waiting]


# --- the order of measurements, and columns of tables ---


def test_cases_take_turns_and_every_other_repeat_goes_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with all repeats of a case in a row: what the machine does meanwhile would hit one side."""
    order: list[str] = []
    measured = measuring.in_turns("abc", repeats=3, measure=lambda case: order.append(case) or f"{case}{len(order)}")
    assert order == [*"abc", *"cba", *"abc"]
    assert capsys.readouterr().out.splitlines()[3:5] == ["repeat 2 of 3: c", "repeat 2 of 3: b"]
    assert measured == {"a": ["a1", "a6", "a7"], "b": ["b2", "b5", "b8"], "c": ["c3", "c4", "c9"]}


def test_a_column_shows_a_value_a_median_or_nothing() -> None:
    """A list where a repeat has no value shows nothing. Seen failing with the median of the others."""

    def show(row: dict[str, Any]) -> str:
        _, (text,) = cells({"x": "{a.b:10*.1f~}"}, [row])
        return text

    assert show({"a": {"b": 0.25}}) == "2.5"
    assert show({"a": {"b": [1.0, 3.0, 2.0]}}) == show({"a": {"b": spread([1.0, 3.0, 2.0])}}) == "20.0\n10.0-30.0"
    assert show({"a": {"b": [1.0, 1.0]}}) == "10.0"
    assert {show(row) for row in ({"a": {"b": [1.0, None]}}, {"a": {"b": []}}, {"a": {}}, {"a": None}, {})} == {"-"}


def test_a_finished_run_of_a_measurement_leaves_no_checkpoint(tmp_path: Path) -> None:
    """One that failed, or whose recipe asks for checkpoints, keeps them. Seen failing with all kept, and with none."""

    def train(config: Config, *, dir: str) -> None:
        (Path(dir) / "checkpoints/step-2").mkdir(parents=True)
        if Path(dir).name == "fails":
            raise ArealLiteError("no space left")

    every = {"done": 0, "fails": 0, "asks": 1}
    runs = [
        PlannedRun(name=name, config=load_config("arith_cpu", [f"run.checkpoint_every={steps}"]))
        for name, steps in every.items()
    ]
    failures = run_all(runs, out=tmp_path, train=train, after_each=lambda: None)
    assert failures == {"fails": "ArealLiteError: no space left"}
    assert {path.parent.name for path in tmp_path.glob("*/checkpoints")} == {"fails", "asks"}
