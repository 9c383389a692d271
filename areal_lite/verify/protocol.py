"""What a verify function is: how it is named, found and called, and what counts as a reward.

    def verify(prompt: str, completion: str, answer: str, **row) -> float

or the same with `async def`. `row` holds the data row's other columns, and what the recipe says in
`verifier.arguments`. What takes long to load goes into a function of those arguments, named by `@prepared_by`: it runs
once in each process, and no call's deadline counts it. Used by `child.py`, in the process that
runs the function; imports nothing heavy, as every restart of that process pays for it.
"""

import asyncio
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from areal_lite.errors import VerifierError

__all__ = ["Reply", "VerifyFunction", "call_verifier", "load_verifier", "prepare_verifier", "prepared_by"]

VerifyFunction = Callable[..., Any]
_DETAIL_CHARS = 2000
_PREPARE = "_verifier_prepare"


class Reply(NamedTuple):
    """What the process answers to one call: a reward, or a failure with its detail."""

    reward: float | None
    failure: str | None = None
    """Short and countable: `nan`, `inf`, `wrong_type:<type>`, `exception:<type>`."""
    detail: str = ""
    """For a person: the end of the traceback."""


def prepared_by(prepare: Callable[..., object]) -> Callable[[VerifyFunction], VerifyFunction]:
    """Decorate a verify function: `prepare(**arguments)` runs before its first call, with the recipe's arguments."""

    def mark(function: VerifyFunction) -> VerifyFunction:
        vars(function)[_PREPARE] = prepare
        return function

    return mark


def prepare_verifier(function: VerifyFunction, arguments: Mapping[str, Any]) -> None:
    """Run what `prepared_by` names, if anything.

    Raises:
        VerifierError: It failed.
    """
    prepare = getattr(function, _PREPARE, None)
    if prepare is None:
        return
    try:
        prepare(**arguments)
    except BaseException as error:  # user code runs here, sys.exit() included
        raise VerifierError(f"the verifier cannot be prepared with {dict(arguments)}: {_describe(error)}") from error


def load_verifier(name: str) -> VerifyFunction:
    """Find a verify function.

    Args:
        name: `module:function`, or `path.py:function` with a path from the working folder.

    Raises:
        VerifierError: The name has another form, or names nothing that can be imported and called.
    """
    location, colon, attribute = name.rpartition(":")
    if not (colon and location and attribute.isidentifier()):
        raise VerifierError(f"a verifier is named module:function or path.py:function, got {name!r}")
    try:
        module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except BaseException as error:  # user code runs here, sys.exit() included
        raise VerifierError(f"the verifier {name!r} cannot be imported: {_describe(error)}") from error
    function: VerifyFunction | None = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, names, n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise VerifierError(f"{location} must have a function {attribute!r}, it has none{hint}")
    return function


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # Behind everything else, so that the file can import its neighbours but they cannot shadow a library.
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"_verifier_{path.stem}", path)
    assert spec is not None  # true for any path that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call_verifier(
    function: VerifyFunction,
    prompt: str,
    completion: str,
    answer: str,
    row: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Reply:
    """Call a verify function once, and turn whatever it does into a reply.

    Args:
        function: From `load_verifier`.
        prompt: As the model saw it.
        completion: What it wrote.
        answer: The row's reference.
        row: The row's other columns.
        arguments: `verifier.arguments`; a column of the same name fails the call.
    """
    try:
        value = function(prompt, completion, answer, **row, **arguments)
        if inspect.isawaitable(value):
            value = _event_loop().run(_wait(value))
        if not isinstance(value, numbers.Real):
            return Reply(None, f"wrong_type:{_type_name(value)}", f"got {_shorten(repr(value))}")
        reward = float(value)
    except BaseException as error:  # a verifier that calls sys.exit() failed like any other
        return Reply(None, f"exception:{type(error).__name__}", _describe(error))
    if math.isnan(reward):
        return Reply(None, "nan")
    return Reply(None, "inf") if math.isinf(reward) else Reply(reward)


@functools.cache
def _event_loop() -> asyncio.Runner:
    """One loop for all calls, so that an async verifier can keep its connections."""
    return asyncio.Runner()


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _describe(error: BaseException) -> str:
    return _shorten("".join(traceback.format_exception(error)).strip())


def _shorten(text: str) -> str:
    """Keep the end, where a traceback names the error."""
    return text if len(text) <= _DETAIL_CHARS else "..." + text[-_DETAIL_CHARS:]
