"""README and all pages: links lead somewhere, paths exist, commands parse; the README stays short."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pages import DOCS, RUN, blocks
from places import ROOT

from areal_lite.config.reading import parse_section, shipped_recipes
from areal_lite.config.recipe import Config
from areal_lite.launch.clusters.job import load_profile
from areal_lite.launch.commands.main import app

README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("examples/*/README.md"),
    ROOT / "benchmarks/README.md",
    *sorted(DOCS.glob("*.md")),
]
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TYPED = re.compile(r"((\w+=\S+ +)*|\.venv/bin/)(areal-lite|make|pip|python|eval|for \w+ in) ")
SHOWN = ("╭─", "control plane", "outstanding <", "waiting ─►", "admitted =", "verifier worker ──", "loss =", "<tool>")
"""First characters of blocks that are not commands: pictures, formulas, a conversation."""
COMMAND = re.compile(r"areal-lite ((?:[a-z][a-z-]*)(?: [^`\n#]*)?)")


def named(pages: list[Path] = PAGES) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT).with_suffix("")))


def test_readme_is_short_and_the_index_names_every_page() -> None:
    assert len(README.read_text().splitlines()) <= 140
    index = (DOCS / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index] == []


@pytest.mark.slow
def test_readme_quotes_what_is_counted() -> None:
    """Within 3 % of `make size`. Seen failing with a figure 5 % smaller."""
    quoted = re.search(r"([\d,]+) lines of Python\. <!-- make size: pure code of the package -->", README.read_text())
    counted = subprocess.run([sys.executable, DOCS / "size.py"], capture_output=True, text=True, check=True).stdout
    package = next(line for line in counted.splitlines() if line.startswith("package  "))
    assert quoted is not None
    assert int(quoted[1].replace(",", "")) == pytest.approx(int(package.split()[-1].replace(",", "")), rel=0.03)


@named()
def test_links_lead_somewhere(page: Path) -> None:
    """Seen failing with a page renamed, and with a heading reworded."""
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], link


@named([page for page in PAGES if page.stem != "log"])
def test_paths_that_a_page_names_exist(page: Path) -> None:
    """Seen failing with `areal_lite/presets.py`."""
    for path in re.findall(
        r"`((?:areal_lite|actors|launch|tests|docs|examples|docker|benchmarks)/[\w./-]*)`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_map_names_files_that_exist() -> None:
    """Seen failing with a file in the wrong row."""
    rows = re.findall(
        r"^\| (`(?:areal_lite|actors|launch)/[^|]*)\|[^|]*\|([^|]*)\|$", README.read_text(), flags=re.MULTILINE
    )
    assert len(rows) >= 8
    for folders, files in rows:
        for name in re.findall(r"`([^`]+)`", files):
            assert any((ROOT / folder / name).exists() for folder in re.findall(r"`([^`]+)`", folders)), name


def typed(page: Path) -> list[str]:
    """Return all blocks of a page, indented ones too, with continuation lines joined."""
    text = page.read_text().replace("\\\n", " ")
    return [*FENCE.findall(text), *re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)]


@named()
def test_every_block_of_a_page_parses(page: Path, tmp_path: Path) -> None:
    """Recipes, profiles and rows that no other test runs. Other lines are commands, or begin as in `SHOWN`.

    Seen failing with keys misspelt in a recipe, a profile and a row, a Python block elsewhere, and other programs.
    """
    lines = re.findall(r"^ {4}(\S.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    for language, text in blocks(page):
        if language == "python":
            assert page.name in (*RUN, "clusters.md"), text  # clusters.md: test_kind_plugin.py
        elif language == "yaml" and page.name in RUN:
            pass
        elif language == "yaml":
            raw = yaml.safe_load(text)
            if "nodes" in raw:
                (tmp_path / "profile.yaml").write_text(text)
                load_profile(str(tmp_path / "profile.yaml"))
            else:
                parse_section(raw, Config)
        elif language == "jinja":
            assert page.name == "clusters.md"
        elif language == "json":
            assert all(json.loads("[" + text.replace("}\n{", "},{") + "]"))
        elif language == "toml":
            assert tomllib.loads(text)
        else:
            assert language in ("", "sh"), text
            lines += [] if text.lstrip().startswith(SHOWN) else text.replace("\\\n", " ").splitlines()
    assert [line for line in lines if not TYPED.match(line)] == []


@named()
def test_a_program_that_a_page_types_exists(page: Path) -> None:
    """Those of areal-lite are parsed below. Seen failing with `vllm serve`, and with `pip install areal-lite`."""
    lines = [line for block in typed(page) for line in block.splitlines()]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in [line for line in lines if re.match(r"(make|pip|python|\.venv/bin/python|vllm) ", line)]:
        program, first, *words = shlex.split(line, comments=True)
        if program == "make":
            assert first in targets, line
        elif program == "pip":
            assert not any(word.startswith("areal-lite") for word in words), line
        elif first == "-m":
            package, *inner = words[0].split(".")
            spec = importlib.util.find_spec(package)
            assert spec is not None, line
            assert Path(str(spec.origin)).parent.joinpath(*inner).with_suffix(".py").exists() or not inner, line
        else:
            assert (ROOT / first).is_file(), line


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for text in typed(page):
            found += [(page.stem, words.strip().rstrip(";").split("; done")[0]) for words in COMMAND.findall(text)]
        found += [(page.stem, words.strip()) for words in re.findall(r"`areal-lite ([^`\n]+)`", page.read_text())]
    return sorted({(stem, words) for stem, words in found if "<" not in words})


@pytest.mark.parametrize(("page", "words"), commands())
def test_a_command_of_the_pages_parses(page: str, words: str) -> None:
    """And its recipe is shipped; test_docs_verifiers.py runs some. Seen failing with `--repeat`."""
    command: Any = typer.main.get_command(app)
    arguments = shlex.split(words)
    while arguments and hasattr(command, "commands") and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if hasattr(command, "commands"):  # `areal-lite bench`, and no command of `areal-lite` itself
        assert not arguments
        return
    if not arguments or "RECIPE" in arguments:  # the command alone, in a sentence
        return
    command.make_context(words, list(arguments))
    if words.split()[0] in ("train", "check-config", "sft", "reward-model", "dpo") and "." not in arguments[0]:
        assert arguments[0] in shipped_recipes()


def texts() -> Iterator[str]:
    """Yield every string of the package, with `...` in place of formatted values."""
    for folder in ("areal_lite", "launch", "actors"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_explained_message_exists() -> None:
    """Its parts between `...` occur in one string, in order. Seen failing with a message reworded in the code."""
    known = list(texts())
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    patterns = {row: ".*".join(map(re.escape, row.split("..."))) for row in rows if row != "message"}
    assert len(patterns) >= 15
    assert [one for one, pattern in patterns.items() if not any(re.search(pattern, text) for text in known)] == []
