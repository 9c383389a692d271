"""Tables of measurements show what their JSON files hold, and what measures them again is written down."""

import json
import subprocess
from pathlib import Path

import pytest
from pages import tables as load
from places import DOCS

from areal_lite import node


class Interrupted(subprocess.Popen[bytes]):
    """A process; the first `wait` for a command meets Ctrl-C."""

    def wait(self, timeout: float | None = None) -> int:
        if "bash" in self.args and not hasattr(self, "was_asked"):
            self.was_asked = True
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_pages_match_their_json_files() -> None:
    """Seen failing with a figure of docs/performance.md and one of README changed by hand."""
    tables = load()
    parts = tables.all_parts()
    assert tables.pages()
    for path in tables.pages():
        assert tables.filled(path.read_text(), parts) == path.read_text(), f"{path.name}: python docs/tables.py"


def test_every_part_has_one_place_and_every_place_a_part() -> None:
    """Seen failing with a place renamed on one side."""
    tables = load()
    places = [found["name"] for path in tables.pages() for found in tables.PLACE.finditer(path.read_text())]
    assert sorted(places) == sorted(tables.all_parts())
    comments = [path.read_text().count(": docs/tables.py -->") for path in (*tables.OUTSIDE, *DOCS.glob("*.md"))]
    assert sum(comments) == len(places)


def test_every_figure_has_a_command_that_measures_it_again() -> None:
    """Seen failing with a command left out, and with one for figures that are gone."""
    figures = load("figures")
    assert sorted(figures.COMMANDS) == sorted(figures.measured())
    assert figures.COMMANDS.keys() > figures.APART.keys()
    commands = [command.format(out="OUT") for command in figures.COMMANDS.values()]
    for word in " ".join(commands).split():
        assert not word.endswith(".py") or (DOCS.parent / word).is_file(), word


def test_figures_are_fresh_only_with_the_hash_of_todays_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hash of Python and YAML files. Seen failing with Python alone, and with names alone."""
    figures = load("figures")
    for name in ("node.py", "a.yaml", "notes.md"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(node, "__file__", str(tmp_path / "node.py"))
    found = {"now": {"source": node.source_hash()}, "before": {"source": "0123"}, "never": {"commit": "abc"}}
    assert figures.stale(found).keys() == {"before", "never"}
    (tmp_path / "notes.md").write_text("2")
    assert "now" not in figures.stale(found)
    (tmp_path / "a.yaml").write_text("2")
    assert "now" in figures.stale(found)
    assert figures.main([]) == 1


def test_what_is_stale_is_measured_until_it_is_fresh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is apart is no failure, and measured by its name alone; a run that ended is kept, half a one is not.

    Seen failing with a command that failed counted as done, with fresh figures measured again, with half a run kept,
    with what is apart in the exit code, and with a command that Ctrl-C kills before it has ended.
    """
    figures = load("figures")
    docs, fresh = tmp_path / "docs", {"source": figures.source_hash()}
    docs.mkdir()
    (docs / "performance.json").write_text(json.dumps({"queue": {}, "train": fresh}))
    (docs / "memory.json").write_text("{}")
    (tmp_path / "new").write_text(json.dumps(fresh))
    monkeypatch.setattr(figures, "HERE", docs)
    commands = {"queue": "false", "train": "false", "memory": "cp new docs/memory.json", "gpu": "touch {out}/../now"}
    monkeypatch.setattr(figures, "COMMANDS", commands)
    monkeypatch.setattr(figures, "APART", {"gpu": "needs a GPU"})
    folder = tmp_path / "runs/figures" / fresh["source"]
    for name, status in {"whole": "done", "half": "interrupted"}.items():
        (run := folder / "memory" / name).mkdir(parents=True)
        (run / "config.json").touch()
        (run / "summary.json").write_text(json.dumps({"status": status}))
    assert figures.main(["measure"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [lines[0], lines[2], lines[-1]] == ["queue: false", "memory: cp new docs/memory.json", "not measured: queue"]
    assert lines[1].startswith("queue: NOT measured, ")
    assert lines[1].endswith(" minutes. Left: memory")
    assert [path.name for path in (folder / "memory").iterdir()] == ["whole"]
    commands["queue"] = "sleep 0.5; touch ended"
    monkeypatch.setattr(figures.subprocess, "Popen", Interrupted)
    assert figures.main(["measure", "queue", "memory"]) == 130
    assert (tmp_path / "ended").is_file()
    assert "stopped in queue; repeat the command to go on. Left: queue, memory" in capfd.readouterr().out
    (docs / "performance.json").write_text(json.dumps({"queue": fresh, "train": fresh}))
    assert figures.main([]) == 0
    assert "apart (needs a GPU): not measured yet" in capfd.readouterr().out
    assert not (folder / "now").exists()
