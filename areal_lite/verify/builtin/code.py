"""The verifier `code`: a candidate's program against tests, in a sandbox."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, NamedTuple

from pydantic import Field

from areal_lite.errors import VerifierError
from areal_lite.verify.builtin.program import Outcome, Program
from areal_lite.verify.builtin.program_tests import read_tests, same_output, split_asserts
from areal_lite.verify.builtin.program_text import find_program, names_of
from areal_lite.verify.builtin.remote import ENDED
from areal_lite.verify.builtin.sandbox import Limits, check_bubblewrap, sweeping
from areal_lite.verify.result import VerifyResult, prepared_by

STATUSES = ("passed", "wrong", "crash", "timeout", "cpu", "memory", "output", "processes")
"""How a case can end."""

_DETAIL_CHARS = 500

_MODULES = (
    "sys, string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, "
    "operator, io, json, typing"
)
IMPORTS = "\n".join(
    [*(f"from {name} import *" for name in _MODULES.split(", ")), f"import {_MODULES}", "from builtins import *"]
)
"""What LiveCodeBench's grader puts before programs: starter code names `List`."""


class Verdict(NamedTuple):
    """What came of one case."""

    status: str
    """One of `STATUSES`."""
    detail: str = ""
    """For a person."""


@prepared_by(lambda self: self.sandbox == "plain" or check_bubblewrap())
class code(Limits):
    """Run the Python program of a completion against the row's tests.

    `find_program` finds it in the completion. It fails a case by a wrong result, and by whatever it does to itself: a
    crash, or a limit met. That is its result and scores; trouble with the sandbox is an error.

    Bubblewrap gives a program no network, no files but the system's and a temporary folder, no sight of other processes
    and a user of its own; a plain process has the limits alone. docs/verifiers.md has the list, and what is not on it.

    Assert-style tests run in a process of their own, to which the candidate's functions only hand over plain values:
    leaving early, patching functions, or objects that equal everything gain nothing. Arguments are copies, so a
    function that works in place must return its result; an object of the candidate's own class equals nothing.
    """

    reward: Literal["share", "all"] = "share"
    """share of the cases passed, or 1 only for all"""
    total_s: float = Field(5.0, gt=0)
    """processor seconds for all tests; after them, cases count as timed out if one exceeded a limit before, else it is
    an error, as the program may be right"""

    tolerance: float = Field(1e-6, ge=0)
    """distance allowed of numbers written with a decimal point, absolute, or as a share of numbers above 1; 0 = none"""
    prelude: str = ""
    """Python that runs before each program, such as imports that its task takes for granted"""

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
        tests: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | None = None,
        test_code: str | None = None,
        asserts: Sequence[str] | str | None = None,
        entry_point: str | None = None,
        metadata: Any = None,
        **row: Any,
    ) -> VerifyResult:
        """Score a program.

        Args:
            tests: Column: `[{"input": text for standard input, "output": text expected}]`, or the same as JSON; or
                calls of a function (`read_tests`). `same_output` compares.
            test_code: Column: Python whose statements at top level that assert or call something are the cases. Where
                it defines `check` and there is an `entry_point`, `check(entry_point)` is one.
            asserts: Column: a list of such statements, each a case, or the same as JSON.
            entry_point: Column: the function to be tested.
            metadata: Column: of LiveCodeBench's rows, which names the function to call.

        Returns:
            The reward; metrics: the shares of cases that ended as `passed`, `wrong`, `crash`, `timeout`, `cpu`,
            `memory`, `output` or `processes`; feedback: what the first failed case did.

        Raises:
            ValueError: The row has no tests, or none that can be read.
            VerifierUnavailable: The sandbox could not be set up.
            VerifierError: `total_s` is not enough, or the tests' own side broke.
        """
        if tests is None and test_code is None and asserts is None:
            raise ValueError("a row must have a column tests, test_code or asserts, got none of them")
        examples, calls = ([], []) if tests is None else read_tests(tests, metadata=metadata, entry_point=entry_point)
        cases = [] if test_code is None and asserts is None else split_asserts(test_code, asserts, entry_point)
        needed = names_of("\n".join(source for _, source in cases)).free | {call.function for call in calls}
        program = find_program(completion, needed | {entry_point or ""} | ({"Solution"} if calls else set()))
        for call in calls:
            cases.append((True, call.source(is_method="class Solution" in program, tolerance=self.tolerance)))
            entry_point = entry_point or call.function
        # A future statement must come first. Imports that nothing needs would cost time in each case.
        imports = IMPORTS if tests is not None and names_of(program).free and "from __future__" not in program else ""
        program = "\n".join(filter(None, (self.prelude, imports, program)))
        verdicts: list[Verdict] = []
        with sweeping():
            if examples:
                verdicts += self._run_examples(program, examples)
            if cases:
                verdicts += self._run_asserts(program, cases, entry_point)
        return self._result(verdicts)

    def _run_examples(self, program: str, examples: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Run a program once for each standard input, and compare what it writes with the output expected.

        `total_s` counts a case that is ended from outside by its wall time.

        Raises:
            VerifierError: The total was used up by cases that all kept their limits.
        """
        verdicts: list[Verdict] = []
        left_s = self.total_s
        runner: Program | None = None
        with ExitStack() as stack:
            for given, expected in examples:
                if left_s <= 0:
                    return verdicts + self._not_run(verdicts, len(examples) - len(verdicts))
                if runner is None or runner.has_ended:  # the case before broke its sandbox
                    runner = stack.enter_context(closing(Program(program, limits=self)))
                outcome = runner.run(given, more_output_bytes=len(expected.encode(errors="replace")))
                left_s -= outcome.seconds
                verdicts.append(self._compared(outcome, expected))
        return verdicts

    def _not_run(self, verdicts: Sequence[Verdict], number: int) -> list[Verdict]:
        """Judge what there was no time for: a program that met a limit is to blame, a total too small for it is not."""
        if all(verdict.status in ("passed", "wrong", "crash") for verdict in verdicts):
            raise VerifierError(
                f"total_s must be enough for all {len(verdicts) + number} cases of a program that keeps its limits, "
                f"got {self.total_s:g}, which {len(verdicts)} cases used up: raise total_s (and the verifier's "
                "timeout_s)"
            )
        return [Verdict("timeout", f"not run: the cases before took {self.total_s:g} s together")] * number

    def _compared(self, outcome: Outcome, expected: str) -> Verdict:
        if outcome.status != "ok":
            return Verdict(outcome.status, outcome.stderr[-_DETAIL_CHARS:].strip())
        if same_output(outcome.stdout, expected, self.tolerance):
            return Verdict("passed")
        return Verdict("wrong", f"expected {expected[:_DETAIL_CHARS]!r}, got {outcome.stdout[:_DETAIL_CHARS]!r}")

    def _run_asserts(self, program: str, cases: Sequence[tuple[bool, str]], entry_point: str | None) -> list[Verdict]:
        """Run assert-style tests against a program; a `VerifierError` where the tests' own side broke."""
        with closing(Program(program, limits=self)) as runner:
            outcome = runner.run(tests=[cases, entry_point])
        ending = outcome.status if outcome.status in STATUSES else "crash"
        verdicts: list[Verdict] = []
        for trouble in outcome.verdicts:
            status = "passed" if trouble is None else ending if trouble.startswith(ENDED) else "wrong"
            verdicts.append(Verdict(status, trouble or ""))
        num_missing = sum(counts for counts, _ in cases) - len(verdicts)
        if num_missing and ending == "crash":
            raise VerifierError(f"{num_missing} tests gave no verdict: {outcome.stderr[-1000:]}")
        # The tests were cut off at a limit. They hold nothing but what the candidate made them wait for or sent.
        return verdicts + [Verdict(ending, "its tests were cut off")] * num_missing

    def _result(self, verdicts: Sequence[Verdict]) -> VerifyResult:
        shares = {status: sum(item.status == status for item in verdicts) / len(verdicts) for status in STATUSES}
        failed = [(index, item) for index, item in enumerate(verdicts, 1) if item.status != "passed"]
        feedback = [f"case {index} of {len(verdicts)}: {item.status}: {item.detail}" for index, item in failed[:1]]
        earned = shares["passed"] if self.reward == "share" else float(not failed)
        return VerifyResult(earned, feedback="".join(feedback), metrics=shares)
