"""The verifier `code`: what a program earns. What it may not do is in test_code_sandbox.py and test_code_plain.py."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from code_programs import CHEAT_TESTS, CHEATS

from areal_lite.errors import VerifierUnavailable
from areal_lite.verify.builtin import code as code_module
from areal_lite.verify.builtin import program as program_module
from areal_lite.verify.builtin.code import code, find_program
from areal_lite.verify.builtin.code_cases import split_asserts

SUM = "a, b = map(int, input().split())\nprint(a + b)"
SUM_TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n\n"}, {"input": "0 3", "output": "3  "}]


def run(completion: str, **row: Any) -> Any:
    return code("", completion, "", **{"sandbox": "plain", "wall_s": 5.0, "total_s": 10.0, "cpu_s": 5, **row})


@pytest.fixture
def fresh() -> Iterator[None]:
    """Settings of the process put back to none."""
    yield
    code_module._prepared.clear()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nprint(1)\n```\nor better\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nIt writes:\n```text\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\nprint('cut", "print(1)\nprint('cut"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_program_is_the_last_block(text: str, program: str) -> None:
    assert find_program(text) == program


def test_the_reward_is_the_share_of_cases_or_all_or_nothing() -> None:
    """`print(3)` is right in two of three. White space at ends does not count; seen failing with it compared."""
    assert run(SUM, tests=SUM_TESTS).reward == 1.0
    assert run("print(3)", tests=json.dumps(SUM_TESTS)).reward == pytest.approx(2 / 3)
    result = run("print(3)", tests=SUM_TESTS, reward="all")
    assert (result.reward, result.metrics["wrong"]) == (0.0, pytest.approx(1 / 3))
    assert result.feedback == "case 2 of 3: wrong: expected '10\\n\\n', got '3\\n'"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("1/0", "crash"),
        ("import sys; sys.exit(3)", "crash"),
        ("import os; os.abort()", "crash"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("bytearray(2 ** 31)", "memory"),
        ("x = [bytearray(2 ** 20) for _ in range(10 ** 6)]", "memory"),
        ("while True: print('x' * 1000)", "output"),
    ],
)
def test_a_programs_own_end_is_a_result_that_scores_0(program: str, status: str) -> None:
    """Not an exception, which would be a failed verifier."""
    result = run(program, tests=[{"input": "", "output": ""}], wall_s=1.0)
    assert (result.reward, result.metrics[status]) == (0.0, 1.0)
    assert result.feedback.startswith(f"case 1 of 1: {status}")


def test_processor_time_is_limited_apart_from_wall_time() -> None:
    result = run("while True: pass", tests=[{"input": "", "output": ""}], cpu_s=1, wall_s=30.0, total_s=30.0)
    assert result.metrics["cpu"] == 1.0


def test_cases_beyond_the_total_are_not_run() -> None:
    """The first of 50 takes all of the half second."""
    tests = [{"input": "", "output": ""}] * 50
    result = run("import time; time.sleep(60)", tests=tests, wall_s=5.0, total_s=0.5)
    assert (result.reward, result.metrics["timeout"]) == (0.0, 1.0)


def test_asserts_are_cases_of_their_own() -> None:
    asserts = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 3"]
    assert run("def add(a, b): return a + b", asserts=asserts).reward == pytest.approx(2 / 3)
    assert run("def add(a, b): return a + b", test_code="\n".join(asserts)).reward == pytest.approx(2 / 3)
    assert run("def add(a, b): return (", asserts=asserts).reward == 0.0
    assert run("", asserts=asserts).feedback == "case 1 of 3: wrong: NameError: name 'add' is not defined"


def test_values_objects_and_exceptions_come_over() -> None:
    program = """
import collections
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
def same(*values, **named): return values, named
def count(text): return collections.Counter(text)
def up_to(n):
    yield from range(n)
LIMIT = 7
"""
    test_code = """
values = [None, True, -3, 2.5, 'a\\u00e4', b'x', 1j, [1, [2]], (1,), {1, 2}, frozenset({3}), {(1, 2): [3]}, 10 ** 30]
for value in values:
    assert same(value, key=value) == ((value,), {'key': value})
    assert type(same(value)[0][0]) is type(value)
assert count('aab') == {'a': 2, 'b': 1}
assert list(up_to(3)) == [0, 1, 2]
assert LIMIT == 7
stack = Stack(1, 2)
stack.push(3)
assert len(stack) == 3 and list(stack) == [1, 2, 3] and stack.items[0] == 1
assert [stack.pop() for _ in range(3)] == [3, 2, 1]
try:
    stack.pop()
    assert False, 'nothing was raised'
except IndexError as error:
    assert 'empty list' in str(error)
"""
    result = run(program, test_code=test_code)
    assert (result.reward, result.feedback) == (1.0, "")


def test_check_is_called_with_the_entry_point() -> None:
    """A name that Python has too is the candidate's only there."""
    tests = "def check(candidate):\n    assert candidate([1, 2]) == 4\n    assert sum([1]) == 2\n"
    result = run("def sum(values): return len(values) + len(values)", test_code=tests, entry_point="sum")
    assert (result.reward, result.feedback) == (1.0, "")


@pytest.mark.parametrize("cheat", CHEATS)
def test_asserts_are_not_fooled(cheat: str) -> None:
    """Each passes, or ends with 0, where tests and candidate share a process.

    Seen failing with the candidate's names put before Python's (patches abs), with objects that equal everything, with
    a program that is gone counted as passed (leaves hard, prints a verdict), and with verdicts that never came
    counted so (no answer).
    """
    result = run(CHEATS[cheat], asserts=CHEAT_TESTS, wall_s=1.0)
    assert (result.reward, result.metrics["passed"]) == (0.0, 0.0)


def test_split_asserts_tells_cases_from_what_prepares_them() -> None:
    """A loop with asserts inside is one case; definitions, imports and values are none."""
    source = "import math\nx = f(1)\ndef g(): assert x\nfor n in x:\n    assert n\nassert x == 1\ng()\n'a text'"
    cases = split_asserts(source, None, None)
    assert [case.source.split()[0] for case in cases if case.counts] == ["for", "assert", "g()"]
    assert [case.counts for case in cases] == [False, False, False, True, True, True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "must have a column tests, test_code or asserts"),
        ({"tests": []}, "with something in it"),
        ({"tests": [{"stdin": "1"}]}, '"input"'),
        ({"test_code": "x = 1"}, "at top level"),
        ({"test_code": "assert ("}, "never closed"),
    ],
)
def test_a_row_without_proper_tests_is_an_error_not_a_0(row: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, SyntaxError), match=message):
        run(SUM, **row)


def test_a_sandbox_that_does_not_stand_is_an_error_not_a_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program never started. Seen failing with the prelude's byte not waited for: it scored 0."""
    monkeypatch.setattr("areal_lite.verify.builtin.sandbox._PRELUDE", "raise SystemExit('no room')")
    with pytest.raises(VerifierUnavailable, match="no room"):
        run(SUM, tests=SUM_TESTS)


def test_a_program_cannot_pass_for_a_broken_sandbox() -> None:
    program = "import sys; sys.stderr.write('bwrap: no permissions'); sys.exit(1)"
    assert run(program, tests=SUM_TESTS).metrics["crash"] == 1.0


@pytest.mark.parametrize(
    "arguments",
    [{"reward": "most"}, {"sandbox": "docker"}, {"wall_s": 0}, {"memory_mb": 1.5}, {"processes": -1}, {"time_s": 3}],
)
def test_wrong_arguments_fail_when_the_verifier_is_prepared(arguments: dict[str, Any], fresh: None) -> None:
    with pytest.raises((ValueError, TypeError)):
        vars(code)["_verifier_prepare"](**arguments)


def test_a_row_cannot_loosen_the_sandbox(fresh: None) -> None:
    """A column `sandbox` would be taken for the argument. Seen failing without the comparison."""
    vars(code)["_verifier_prepare"](sandbox="plain", memory_mb=256)
    assert code("", SUM, "", tests=SUM_TESTS, sandbox="plain", memory_mb=256).reward == 1.0
    for column in ({"memory_mb": 10**6}, {"memory_mb": 256, "processes": 10**6}, {"memory_mb": 256, "reward": "all"}):
        with pytest.raises(ValueError, match="must not have columns"):
            code("", SUM, "", tests=SUM_TESTS, **{"sandbox": "plain", **column})


def test_a_closed_program_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    launch = program_module.launch

    def noting(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(launch(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(program_module, "launch", noting)
    run("while True: pass", tests=[{"input": "", "output": ""}], wall_s=0.3)
    assert [process.poll() is None for process in started] == [False]
