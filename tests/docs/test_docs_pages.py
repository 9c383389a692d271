"""Tables of measurements show what their JSON files hold, and results are copied into those files."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import tables as load_tables
from places import DOCS


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
