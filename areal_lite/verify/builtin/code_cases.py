"""The cases of a row of the verifier `code`, and what a candidate's program makes of them."""

import ast
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from areal_lite.errors import VerifierError
from areal_lite.verify.builtin.program import Outcome, Program
from areal_lite.verify.builtin.remote import ENDED
from areal_lite.verify.builtin.sandbox import Limits

STATUSES = ("passed", "wrong", "crash", "timeout", "cpu", "memory", "output", "processes")
"""How a case can end."""

_DETAIL_CHARS = 500


class Verdict(NamedTuple):
    """What came of one case."""

    status: str
    """One of `STATUSES`."""
    detail: str = ""
    """For a person."""


class Case(NamedTuple):
    """A piece of assert-style tests."""

    counts: bool
    """Whether it is a case; else it prepares others."""
    source: str


def run_examples(
    program: str, tests: Sequence[Mapping[str, str]] | str, *, limits: Limits, total_s: float
) -> list[Verdict]:
    """Run a program once for each standard input, and compare what it writes.

    Args:
        tests: `[{"input", "output"}]`, or the same as JSON; anything else is a `ValueError`.
        limits: Of each case.
        total_s: Processor seconds of all cases, a case that is ended from outside counted by its wall time.

    Raises:
        VerifierError: The total was used up by cases that all kept their limits.
    """
    examples = _listed(tests, "tests")
    for example in examples:
        if not isinstance(example, Mapping) or not {"input", "output"} <= example.keys():
            raise ValueError(f'a test must be {{"input": ..., "output": ...}}, got {example!r:.200}')
    verdicts: list[Verdict] = []
    left_s = total_s
    runner: Program | None = None
    with ExitStack() as stack:
        for example in examples:
            if left_s <= 0:
                return verdicts + _not_run(verdicts, total_s, number=len(examples) - len(verdicts))
            if runner is None or runner.has_ended:  # the case before broke its sandbox
                runner = stack.enter_context(closing(Program("cases", "candidate.py", program, limits=limits)))
                runner.stand()
            expected = str(example["output"])
            outcome = runner.run_case(str(example["input"]), more_output_bytes=len(expected.encode(errors="replace")))
            left_s -= outcome.seconds
            verdicts.append(_compared(outcome, expected))
    return verdicts


def _not_run(verdicts: Sequence[Verdict], total_s: float, *, number: int) -> list[Verdict]:
    """Judge what there was no time for: a program that met a limit is to blame, a total too small for it is not."""
    if all(verdict.status in ("passed", "wrong", "crash") for verdict in verdicts):
        raise VerifierError(
            f"total_s must be enough for all {len(verdicts) + number} cases of a program that keeps its limits, got "
            f"{total_s:g}, which {len(verdicts)} cases used up: raise total_s (and the verifier's timeout_s)"
        )
    return [Verdict("timeout", f"not run: the cases before took {total_s:g} s together")] * number


def _listed(value: Any, name: str) -> list[Any]:
    items = json.loads(value) if isinstance(value, str) else list(value)
    if not isinstance(items, list) or not items:
        raise ValueError(f"{name} must be a list with something in it, got {items!r:.200}")
    return items


def _compared(outcome: Outcome, expected: str) -> Verdict:
    if outcome.status != "ok":
        return Verdict(outcome.status, outcome.stderr[-_DETAIL_CHARS:].strip())
    if _lines(outcome.stdout) == _lines(expected):
        return Verdict("passed")
    return Verdict("wrong", f"expected {expected[:_DETAIL_CHARS]!r}, got {outcome.stdout[:_DETAIL_CHARS]!r}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def split_asserts(test_code: str | None, asserts: Sequence[str] | str | None, entry_point: str | None) -> list[Case]:
    """Cut assert-style tests into cases.

    Args:
        test_code: Statements at top level that assert or call something are cases, the others prepare.
        asserts: Each a case of its own.
        entry_point: What `check` is called with, where the tests define it.

    Raises:
        ValueError: There is no case in them, or they are not Python (`SyntaxError`).
    """
    body = ast.parse(test_code or "").body
    cases = [Case(_is_case(statement), ast.unparse(statement)) for statement in body]
    if entry_point and any(isinstance(item, ast.FunctionDef) and item.name == "check" for item in body):
        cases.append(Case(True, f"check({entry_point})"))
    for source in [] if asserts is None else _listed(asserts, "asserts"):
        ast.parse(source)
        cases.append(Case(True, source))
    if not any(case.counts for case in cases):
        raise ValueError(f"test_code must assert or call something at top level, got {test_code!r:.200}")
    return cases


def _is_case(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    calls = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return calls or any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def run_asserts(program: str, cases: Sequence[Case], *, entry_point: str | None, limits: Limits) -> list[Verdict]:
    """Run assert-style tests against a program, each side in a sandbox; a `VerifierError` where the tests' broke."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(end) for end in socket.socketpair())
        candidate = Program("serve", "candidate.py", program, limits=limits, link=first)
        stack.callback(candidate.close)
        tests = Program("test", "cases.json", json.dumps([cases, entry_point]), limits=limits, link=second)
        stack.callback(tests.close)
        candidate.stand()
        tests.stand()
        outcome = tests.wait(beside=candidate)
        return _verdicts(outcome, candidate.end(), number=sum(case.counts for case in cases))


def _verdicts(tests: Outcome, candidate: Outcome, *, number: int) -> list[Verdict]:
    ending = candidate.status if candidate.status in STATUSES else "crash"
    verdicts = []
    for trouble in map(json.loads, tests.stdout.splitlines()):
        status = "passed" if trouble is None else ending if trouble.startswith(ENDED) else "wrong"
        verdicts.append(Verdict(status, trouble or ""))
    if len(verdicts) < number and tests.status in ("ok", "crash"):
        raise VerifierError(f"{number} tests must give a verdict each, got {len(verdicts)}: {tests.stderr[-1000:]}")
    # The tests were cut off at a limit. They hold nothing but what the candidate made them wait for or sent.
    missing = ending if candidate.status in STATUSES else tests.status
    return verdicts + [Verdict(missing, "its tests were cut off")] * (number - len(verdicts))
