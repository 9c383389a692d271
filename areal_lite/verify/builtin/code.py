"""The verifier `code`: a candidate's program against tests, in a sandbox."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from areal_lite.verify.builtin.code_cases import STATUSES, Verdict, run_asserts, run_examples, split_asserts
from areal_lite.verify.builtin.sandbox import Limits, sweeping
from areal_lite.verify.result import VerifyResult, prepared_by

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


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
