"""Whether the functions that a recipe names are there, found without running any of them.

Called by `check-config` and before anything starts: a typing error should not cost half a minute of engines. What only
running shows (an import that fails) is left to the workers.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from areal_lite.config.plugins import split_name
from areal_lite.config.recipe import Config
from areal_lite.errors import PluginError

__all__ = ["plugin_problems"]


def plugin_problems(config: Config) -> Iterable[str]:
    """Yield one sentence (key, what is missing, remedy) per function that cannot be there."""
    for key, name, kind in _named(config):
        try:
            location, attribute = split_name(name, kind=kind)
        except PluginError as error:
            yield f"{key}: {error}"
            continue
        problem = _in_file(Path(location), attribute) if location.endswith(".py") else _in_module(location)
        if problem:
            yield f"{key}={name}: {problem}"


def _named(config: Config) -> Iterable[tuple[str, str, str]]:
    """Yield (key, name, kind) of every function that the recipe names itself."""
    verifier, rollout = config.verifier, config.rollout
    functions = [verifier.function] if isinstance(verifier.function, str) else [*verifier.function]
    for name in (*functions, *filter(None, [verifier.eval_function])):
        if name not in verifier.named:
            yield "verifier.function" if name in functions else "verifier.eval_function", name, "verifier"
    for key, settings in verifier.named.items():
        yield f"verifier.named.{key}.function", settings.function, "verifier"
    if rollout.workflow not in rollout.workflows:
        yield "rollout.workflow", rollout.workflow, "workflow"
    for key, workflow in rollout.workflows.items():
        yield f"rollout.workflows.{key}.function", workflow.function, "workflow"
    for key, source in config.data.sources.items():
        if ":" in source.source:
            yield f"data.mix.{key}.source" if config.data.mix else "data.source", source.source, "source"


def _in_module(module: str) -> str | None:
    # Only the outermost package is looked for: finding an inner one would import it.
    package = module.partition(".")[0]
    return None if importlib.util.find_spec(package) else f"there is no package {package!r}; install it, or correct it"


def _in_file(path: Path, attribute: str) -> str | None:
    if not path.is_file():
        return f"there is no file {path.absolute()}; correct the path"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"the file is not Python: {error}"
    names = {name for node in tree.body for name in _defined(node)}
    if attribute in names or "*" in names:
        return None
    near = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5)
    return f"the file has no {attribute!r}" + (f"; did you mean {near[0]}?" if near else "")


def _defined(node: ast.stmt) -> Iterable[str]:
    """Yield the names that a statement at the top of a file defines; blocks are searched as well."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in node.names)
        case _:
            names = (child for child in ast.walk(node) if isinstance(child, ast.Name | ast.FunctionDef | ast.alias))
            yield from (child.id if isinstance(child, ast.Name) else child.name for child in names)
