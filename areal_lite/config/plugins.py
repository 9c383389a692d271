"""Find functions that a recipe names: verifiers, workflows, sources, losses, cluster kinds.

An entry point gives a function a name, so that any installed package can add its own; the shipped ones use the same
mechanism. A verifier may be a pydantic model, whose fields are then its arguments.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from areal_lite.config.suggestion import suggestion
from areal_lite.errors import PluginError

if TYPE_CHECKING:
    from pydantic import BaseModel

PLUGIN_GROUPS = {
    "verifier": "areal_lite.verifiers",
    "workflow": "areal_lite.workflows",
    "source": "areal_lite.sources",
    "cluster": "areal_lite.clusters",
    "loss function": "areal_lite.loss_functions",
    "advantage function": "areal_lite.advantage_functions",
}
"""Kinds of functions, and the entry-point group of each."""
PICKLE = ".pkl"
"""Suffix of a function that was pickled to a file."""
_searched = set[str]()
"""Folders in which functions, and their neighbours, are looked for."""


def known_names(kind: str) -> list[str]:
    """Return the names of a kind's entry points, sorted."""
    return sorted({entry.name for entry in entry_points(group=PLUGIN_GROUPS.get(kind, ""))})


def split_name(name: str, *, kind: str) -> tuple[str, str]:
    """Return module or path, and function, of a name, without importing anything.

    Args:
        name: `module:function`, `path.py:function`, a known name, or a path from `reference_to`, which has no function.

    Raises:
        PluginError: It has another form, or is not known.
    """
    location, colon, attribute = name.rpartition(":")
    if colon and location and attribute.isidentifier():
        return location, attribute
    if (path := name.removesuffix(":")).endswith(PICKLE):  # also with both parts joined again
        return path, ""
    for entry in entry_points(group=PLUGIN_GROUPS.get(kind, ""), name=name):
        return entry.module, entry.attr
    known = known_names(kind)
    raise PluginError(
        f"a {kind} is named module:function or path.py:function"
        + (f", or is one of {', '.join(known)} (a new one in pyproject.toml: after `make setup`)" if known else "")
        + f"; got {name!r}{suggestion(name, [*known, *with_a_colon(name)])}"
    )


def is_own_code(name: str) -> bool:
    """Whether a name is of a user's function, by its form: it has a colon, or is a path from `reference_to`."""
    return ":" in name or name.endswith(PICKLE)


def name_problems(key: str, name: str | None, *, kind: str) -> Iterable[str]:
    """Yield a sentence if the value of a setting cannot name a function; None is fine."""
    try:
        _ = name is None or split_name(name, kind=kind)
    except PluginError as error:
        yield f"{key}: {error}"


def with_a_colon(name: str) -> list[str]:
    """Return `module:function` for `module.function`; nothing for a name of another form."""
    module, _, function = name.rpartition(".")
    is_one = ":" not in name and module and function.isidentifier() and function not in ("py", "yaml", "yml")
    return [f"{module}:{function}"] if is_one else []


def plugin_file(name: str) -> str:
    """Return the file of `path.py:function`; nothing for a text of another form.

    One of several words is a function only where there is such a file: else it is a prompt, or a command.
    """
    path, _, function = name.rpartition(":")
    is_one = path.endswith(".py") and function.isidentifier() and (len(name.split()) == 1 or os.path.isfile(path))
    return path if is_one else ""


def plugin_files(value: Any) -> Iterator[str]:
    """Yield the file of each `path.py:function` in a recipe's value, in its lists and mappings too."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from plugin_files(item)
    elif isinstance(value, str) and (path := plugin_file(value)):
        yield path


def find_function(name: str, *, kind: str) -> Callable[..., Any]:
    """Import what a name, as for `split_name`, names; a path is taken from the working folder, a module from there too.

    Raises:
        PluginError: The name is wrong, or what it names cannot be imported or called; user code may have raised.
    """
    location, attribute = split_name(name, kind=kind)
    try:
        if is_own_code(name):
            _search(os.getcwd())
        if not attribute:
            import cloudpickle

            return cloudpickle.loads(Path(location).read_bytes())  # type: ignore[no-any-return]
        module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except (Exception, SystemExit) as error:  # user code runs here
        raise PluginError(f"the {kind} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise PluginError(f"{location} must have a function {attribute!r}, it has none{suggestion(attribute, names)}")
    return function  # type: ignore[no-any-return]


def arguments_model(name: str, *, kind: str) -> "type[BaseModel] | None":
    """Return the model of a known name's arguments, if it has one; a user's own code is not imported here."""
    function: Any = find_function(name, kind=kind) if name in known_names(kind) else None
    return function if hasattr(function, "model_fields") else None


def reference_to(function: Callable[..., Any], folder: Path) -> str:
    """Return a name under which workers find a function, for a recipe.

    One at the top of a module is named `module:function`, or `path.py:function` outside packages. Any other one, of a
    notebook, a script or another function, is written to a file in `folder`, with all it refers to.

    Raises:
        PluginError: It refers to what cannot be written to a file.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module and module.__name__ != "__main__" and getattr(module, name, None) is function:
        file = Path(getattr(module, "__file__", None) or "")  # `builtins` has none
        is_file = "." not in module.__name__ and file.suffix == ".py" and file.name != "__init__.py"
        return f"{file.resolve() if is_file else module.__name__}:{name}"
    import cloudpickle

    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects that it refers to raise
        raise PluginError(
            f"the function {name} must be at the top of a module, or refer only to what can be pickled, got "
            f"{type(error).__name__}: {error}: make locks, files and clients inside it, or move it to a .py file"
        ) from error
    stem = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_")
    path = folder.resolve() / f"{stem}-{hashlib.sha256(content).hexdigest()[:8]}{PICKLE}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def without_digests(text: str) -> str:
    """Remove the digests of pickled functions: another process pickles the same code to other bytes.

    Example:
        >>> without_digests("functions/reward-0a1b2c3d.pkl")
        'functions/reward.pkl'
    """
    return re.sub(rf"-[0-9a-f]{{8}}(?={PICKLE})", "", text)


def _search(folder: str) -> None:
    """Let modules in a folder be found; at the end, so that they cannot shadow a library."""
    _searched.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)


def takes(function: Callable[..., Any], name: str) -> bool:
    """True if a function has this keyword, or takes any; also if its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    _search(str(path.parent))  # for its neighbours
    _refuse_namesakes(path)
    spec = importlib.util.spec_from_file_location(f"_plugin_{path.stem}", path)
    assert spec is not None  # true for any path that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _refuse_namesakes(path: Path) -> None:
    """Raise if a file imports a neighbour that has a namesake in another's folder, which Python would take for it."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    for name in sorted({name.partition(".")[0] for name in names}):
        if not (neighbour := path.parent / f"{name}.py").is_file():
            continue
        found = importlib.util.find_spec(name)
        taken = Path(found.origin) if found and found.origin else neighbour
        if str(taken.parent) in _searched and not taken.samefile(neighbour):
            raise ImportError(f"{path} imports {name}, which is {taken} in this process: rename {neighbour}")
