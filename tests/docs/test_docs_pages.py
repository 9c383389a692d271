"""Tables of measurements show what their JSON files hold, and results are copied into those files."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from pages import tables as load_tables
from places import DOCS


@pytest.fixture
def tables() -> ModuleType:
    return load_tables()


def test_pages_match_their_json_files(tables: ModuleType) -> None:
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


def test_results_are_copied_into_their_json_files(
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
    tables.copy_results(
        [str(tmp_path / name) for name in ("plan.json", "modes.json", "long.json", "short.json", "run")]
    )
    assert tables.load("staleness-ablation")["runs"] == [1]
    peers = {"peers speed, 2, 9, sigma 1", "peers speed, 2, 9 each"}
    assert tables.load("performance").keys() == {"queue", "modes arith_cpu", *peers}
    assert tables.load("performance")["modes arith_cpu"].keys() == {"benchmark", "recipe", "modes"}
    (run,) = tables.load("demo")["runs"]
    assert run == demo | {"seed": 7, "rewards": {"1": 0.25}}
