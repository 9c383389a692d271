"""Functions that a recipe names: verifiers, workflows, environments. Called where they run, not where recipes are read.

A name is `module:function`, `path.py:function`, or the name of an entry point, so that any installed package can bring
its own; ours are found in the same way.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_lite.errors import PluginError

__all__ = ["PLUGIN_GROUPS", "find_function", "known_names", "split_name", "with_a_colon"]

PLUGIN_GROUPS = {"verifier": "areal_lite.verifiers", "workflow": "areal_lite.workflows", "source": "areal_lite.sources"}
"""What can be named, and the entry-point group that holds its names."""


def known_names(kind: str) -> list[str]:
    """Return the names that need no module, of a kind in `PLUGIN_GROUPS`, sorted."""
    return sorted({entry.name for entry in entry_points(group=PLUGIN_GROUPS[kind])}) if kind in PLUGIN_GROUPS else []


def split_name(name: str, *, kind: str) -> tuple[str, str]:
    """Return module or path, and function, of a name, without importing anything.

    Args:
        name: `module:function`, `path.py:function`, or a known name.
        kind: What it names; a kind in `PLUGIN_GROUPS` has known names.

    Raises:
        PluginError: It has another form, or is not known.
    """
    location, colon, attribute = name.rpartition(":")
    if colon and location and attribute.isidentifier():
        return location, attribute
    for entry in entry_points(group=PLUGIN_GROUPS[kind], name=name) if kind in PLUGIN_GROUPS and not colon else ():
        return entry.module, entry.attr
    known = known_names(kind)
    near = difflib.get_close_matches(name, [*known, *with_a_colon(name)], n=1, cutoff=0.4)
    raise PluginError(
        f"a {kind} is named module:function or path.py:function"
        + (f", or is one of {', '.join(known)}" if known else "")
        + f"; got {name!r}"
        + (f": did you mean {near[0]}?" if near else "")
    )


def with_a_colon(name: str) -> list[str]:
    """Return what `module.function` was meant to be; nothing for a name of another form."""
    module, _, function = name.rpartition(".")
    is_one = ":" not in name and module and function.isidentifier() and function not in ("py", "yaml", "yml")
    return [f"{module}:{function}"] if is_one else []


def find_function(name: str, *, kind: str) -> Callable[..., Any]:
    """Import what a name names.

    Args:
        name: As for `split_name`; a path is taken from the working folder.
        kind: As for `split_name`.

    Raises:
        PluginError: The name is wrong, or what it names cannot be imported or called; user code may have raised.
    """
    location, attribute = split_name(name, kind=kind)
    try:
        module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except BaseException as error:  # user code runs here, sys.exit() included
        raise PluginError(f"the {kind} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PluginError(f"{location} must have a function {attribute!r}, it has none{hint}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # Behind everything else, so that the file can import its neighbours but they cannot shadow a library.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"_plugin_{path.stem}", path)
    assert spec is not None  # true for any path that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
