"""Tables of measurements show what their JSON files hold."""

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
