"""The two sides of assert-style tests, in processes of their own (`inside.py`), joined by a socket.

The tests' process runs no line of the candidate's code, and receives only plain values: a candidate that exits, patches
functions, or returns objects equal to everything changes nothing there. Standard library only, no other file of ours.
"""

import ast
import builtins
import datetime
import importlib
import json
import operator
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import IO, Any

_MAX_LINE = 2**24


class CandidateError(Exception):
    """What the candidate's program raised or did, where it is no built-in exception."""


class CandidateEnded(Exception):
    """The candidate's program is gone, or gave no proper answer."""


ENDED = CandidateEnded.__name__
"""How the trouble of such a case begins."""


def encode(value: Any, objects: dict[int, Any] | None = None) -> Any:
    """Turn a value into what JSON holds; a `TypeError` for what cannot be sent.

    Args:
        value: Built-in values, numbers and dates of the standard library, nested as one likes; of a subclass, what it
            is as one of these.
        objects: Where everything else is kept, by number; None = it is refused.
    """
    if value is None:
        return ["value", None]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return ["value", kind(value)]
    for plain, parts in _PARTS.items():
        if isinstance(value, plain):
            return [plain.__name__, [encode(part, objects) for part in parts(value)]]
    if isinstance(value, RemoteObject):
        return ["object", object.__getattribute__(value, "_number")]
    if objects is None:
        raise TypeError(f"a test can send built-in values only, got {type(value).__name__}")
    objects[id(value)] = value
    return ["object", id(value)]


_COLLECTIONS = (list, tuple, set, frozenset, dict)
# A datetime is a date as well: it goes first.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys(_COLLECTIONS, iter),
    dict: lambda value: value.items(),
    bytes: lambda value: [bytes.decode(value, "latin-1"), "latin-1"],
    complex: lambda value: [value.real, value.imag],
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [value.numerator, value.denominator],
    range: lambda value: [value.start, value.stop, value.step],
    datetime.datetime: lambda value: [value.isoformat()],
    datetime.date: lambda value: [value.isoformat()],
    datetime.time: lambda value: [value.isoformat()],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _PARTS}


def decode(packed: Any, objects: Any) -> Any:
    """Turn it back; `objects[number]` is what stands for an object of the other side."""
    name, content = packed
    if name == "value":
        return content
    if name == "object":
        return objects[content]
    kind, parts = _KINDS[name], [decode(part, objects) for part in content]
    return kind(parts) if kind in _COLLECTIONS else getattr(kind, "fromisoformat", kind)(*parts)


# --- the candidate's side ---


def serve(channel: socket.socket, source: str) -> None:
    """Run a program's definitions, then answer requests until the tests hang up."""
    names: dict[str, Any] = {"__name__": "candidate"}
    objects: dict[int, Any] = {0: names}
    failed: BaseException | None = None
    try:
        exec(compile(source, "candidate.py", "exec"), names)
    except BaseException as error:  # a program may end with sys.exit(): what it defined before counts
        failed = error
    stream = channel.makefile("rw", encoding="utf-8")
    for line in stream:
        reply: dict[str, Any]
        try:
            do, number, arguments = json.loads(line)
            value = _OPERATIONS[do](objects[number], *(decode(item, objects) for item in arguments))
            reply = {"value": encode(value, objects)}
        except BaseException as error:
            cause = failed if failed is not None and isinstance(error, KeyError | NameError) else error
            reply = {"error": [type(cause).__name__, str(cause)[:500]]}
        stream.write(json.dumps(reply) + "\n")
        stream.flush()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, arguments, named: target(*arguments, **named),
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    **{function.__name__: function for function in (getattr, setattr, len, iter, next, str, repr)},
}


# --- the tests' side ---


class _Asker:
    """Sends requests to the candidate's side, and stands for its objects."""

    def __init__(self, channel: socket.socket) -> None:
        self._stream = channel.makefile("rw", encoding="utf-8")

    def __getitem__(self, number: int) -> "RemoteObject":
        return RemoteObject(self, number)

    def ask(self, do: str, *arguments: Any, number: int = 0) -> Any:
        """Have something done with an object; number 0 is all the names of the candidate's program."""
        request = [do, number, [encode(item) for item in arguments]]
        try:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            reply = json.loads(self._stream.readline(_MAX_LINE))
            if "value" in reply:
                return decode(reply["value"], self)
            name, text = reply["error"]
        except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CandidateEnded(f"no proper answer came ({type(error).__name__})") from None
        kind = getattr(builtins, str(name), None)
        # To Python the end of an iterator is an answer: raised by anything else, it would end a loop of the tests'.
        ends_loops = kind in (StopIteration, StopAsyncIteration) and do != "next"
        if isinstance(kind, type) and issubclass(kind, Exception) and not ends_loops:
            raise kind(text)
        raise CandidateError(f"{name}: {text}")


def _asking(do: str, kind: Callable[[Any], Any] = lambda value: value) -> Any:
    def method(self: "RemoteObject", *arguments: Any) -> Any:
        asker: _Asker = object.__getattribute__(self, "_asker")
        return kind(asker.ask(do, *arguments, number=object.__getattribute__(self, "_number")))

    return method


class RemoteObject:
    """Stands for an object of the candidate's: to be called, indexed, iterated, asked for attributes.

    It equals only itself, whatever the candidate's class says.
    """

    def __init__(self, asker: _Asker, number: int) -> None:
        object.__setattr__(self, "_asker", asker)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call what it stands for, with copies of the arguments."""
        return _asking("call")(self, list(arguments), named)

    __getattr__, __setattr__ = _asking("getattr"), _asking("setattr")
    __getitem__, __setitem__ = _asking("getitem"), _asking("setitem")
    __iter__, __next__, __len__ = _asking("iter"), _asking("next"), _asking("len", int)
    __str__, __repr__ = _asking("str", str), _asking("repr", str)


def same_value(given: Any, results: list[Any], tolerance: float) -> bool:
    """Whether a value is one of some JSON values: tuples count as lists, floats may differ as in printed output."""
    return any(_same(given, result, tolerance) for result in results)


def _same(given: Any, result: Any, tolerance: float) -> bool:
    if isinstance(given, list | tuple) and isinstance(result, list):
        return len(given) == len(result) and all(map(_same, given, result, [tolerance] * len(result)))
    if isinstance(given, int | float) and isinstance(result, float) and abs(given) < float("inf"):
        return bool(abs(given - result) <= tolerance * max(1, abs(result)))
    return bool(given == result)


class _Names(dict[str, Any]):
    """The tests' globals: their own names, then Python's and its modules, then the candidate's.

    Python's go first, so that a candidate's `all` or `math` does not judge its own answers.
    """

    def __init__(self, asker: _Asker, entry_point: str | None, called: set[str]) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins, "same_value": same_value})
        self._asker, self._entry_point, self._called = asker, entry_point, called

    def __missing__(self, name: str) -> Any:
        if name != self._entry_point:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            # No module can be called: what the tests call `bisect` or `copy` is a function of the candidate's.
            if name in sys.stdlib_module_names and name not in self._called:
                return importlib.import_module(name)
        try:
            return self._asker.ask("getitem", name)
        except KeyError:  # of which Python would make its own function of that name
            raise NameError(f"name {name!r} is not defined") from None


def _called_in(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def test(channel: socket.socket, verdicts: IO[str]) -> bool:
    """Run tests in order; write a line for each case: null where it passed, else what went wrong.

    Args:
        channel: To the candidate's side.
        verdicts: For the lines. From it comes a line of JSON, `[cases, entry point]`. A case is `[whether it counts,
            source]`: one that does not count prepares the others, and may fail. The entry point is a name that is the
            candidate's even where Python has it too.

    Returns:
        Whether the candidate's side ended, or gave no proper answer.
    """
    cases, entry_point = json.loads(verdicts.readline())
    names = _Names(_Asker(channel), entry_point, set().union(*(_called_in(source) for _, source in cases)))
    has_ended = False
    for counts, source in cases:
        trouble: str | None = None
        try:
            exec(compile(source, "tests.py", "exec"), names)
        except BaseException as error:
            words = traceback.format_exception_only(error)[-1].strip()
            trouble = words if str(error) else f"{words}: {source[:200]}"
            has_ended = has_ended or isinstance(error, CandidateEnded)
        if counts:
            verdicts.write(json.dumps(trouble) + "\n")
            verdicts.flush()
    return has_ended
