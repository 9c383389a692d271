"""Reads a row's tests for the verifier `code`: standard input and output, calls with JSON values, and asserts."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

_KINDS = {"stdin": False, "stdin_stdout": False, "functional": True, "function_call": True}
"""What LiveCodeBench's `testtype` and others' `type` can be, and whether it is a call."""
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")


class CallTest(NamedTuple):
    """A function's arguments and result."""

    function: str
    """A function, or a method of `class Solution`."""
    arguments: list[Any]
    results: list[Any]
    """Of which one is right."""

    def source(self, *, is_method: bool, tolerance: float) -> str:
        """Return an assert; JSON carries the values, and `same_value` of the tests' side compares them."""
        called = f"Solution().{self.function}" if is_method else self.function
        arguments, results = (f"json.loads({json.dumps(values)!r})" for values in (self.arguments, self.results))
        return f"assert same_value({called}(*{arguments}), {results}, {tolerance!r})"


def read_tests(
    tests: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str, *, metadata: Any, entry_point: str | None
) -> tuple[list[tuple[str, str]], list[CallTest]]:
    """Return the tests of standard input, each with the output expected, and those that call a function.

    A call's function is the test's `fn_name`, the metadata's `func_name` or `fn_name`, or the entry point; a test is a
    call if its `testtype` or `type` says so, without one if it has a function of its own. Arguments are a list, or text
    with one JSON value a line; the result is JSON text, or as it is.

    Args:
        tests: `[{"input", "output", ...}]`, or `{"inputs": [...], "outputs": [...], "fn_name": ...}`; either as JSON.
        metadata: A mapping, or the same as JSON; anything else is ignored.

    Raises:
        ValueError: The tests have another form, or a call has no function.

    Source: the graders of LiveCodeBench (`lcb_runner/evaluation/testing_util.py`) and APPS.
    """
    examples: list[tuple[str, str]] = []
    calls: list[CallTest] = []
    for test in _rows_of(tests):
        if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
            raise ValueError(f'a test must be {{"input": ..., "output": ...}}, got {test!r:.200}')
        about = _mapping(test.get("metadata") or metadata)
        function = test.get("fn_name") or about.get("func_name") or about.get("fn_name")
        known = test["type"] if test.get("type") in _KINDS else None
        is_call = _KINDS.get(test.get("testtype") or known or ("functional" if function else "stdin"))
        if is_call is None or (is_call and not (function := function or entry_point)):
            raise ValueError(
                f"a test must have a testtype: {', '.join(_KINDS)}, and a call a function (fn_name, entry_point or the "
                f"metadata's func_name), got {test!r:.200}"
            )
        if is_call:
            calls.append(CallTest(str(function), *_call_values(test["input"], test["output"])))
        else:
            examples.append((_text(test["input"]), _text(test["output"])))
    return examples, calls


def _rows_of(tests: Any) -> list[Any]:
    if isinstance(tests, str) and tests[:1] not in "[{":
        raise ValueError(
            f"tests must be a list or its JSON, got {tests!r:.60}: LiveCodeBench's private_test_cases are compressed "
            "pickles, which can run code; decode them into JSON when the data is prepared"
        )
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": given, "output": result, "fn_name": tests.get("fn_name")} for given, result in pairs]
    return listed(tests, "tests")


def _mapping(value: Any) -> Mapping[str, Any]:
    value = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call_values(given: Any, result: Any) -> tuple[list[Any], list[Any]]:
    try:
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
        # APPS wraps most results in a list, and its grader takes either.
        wrapped = result if isinstance(result, list) and len(result) == 1 else []
        return arguments, [json.loads(result)] if isinstance(result, str) else [result, *wrapped]
    except (ValueError, TypeError) as error:
        raise ValueError(f"a call's input and output must be JSON, got {given!r:.80} and {result!r:.80}") from error


def listed(value: Any, name: str) -> list[Any]:
    """Return a list that is not empty, also from its JSON; a `ValueError` otherwise."""
    items = json.loads(value) if isinstance(value, str) else list(value)
    if not isinstance(items, list) or not items:
        raise ValueError(f"{name} must be a list with something in it, got {items!r:.200}")
    return items


def same_output(given: str, expected: str, tolerance: float) -> bool:
    """Compare what a program wrote line by line.

    White space at both ends of lines and of the whole does not count, nor how much stands between numbers of a line
    that has nothing else.

    Numbers of which one is written with a point or exponent are equal if they differ by at most `tolerance`, or by that
    share of the expected one if this is larger than 1; to a whole number expected, the other must be equal.
    """
    lines, wanted = ([_words(line.strip()) for line in text.strip().split("\n")] for text in (given, expected))
    if list(map(len, lines)) != list(map(len, wanted)):
        return False
    pairs = zip(chain.from_iterable(lines), chain.from_iterable(wanted), strict=True)
    return all(one == two or _close(one, two, tolerance) for one, two in pairs)


def _words(line: str) -> list[str]:
    """Return the numbers of a line, or its words and the white space between them."""
    words = line.split()
    return words if all(map(_NUMBER.fullmatch, words)) else re.split(r"(\s+)", line)


def _close(given: str, expected: str, tolerance: float) -> bool:
    if not (tolerance and _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected) and {*given, *expected} & {*".eE"}):
        return False
    target = Decimal(expected)
    allowed = Decimal(str(tolerance)) * max(Decimal(1), abs(target)) if {*expected} & {*".eE"} else 0
    return abs(Decimal(given) - target) <= allowed


def split_asserts(
    test_code: str | None, asserts: Sequence[str] | str | None, entry_point: str | None
) -> list[tuple[bool, str]]:
    """Cut assert-style tests into pieces, each with whether it is a case; else it prepares others.

    Args:
        test_code: Statements at top level that assert or call something are cases, the others prepare.
        asserts: Each a case of its own.
        entry_point: What `check` is called with, where the tests define it.

    Raises:
        ValueError: There is no case in them, or they are not Python (`SyntaxError`).
    """
    body = ast.parse(test_code or "").body
    cases = [(_is_case(statement), ast.unparse(statement)) for statement in body]
    if entry_point and any(isinstance(item, ast.FunctionDef) and item.name == "check" for item in body):
        cases.append((True, f"check({entry_point})"))
    for source in [] if asserts is None else listed(asserts, "asserts"):
        ast.parse(source)
        cases.append((True, source))
    if not any(counts for counts, _ in cases):
        raise ValueError(f"test_code must assert or call something at top level, got {test_code!r:.200}")
    return cases


def _is_case(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    calls = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return calls or any(isinstance(node, ast.Assert) for node in ast.walk(statement))
