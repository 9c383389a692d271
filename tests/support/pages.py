"""The fenced blocks of a page in docs/."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from places import DOCS

__all__ = ["DOCS", "RUN", "Block", "blocks", "tables"]

RUN = ("verifiers.md", "workflows.md", "data.md", "first.md", "agents.md")
"""Pages whose files test_docs_verifiers.py runs, in one folder."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.\w+)$", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that its first line names."""
        match = _FILE.match(self.text)
        return match and match[1]


def blocks(page: str | Path, *languages: str) -> list[Block]:
    """Return the blocks of a page in these languages, in order; all of them where none is named."""
    found = [Block(*match.groups()) for match in _BLOCK.finditer((DOCS / page).read_text())]
    return [block for block in found if not languages or block.language in languages]


def tables(name: str = "tables") -> ModuleType:
    """Return the script that makes the pages of measurements, or another one in docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
