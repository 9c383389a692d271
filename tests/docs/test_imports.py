"""The import graph as it is: links resolved to one name per file, imports inside functions counted too."""

import ast
import doctest
import importlib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

LINKS = {path.resolve(): path.name for path in (ROOT / "areal_lite").iterdir() if path.is_symlink()}
HEAVY = {
    "ray": ("areal_lite.actors", "areal_lite.launch"),
    "vllm": (
        *(f"areal_lite.rollout.{name}" for name in ("vllm_engine", "endpoint", "api_formats")),
        "areal_lite.weights",
    ),
    "zmq": tuple(f"areal_lite.sample_queue.{name}" for name in ("access", "client", "server")),
}
"""Where each heavy package may be imported at all."""


def modules() -> dict[str, Path]:
    """Every module of the package by the name it is imported under."""
    found = {}
    for top, name in {ROOT / "areal_lite": "", **LINKS}.items():
        for path in top.rglob("*.py"):
            if top.name == "areal_lite" and path.relative_to(top).parts[0] in LINKS.values():
                continue
            parts = ("areal_lite", *filter(None, [name]), *path.relative_to(top).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Names that a file imports anywhere: modules, and what is taken from them, which may be modules too."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def graph() -> dict[str, set[str]]:
    """Edges between our own modules."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        found = {name if name in known else name.rpartition(".")[0] for name in imports(path)}
        edges[module] = (found & known.keys()) - {module}
    return edges


def folder(module: str) -> str:
    """The room of a module: `areal_lite.train`, `areal_lite.launch.run`, or a loose module's own name."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["launch"] else 2])


def assert_no_circle(edges: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_import_in_no_circle():
    """Seen failing with `import areal_lite.launch.run.train` inside a function of launch/run/places.py."""
    assert_no_circle(graph())


def test_folders_import_in_no_circle():
    """Seen failing before config stopped asking verify and data what they know."""
    rooms: dict[str, set[str]] = {}
    for module, targets in graph().items():
        rooms.setdefault(folder(module), set()).update(map(folder, targets))
    rooms.pop("areal_lite")  # the front door opens on everything
    assert_no_circle({room: targets - {room, "areal_lite"} for room, targets in rooms.items()})


def test_the_core_imports_launch_inside_one_function_only():
    """`areal_lite.run` starts a run. Seen failing with the commands in areal_lite/, and with the import moved up."""
    outer = ("areal_lite.actors", "areal_lite.launch")
    core = {name: path for name, path in modules().items() if not name.startswith(outer)}
    strays = {name for name, path in core.items() if any(found.startswith(outer) for found in imports(path))}
    top = [ast.unparse(node) for node in ast.parse(core["areal_lite.api"].read_text()).body]
    assert strays == {"areal_lite.api"}
    assert not [line for line in top if line.startswith(("import", "from")) and "areal_lite.launch" in line]


def test_heavy_packages_are_imported_at_home_only():
    """Seen failing with `import ray` inside a function of record/recorder.py."""
    strays = [
        (module, name)
        for module, path in modules().items()
        for name in {name.partition(".")[0] for name in imports(path)} & HEAVY.keys()
        if not module.startswith(HEAVY[name])
    ]
    assert strays == []


@pytest.mark.parametrize("name", sorted(name for name, path in modules().items() if ">>> " in path.read_text()))
def test_the_examples_of_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
