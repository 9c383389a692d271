"""The two programs of assert-style tests, which run in sandboxes of their own, joined by a socket.

    python code_remote.py serve SOCKET candidate.py      the candidate's program, which answers calls
    python code_remote.py test SOCKET cases.json         the tests, which see the candidate's names from afar

The tests' process runs no line of the candidate's, and only plain values come over: a candidate that leaves, patches
functions, or returns objects equal to everything changes nothing there. Standard library only, no other file of ours.
"""

import ast
import builtins
import datetime
import importlib
import json
import operator
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_LINE = 2**24


class CandidateError(Exception):
    """What the candidate's program raised or did, where it is no built-in exception."""


class CandidateEnded(Exception):
    """The candidate's program is gone, or gave no proper answer."""


ENDED = CandidateEnded.__name__
"""How the words on such a case begin."""


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
    if isinstance(value, dict):
        return ["dict", [[encode(item, objects) for item in pair] for pair in value.items()]]
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            return [name, [encode(item, objects) for item in value]]
    for plain, parts in _PARTS.items():
        if isinstance(value, plain):
            return [plain.__name__, [encode(part) for part in parts(value)]]
    if isinstance(value, RemoteObject):
        return ["object", object.__getattribute__(value, "_number")]
    if objects is None:
        raise TypeError(f"a test can send built-in values only, got {type(value).__name__}")
    objects[id(value)] = value
    return ["object", id(value)]


# A datetime is a date as well: it goes first.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
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
_SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAKERS: dict[str, Callable[..., Any]] = {kind.__name__: getattr(kind, "fromisoformat", kind) for kind in _PARTS}


def decode(packed: Any, objects: Any) -> Any:
    """Turn it back; `objects[number]` is what stands for an object of the other side."""
    kind, content = packed
    if kind == "value":
        return content
    if kind == "object":
        return objects[content]
    if kind == "dict":
        return {decode(key, objects): decode(value, objects) for key, value in content}
    if kind in _MAKERS:
        return _MAKERS[kind](*(decode(part, objects) for part in content))
    return _SEQUENCES[kind](decode(item, objects) for item in content)


# --- the candidate's side ---


def serve(channel: socket.socket, source: str) -> None:
    """Run a program's definitions, then answer what is asked until the tests hang up."""
    names: dict[str, Any] = {"__name__": "candidate"}
    objects: dict[int, Any] = {}
    failed: BaseException | None = None
    try:
        exec(compile(source, "candidate.py", "exec"), names)
    except BaseException as error:  # a program may end with sys.exit(): what it defined before counts
        failed = error
    stream = channel.makefile("rw", encoding="utf-8")
    for line in stream:
        reply: dict[str, Any]
        try:
            reply = {"value": encode(_do(json.loads(line), names, objects), objects)}
        except BaseException as error:
            cause = failed if failed is not None and isinstance(error, KeyError | NameError) else error
            reply = {"error": [type(cause).__name__, str(cause)[:500]]}
        stream.write(json.dumps(reply) + "\n")
        stream.flush()


def _do(request: dict[str, Any], names: dict[str, Any], objects: dict[int, Any]) -> Any:
    arguments = [decode(item, objects) for item in request["arguments"]]
    if request["do"] == "name":
        if arguments[0] not in names:
            raise NameError(f"name {arguments[0]!r} is not defined")
        return names[arguments[0]]
    return _OPERATIONS[request["do"]](objects[request["object"]], *arguments)


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
        request = {"do": do, "object": number, "arguments": [encode(item) for item in arguments]}
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


class _Names(dict[str, Any]):
    """The tests' globals: their own names, then Python's and its modules, then the candidate's.

    Python's go first, so that a candidate's `all` or `math` does not judge its own answers.
    """

    def __init__(self, asker: _Asker, entry_point: str | None, called: set[str]) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins})
        self._asker, self._entry_point, self._called = asker, entry_point, called

    def __missing__(self, name: str) -> Any:
        if name != self._entry_point:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            # No module can be called: what the tests call `bisect` or `copy` is a function of the candidate's.
            if name in sys.stdlib_module_names and name not in self._called:
                return importlib.import_module(name)
        return self._asker.ask("name", name)


def _called_in(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def run_cases(channel: socket.socket, cases: list[list[Any]], *, entry_point: str | None) -> Iterator[str | None]:
    """Run the tests in order; yield for each case None where it passed, else what went wrong.

    Args:
        cases: `[is a case, source]`: what is none prepares the others, and may fail without being counted.
        entry_point: A name that is the candidate's even where Python has it too.
    """
    names = _Names(_Asker(channel), entry_point, set().union(*(_called_in(source) for _, source in cases)))
    for is_case, source in cases:
        trouble: str | None = None
        try:
            exec(compile(source, "tests.py", "exec"), names)
        except BaseException as error:
            words = traceback.format_exception_only(error)[-1].strip()
            trouble = words if str(error) else f"{words}: {source[:200]}"
        if is_case:
            yield trouble


def _main(do: str, descriptor: str, file: str) -> None:
    sys.set_int_max_str_digits(0)  # JSON holds numbers of any length; time has a limit of its own
    channel = socket.socket(fileno=int(descriptor))
    with open(file, encoding="utf-8", errors="surrogatepass") as stream:
        content = stream.read()
    if do == "serve":
        serve(channel, content)
        return
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tests may print
    for trouble in run_cases(channel, **json.loads(content)):
        verdicts.write(json.dumps(trouble) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
