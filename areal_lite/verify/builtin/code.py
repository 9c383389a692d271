"""The verifier `code`: a candidate's program against tests, in a sandbox. Runs in the verifier's process.

`sandbox.py` contains the program, `program.py` runs it, `code_cases.py` makes cases of a row's tests.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, get_args

from areal_lite.verify.builtin.code_cases import STATUSES, Verdict, run_asserts, run_examples, split_asserts
from areal_lite.verify.builtin.sandbox import Limits, choose_kind, sweeping
from areal_lite.verify.result import VerifyResult, prepared_by

__all__ = ["code", "find_program", "least_timeout_s"]

_Reward = Literal["share", "all"]
_Sandbox = Literal["auto", "bubblewrap", "plain"]
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def _check(
    *,
    reward: _Reward = "share",
    sandbox: _Sandbox = "bubblewrap",
    wall_s: float = 10.0,
    total_s: float = 5.0,
    cpu_s: int = 2,
    memory_mb: int = 512,
    output_kb: int = 256,
    disk_mb: int = 16,
    processes: int = 8,
) -> None:
    if reward not in get_args(_Reward):
        raise ValueError(f"reward must be share or all, got {reward!r}")
    if sandbox not in get_args(_Sandbox):
        raise ValueError(f"sandbox must be auto, bubblewrap or plain, got {sandbox!r}")
    limits = {"wall_s": wall_s, "total_s": total_s, "cpu_s": cpu_s, "memory_mb": memory_mb, "output_kb": output_kb}
    for name, value in {**limits, "disk_mb": disk_mb, "processes": processes}.items():
        kinds = int | float if name in ("wall_s", "total_s") else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ValueError(f"{name} must be a number above 0, whole where it is no time, got {value!r}")
    choose_kind(sandbox)
    _prepared.update(limits, disk_mb=disk_mb, processes=processes, sandbox=sandbox, reward=reward)


_prepared: dict[str, Any] = {}
"""The recipe's settings, once this process is prepared: a row must not bring its own in a column of such a name."""


@prepared_by(_check)
def code(
    prompt: str,
    completion: str,
    answer: str,
    *,
    tests: Sequence[Mapping[str, str]] | str | None = None,
    test_code: str | None = None,
    asserts: Sequence[str] | str | None = None,
    entry_point: str | None = None,
    reward: _Reward = "share",
    sandbox: _Sandbox = "bubblewrap",
    wall_s: float = 10.0,
    total_s: float = 5.0,
    cpu_s: int = 2,
    memory_mb: int = 512,
    output_kb: int = 256,
    disk_mb: int = 16,
    processes: int = 8,
    **row: Any,
) -> VerifyResult:
    """Run the Python program of a completion against the row's tests.

    The program is the last ``` block, or the whole completion. It fails a case by a wrong result, and by whatever it
    does to itself: a crash, or a limit met. That is its result and scores; trouble with the sandbox is an error.

    Bubblewrap gives a program no network, no files but the system's and Python's standard library, read only, a
    temporary folder that is gone afterwards, no environment variables, no sight of other processes, a user of its own.
    It does not contain an attack on the kernel, and nothing limits what share of a core the limits are spent on.
    A plain process has the limits alone: it reads and writes what the user may, network and other processes included.
    docs/code-sandbox.md has the list.

    Assert-style tests run in a process of their own, to which the candidate's functions only hand over plain values:
    leaving early, patching functions, or objects that equal everything gain nothing. Arguments are copies, so a
    function that works in place must return its result; an object of the candidate's own class equals nothing.

    Args:
        prompt: Not looked at.
        completion: What the model wrote.
        answer: Not looked at.
        tests: Column: `[{"input": text for standard input, "output": text expected}]`, or the same as JSON. White
            space at the ends of lines and of the output is left out.
        test_code: Column: Python whose statements at top level that assert or call something are the cases. Where it
            defines `check` and there is an `entry_point`, `check(entry_point)` is one.
        asserts: Column: a list of such statements, each a case, or the same as JSON.
        entry_point: Column: the function to be tested.
        reward: `share` of the cases passed, or 1 only for `all`.
        sandbox: `bubblewrap`; `plain` = none, see below; `auto` = plain where bubblewrap does not work.
        wall_s: Seconds that one case, or all asserts together, may take. For programs that sleep: keep it far above
            `cpu_s`, so that it decides nothing on a busy machine.
        total_s: Processor seconds for all of `tests`. Behind it, cases count as timed out if one met a limit before;
            else it is an error, as the program may be right.
        cpu_s: Processor seconds of one process.
        memory_mb: Memory in MiB.
        output_kb: Standard output and error in KiB, beyond what is expected.
        disk_mb: A file, and in bubblewrap the temporary folder, in MiB.
        processes: Processes and threads at once.
        **row: Not looked at.

    Returns:
        The reward; metrics: the shares of cases that ended as `passed`, `wrong`, `crash`, `timeout`, `cpu`, `memory`,
        `output` or `processes`, and with `sandbox: auto` whether it is `sandbox_plain`; feedback: what the first failed
        case did.

    Raises:
        ValueError: The row has no tests, or none that can be read, or has a column with the name of a setting.
        VerifierUnavailable: The sandbox could not be set up.
        VerifierError: `total_s` is not enough, or the tests' own side broke.
    """
    limits = Limits(
        wall_s=wall_s,
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        output_kb=output_kb,
        disk_mb=disk_mb,
        processes=processes,
    )
    settings = {"reward": reward, "sandbox": sandbox, "total_s": total_s, **asdict(limits)}
    if _prepared and settings != _prepared:
        raise ValueError(f"a row must not have columns with the names of settings, {', '.join(settings)}: rename them")
    program, kind = find_program(completion), choose_kind(sandbox)
    if tests is None and test_code is None and asserts is None:
        raise ValueError("a row must have a column tests, test_code or asserts, got none of them")
    verdicts: list[Verdict] = []
    with sweeping():
        if tests is not None:
            verdicts += run_examples(program, tests, kind=kind, limits=limits, total_s=total_s)
        if test_code is not None or asserts is not None:
            cases = split_asserts(test_code, asserts, entry_point)
            verdicts += run_asserts(program, cases, entry_point=entry_point, kind=kind, limits=limits)
    result = _result(verdicts, reward)
    return (
        replace(result, metrics={**result.metrics, "sandbox_plain": kind == "plain"}) if sandbox == "auto" else result
    )


def least_timeout_s(*, wall_s: float = 10.0, total_s: float = 5.0, **_: object) -> float:
    """Return the `timeout_s` below which the pool could end a call before the limits do, on a machine that is idle.

    The cases of `tests` take `total_s` and the last of them its `wall_s`, asserts another `wall_s`; 2 s are for starts.
    """
    return total_s + 2 * wall_s + 2


def find_program(completion: str) -> str:
    """Return the last ``` block that is not marked as another language, else the last block, else everything."""
    blocks = _BLOCK.findall(completion)
    python: list[str] = [text for language, text in blocks if language.lower() in ("", "py", "python", "python3")]
    return (python or [text for _, text in blocks] or [completion])[-1]


def _result(verdicts: Sequence[Verdict], reward: _Reward) -> VerifyResult:
    shares = {status: sum(item.status == status for item in verdicts) / len(verdicts) for status in STATUSES}
    failed = [(index, item) for index, item in enumerate(verdicts, 1) if item.status != "passed"]
    feedback = [f"case {index} of {len(verdicts)}: {item.status}: {item.detail}" for index, item in failed[:1]]
    earned = shares["passed"] if reward == "share" else float(not failed)
    return VerifyResult(earned, feedback="".join(feedback), metrics=shares)
