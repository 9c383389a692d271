"""Whether the functions that a recipe names are there, and take the arguments it gives them.

A typing error should not cost half a minute of engines. What a user brings is imported, in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import ValidationError

from areal_lite.config.plugins import arguments_model, is_own_code, known_names
from areal_lite.config.reading import explained
from areal_lite.config.verifier import VerifierSettings
from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from areal_lite.config.recipe import Config

_IMPORT = """
import json, sys
from areal_lite.config.plugins import find_function
from areal_lite.config.recipe import parse_config
from areal_lite.errors import ArealLiteError
named, loader, raw = json.load(sys.stdin)
problems = []
for key, name, kind in named:
    try:
        find_function(name, kind=kind)
    except ArealLiteError as error:
        problems.append(f"{key}: {error}")
if loader and not problems:
    try:
        find_function(loader, kind="loader")(parse_config(raw))
    except ArealLiteError as error:
        problems.append(str(error))
sys.stderr.write("".join(f"\\0{problem}" for problem in problems))
"""


def check_plugins(config: "Config", *, verifiers_only: bool = False, loader: str | None = None) -> None:
    """Raise a `ConfigError` for functions that are missing or refuse their arguments: a line (key, fault, remedy) each.

    Args:
        config: The recipe.
        verifiers_only: The command uses nothing else of it.
        loader: `module:function` that loads the recipe's workflows and loss function as a run does.
    """
    verifiers = list(_verifiers(config))
    named = [] if verifiers_only else list(_functions(config))
    for key, section, one in verifiers:
        inner = one.arguments.get("function") if one.function in known_names("verifier") else None
        named += [(key, one.function, "verifier"), (f"{section}.arguments.function", inner, "reward function")]
    own = [
        (key, name, kind)
        for key, name, kind in named
        if isinstance(name, str) and (is_own_code(name) or kind == "reward function")
    ]
    is_plain = all(name in (None, "single_turn") for _, name, kind in named if kind in ("workflow", "loss function"))
    loader = None if is_plain else loader
    problems = list(_import_problems(own, loader, config)) if own or loader else []
    for _, section, one in verifiers:
        problems += _argument_problems(section, one)
    if problems:
        raise ConfigError("\n".join(problems))


def _import_problems(named: list[tuple[str, str, str]], loader: str | None, config: "Config") -> Iterable[str]:
    """Import as the workers will, with `run.env`."""
    names, limit_s = ", ".join(name for _, name, _ in named) or "workflows", config.run.start_timeout_s
    command, environment = [sys.executable, "-P", "-c", _IMPORT], os.environ | config.run.given_env
    task = json.dumps([named, loader, config.model_dump(mode="json")])
    try:
        done = subprocess.run(command, env=environment, input=task, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        yield f"{names} must be imported within run.start_timeout_s={limit_s:g} s, which they were not: raise it"
        return
    yield from done.stderr.split("\0")[1:]
    if done.returncode:
        yield f"importing {names} ended its process ({done.returncode}): {done.stderr[-500:].strip()}"


def _functions(config: "Config") -> Iterable[tuple[str, str | None, str]]:
    """Yield setting, name and kind of whatever may be a function, but the verifiers."""
    rollout = config.rollout
    yield "rollout.workflow", rollout.workflow, "workflow"
    for key, one in rollout.workflows.items():
        yield f"rollout.workflows.{key}.function", one.function, "workflow"
    yield "rollout.tool_parser", rollout.tool_parser, "tool parser"
    for key, source in config.data.sources.items():
        yield f"{config.data.place_of(key)}.source", source.source, "source"
        yield f"{config.data.place_of(key)}.workflow", source.workflow, "workflow"
    for key in ("loss_function", "advantage_function"):
        yield f"objective.{key}", getattr(config.objective, key), key.replace("_", " ")


def _verifiers(config: "Config") -> Iterable[tuple[str, str, VerifierSettings]]:
    """Yield every verifier that may be asked, with the setting that names it and the section of its own settings."""
    verifier = config.verifier
    chosen: dict[str | None, str] = {name: "verifier.function" for name in verifier.weights}
    chosen.setdefault(verifier.eval_function, "verifier.eval_function")
    for key, source in config.data.sources.items():
        chosen.setdefault(source.verifier, f"{config.data.place_of(key)}.verifier")
    for name, key in chosen.items():
        if name is not None and name not in verifier.named:
            yield key, "verifier", verifier.settings_of(name)
    of_sections = {"verifier.named": verifier.named, "reward_watch.verifiers": config.reward_watch.verifiers}
    for section, named in of_sections.items():
        for key, one in named.items():
            yield f"{section}.{key}.function", f"{section}.{key}", one


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
            f"{section}.timeout_s must be at least {least:g} for the verifier {settings.function} with its arguments, "
            f"got {settings.timeout_s:g}: raise it, or lower the limits in its arguments"
        )
