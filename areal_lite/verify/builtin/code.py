"""The verifier `code`: a candidate's program against tests, in a sandbox."""

import ast
import json
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, NamedTuple

from pydantic import Field

from areal_lite.errors import VerifierError
from areal_lite.verify.builtin.program import Outcome, Program
from areal_lite.verify.builtin.remote import ENDED
from areal_lite.verify.builtin.sandbox import Limits, sweeping
from areal_lite.verify.result import VerifyResult, prepared_by

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)

STATUSES = ("passed", "wrong", "crash", "timeout", "cpu", "memory", "output", "processes")
"""How a case can end."""

_DETAIL_CHARS = 500


class Verdict(NamedTuple):
    """What came of one case."""

    status: str
    """One of `STATUSES`."""
    detail: str = ""
    """For a person."""


@prepared_by(lambda self: self.kind)
class code(Limits):
    """Run the Python program of a completion against the row's tests.

    The program is the last ``` block, or the whole completion. It fails a case by a wrong result, and by whatever it
    does to itself: a crash, or a limit met. That is its result and scores; trouble with the sandbox is an error.

    Bubblewrap gives a program no network, no files but the system's and a temporary folder, no sight of other processes
    and a user of its own; a plain process has the limits alone. docs/security.md has the list, and what is not on it.

    Assert-style tests run in a process of their own, to which the candidate's functions only hand over plain values:
    leaving early, patching functions, or objects that equal everything gain nothing. Arguments are copies, so a
    function that works in place must return its result; an object of the candidate's own class equals nothing.
    """

    reward: Literal["share", "all"] = "share"
    """share of the cases passed, or 1 only for all"""
    total_s: float = Field(5.0, gt=0)
    """processor seconds for all tests; behind it, cases count as timed out if one met a limit before, else it is an
    error, as the program may be right"""

    @property
    def least_timeout_s(self) -> float:
        """The `timeout_s` below which the pool could end a call before the limits do, on a machine that is idle.

        The cases of `tests` take `total_s` and the last of them its `wall_s`, asserts another; 2 s are for starts.
        """
        return self.total_s + 2 * self.wall_s + 2

    def __call__(
        self,
        prompt: str,
        completion: str,
        answer: str,
        /,
        *,
        tests: Sequence[Mapping[str, str]] | str | None = None,
        test_code: str | None = None,
        asserts: Sequence[str] | str | None = None,
        entry_point: str | None = None,
        **row: Any,
    ) -> VerifyResult:
        """Score a program.

        Args:
            tests: Column: `[{"input": text for standard input, "output": text expected}]`, or the same as JSON. White
                space at the ends of lines and of the output is left out.
            test_code: Column: Python whose statements at top level that assert or call something are the cases. Where
                it defines `check` and there is an `entry_point`, `check(entry_point)` is one.
            asserts: Column: a list of such statements, each a case, or the same as JSON.
            entry_point: Column: the function to be tested.

        Returns:
            The reward; metrics: the shares of cases that ended as `passed`, `wrong`, `crash`, `timeout`, `cpu`,
            `memory`, `output` or `processes`, and with `sandbox: auto` whether it is `sandbox_plain`; feedback: what
            the first failed case did.

        Raises:
            ValueError: The row has no tests, or none that can be read.
            VerifierUnavailable: The sandbox could not be set up.
            VerifierError: `total_s` is not enough, or the tests' own side broke.
        """
        if tests is None and test_code is None and asserts is None:
            raise ValueError("a row must have a column tests, test_code or asserts, got none of them")
        program = find_program(completion)
        verdicts: list[Verdict] = []
        with sweeping():
            if tests is not None:
                verdicts += run_examples(program, tests, limits=self, total_s=self.total_s)
            if test_code is not None or asserts is not None:
                cases = split_asserts(test_code, asserts, entry_point)
                verdicts += run_asserts(program, cases, entry_point=entry_point, limits=self)
        return self._result(verdicts)

    def _result(self, verdicts: Sequence[Verdict]) -> VerifyResult:
        shares = {status: sum(item.status == status for item in verdicts) / len(verdicts) for status in STATUSES}
        failed = [(index, item) for index, item in enumerate(verdicts, 1) if item.status != "passed"]
        feedback = [f"case {index} of {len(verdicts)}: {item.status}: {item.detail}" for index, item in failed[:1]]
        earned = shares["passed"] if self.reward == "share" else float(not failed)
        kind = {"sandbox_plain": self.kind == "plain"} if self.sandbox == "auto" else {}
        return VerifyResult(earned, feedback="".join(feedback), metrics=shares | kind)


def find_program(completion: str) -> str:
    """Return the last ``` block that is not marked as another language, else the last block, else everything."""
    blocks = _BLOCK.findall(completion)
    python: list[str] = [text for language, text in blocks if language.lower() in ("", "py", "python", "python3")]
    return (python or [text for _, text in blocks] or [completion])[-1]


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
    for source in [] if asserts is None else _listed(asserts, "asserts"):
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


def run_asserts(
    program: str, cases: Sequence[tuple[bool, str]], *, entry_point: str | None, limits: Limits
) -> list[Verdict]:
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
        return _verdicts(outcome, candidate.end(), number=sum(counts for counts, _ in cases))


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
