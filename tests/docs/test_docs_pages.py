"""Tables of measurements show what their JSON files hold, and results are copied into those files."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import tables as load_tables
from places import DOCS

RUN: dict[str, Any] = {
    "name": "areal", "overrides": {}, "seed": 0, "lr": 3e-5, "max_staleness": 2, "status": "done", "steps": 40,
    "curve": {"0": 0.25, "20": 0.5, "40": 0.75}, "start": 0.25, "end": 0.75, "seconds": 61.4, "samples_per_s": 100.0,
    "age_max": 2, "age_mean": 1.52, "rollout_idle": 0.31, "trainer_idle": 0.02, "paused": 0.05, "parity": 3e-6,
}  # fmt: skip
WHERE = {"commit": "abc1234", "cores": 2, "machine": "x86_64", "processor": "a processor"}


@pytest.fixture
def tables() -> ModuleType:
    return load_tables()


def part(tables: ModuleType, name: str, content: dict[str, Any]) -> str:
    """A part that is made of this content in place of its JSON file."""
    return tables.PARTS[name][1](content)


def test_pages_show_what_the_json_files_say(tables: ModuleType) -> None:
    """Seen failing with a figure of docs/performance.md and one of README changed by hand."""
    parts = tables.all_parts()
    assert tables.pages()
    for path in tables.pages():
        assert tables.filled(path.read_text(), parts) == path.read_text(), f"{path.name}: python docs/tables.py"


def test_every_part_has_one_place_and_every_place_a_part(tables: ModuleType) -> None:
    """Seen failing with a place renamed on one side."""
    places = [found["name"] for path in tables.pages() for found in tables.PLACE.finditer(path.read_text())]
    assert sorted(places) == sorted(tables.all_parts())
    comments = [path.read_text().count(": docs/tables.py -->") for path in (*tables.OUTSIDE, *DOCS.glob("*.md"))]
    assert sum(comments) == len(places)


def ablation_run(eta: int, proximal: str, *, end: float, seed: int = 0) -> dict[str, Any]:
    curves = {"eval": {"0": 0.1, "5": end}, "rewards": {"1": 0.2, "2": end}}
    return (
        RUN | curves | {"max_staleness": eta, "overrides": {"objective.proximal": proximal}, "end": end, "seed": seed}
    )


def test_the_ablation_table_shows_mean_and_spread_over_seeds(tables: ModuleType) -> None:
    """Naive 0.5 and 0.7, decoupled 0.8: means 0.6 and 0.8, 0.2 apart. An eta with one kind only has no difference."""
    runs = [
        ablation_run(4, "behaviour", end=0.5),
        ablation_run(4, "behaviour", end=0.7, seed=1),
        ablation_run(4, "recompute", end=0.8),
        ablation_run(16, "recompute", end=0.6),
        ablation_run(16, "behaviour", end=0.0) | {"end": None},
    ]
    lines = part(tables, "staleness", {**WHERE, "runs": runs}).splitlines()[2:]
    assert lines[2].startswith("| 4 | 0.600 (0.500 to 0.700) | 0.800 (0.800 to 0.800) | +0.200 | 1.52, 1.52 | 2 |")
    assert lines[3].startswith("| 16 | - | 0.600 (0.600 to 0.600) | - |")


def test_what_was_measured_is_taken_over_by_what_it_is(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of a plan, of a benchmark and of two runs of the demo, each into the page it belongs to."""
    monkeypatch.setattr(tables, "HERE", tmp_path)
    (tmp_path / "performance.json").write_text('{"queue": 1}')
    demo = json.loads((DOCS / "demo.json").read_text())["runs"][0]
    for name, content in (
        ("plan.json", {"plan": "staleness", "runs": [1]}),
        ("modes.json", {"benchmark": "modes", "recipe": "a/arith_cpu.yaml", "modes": [], "config": {}, "search": []}),
        ("long.json", {"benchmark": "peers speed", "rows": [{"parameters": 2, "lengths": "9, sigma 1"}]}),
        ("short.json", {"benchmark": "peers speed", "rows": [{"parameters": 2, "lengths": "9 each"}]}),
        ("run/summary.json", demo),
        ("run/config.json", {"run": {"seed": 7}}),
        ("run/metrics.jsonl", {"step": 1, "reward_mean": 0.25}),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    tables.take_over([str(tmp_path / name) for name in ("plan.json", "modes.json", "long.json", "short.json", "run")])
    assert tables.load("staleness-ablation")["runs"] == [1]
    peers = {"peers speed, 2, 9, sigma 1", "peers speed, 2, 9 each"}
    assert tables.load("performance").keys() == {"queue", "modes arith_cpu", *peers}
    assert tables.load("performance")["modes arith_cpu"].keys() == {"benchmark", "recipe", "modes"}
    (run,) = tables.load("demo")["runs"]
    assert run == demo | {"seed": 7, "rewards": {"1": 0.25}}


def test_a_target_is_met_by_the_median_in_its_own_direction(tables: ModuleType) -> None:
    """At least 5: 5.0 meets it, 4.9 does not. At most 3: the other way round. Seen failing with one direction only."""
    spread = {"low": 1.0, "high": 9.0}
    targets = [
        {"measure": name, key: bound, "median": median, **spread}
        for name, key, bound, median in [
            ("a", "at_least", 5.0, 5.0),
            ("b", "at_least", 5.0, 4.9),
            ("c", "at_most", 3.0, 2.9),
            ("d", "at_most", 3.0, 3.1),
        ]
    ]
    lines = part(tables, "targets", {"queue": {"targets": targets}})
    assert [line.split(" | ")[-1] for line in lines.splitlines()[2:]] == ["yes |", "**no** |", "yes |", "**no** |"]
    assert lines.splitlines()[2] == "| a | at least 5 | 5.00 | 1.00 to 9.00 | yes |"


def test_the_simulation_loses_of_long_answers_what_each_policy_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mask` their beginnings, `drop` whole ones, `keep` nothing, and `wait` nothing but time.

    Seen failing with new weights that do not reach samples in flight, and with dropped groups left in the engine.
    """
    simulation = load_tables("long_answers")
    monkeypatch.setattr(simulation, "STEPS", 40)
    found = {
        policy: simulation.Simulation(policy=policy, eta=1, ahead=1, scene=simulation.SCENES["memory-bound"]).run()
        for policy in ("mask", "drop", "wait", "keep")
    }
    long = {policy: row["shares"]["257-1024"] for policy, row in found.items()}
    assert long["mask"][0] < 0.8 < long["mask"][3]
    assert max(long["drop"]) < 0.9
    assert long["wait"] == long["keep"] == [1.0] * 4
    assert found["keep"]["ages"]["max"] > 1 == found["wait"]["ages"]["max"] == found["mask"]["ages"]["max"]
    assert found["wait"]["groups_per_time"] < found["keep"]["groups_per_time"] == found["mask"]["groups_per_time"]
    assert found["mask"]["over_bound"] == found["wait"]["over_bound"] == 0 < found["keep"]["over_bound"] < 0.5
