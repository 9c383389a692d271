"""The verifier `code`: what a program earns. What it may not do is in test_code_sandbox.py and test_code_plain.py."""

import json
import subprocess
from typing import Any
from unittest import mock

import pytest
from code_programs import CHEAT_TESTS, CHEATS, run_code

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError, VerifierError, VerifierUnavailable
from areal_lite.verify.builtin.code import code
from areal_lite.verify.builtin.program_tests import split_asserts
from areal_lite.verify.builtin.program_text import find_program
from areal_lite.verify.builtin.sandbox import check_bubblewrap
from areal_lite.verify.protocol import Verifier

pytestmark = pytest.mark.deadline

SUM = "a, b = map(int, input().split())\nprint(a + b)"
SUM_TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n\n"}, {"input": "0 3", "output": "3  "}]


def run(completion: str, **row: Any) -> Any:
    return run_code(completion, **{"sandbox": "plain", "wall_s": 5.0, "total_s": 10.0, "cpu_s": 5, **row})


DEFINES, USES, WHOLE = "def triple(x): return 3 * x\n", "print(triple(5))\n", "print(3 * int(input()))\n"


def block(text: str, label: str = "python", fence: str = "```") -> str:
    return f"{fence}{label}\n{text}{fence}\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\nprint('cut", "print(1)\nprint('cut"),
        (block("print(1)\n") + "or better\n" + block(WHOLE, "py"), WHOLE),
        (block(WHOLE) + "It writes\n" + block("6\n", "text"), WHOLE),
        (block(WHOLE, "") + "It writes\n" + block("6\n", ""), WHOLE),
        ("1. do\n   " + block("x = 1\n   print(x)\n   ").replace("\nx", "\n   x"), "x = 1\nprint(x)\n"),
        ("- " + block("  print(1)\n"), "print(1)\n"),
        (block(WHOLE, "py", "~~~"), WHOLE),
        (block(WHOLE, "{.python}"), WHOLE),
        (block(WHOLE, "Python3 title=x", "````"), WHOLE),
        (block(DEFINES) + "Then read the number:\n" + block("print(triple(int(input())))\n"), None),
        (block("import math\n") + "then\n" + block("print(math.pi)\n"), "import math\n\nprint(math.pi)\n"),
        (block(DEFINES + WHOLE) + "For example\n" + block(USES), DEFINES + WHOLE),
        (block(DEFINES + WHOLE) + "Now shorter:\n" + block(WHOLE), WHOLE),
        (block(WHOLE) + block("\n"), WHOLE),
        (block(WHOLE) + "wrong again:\n" + block("print(\n"), "print(\n"),
        (f"<think>{block(USES)}</think>{block(WHOLE, '')}", WHOLE),
        (f"<think>{block(USES)}", ""),
        (f"<answer>{block(WHOLE)}</answer>", WHOLE),
        ("**So:** " + block(WHOLE), WHOLE),
        (block(WHOLE).replace("\n```\n", "```"), WHOLE.strip()),
        ("Not in ```code``` like\n" + block("print('```')\nprint(1)\n"), "print('```')\nprint(1)\n"),
    ],
)
def test_the_program_is_the_last_block_that_is_no_output_and_no_example(text: str, program: str | None) -> None:
    """Seen failing with the last block that is Python or has no label: on output, examples, parts, lists and tildes.

    Five of the last six were seen failing with thoughts read, tags and all, and fences wanted alone on their lines.
    """
    joined = f"{DEFINES}\nprint(triple(int(input())))\n"
    assert find_program(text) == (joined if program is None else program)


@pytest.mark.parametrize("usage", [USES, "from solution import triple\nprint(triple(5))\n", "print(1)\n"])
def test_an_example_behind_the_solution_does_not_replace_it(usage: str) -> None:
    """Seen failing with the last block run, in which the function has no definition."""
    completion = block(DEFINES) + "For example:\n" + block(usage)
    assert run(completion, asserts=["assert triple(2) == 6"]).reward == 1.0
    assert run(completion, test_code="def check(f):\n    assert f(2) == 6", entry_point="triple").reward == 1.0


# --- calls, as LiveCodeBench's and APPS's graders make them ---

METHOD = "class Solution:\n    def total(self, a: List[int], b: int) -> int:\n        return sum(a) + b"
FUNCTION = "def total(a, b):\n    return sum(a) + b"
CALLS = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}, {"input": "[]\n4", "output": "5"}]


@pytest.mark.parametrize(
    "program", [METHOD, FUNCTION, block(METHOD + "\n") + block("print(Solution().total([1], 2))\n")]
)
@pytest.mark.parametrize(
    "row",
    [
        {"tests": CALLS, "metadata": '{"func_name": "total"}'},
        {"tests": json.dumps(CALLS), "metadata": {"fn_name": "total"}},
        {"tests": [test | {"testtype": "functional"} for test in CALLS], "entry_point": "total"},
        {"tests": [test | {"testtype": None, "metadata": None, "fn_name": "total"} for test in CALLS]},
        {"tests": [test | {"metadata": {"func_name": "total"}} for test in CALLS]},
        {"tests": [test | {"type": "function_call", "fn_name": "total"} for test in CALLS]},
        {"tests": [{"fn_name": "total", "input": [[1, 2], 3], "output": 6}, CALLS[1] | {"fn_name": "total"}]},
        {"tests": {"fn_name": "total", "inputs": [[[1, 2], 3], [[], 4]], "outputs": [[6], [5]]}},
    ],
)  # fmt: skip
def test_call_based_tests_call_the_function(program: str, row: dict[str, Any]) -> None:
    """One of two is right: 1 + 2 + 3 = 6, 4 is not 5. Seen failing (0.0) with the program run as a script.

    Null, as Arrow fills missing keys, was seen failing with a ValueError.
    """
    result = run(program, **row)
    assert (result.reward, result.metrics["wrong"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("output", "value", "score"),
    [
        ("[1, 2]", "(1, 2)", 1), ("[[1, 2], [3]]", "[(1, 2), [3]]", 1), ("[1, 2]", "[2, 1]", 0), ('"a"', "'a'", 1),
        ("1.5", "1.50000001", 1), ("1.5", "1.6", 0), ("[0.1]", "[0.1 + 1e-12]", 1), ("true", "True", 1),
        ("null", "None", 1), ("1000000", "1000001", 0), ('{"a": [1]}', "{'a': [1]}", 1), ("2.0", "'2.0'", 0),
        ("1.0", "float('nan')", 0), ("[1]", "1", 0),
    ],
)  # fmt: skip
def test_what_a_call_returns_is_compared_as_json(output: str, value: str, score: float) -> None:
    """Seen failing with tuples told from lists, with == alone, and with each a script."""
    tests = [{"input": "0", "output": output, "fn_name": "f"}]
    assert run(f"def f(n): return {value}", tests=tests).reward == score


def test_the_prelude_runs_first_and_a_future_statement_stays_first() -> None:
    """Without one, asserts get no imports: seen failing with those of calls put before every program.

    `tests` bring them. Seen failing for standard input.
    """
    asserts = ["assert area(2) == 4 * math.pi"]
    assert run("def area(r): return math.pi * r * r", asserts=asserts).reward == 0.0
    assert run("def area(r): return math.pi * r * r", asserts=asserts, prelude="import math").reward == 1.0
    assert run("print(gcd(int(input()), 4))", tests=[{"input": "6", "output": "2"}]).reward == 1.0
    assert run(f"from __future__ import annotations\n{METHOD}", tests=CALLS, entry_point="total",
               metadata={"func_name": "total"}).reward == 0.5  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected", "options", "score"),
    [
        ("1.4142135623730951", "1.41421356", {}, 1), ("1.4143", "1.41421356", {}, 0), ("a 0.5 b", "a 0.50 b", {}, 1),
        ("1e-7", "0.0", {}, 1), ("1000000.5", "1000000.9", {}, 1), ("1000001", "1000000", {}, 0), ("2.0", "2", {}, 1),
        ("2.0000001", "2", {}, 0), ("0.5", "0.50", {"tolerance": 0.0}, 0), ("nan", "0.5", {}, 0), ("inf", "inf", {}, 1),
        ("0.5  1", "0.5 1", {}, 1), (" 0.51", "0.51", {}, 1), ("a  1", "a 1", {}, 0), ("\n1\n 2", " 1\n2", {}, 1),
        ("1 2", "1\n2", {}, 0), ("12", "1 2", {}, 0), ("2  1", "1 2", {}, 0), ("1.42", "1.4", {"tolerance": 0.1}, 1),
        ("12 " * 99 + "a", "b", {}, 0),
        ("1.5", "1.5 2", {}, 0),
        ("a\u2028b", "a\nb", {}, 0), ("a\x0bb", "a\nb", {}, 0), ("a\r\nb", "a\nb", {}, 1),
    ],
)  # fmt: skip
def test_output_may_differ_by_a_tolerance_where_it_has_a_point(
    given: str, expected: str, options: dict[str, float], score: float
) -> None:
    """1e-6, or a millionth of numbers above 1: 0.4 of 1000000.9. Seen failing with text compared; the lines of the
    last three with `splitlines`, with white space in front of lines and between numbers
    compared, and (without an end) with a line of numbers and a word matched by one pattern.
    """
    program = f"import sys; sys.stdout.buffer.write({given.encode()!r})"
    assert run(program, tests=[{"input": "", "output": expected}], **options).reward == score


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
        ("while True: pass", "cpu"),
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
    wall_s = 1.0 if status == "timeout" else 30.0
    cpu_s = 1 if status == "cpu" else 20
    result = run(program, tests=[{"input": "", "output": ""}], wall_s=wall_s, total_s=wall_s + 9, cpu_s=cpu_s)
    assert (result.reward, result.metrics[status]) == (0.0, 1.0)
    assert result.feedback.startswith(f"case 1 of 1: {status}")


def test_cases_beyond_the_total_are_not_run() -> None:
    """The first of 50 takes all of the half second, and what takes that long is to blame for the rest."""
    tests = [{"input": "", "output": ""}] * 50
    result = run("import time; time.sleep(60)", tests=tests, wall_s=0.6, total_s=0.5)
    assert (result.reward, result.metrics["timeout"]) == (0.0, 1.0)


def test_cases_that_there_was_no_time_for_are_an_error_where_no_limit_was_met() -> None:
    """Four cases of 0.3 s do not fit into 0.5 s. The program may be right: seen failing with them counted as timed out,
    0.5.
    """
    program = "import time\nwhile time.process_time() < 0.3: pass"
    with pytest.raises(VerifierError, match="raise total_s"):
        run(program, tests=[{"input": "", "output": ""}] * 4, cpu_s=2, total_s=0.5)


def test_only_a_programs_own_processor_time_is_charged() -> None:
    """As on a busy machine, the wall time of 5 cases is longer than the total. Seen failing with wall time charged."""
    program = "import time; time.sleep(0.2); print(1)"
    result = run(program, tests=[{"input": "", "output": "1"}] * 5, total_s=0.6)
    assert (result.reward, result.feedback) == (1.0, "")


def test_all_cases_run_in_one_sandbox_unless_one_breaks_it() -> None:
    """40 cases of which the third fills its output: the next starts a second one. Seen failing with one for each."""
    program = "n = int(input())\nwhile n == 2: print(n)\nprint(n)"
    with mock.patch.object(subprocess, "Popen", wraps=subprocess.Popen) as start:
        result = run(program, tests=[{"input": str(n), "output": str(n)} for n in range(40)], total_s=30.0)
    assert (result.metrics["passed"], result.metrics["output"]) == (39 / 40, 1 / 40)
    assert start.call_count == 2


def test_a_case_finds_nothing_of_the_one_before() -> None:
    """Neither names, files, input nor processes. Seen failing with files left, and with what still runs left."""
    program = """
import os, sys, time
print(sorted(set(os.listdir(".")) - {"candidate.py", "inside.py", "remote.py", "stdin"}), "left" in globals(), __name__)
print(open("/proc/{0}/task/{0}/children".format(os.getppid())).read().split() == [str(os.getpid())], sys.stdin.read())
left = os.makedirs("a/b")
open("file", "w").close()
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
os._exit(sys.stdout.flush() or 0)
"""
    tests = [{"input": text, "output": f"[] False __main__\nTrue {text}"} for text in "ab"]
    result = run(program, tests=tests)
    assert (result.reward, result.feedback) == (1.0, "")


def test_what_is_expected_may_be_longer_than_the_limit() -> None:
    """Seen failing with `output_kb` the limit of all output."""
    text = "x" * 100_000
    assert run("print('x' * 100000)", tests=[{"input": "", "output": text}], output_kb=16).reward == 1.0
    assert run("print('x' * 200000)", tests=[{"input": "", "output": text}], output_kb=16).metrics["output"] == 1.0


def test_more_output_than_disk_may_be_allowed() -> None:
    """2 MiB, where a file may have one. Seen failing with `disk_mb` the limit of printing, too."""
    program = f"print('x' * {2**21})"
    result = run(program, tests=[{"input": "", "output": "x"}], output_kb=4096, disk_mb=1)
    assert result.metrics["wrong"] == 1.0


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


VALUES = [
    "10 ** 5000",
    "Decimal('1.50')",
    "Fraction(-2, 3)",
    "range(1, 9, 2)",
    "datetime.date(2024, 2, 29)",
    "datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.timezone.utc)",
    "datetime.time(23, 59)",
    "datetime.timedelta(days=-1, microseconds=3)",
]


def test_value_types_of_the_standard_library_come_over() -> None:
    """Seen failing, each: Python writes no number of more than 4300 digits, and the others equalled nothing."""
    imports = "import datetime\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    test_code = imports + "\n".join(
        f"assert give({value}) == [{value}]\nassert type(give({value})[0]) is type({value})" for value in VALUES
    )
    result = run("def give(value): return [value]", test_code=test_code)
    assert (result.reward, result.feedback) == (1.0, "")
    assert run(f"{imports}def give(value): return [None]", test_code=test_code).reward == 0.0


def test_long_numbers_can_be_written() -> None:
    """10^5000 + 1. Seen failing with Python's own limit of 4300 digits."""
    tests = [{"input": "1" + "0" * 5000, "output": "1" + "0" * 4999 + "1"}]
    assert run("print(int(input()) + 1)", tests=tests).reward == 1.0


def test_a_function_may_have_the_name_of_a_module() -> None:
    """What the tests call can be no module. Seen failing with modules put before the candidate's names always."""
    program = "def bisect(values): return len(values) // 2"
    assert run(program, asserts=["assert bisect([1, 2]) == 1", "assert math.sqrt(4) == bisect([0] * 4)"]).reward == 1.0


def test_helpers_of_the_tests_own_go_before_the_candidates() -> None:
    """A prompt's helper goes into `test_code`: the candidate's `poly` does not judge its roots."""
    program = "def poly(xs, x): return 0\ndef root(xs): return 7"
    row = {
        "test_code": "def poly(xs, x): return xs[0] + xs[1] * x",
        "asserts": ["assert poly([-2, 1], root([-2, 1])) == 0"],
    }
    assert run(program, **row).reward == 0.0
    assert run(program.replace("7", "2"), **row).reward == 1.0


def test_check_is_called_with_the_entry_point() -> None:
    """A name that Python has too is the candidate's only there, and then never Python's own.

    Seen failing (1.0 for an empty program) with a KeyError raised where a name is looked up.
    """
    tests = "def check(candidate):\n    assert candidate([1, 2]) == 4\n    assert sum([1]) == 2\n"
    result = run("def sum(values): return len(values) + len(values)", test_code=tests, entry_point="sum")
    assert (result.reward, result.feedback) == (1.0, "")
    result = run("", asserts=["assert sum([1, 2]) == 3"], entry_point="sum")
    assert (result.reward, result.feedback) == (0.0, "case 1 of 1: wrong: NameError: name 'sum' is not defined")


@pytest.mark.parametrize("cheat", CHEATS)
def test_asserts_are_not_fooled(cheat: str) -> None:
    """Each passes, or ends with 0, where tests and candidate share a process.

    Seen failing with the candidate's names put before Python's (patches abs), with objects that equal everything, with
    a program that is gone counted as passed (leaves hard, prints a verdict), with verdicts that never came
    counted so (no answer), with every built-in exception raised as it is (ends loops), and with modules taken from the
    candidate (replaces a module).
    """
    result = run(CHEATS[cheat], asserts=CHEAT_TESTS, wall_s=1.0)
    assert (result.reward, result.metrics["passed"]) == (0.0, 0.0)


def test_split_asserts_tells_cases_from_what_prepares_them() -> None:
    """A loop with asserts inside is one case; definitions, imports and values are none."""
    source = "import math\nx = f(1)\ndef g(): assert x\nfor n in x:\n    assert n\nassert x == 1\ng()\n'a text'"
    cases = split_asserts(source, None, None)
    assert [source.split()[0] for counts, source in cases if counts] == ["for", "assert", "g()"]
    assert [counts for counts, _ in cases] == [False, False, False, True, True, True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "must have a column tests, test_code or asserts"),
        ({"tests": []}, "with something in it"),
        ({"tests": [{"stdin": "1"}]}, '"input"'),
        ({"tests": [{"input": "5", "output": "25", "testtype": "functional"}]}, "a call a function"),
        ({"tests": [{"input": "5", "output": "25", "testtype": "interactive"}]}, "must have a testtype"),
        ({"tests": [{"input": "five", "output": "25", "fn_name": "f"}]}, "must be JSON"),
        ({"tests": "eJxrYJmqxQABtVM0ejhLU4tLUnMBLh8F"}, "private_test_cases are compressed"),
        ({"test_code": "x = 1"}, "at top level"),
        ({"test_code": "assert ("}, "never closed"),
    ],
)
def test_a_row_without_proper_tests_is_an_error_not_a_0(row: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, SyntaxError), match=message):
        run(SUM, **row)


def test_a_sandbox_that_does_not_stand_is_an_error_not_a_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program never started. Seen failing with the byte of `inside.py` not waited for: it scored 0."""
    monkeypatch.setattr("areal_lite.verify.builtin.program._INSIDE", "raise SystemExit('no room')")
    with pytest.raises(VerifierUnavailable, match="no room"):
        run(SUM, tests=SUM_TESTS)


def test_a_program_cannot_pass_for_a_broken_sandbox() -> None:
    program = "import sys; sys.stderr.write('bwrap: no permissions'); sys.exit(1)"
    assert run(program, tests=SUM_TESTS).metrics["crash"] == 1.0


def test_a_row_cannot_loosen_the_sandbox() -> None:
    """Columns with the names of arguments are columns: 150 MiB are too many, and one case of two is half a point.

    Seen failing with the arguments passed as keywords, the row's over them.
    """
    program = "x = b'x' * (150 * 2**20); print(1)"
    row = {"tests": [{"input": "", "output": "1"}], "memory_mb": 10**6, "sandbox": "none", "arguments": {}}
    (reply,) = Verifier(code, {"sandbox": "plain", "memory_mb": 128}).answer([("", program, "", row)])
    assert (reply.reward, reply.metrics["memory"]) == (0.0, 1.0)
    row = {"tests": [{"input": "", "output": "1"}, {"input": "", "output": "2"}], "reward": "all"}
    (reply,) = Verifier(code, {"sandbox": "plain"}).answer([("", "print(1)", "", row)])
    assert reply.reward == 0.5


def test_without_a_sandbox_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with plain where bubblewrap does not work."""
    monkeypatch.setattr("areal_lite.verify.builtin.code.check_bubblewrap", check_bubblewrap.__wrapped__)  # no cache
    monkeypatch.setattr("areal_lite.verify.builtin.sandbox.shutil.which", lambda name: None)
    with pytest.raises(VerifierError, match=r"no program bwrap.*install bubblewrap.*write `sandbox: plain`"):
        Verifier(code, {})
    assert run(SUM, tests=SUM_TESTS, sandbox="plain").reward == 1.0


@pytest.mark.parametrize(
    ("verifier", "least"),
    [
        ({"function": "code"}, 27),
        ({"function": {"code": 1.0, "format": 0.2}, "timeout_s": 26}, 27),
        ({"eval_function": "code"}, 27),
        ({"rows": "code"}, 27),
        ({"named": {"short": {"function": "code", "arguments": {"wall_s": 3.0, "total_s": 1.0}, "timeout_s": 8}}}, 9),
    ],
)
def test_a_deadline_shorter_than_the_limits_is_refused(verifier: dict[str, Any], least: int) -> None:
    """5 + 2 * 10 + 2 = 27; 1 + 2 * 3 + 2 = 9. Seen failing with the verifiers that a source's rows choose left out."""
    data = {"verifier": verifier["rows"]} if "rows" in verifier else {}
    verifier = {name: value for name, value in verifier.items() if name != "rows"}
    with pytest.raises(ConfigError, match=f"timeout_s must be at least {least} for the verifier code"):
        check_plugins(parse_config({"verifier": verifier, "data": data}))
    enough = {"timeout_s": least} if "named" not in verifier else {}
    named = {name: {**one, "timeout_s": least} for name, one in verifier.get("named", {}).items()}
    check_plugins(parse_config({"verifier": {**verifier, **enough, "named": named}, "data": data}))
