"""Finds the program in what a model wrote: the right block among examples, output and explanations."""

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Set
from typing import NamedTuple

from areal_lite.verify.builtin.final_answer import answer_text, without_thoughts

_BLOCK = re.compile(
    r"(?:^[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?|(?=`{3,}(?i:py|python3?)\s))"
    r"(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<label>[\w+-]*)[^\n`]*\n"
    r"(?P<text>.*?)(?:^[ \t]*(?P=fence)|(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("py", "python", "python3")


class Names(NamedTuple):
    """The global names of a program."""

    defined: Set[str]
    bound: Set[str]
    """Those it defines or imports."""
    free: Set[str]
    """Those it uses and neither it nor Python defines."""


def find_program(completion: str, needed: Set[str] = frozenset()) -> str:
    """Return the program that a completion gives in its `answer_text`, without its indentation.

    It is the last block labelled as Python; without one, the last unlabelled block that does something, else the last
    block, else the whole text. Two things can make it another: the tests need names that only an earlier block defines,
    or it uses names that only earlier blocks define. Those are put before it, or taken in its place if they run
    something themselves: then it is an example of their use.

    Args:
        needed: Names that the tests use; one is enough.
    """
    completion = textwrap.dedent(answer_text(completion) or without_thoughts(completion)).strip()
    blocks = [match for match in _BLOCK.finditer(completion) if match["text"].strip()]
    labels = {match: match["label"].lower() for match in blocks}
    chosen = [match for match in blocks if labels[match] in _PYTHON] or [match for match in blocks if not labels[match]]
    texts = [textwrap.dedent(match["text"]) for match in chosen or blocks] or [completion]
    if not any(labels[match] for match in chosen):
        texts = [text for text in texts if _acts(text) or names_of(text).bound] or texts
    last = max((at for at, text in enumerate(texts) if names_of(text).defined & needed), default=len(texts) - 1)
    program = texts[last]
    for text in reversed(texts[:last]):
        if names_of(text).bound & names_of(program).free:
            program = text if _acts(text) else f"{text}\n{program}"
    return program


def names_of(source: str) -> Names:
    """Return the global names of a program; none if it cannot be compiled."""
    try:
        tables = [symtable.symtable(source, "program", "exec")]
    except (SyntaxError, ValueError, RecursionError):
        return Names(set(), set(), set())
    bound = {name.get_name(): name for name in tables[0].get_symbols() if name.is_assigned() or name.is_imported()}
    defined = {name for name, symbol in bound.items() if not symbol.is_imported()}
    for table in tables:
        tables += table.get_children()
    used = {name.get_name() for table in tables for name in table.get_symbols() if name.is_global()}
    return Names(defined, bound.keys(), used - bound.keys() - vars(builtins).keys())


def _acts(source: str) -> bool:
    """Whether a program does more than define names, as one that prints does and a text such as `6` does not."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return False
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
    return any(
        any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for statement in body
        if not isinstance(statement, (*definitions, ast.AnnAssign))
    )
