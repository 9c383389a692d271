"""Whether the functions that a recipe names are there, and take the arguments it gives them.

A typing error should not cost half a minute of engines. Files and modules of a user's are looked at, and before a run
imported, in a process of their own.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from areal_lite.config.plugins import arguments_model, known_names, split_name
from areal_lite.config.reading import explained
from areal_lite.config.recipe import Config
from areal_lite.config.suggestion import suggestion
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import ConfigError


def check_plugins(config: Config, *, verifiers_only: bool = False) -> None:
    """Raise a `ConfigError`, a line per problem, for a recipe whose functions are missing or refuse their arguments."""
    if problems := list(_verifier_problems(config) if verifiers_only else plugin_problems(config)):
        raise ConfigError("\n".join(problems))


def import_plugins(config: Config) -> None:
    """Import what a user brings, as the workers will; a `ConfigError` with what that raised."""
    named = list(_functions(config))
    for key, section, one in _verifiers(config):
        named.append((key, one.function, "verifier"))
        if (inner := str(one.arguments.get("function", ""))) and one.function in known_names("verifier"):
            named.append((f"{section}.arguments.function", inner, "reward function"))
    given = [item for item in named if item[1] not in known_names(item[2])]
    if not given:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, json.dumps(given)],
            env=os.environ | config.run.env,
            capture_output=True,
            text=True,
            timeout=config.run.start_timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        names = ", ".join(name for _, name, _ in given)
        raise ConfigError(
            f"{names} must be imported within run.start_timeout_s={config.run.start_timeout_s:g} s, which they were not"
        ) from error
    if done.returncode:
        said = done.stderr.rpartition("\0")[2].strip()
        raise ConfigError(
            said or f"importing {given[0][1]} ended its process ({done.returncode}): {done.stderr[-500:]}"
        )


_IMPORT = """
import json, sys
from areal_lite.config.plugins import find_function
for key, name, kind in json.loads(sys.argv[1]):
    try:
        find_function(name, kind=kind)
    except ValueError as error:
        sys.exit(f"\\0{key}: {error}")
"""


def plugin_problems(config: Config) -> Iterable[str]:
    """Yield one sentence (key, what is wrong, remedy) per function."""
    for key, name, kind in _functions(config):
        yield from _missing(key, name, kind=kind)
    yield from _verifier_problems(config)


def _functions(config: Config) -> Iterable[tuple[str, str, str]]:
    """Yield setting, name and kind of every function but the verifiers."""
    rollout = config.rollout
    workflows = {f"rollout.workflows.{key}.function": one.function for key, one in rollout.workflows.items()}
    if rollout.workflow not in rollout.workflows:
        workflows["rollout.workflow"] = rollout.workflow
    yield from ((key, name, "workflow") for key, name in workflows.items())
    for key, source in config.data.sources.items():
        if ":" in source.source:
            yield f"{config.data.place_of(key)}.source", source.source, "source"
    for key in ("loss_function", "advantage_function"):
        if (name := getattr(config.objective, key)) is not None:
            yield f"objective.{key}", name, key.replace("_", " ")


def _verifier_problems(config: Config) -> Iterable[str]:
    """Yield the same of the verifiers alone."""
    for key, section, settings in _verifiers(config):
        yield from list(_missing(key, settings.function, kind="verifier")) or _argument_problems(section, settings)


def _verifiers(config: Config) -> Iterable[tuple[str, str, VerifierSettings]]:
    """Yield every verifier that may be asked, with the setting that names it and the section of its own settings."""
    verifier = config.verifier
    chosen = {name: "verifier.function" for name in verifier.weights}
    if verifier.eval_function is not None:
        chosen.setdefault(verifier.eval_function, "verifier.eval_function")
    for key, source in config.data.sources.items():
        if source.verifier in known_names("verifier"):  # else one of `named`
            chosen.setdefault(source.verifier, f"{config.data.place_of(key)}.verifier")
    for name, key in chosen.items():
        if name not in verifier.named:
            yield key, "verifier", verifier.settings_of(name)
    for key, one in verifier.named.items():
        yield f"verifier.named.{key}.function", f"verifier.named.{key}", one


def _missing(key: str, name: str, *, kind: str) -> Iterable[str]:
    location, attribute = split_name(name, kind=kind)  # of the right form, as the recipe's sections saw to
    if attribute and not location.endswith(".py"):
        # Only the outermost package is looked for: finding an inner one would import it.
        package = location.partition(".")[0]
        if not importlib.util.find_spec(package):
            yield f"{key}={name}: there is no package {package!r}; install it, or correct it"
    elif not Path(location).is_file():
        yield f"{key}={name}: there is no file {Path(location).absolute()}; correct the path"
    elif attribute:
        yield from (f"{key}={name}: {problem}" for problem in _problems_in(Path(location), attribute))


def _problems_in(path: Path, attribute: str) -> Iterable[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield f"the file is not Python: {error}"
        return
    names = {name for node in tree.body for name in _defined(node)}
    if not names & {attribute, "*"}:
        yield f"the file has no {attribute!r}{suggestion(attribute, names)}"


def _defined(node: ast.stmt) -> Iterable[str]:
    """Yield the names that a statement at the top of a file defines; blocks are searched as well."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for child in ast.walk(node):
        match child:
            case ast.alias(name=name, asname=other):
                yield other or name
            case ast.Name(id=name) | ast.FunctionDef(name=name):
                yield name


def _argument_problems(section: str, settings: VerifierSettings) -> Iterable[str]:
    """Ask the function's own model, where it has one."""
    model = arguments_model(settings.function, kind="verifier")
    if model is None:
        return
    try:
        checked = model.model_validate(settings.arguments)
    except ValidationError as error:
        yield from explained(error, model, prefix=f"{section}.arguments.")
        return
    if settings.timeout_s < (least := getattr(checked, "least_timeout_s", 0.0)):
        yield (
            f"{section}.timeout_s must be at least {least:g} for the verifier {settings.function} with its "
            f"arguments, got {settings.timeout_s:g}, which would end slow calls before their own limits do: raise it "
            "(verify: --timeout), or lower the limits in its arguments"
        )
